"""How `--events` names where events are sent."""

from pathlib import Path

import pytest

from decideonce_server.events_url import open_sink
from decideonce_server.sink_kafka import KafkaSink
from decideonce_server.sink_log import LogSink
from decideonce_server.sink_nats import NatsSink

SCHEMES = "--events must be kafka://HOST:PORT, nats://HOST:PORT, tls://HOST:PORT, log:PATH or none"
HOST = "each host of --events must be HOST:PORT, and is "
QUERY = "--events: what follows the ? must be PROPERTY=VALUE, joined by &"
USER = "--events must not have a user or password before its host: give them as properties"
BETWEEN = "--events must have nothing between its hosts and its properties"
PATH = "--events: the PATH of log:PATH must be a file, in a directory that exists"
UNKNOWN_KAFKA = (
    "--events: acks must be one of compression.type, enable.ssl.certificate.verification, message.max.bytes, "
    "security.protocol, or begin with sasl. or ssl."
)
SASL = "security.protocol=SASL_SSL&sasl.mechanism=PLAIN&sasl.username=u"


async def opened(url: str) -> type:
    """Open a sink, close it, and give its type."""
    sink = open_sink(url)
    await sink.close()
    return type(sink)


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("kafka://127.0.0.1:1", KafkaSink),
        ("kafka://127.0.0.1:1,[::1]:1?compression.type=zstd&message.max.bytes=2000000", KafkaSink),
        (f"kafka://127.0.0.1:1?{SASL}&sasl.password.file={{secret}}", KafkaSink),
        ("nats://127.0.0.1:1", NatsSink),
        ("nats://127.0.0.1:1,127.0.0.1:2?user=u&password.file={secret}", NatsSink),
        ("tls://127.0.0.1:1", NatsSink),
        ("log:{directory}/events.jsonl", LogSink),
    ],
)
async def test_url_opens_its_sink(tmp_path: Path, url: str, kind: type) -> None:
    """Each form opens its sink, whether or not anything is there yet."""
    (tmp_path / "secret").write_text("s3cret\n")
    assert kind is await opened(url.format(directory=tmp_path, secret=tmp_path / "secret"))


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("", SCHEMES),
        ("none", SCHEMES),
        ("kafka", SCHEMES),
        ("kafka:127.0.0.1:9092", SCHEMES),
        ("redis://127.0.0.1:6379", SCHEMES),
        ("kafka://", HOST + "''"),
        ("kafka://localhost", HOST + "'localhost'"),
        ("kafka://localhost:9092,", HOST + "''"),
        ("nats://localhost:port", HOST + "'localhost:port'"),
        ("kafka://user:s3cret@localhost:9092", USER),
        ("nats://s3cret@localhost:4222", USER),
        ("kafka://localhost:9092/topic", BETWEEN),
        ("nats://localhost:4222#s3cret", BETWEEN),
        ("kafka://localhost:9092?s3cret", QUERY),
        ("kafka://localhost:9092?compression.type=", QUERY),
        ("kafka://localhost:9092?ssl.ca.location=a&ssl.ca.location=b", "--events: each property must be given once"),
        (
            "kafka://localhost:9092?acks=0",
            UNKNOWN_KAFKA,
        ),
        (
            "kafka://localhost:9092?sasl.password=s3cret",
            "--events: sasl.password must not stand in a URL: give sasl.password.file, the path of a file with it",
        ),
        (
            "kafka://localhost:9092?ssl.key.pem=s3cret",
            "--events: ssl.key.pem must not stand in a URL: give ssl.key.pem.file, the path of a file with it",
        ),
        (
            "kafka://localhost:9092?sasl.password.file={directory}/missing",
            "--events: sasl.password.file must be the path of a text file that can be read",
        ),
        (
            "kafka://localhost:9092?sasl.password.file={directory}/empty",
            "--events: sasl.password.file must be the path of a file that isn't empty",
        ),
        (
            "kafka://localhost:9092?sasl.unheard-of=1",
            '--events: No such configuration property: "sasl.unheard-of"',
        ),
        (
            "nats://localhost:4222?password=s3cret",
            "--events: password must be one of ca.file, certificate.file, key.file, password.file, user",
        ),
        ("nats://localhost:4222?user=u", "--events: user and password.file go together"),
        (
            "nats://localhost:4222?ca.file=a",
            "--events: ca.file, certificate.file and key.file need tls://",
        ),
        (
            "tls://localhost:4222?ca.file={directory}/empty",
            "--events: ca.file must be the path of certificates in PEM form",
        ),
        ("tls://localhost:4222?key.file={directory}/empty", "--events: key.file needs certificate.file"),
        (
            "tls://localhost:4222?certificate.file={directory}/empty",
            "--events: certificate.file and key.file must be a certificate and its key, as PEM",
        ),
        ("log:", PATH),
        ("log:{directory}", PATH),
        ("log:{directory}/missing/events.jsonl", PATH),
    ],
)
def test_wrong_url_is_refused(tmp_path: Path, url: str, text: str) -> None:
    """A wrong URL is refused with a text that names the part and the rule, and never holds a secret."""
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="--events") as refusal:
        open_sink(url.format(directory=tmp_path))
    assert text == str(refusal.value)
    assert "s3cret" not in str(refusal.value)
