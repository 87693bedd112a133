"""What every sink does, shown on real brokers; Apache Kafka takes part with `make interop`."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import nats as nats_client
import pytest
import uuid_utils.compat
from nats.aio.msg import Msg

from brokers import MAX_MESSAGE_BYTES, ApacheKafka, Broker, LogFile, Nats, Tansu
from decideonce.v1 import events_pb2
from decideonce_server.cloudevent import PayloadFormat, message_of
from decideonce_server.events_url import open_sink
from decideonce_server.outbox import Event
from decideonce_server.sink import CLOSE_WITHIN_S, Delivery, Message, Receipt, Refusal, Sink
from processes import until

# Short, so that outages are soon over.
SEND_WITHIN_S = 2.0
# A machine that is busy with something else.
SLACK_S = 3.0

ACKNOWLEDGED, NOT_ACKNOWLEDGED = Receipt.ACKNOWLEDGED, Receipt.NOT_ACKNOWLEDGED
APACHE_KAFKA = pytest.param(ApacheKafka, marks=pytest.mark.interop)
SERVERS = [Nats, Tansu, APACHE_KAFKA]

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(params=[LogFile, *SERVERS])
def broker(request: pytest.FixtureRequest, started: Callable[[Any], Any]) -> Any:
    """Give something that events can be sent to."""
    return started(request.param)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, started: Callable[[Any], Any]) -> Broker:
    """Give a broker that is a process."""
    return started(request.param)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """Give a topic of the test's own."""
    name = f"test.{uuid_utils.compat.uuid4()}"
    kind = "broker" if "broker" in request.fixturenames else "server"
    request.getfixturevalue(kind).make_topic(name)
    return name


@pytest.fixture
async def open_one() -> AsyncIterator[Callable[[str], Sink]]:
    """Give a function that opens a sink, which is closed when the test ends."""
    sinks: list[Sink] = []

    def open_one(url: str) -> Sink:
        sinks.append(open_sink(url, SEND_WITHIN_S))
        return sinks[-1]

    yield open_one
    for sink in sinks:
        await sink.close()


def new_message(
    topic: str, size: int = 0, payload_format: PayloadFormat = PayloadFormat.PROTOBUF, tenant: str = "acme:eu"
) -> Message:
    """Make the message of an event; `size` bytes are added to its payload."""
    event_id = uuid_utils.compat.uuid7()
    key = str(uuid_utils.compat.uuid4())
    payload = events_pb2.DecisionEvent(event_id=str(event_id), type="loan.approved")
    payload.event_time.FromJsonString("2026-11-30T08:15:30.120Z")
    payload.effect.payload.update({"name": 'Zoë "§" 100%', "padding": "x" * size})
    event = Event(
        event_id,
        0,
        tenant,
        "credit.approve-loan",
        key,
        "loan.approved",
        payload.SerializeToString(),
        topic,
        TRACEPARENT,
    )
    return message_of(event, payload_format)


async def acknowledged(sink: Sink, message: Message) -> bool:
    """Send a message, and tell whether it arrived."""
    return await sink.send([message]) == [ACKNOWLEDGED]


async def timed(work: Any, within_s: float) -> Any:
    """Wait for something that must be over in time."""
    async with asyncio.timeout(within_s + SLACK_S):
        return await work


def headers_of(broker: Any, message: Message) -> dict[str, str]:
    """Give the headers that the message must arrive with; a line of a file has the attributes themselves."""
    attributes = dict(message.attributes)
    if isinstance(broker, LogFile):
        return attributes
    if isinstance(broker, Nats):
        return {f"ce-{name}": value for name, value in attributes.items()} | {"Nats-Msg-Id": str(message.id)}
    content_type = attributes.pop("datacontenttype")
    return {f"ce_{name}": value for name, value in attributes.items()} | {"content-type": content_type}


async def test_event_arrives_as_a_cloudevent(broker: Any, topic: str, open_one: Callable[[str], Sink]) -> None:
    """An event's attributes arrive as its binding's headers, its payload byte by byte, its key as Kafka's key."""
    message = new_message(topic)
    assert [ACKNOWLEDGED] == await open_one(broker.url).send([message])
    (received,) = [one for one in broker.read(topic, 1) if one.payload == message.payload]
    assert headers_of(broker, message) == received.headers
    assert (None if isinstance(broker, Nats) else message.key) == received.key


async def test_headers_carry_any_text(server: Broker, topic: str, open_one: Callable[[str], Sink]) -> None:
    """What isn't plain ASCII is UTF-8 in Kafka's headers, and percent-encoded in NATS', as the bindings say."""
    message = new_message(topic)
    message = dataclasses.replace(message, attributes={**message.attributes, "subject": 'Zoë "1" 5%'})
    assert [ACKNOWLEDGED] == await open_one(server.url).send([message])
    (received,) = server.read(topic, 1)
    if isinstance(server, Nats):
        assert "Zo%C3%AB%20%221%22%205%25" == received.headers["ce-subject"]
    else:
        assert 'Zoë "1" 5%' == received.headers["ce_subject"]


async def test_set_of_a_thousand_arrives(broker: Any, topic: str, open_one: Callable[[str], Sink]) -> None:
    """A set of 1,000 events is acknowledged, and all of them are there."""
    messages = [new_message(topic, 500) for _ in range(1000)]
    assert [ACKNOWLEDGED] * 1000 == await timed(open_one(broker.url).send(messages), SEND_WITHIN_S)
    arrived = {received.payload for received in broker.read(topic, 1000)}
    assert arrived >= {message.payload for message in messages}


async def test_empty_set_is_sent(broker: Any, open_one: Callable[[str], Sink]) -> None:
    """A set of none has no deliveries."""
    assert [] == await open_one(broker.url).send([])


async def test_message_sent_twice_is_acknowledged_twice(
    broker: Any, topic: str, open_one: Callable[[str], Sink]
) -> None:
    """An event that was sent before is acknowledged again; NATS, which knows it by its id, keeps it once."""
    sink = open_one(broker.url)
    message = new_message(topic)
    assert [[ACKNOWLEDGED]] * 2 == [await sink.send([message]) for _ in range(2)]
    last = new_message(topic)
    assert [ACKNOWLEDGED] == await sink.send([last])
    once = isinstance(broker, Nats)
    payloads = [received.payload for received in broker.read(topic, 2 if once else 3)]
    assert (1 if once else 2) == payloads.count(message.payload)


async def test_sets_are_sent_at_the_same_time(broker: Any, topic: str, open_one: Callable[[str], Sink]) -> None:
    """Several sets share a sink that connects for them just then."""
    sink = open_one(broker.url)
    sets = [[new_message(topic) for _ in range(100)] for _ in range(4)]
    assert [[ACKNOWLEDGED] * 100] * 4 == await asyncio.gather(*(sink.send(messages) for messages in sets))


async def test_large_message_is_refused_alone(server: Broker, topic: str, open_one: Callable[[str], Sink]) -> None:
    """A message of 2 MB is MESSAGE_TOO_LARGE; its neighbours, and what is sent later, arrive."""
    sink = open_one(server.url)
    messages = [new_message(topic, size) for size in (0, 2_000_000, 0)]
    expected = [ACKNOWLEDGED, Refusal.MESSAGE_TOO_LARGE, ACKNOWLEDGED]
    assert expected == await sink.send(messages)
    assert expected == await sink.send(messages)


async def test_headers_count_in_a_messages_size(server: Broker, topic: str, open_one: Callable[[str], Sink]) -> None:
    """A payload that fits only without its headers is refused, and the connection lives on."""
    sink = open_one(server.url)
    empty = new_message(topic, 1)
    message = dataclasses.replace(empty, payload=b"x" * (MAX_MESSAGE_BYTES - 100))
    assert [Refusal.MESSAGE_TOO_LARGE, ACKNOWLEDGED] == await sink.send([message, new_message(topic)])


async def test_unknown_topic_is_refused_alone(server: Broker, topic: str, open_one: Callable[[str], Sink]) -> None:
    """A topic that doesn't exist is TOPIC_NOT_FOUND, its neighbours arrive; once it is made, the same sink finds it."""
    sink = open_one(server.url)
    unknown = f"{topic}.unknown"
    messages = [new_message(topic), new_message(unknown), new_message(topic)]
    expected = [ACKNOWLEDGED, Refusal.TOPIC_NOT_FOUND, ACKNOWLEDGED]
    assert expected == await sink.send(messages)
    assert expected == await sink.send(messages)
    server.make_topic(unknown)
    await until(lambda: acknowledged(sink, messages[1]))


async def test_impossible_topic_is_refused(server: Broker, topic: str, open_one: Callable[[str], Sink]) -> None:
    """A name that no topic can have is refused; its neighbours arrive."""
    messages = [new_message(topic), new_message("no topic"), new_message(topic)]
    deliveries = await open_one(server.url).send(messages)
    assert [ACKNOWLEDGED, ACKNOWLEDGED] == deliveries[::2]
    assert isinstance(deliveries[1], Refusal)


async def test_same_sink_works_again_after_an_outage(broker: Any, topic: str, open_one: Callable[[str], Sink]) -> None:
    """While the broker is down nothing is acknowledged or refused; when it is back, the same sink sends again."""
    sink = open_one(broker.url)
    assert [ACKNOWLEDGED] == await sink.send([new_message(topic)])
    broker.stop()
    messages = [new_message(topic), new_message(f"{topic}.unknown")]
    assert [NOT_ACKNOWLEDGED] * 2 == await timed(sink.send(messages), SEND_WITHIN_S)
    broker.start()
    await until(lambda: acknowledged(sink, messages[0]))
    assert messages[0].payload in [received.payload for received in broker.read(topic, 1)]


async def test_sink_opens_while_its_broker_is_down(server: Broker, topic: str, open_one: Callable[[str], Sink]) -> None:
    """A broker that is down at first is an outage like another."""
    server.stop()
    sink = open_one(server.url)
    message = new_message(topic)
    assert [NOT_ACKNOWLEDGED] == await timed(sink.send([message]), SEND_WITHIN_S)
    server.start()
    await until(lambda: acknowledged(sink, message))


async def test_broker_that_is_silent_acknowledges_nothing(
    server: Broker, topic: str, open_one: Callable[[str], Sink]
) -> None:
    """A broker that freezes is an outage, not a refusal, also where a set is more than the libraries keep for it."""
    sink = open_one(server.url)
    assert [ACKNOWLEDGED] == await sink.send([new_message(topic)])
    messages = [new_message(topic), new_message(f"{topic}.unknown"), *(new_message(topic, 50_000) for _ in range(200))]
    server.freeze()
    try:
        assert [NOT_ACKNOWLEDGED] * 202 == await timed(sink.send(messages), SEND_WITHIN_S)
    finally:
        server.thaw()
    await until(lambda: acknowledged(sink, messages[0]))


async def test_sink_closes_while_it_sends(server: Broker, topic: str, open_one: Callable[[str], Sink]) -> None:
    """Closing ends soon though the broker is silent, and so does the set that is under way."""
    sink = open_one(server.url)
    assert [ACKNOWLEDGED] == await sink.send([new_message(topic)])
    server.freeze()
    try:
        under_way = asyncio.create_task(sink.send([new_message(topic)]))
        await asyncio.wait([under_way], timeout=0.1)
        await timed(sink.close(), CLOSE_WITHIN_S)
        assert [NOT_ACKNOWLEDGED] == await timed(under_way, 0)
    finally:
        server.thaw()


async def test_payload_goes_out_as_json(broker: Any, topic: str, open_one: Callable[[str], Sink]) -> None:
    """With JSON, brokers get protobuf's JSON mapping, and a file's line has it as a value."""
    message = new_message(topic, payload_format=PayloadFormat.JSON)
    assert [ACKNOWLEDGED] == await open_one(broker.url).send([message])
    if isinstance(broker, LogFile):
        line = json.loads(broker.path.read_text().splitlines()[-1])
        assert json.loads(message.payload) == line["data"]
    else:
        assert [message.payload] == [received.payload for received in broker.read(topic, 1)]


@pytest.fixture
def nats(request: pytest.FixtureRequest) -> Iterator[Nats]:
    """Give a NATS with settings of the test's own: its parameter, settings and login."""
    settings, login = request.param
    broker = Nats(settings, **login)
    try:
        yield broker
    finally:
        broker.close()


LOGIN = {"user": "decideonce", "password": "right"}
ALLOWED = '{ user: decideonce, password: right, permissions: { publish: { deny: "test.Forbidden" } } }'


@pytest.mark.parametrize("nats", [(f"authorization {{ users = [{ALLOWED}] }}", LOGIN)], indirect=True)
async def test_nats_refuses_a_subject_of_others(nats: Nats, tmp_path: Path, open_one: Callable[[str], Sink]) -> None:
    """A subject that this user may not publish to is REFUSED, its neighbours arrive; no login is an outage."""
    nats.make_topic("test.allowed")
    (tmp_path / "password").write_text("right\n")
    sink = open_one(f"{nats.url}?user=decideonce&password.file={tmp_path}/password")
    messages = [new_message(topic) for topic in ("test.allowed", "test.Forbidden", "test.allowed")]
    assert [ACKNOWLEDGED, Refusal.REFUSED, ACKNOWLEDGED] == await timed(sink.send(messages), SEND_WITHIN_S)
    stranger = open_one(nats.url)
    assert [NOT_ACKNOWLEDGED] * 3 == await timed(stranger.send(messages), SEND_WITHIN_S)


@pytest.mark.parametrize("nats", [("jetstream: disabled", {})], indirect=True)
async def test_nats_without_jetstream_is_an_outage(nats: Nats, open_one: Callable[[str], Sink]) -> None:
    """Where JetStream doesn't answer, that nobody answers on the subject doesn't mean that there is no stream."""
    assert [NOT_ACKNOWLEDGED] == await open_one(nats.url).send([new_message("test.any")])


async def test_nats_acknowledges_by_a_stream_alone(
    started: Callable[[Any], Any], open_one: Callable[[str], Sink]
) -> None:
    """An answer of somebody else who listens on a subject is no acknowledgement."""
    server = started(Nats)
    async with await nats_client.connect(server.url) as client:

        async def answer(message: Msg) -> None:
            await message.respond(b"{}" if message.data else b"thanks")

        await client.subscribe("services.*", cb=answer)
        await client.flush()
        messages = [new_message("services.a"), dataclasses.replace(new_message("services.b"), payload=b"")]
        assert [NOT_ACKNOWLEDGED] * 2 == await open_one(server.url).send(messages)


async def test_nats_stream_limits_its_messages(started: Callable[[Any], Any], open_one: Callable[[str], Sink]) -> None:
    """A stream's own limit makes a message MESSAGE_TOO_LARGE; a stream that is full is an outage."""
    nats = started(Nats)
    nats.make_topic("limited.size", max_msg_size=1000)
    nats.make_topic("limited.count", max_msgs=1, discard="new")
    sink = open_one(nats.url)
    deliveries: list[Delivery] = await sink.send([new_message("limited.size", 2000), new_message("limited.size")])
    assert [Refusal.MESSAGE_TOO_LARGE, ACKNOWLEDGED] == deliveries
    assert [ACKNOWLEDGED, NOT_ACKNOWLEDGED] == await sink.send([new_message("limited.count") for _ in range(2)])


@pytest.mark.interop
async def test_kafka_refuses_what_its_topic_does_not_take(
    started: Callable[[Any], Any], open_one: Callable[[str], Sink]
) -> None:
    """A size that only the broker knows of is MESSAGE_TOO_LARGE too; neighbours in the same set arrive."""
    kafka = started(ApacheKafka)
    kafka.make_topic("limited.size", max_message_bytes="200000")
    sink = open_one(f"{kafka.url}?message.max.bytes=10000000")
    messages = [new_message("limited.size", size) for size in (0, 250_000, 600, 2_000_000, 0)]
    large = Refusal.MESSAGE_TOO_LARGE
    assert [ACKNOWLEDGED, large, ACKNOWLEDGED, large, ACKNOWLEDGED] == await sink.send(messages)


async def test_torn_line_spoils_no_other(open_one: Callable[[str], Sink]) -> None:
    """What a crash left of a line stands on a line of its own, and the next set behind it."""
    log = LogFile()
    try:
        sink = open_one(log.url)
        messages = [new_message("any"), new_message("any")]
        assert [ACKNOWLEDGED] == await sink.send(messages[:1])
        with log.path.open("a") as file:
            file.write('{"specversion": "1.0", "id"')
        assert [ACKNOWLEDGED] == await sink.send(messages[1:])
        first, torn, second = log.path.read_text().splitlines()
        assert '{"specversion": "1.0", "id"' == torn
        assert [str(message.id) for message in messages] == [json.loads(line)["id"] for line in (first, second)]
    finally:
        log.close()


async def test_sets_of_several_publishers_leave_no_empty_line(open_one: Callable[[str], Sink]) -> None:
    """A set that is being written isn't taken for a torn line by whoever appends the next one."""
    log = LogFile()
    try:
        sinks = [open_one(log.url) for _ in range(4)]
        messages = [new_message("any", 500) for _ in range(200)]
        sent = await asyncio.gather(*(sink.send(messages) for sink in sinks * 8))
        assert [[ACKNOWLEDGED] * 200] * 32 == sent
        expected = sorted([str(message.id) for message in messages] * 32)
        assert expected == sorted(json.loads(line)["id"] for line in log.path.read_text().splitlines())
    finally:
        log.close()


async def test_full_disk_is_an_outage(open_one: Callable[[str], Sink]) -> None:
    """Where the disk takes no more, nothing is acknowledged."""
    sink = open_one("log:/dev/full")
    assert [NOT_ACKNOWLEDGED] == await sink.send([new_message("any")])
