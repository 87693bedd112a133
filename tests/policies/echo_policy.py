"""Answers with what it sees, and does what the facts tell it to."""

import asyncio
import os
import time

from decideonce_server.policy import RetryLater


def decide(facts, decision):
    """Print a mark, do what `do` says, and give the facts back."""
    if "mark" in facts:
        # One write, also where output isn't buffered: the lines of several evaluators don't mix.
        print(f"evaluated {facts['mark']}\n", end="", flush=True)
    todo = facts.get("do")
    if todo == "need" and not os.path.exists(facts["source"]):
        todo = facts.get("fault", "retry")
    if todo == "fail":
        raise ValueError(f"can't decide on {facts}")
    if todo == "retry":
        raise RetryLater("the source is down")
    if todo == "crash":
        os._exit(137)
    if todo == "nothing":
        return {}
    if todo == "sleep":
        time.sleep(facts["seconds"])
    if todo == "burn":
        for _ in range(int(facts["seconds"] * 20_000_000)):
            pass
    return {
        "outcome": facts.get("outcome", "DONE"),
        "reasons": facts.get("reasons", []),
        "effects": facts.get("effects", []),
        "echo": facts.get("echo", {}),
        "tenant": decision["tenant"],
    }


async def decide_slowly(facts, decision):
    """Wait as the facts say."""
    await asyncio.sleep(facts.get("seconds", 0))
    return {"outcome": "DONE"}
