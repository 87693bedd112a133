"""Structured logs on stderr: JSON lines, or plain text on a terminal."""

import hashlib
import logging
import sys

import structlog


def key_hash(operation_key: str) -> str:
    """Name an operation key in a log: the same everywhere, and nothing that could be used."""
    return "sha256:" + hashlib.sha256(operation_key.encode()).hexdigest()[:12]


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
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # Libraries' own logs: what they warn of, in the same place.
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(name)s: %(message)s")
