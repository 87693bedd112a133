"""Takes as long as the facts say."""

import time

from chaos_counter import count


def decide(facts, decision):
    """Sleep, then decide; a number that divides by 7 is refused."""
    time.sleep(facts["seconds"])
    if facts["n"] % 7 == 0:
        raise ValueError("this one never")
    return {"outcome": "SLOW", "n": facts["n"], "effects": [{"type": "chaos.done", "payload": {"n": facts["n"]}}]}


def decide_impurely(facts, decision):
    """Give another outcome each time, which no policy may: it shows whose result was stored."""
    outcome = f"EVALUATION-{count(facts['file'])}"
    time.sleep(facts["seconds"])
    return {"outcome": outcome}
