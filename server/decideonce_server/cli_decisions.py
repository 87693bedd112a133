"""The command line's part for decisions: make one, and follow it."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TextIO

import click
import grpc
from google.protobuf import duration_pb2
from rich.text import Text

from decideonce.keys import OPERATION_KEY_RULE, is_operation_key, new_operation_key
from decideonce.v1 import decision_service_pb2 as wire
from decideonce_server import console, values
from decideonce_server.cli_service import CALL_TIME_S, Service, calls_service
from decideonce_server.options import DURATION, VERSION, duration_text

# No operation lets a caller wait longer, and gRPC can't count much further.
WAIT_MAX = timedelta(days=1)
# Less than the longest that a service holds a status call open.
WATCH_WAIT = timedelta(seconds=25)
# Between two looks, at most.
WATCH_PAUSE = timedelta(seconds=1)

STATUS_STYLES = {
    wire.DECISION_STATUS_SUCCEEDED: "green",
    wire.DECISION_STATUS_PROCESSING: "yellow",
    wire.DECISION_STATUS_FAILED_RETRYABLE: "yellow",
    wire.DECISION_STATUS_FAILED_FINAL: "red",
    wire.DECISION_STATUS_EXPIRED: "dim",
}
FINAL = (wire.DECISION_STATUS_SUCCEEDED, wire.DECISION_STATUS_FAILED_FINAL, wire.DECISION_STATUS_EXPIRED)


def _facts(file: TextIO | None, pairs: tuple[str, ...]) -> dict[str, values.Json]:
    """Read facts from a file, then single ones from NAME=VALUE, where VALUE is JSON or else text."""
    facts: dict[str, values.Json] = {}
    if file is not None:
        try:
            read = json.load(file)
        except ValueError as error:
            raise click.BadParameter(f"must be JSON: {error}", param_hint="--facts") from None
        if not isinstance(read, dict):
            raise click.BadParameter("must be a JSON object", param_hint="--facts")
        facts = read
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise click.BadParameter("must be NAME=VALUE", param_hint="--fact")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        _put(facts, name.split("."), value)
    return facts


def _put(facts: dict[str, values.Json], path: list[str], value: values.Json) -> None:
    inner = facts
    for name in path[:-1]:
        below = inner.setdefault(name, {})
        if not isinstance(below, dict):
            raise click.BadParameter(f"{'.'.join(path)}: {name} is not an object", param_hint="--fact")
        inner = below
    inner[path[-1]] = value


def _key(text: str) -> str:
    if not is_operation_key(text):
        raise click.BadParameter(OPERATION_KEY_RULE, param_hint="KEY")
    return text


def _wait(max_wait: timedelta | None) -> duration_pb2.Duration | None:
    if max_wait is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromTimedelta(max_wait)
    return duration


def _call_time(max_wait: timedelta | None) -> float:
    return CALL_TIME_S + min(max_wait or timedelta(), WAIT_MAX).total_seconds()


@click.command()
@click.argument("operation")
@click.option("--facts", "facts_file", type=click.File(encoding="utf-8"), help="A JSON file, or - for stdin.")
@click.option(
    "--fact",
    "pairs",
    multiple=True,
    metavar="NAME=VALUE",
    help="One fact, over those of --facts; repeatable. VALUE is JSON, or else text. A NAME a.b is b within a.",
)
@click.option("--key", help="The operation key. Without it: a new one, which is printed.")
@click.option("--policy-version", type=VERSION, help="Decide under this version of the policy.")
@click.option("--max-wait", type=DURATION, help="How long to wait for a result. Without it: the operation's default.")
@calls_service
def decide(
    service: Service,
    *,
    operation: str,
    facts_file: TextIO | None,
    pairs: tuple[str, ...],
    key: str | None,
    policy_version: int | None,
    max_wait: timedelta | None,
    as_json: bool,
) -> None:
    """Decide OPERATION once, or replay the answer.

    Exits with 0 for every recorded answer, whatever its status; --json tells that.
    """
    key = new_operation_key() if key is None else _key(key)
    try:
        struct = values.to_struct(_facts(facts_file, pairs))
    except values.ValueFault as fault:
        raise click.BadParameter(f"{fault.path} {fault.rule}", param_hint="--facts") from None
    request = wire.DecideRequest(
        operation_key=key,
        operation=operation,
        facts=struct,
        policy_version=policy_version,
        max_wait=_wait(max_wait),
    )
    response = service.decisions.Decide(request, metadata=service.metadata, timeout=_call_time(max_wait))
    _print_decision(response, operation, key, as_json=as_json)


@click.command()
@click.argument("operation")
@click.argument("key")
@click.option("--max-wait", type=DURATION, help="How long to wait for a final state. With --watch: until there is one.")
@click.option("--watch", is_flag=True, help="Follow it to its final state, and show each change.")
@calls_service
def status(
    service: Service, *, operation: str, key: str, max_wait: timedelta | None, watch: bool, as_json: bool
) -> None:
    """Tell what is recorded under a KEY.

    With --watch a service that is away for a while is waited for; exits with 1 where --max-wait ends before the state
    is final. With --json each change is one line.
    """
    request = wire.GetDecisionStatusRequest(operation_key=_key(key), operation=operation, max_wait=_wait(max_wait))
    if watch:
        _watch(service, request, max_wait, as_json=as_json)
        return
    response = service.decisions.GetDecisionStatus(request, metadata=service.metadata, timeout=_call_time(max_wait))
    _print_decision(response, operation, key, as_json=as_json)


def _watch(service: Service, request: wire.GetDecisionStatusRequest, limit: timedelta | None, *, as_json: bool) -> None:
    for response in _changes(service, request, limit):
        if as_json:
            console.print_json_line({"operation_key": request.operation_key} | console.message_dict(response))
        elif response.status in FINAL:
            _print_decision(response, request.operation, request.operation_key, as_json=False)
        else:
            console.out.print(_change_line(response))
    if response.status not in FINAL:
        raise SystemExit(1)


def _changes(
    service: Service, request: wire.GetDecisionStatusRequest, limit: timedelta | None
) -> Iterator[wire.GetDecisionStatusResponse]:
    """Give the state as it is, and then each other one, up to a final one or until the limit."""
    end = None if limit is None else time.monotonic() + limit.total_seconds()
    request.ClearField("max_wait")
    response = service.decisions.GetDecisionStatus(request, metadata=service.metadata, timeout=CALL_TIME_S)
    while True:
        yield response
        known = response
        while response.status == known.status and response.provenance == known.provenance:
            left = WATCH_WAIT if end is None else min(WATCH_WAIT, timedelta(seconds=end - time.monotonic()))
            if response.status in FINAL or left <= timedelta(0):
                return
            response = _next_state(service, request, response, left)


def _next_state(
    service: Service, request: wire.GetDecisionStatusRequest, known: wire.GetDecisionStatusResponse, wait: timedelta
) -> wire.GetDecisionStatusResponse:
    """Wait for another state than the known one, and give what there is in the end."""
    # So that a service which can't hold the call open isn't asked without a pause.
    time.sleep(min(known.retry_after.ToTimedelta(), WATCH_PAUSE, wait).total_seconds())
    request.max_wait.FromTimedelta(wait)
    try:
        return service.decisions.GetDecisionStatus(
            request, metadata=service.metadata, timeout=_call_time(wait), wait_for_ready=True
        )
    except grpc.RpcError as error:
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise
        console.err.print(f"no answer ({error.code().name}): asking again")
        time.sleep(min(WATCH_PAUSE, wait).total_seconds())
        return known


def _change_line(response: wire.GetDecisionStatusResponse) -> Text:
    failure = response.failure
    return Text.assemble(
        (f"{time.strftime('%H:%M:%S')}  ", "dim"),
        _status_text(response.status),
        f"  attempt {response.provenance.attempt}  {failure.reason}: {failure.message}" if failure.reason else "",
    )


def _status_text(status: wire.DecisionStatus.ValueType, text: str = "") -> Text:
    name = wire.DecisionStatus.Name(status).removeprefix("DECISION_STATUS_")
    return Text(text or name, f"bold {STATUS_STYLES.get(status, '')}")


def _print_decision(
    response: wire.DecideResponse | wire.GetDecisionStatusResponse,
    operation: str,
    key: str,
    *,
    as_json: bool,
) -> None:
    if as_json:
        console.print_json({"operation_key": key} | console.message_dict(response))
        return
    title = _status_text(response.status, response.decision.outcome)
    if isinstance(response, wire.DecideResponse) and response.status != wire.DECISION_STATUS_PROCESSING:
        title.append("  replayed: the recorded answer" if response.replayed else "  original", "not bold dim")
    provenance = response.provenance
    failure = response.failure
    console.print_record(
        title,
        {
            "reasons": list(response.decision.reasons),
            "outputs": console.one_line(console.message_dict(response.decision.outputs)),
            "failure": f"{failure.reason}: {failure.message}" if failure.reason else "",
            "operation": operation,
            "key": key,
            "decision": provenance.decision_id,
            "policy": f"{provenance.policy_id} version {provenance.policy_version}" if provenance.policy_id else "",
            "digest": provenance.policy_digest,
            "rules": list(provenance.matched_rules),
            "attempt": provenance.attempt or "",
            "retry after": duration_text(response.retry_after.ToTimedelta())
            if response.HasField("retry_after")
            else "",
            "then ask": f"decideonce status {operation} {key} --watch"
            if response.status == wire.DECISION_STATUS_PROCESSING
            else "",
        },
    )
