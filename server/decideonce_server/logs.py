"""Structured logs on stderr: JSON lines, or plain text on a terminal.

No log holds facts, outputs, tokens or whole keys. Of an exception it has the type and the places in the code, never the
text, which may quote anything; of what libraries say it has the template, never what stands in it.
"""

import hashlib
import logging
import sys
import traceback
from types import TracebackType
from typing import Any

import structlog

FRAMES_MAX = 20


def key_hash(operation_key: str) -> str:
    """Name an operation key in a log: the same everywhere, and nothing that could be used."""
    return "sha256:" + hashlib.sha256(operation_key.encode()).hexdigest()[:12]


def places(
    exc_info: tuple[type[BaseException], BaseException, TracebackType | None],
) -> str:
    """Tell an exception's types and where each was raised, the cause last, without any text of theirs."""
    told: list[str] = []
    error: BaseException | None = exc_info[1]
    while error is not None and len(told) < FRAMES_MAX:
        told.append(f"{type(error).__module__}.{type(error).__qualname__}")
        frames = traceback.extract_tb(error.__traceback__)[-(FRAMES_MAX - len(told)) :]
        told += [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(told)


class _Libraries(logging.Handler):
    """Passes on what libraries warn of: their templates' first lines, and where exceptions were raised."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record as ours are."""
        said: dict[str, Any] = {"logger": record.name}
        if record.exc_info and record.exc_info[1] is not None:
            said["exc_info"] = record.exc_info
        log = structlog.get_logger()
        write = log.error if record.levelno >= logging.ERROR else log.warning
        write(str(record.msg).partition("\n")[0], **said)


def configure(level: str) -> None:
    """Send this process's logs to stderr, from the given level on."""
    renderer: structlog.types.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.ExceptionRenderer(places),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(handlers=[_Libraries()], level=logging.WARNING, force=True)
