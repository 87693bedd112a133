"""What an operator can set. The command line gives each as a flag and a DECIDEONCE_… variable."""

import ipaddress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

# In the data directory, in embedded mode.
EVENTS_FILE = "events.jsonl"
DEV_TOKEN_FILE = "dev-token"  # noqa: S105  # a file's name


# Nobody publishes: a pipeline of the operator's own reads the outbox.
NO_EVENTS = "none"


class InvalidSetting(Exception):
    """A setting that can't be used; the text names it and says what it must be."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of `serve`."""

    listen: str = "127.0.0.1:50051"
    database_url: str | None = None
    data_dir: Path = Path(".decideonce")
    catalog: Path | None = None
    metrics: str | None = None
    otlp: str | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    callers: Path | None = None
    allow_plaintext: bool = False
    connection_age_max: timedelta = timedelta(minutes=30)
    pool_size: int = 10
    evaluators: int = 16
    attempts_max: int = 1000
    attempts_per_tenant: int = 500
    new_keys_per_second: int = 1000
    waiters_per_tenant: int = 1000
    mismatches_per_minute: int = 600
    workers: int = 1
    housekeeping: bool = True
    events: str | None = None
    events_format: str | None = None
    drain: timedelta = timedelta(seconds=30)

    @property
    def events_url(self) -> str | None:
        """Where events are published to; None where nobody publishes. The embedded mode has a file of its own."""
        if self.events is not None:
            return None if self.events == NO_EVENTS else self.events
        return f"log:{self.data_dir / EVENTS_FILE}" if self.database_url is None else None

    def check(self) -> None:
        """Check what can be checked before anything is started.

        Raises:
            InvalidSetting: a setting can't be used.
        """
        host, _ = address(self.listen, "--listen")
        if self.metrics is not None:
            address(self.metrics, "--metrics")
        if self.otlp is not None and not (
            urlsplit(self.otlp).hostname and self.otlp.startswith(("http://", "https://"))
        ):
            raise InvalidSetting("--otlp must be http://HOST:PORT, or https://HOST:PORT for TLS")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise InvalidSetting("--tls-certificate and --tls-key go together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise InvalidSetting("--tls-client-ca needs --tls-certificate and --tls-key")
        if self.tls_certificate is None and not self.allow_plaintext and not is_loopback(host):
            raise InvalidSetting(
                f"--listen {self.listen} is not a loopback address: it needs --tls-certificate and --tls-key, "
                "or an explicit --allow-plaintext",
            )


def address(text: str, flag: str) -> tuple[str, int]:
    """Read HOST:PORT.

    Raises:
        InvalidSetting: it isn't.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65_535:  # noqa: PLR2004  # the largest port
        raise InvalidSetting(f"{flag} must be HOST:PORT, and is {text!r}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
