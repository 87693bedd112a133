"""A service of Restate's Python SDK, for hypercorn to serve. Runs in the bench's own environment.

What it answers with is in PEER_RESPONSE, as JSON.
"""

import json
import os

import restate

RESPONSE = json.loads(os.environ["PEER_RESPONSE"])
decider = restate.Service("Decider")


def evaluate(operation_key: str) -> dict:
    """Give what a policy would have decided."""
    return RESPONSE | {"provenance": RESPONSE["provenance"] | {"operationKey": operation_key}}


@decider.handler()
async def decide(context: restate.Context, request: dict) -> dict:
    """Decide in the handler: once per idempotency key, unless the handler's end isn't recorded and it runs again."""
    return evaluate(request["operationKey"])


@decider.handler()
async def step(context: restate.Context, request: dict) -> dict:
    """Decide in a step, whose result is recorded before the handler goes on."""
    return await context.run_typed("evaluate", lambda: evaluate(request["operationKey"]))


app = restate.app([decider])
