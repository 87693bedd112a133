"""Where events are sent, as `--events` names it."""

import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from decideonce_server.settings import InvalidSetting, address
from decideonce_server.sink import SEND_WITHIN_S, Sink
from decideonce_server.sink_kafka import KafkaSink
from decideonce_server.sink_log import LogSink
from decideonce_server.sink_nats import NatsSink

KAFKA_PROPERTIES = {
    "security.protocol",
    "enable.ssl.certificate.verification",
    "message.max.bytes",
    "compression.type",
}
KAFKA_FAMILIES = ("sasl.", "ssl.")
NATS_PROPERTIES = {"user", "password.file", "ca.file", "certificate.file", "key.file"}

_SECRETS = ("password", "passphrase", "secret", ".pem")


def open_sink(url: str, within_s: float = SEND_WITHIN_S) -> Sink:
    """Open the sink that a URL names; `within_s` is its time-out in seconds.

    - `kafka://HOST:PORT[,HOST:PORT]?PROPERTY=VALUE`, with librdkafka's security properties, `message.max.bytes` and
      `compression.type`; a property that holds a secret is given as `PROPERTY.file=PATH`.
    - `nats://HOST:PORT[,HOST:PORT]` or `tls://…`, with `user` and `password.file`; with `tls://` also `ca.file`,
      `certificate.file` and `key.file`.
    - `log:PATH`, a file.

    Nothing is connected yet. The running event loop is the one that the sink is used in.

    Raises:
        ValueError: the text names the part that can't be used, and the rule; never a secret.
    """
    scheme, colon, rest = url.partition(":")
    if colon and scheme == "log":
        return LogSink(_log_path(rest))
    opener = _OPENERS.get(scheme)
    if opener is None or not rest.startswith("//"):
        raise ValueError("--events must be kafka://HOST:PORT, nats://HOST:PORT, tls://HOST:PORT, log:PATH or none")
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise ValueError("--events must not have a user or password before its host: give them as properties")
    if parts.path or parts.fragment:
        raise ValueError("--events must have nothing between its hosts and its properties")
    return opener(parts, _properties(parts.query), within_s)


def _kafka(parts: SplitResult, properties: Mapping[str, str], within_s: float) -> Sink:
    settings = {"bootstrap.servers": ",".join(_hosts(parts))}
    for name, value in properties.items():
        plain = name.removesuffix(".file")
        is_secret = any(word in plain for word in _SECRETS)
        if not plain.startswith(KAFKA_FAMILIES) and name not in KAFKA_PROPERTIES:
            raise ValueError(
                f"--events: {name} must be one of {', '.join(sorted(KAFKA_PROPERTIES))}, or begin with sasl. or ssl."
            )
        if is_secret and plain == name:
            raise ValueError(f"--events: {name} must not stand in a URL: give {name}.file, the path of a file with it")
        if is_secret:
            settings[plain] = _text_of_file(name, value)
        else:
            settings[name] = value
    try:
        return KafkaSink(settings, within_s)
    except ValueError as error:
        raise ValueError(f"--events: {error}") from None


def _nats(parts: SplitResult, properties: Mapping[str, str], within_s: float) -> Sink:
    for name in properties:
        if name not in NATS_PROPERTIES:
            raise ValueError(f"--events: {name} must be one of {', '.join(sorted(NATS_PROPERTIES))}")
    if ("user" in properties) != ("password.file" in properties):
        raise ValueError("--events: user and password.file go together")
    options: dict[str, Any] = {}
    if "user" in properties:
        options["user"] = properties["user"]
        options["password"] = _text_of_file("password.file", properties["password.file"])
    if parts.scheme == "tls":
        options["tls"] = _tls_context(properties)
    elif properties.keys() & {"ca.file", "certificate.file", "key.file"}:
        raise ValueError("--events: ca.file, certificate.file and key.file need tls://")
    return NatsSink([f"{parts.scheme}://{host}" for host in _hosts(parts)], options, within_s)


_OPENERS: Mapping[str, Callable[[SplitResult, Mapping[str, str], float], Sink]] = {
    "kafka": _kafka,
    "nats": _nats,
    "tls": _nats,
}


def _log_path(text: str) -> Path:
    path = Path(text)
    if not text or path.is_dir() or not path.parent.is_dir():
        raise ValueError("--events: the PATH of log:PATH must be a file, in a directory that exists")
    return path


def _hosts(parts: SplitResult) -> list[str]:
    hosts = parts.netloc.split(",")
    for host in hosts:
        try:
            address(host, "each host of --events")
        except InvalidSetting as error:
            raise ValueError(str(error)) from None
    return hosts


def _properties(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        pairs = [("", "")]
    if not all(name and value for name, value in pairs):
        raise ValueError("--events: what follows the ? must be PROPERTY=VALUE, joined by &")
    properties = dict(pairs)
    if len(properties) < len(pairs):
        raise ValueError("--events: each property must be given once")
    return properties


def _text_of_file(name: str, path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError):
        raise ValueError(f"--events: {name} must be the path of a text file that can be read") from None
    if not text:
        raise ValueError(f"--events: {name} must be the path of a file that isn't empty")
    return text


def _tls_context(properties: Mapping[str, str]) -> ssl.SSLContext:
    if "key.file" in properties and "certificate.file" not in properties:
        raise ValueError("--events: key.file needs certificate.file")
    try:
        context = ssl.create_default_context(cafile=properties.get("ca.file"))
    except (OSError, ssl.SSLError):
        raise ValueError("--events: ca.file must be the path of certificates in PEM form") from None
    if "certificate.file" in properties:
        try:
            context.load_cert_chain(properties["certificate.file"], properties.get("key.file"))
        except (OSError, ssl.SSLError):
            raise ValueError(
                "--events: certificate.file and key.file must be a certificate and its key, as PEM"
            ) from None
    return context
