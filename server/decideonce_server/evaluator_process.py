"""What runs in evaluator processes, and in the fork server that they come from.

The fork server (`python -m decideonce_server.evaluator_process DESCRIPTOR`) has one thread and everything imported, so
that a new evaluator takes milliseconds; the main process itself can't be forked, as gRPC's threads run in it. Python's
multiprocessing has a fork server too, but SIGTERM to the process group ends it, and its processes can't be killed then.

The fork server reaps an evaluator only when it is told to. Until then a pid stays taken, so that killing it is safe.
Messages to and from an evaluator are JSON behind their length: what a policy returns arrives as plain values, and the
main process never loads an object of a policy's classes.
"""

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, Final, NoReturn

from decideonce_server import policy_jdm, policy_python
from decideonce_server.policy import (
    Effect,
    Engine,
    EngineName,
    Evaluate,
    Evaluation,
    Input,
    InvalidResult,
    PolicyError,
    PolicyFailed,
    RetryLater,
)

# An order to it: fork (0, with a socket's descriptor) or reap this pid. Its answer: errno, pid or exit code.
ORDER: Final = struct.Struct("<q")
ORDER_FORK: Final = 0
ORDER_ANSWER: Final = struct.Struct("<iq")

LENGTH: Final = struct.Struct("<I")

# A result is kept for its whole retention and copied into an event, and Kafka takes 1 MiB unless told otherwise.
RESULT_BYTES_MAX: Final = 1 << 20
ERROR_TEXT_LENGTH_MAX: Final = 1000

# Of <linux/prctl.h>.
PR_SET_PDEATHSIG: Final = 1

# An evaluator whose main process is gone ends by itself this long after the evaluation should have been killed.
ORPHAN_MARGIN_S: Final = 1.0

# Errors that a policy or its engine gives; the evaluator is ready for the next evaluation after them.
CARRIED_ERRORS: Final = {error.__name__: error for error in (PolicyFailed, InvalidResult, RetryLater)}

_ENGINES: Final[dict[EngineName, Engine]] = {"jdm": policy_jdm.Engine(), "python": policy_python.Engine()}


def message(content: dict[str, Any]) -> bytes:
    """Write a message as it goes over a socket."""
    return _framed(_json(content))


def question(digest: str, inputs: Sequence[tuple[bytes, dict[str, Any]]], seconds_max: float) -> bytes:
    """Write the message that asks for evaluations; facts are JSON texts already, and large ones aren't read for it."""
    pairs = b",".join([b"[" + facts + b"," + _json(decision) + b"]" for facts, decision in inputs])
    head = _json({"digest": digest, "seconds_max": seconds_max})
    return _framed(head[:-1] + b',"inputs":[' + pairs + b"]}")


def _members(value: Evaluation | Effect) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), default=_members)


def _json(content: dict[str, Any]) -> bytes:
    return _ENCODER.encode(content).encode("ascii")


def _framed(text: bytes) -> bytes:
    return LENGTH.pack(len(text)) + text


def run_fork_server(orders: socket.socket) -> None:
    """Fork and reap as ordered, until the main process closes the socket or is gone."""
    # It may be killed before it has read an answer, and while one is made.
    with contextlib.suppress(ConnectionError):
        while True:
            order, descriptors, _, _ = socket.recv_fds(orders, ORDER.size, 1)
            if not order:
                return
            orders.sendall(_answer_to(order, orders, descriptors))


def _answer_to(order: bytes, orders: socket.socket, descriptors: list[int]) -> bytes:
    (pid,) = ORDER.unpack(order)
    try:
        if pid == ORDER_FORK:
            return ORDER_ANSWER.pack(0, _fork(orders, descriptors[0]))
        return ORDER_ANSWER.pack(0, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    except OSError as fault:
        return ORDER_ANSWER.pack(fault.errno, 0)


def _fork(orders: socket.socket, descriptor: int) -> int:
    try:
        pid = os.fork()
        if pid == 0:
            orders.close()
            _run_evaluator_and_exit(descriptor)
    finally:
        os.close(descriptor)
    return pid


def _run_evaluator_and_exit(descriptor: int) -> NoReturn:
    # Left by os._exit, whatever happens: threads that a policy started can't hold it, and the loop above isn't entered.
    status = 1
    try:
        _end_with_parent()
        run_evaluator(socket.socket(fileno=descriptor))
        status = 0
    except ConnectionError:
        status = 0
    except BaseException:  # noqa: BLE001 a defect; it ends this process, and the main process sees that
        traceback.print_exc()
    finally:
        os._exit(status)


def _end_with_parent() -> None:
    """Have the kernel end this process when the fork server ends, which does when the main process does.

    Where there is no prctl (outside Linux), the timer of `_end_after` ends it, later.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run_evaluator(requests: socket.socket) -> None:
    """Answer requests one by one, until the main process closes the socket or is gone."""
    prepared: dict[str, Evaluate] = {}
    reader = requests.makefile("rb")
    while (request := _read(reader)) is not None:
        with _end_after(request["seconds_max"] + ORPHAN_MARGIN_S):
            answer = _answer(request, prepared)
        requests.sendall(answer)


def _read(reader: BinaryIO) -> Any:
    length = reader.read(LENGTH.size)
    return json.loads(reader.read(*LENGTH.unpack(length))) if length else None


@contextlib.contextmanager
def _end_after(seconds: float) -> Iterator[None]:
    """Have the kernel end this process, even one that is busy in C, unless this is left in time."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(request: dict[str, Any], prepared: dict[str, Evaluate]) -> bytes:
    """Answer a request to prepare a version, or to evaluate inputs with one: each by itself, and the CPU time in s."""
    began = time.process_time()
    if "content" in request:
        prepared.pop(request["instead_of"], None)
        try:
            prepared[request["digest"]] = _ENGINES[request["engine"]].prepare(request["content"])
        except PolicyFailed as error:
            return message({"answers": [_error(error)]})
        return message({"answers": [{}]})
    inputs = [Input(facts, decision) for facts, decision in request["inputs"]]
    texts = [_text_of(result) for result in prepared[request["digest"]](inputs)]
    return _framed(b'{"answers":[%s],"cpu_s":%f}' % (b",".join(texts), time.process_time() - began))


def _text_of(result: Evaluation | PolicyError) -> bytes:
    if isinstance(result, Evaluation):
        text = _json({"evaluation": result})
        if len(text) <= RESULT_BYTES_MAX:
            return text
        result = InvalidResult(f"the result must not exceed {RESULT_BYTES_MAX} bytes as JSON")
    return _json(_error(result))


def _error(error: PolicyError) -> dict[str, str]:
    name = next(name for name, carried in CARRIED_ERRORS.items() if isinstance(error, carried))
    return {"error": name, "text": str(error)[:ERROR_TEXT_LENGTH_MAX]}


def main() -> None:
    """Be the fork server."""
    # Ctrl-C and a supervisor's SIGTERM reach the whole process group; the main process still drains then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # The default action of SIGALRM, ending the process, is what _end_after relies on.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # What a policy prints belongs to the log, not among what the server says on its stdout.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    # No collection has to look through what was imported, nor to copy it into each evaluator's own memory.
    gc.collect()
    gc.freeze()
    run_fork_server(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
