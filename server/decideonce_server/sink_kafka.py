"""Events to Kafka, through librdkafka's idempotent producer."""

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog
from cloudevents.core.bindings.kafka import to_binary
from cloudevents.core.formats.json import JSONFormat
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka import Message as KafkaMessage

from decideonce_server.cloudevent import binary_event
from decideonce_server.sink import CLOSE_WITHIN_S, SEND_WITHIN_S, Delivery, Message, Receipt, Refusal

log = structlog.get_logger()

FORMAT = JSONFormat()

# Each over librdkafka's default for a reason of its own.
SETTINGS: Mapping[str, str | int | float | bool] = {
    "client.id": "decideonce",
    "acks": "all",
    "enable.idempotence": True,
    # As Java's clients choose a key's partition, and so Debezium: a key stays where it is when one replaces the other.
    "partitioner": "murmur2_random",
    # A topic that a typing error names must not come into being, wherever the broker would allow that.
    "allow.auto.create.topics": False,
    # What waits in the library is bounded.
    "queue.buffering.max.messages": 20_000,
    "queue.buffering.max.kbytes": 65_536,
    # A broker judges the size of a whole batch: small ones can't make it refuse what it would take alone.
    "batch.size": 131_072,
    # The set is complete when it is handed over.
    "linger.ms": 1,
    # What was down is back soon after.
    "reconnect.backoff.max.ms": 1000,
    # librdkafka's own lines on stderr; what matters of them is logged by the error callback.
    "log_level": 2,
}

# The library gives up a message by itself this much before the time-out is over: what a set leaves behind would reach
# the broker behind newer events of its key.
GIVE_UP_AFTER = 0.75
# How long a topic that was never seen may be missing in the broker's answers before they are believed.
MISSING_FOR = 0.1

POLL_S = 0.05
IDLE_POLL_S = 1.0
ASK_WITHIN_S = 1.0

REFUSALS = {
    KafkaError.MSG_SIZE_TOO_LARGE: Refusal.MESSAGE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE: Refusal.MESSAGE_TOO_LARGE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED: Refusal.REFUSED,
    KafkaError.TOPIC_EXCEPTION: Refusal.REFUSED,
    KafkaError.INVALID_RECORD: Refusal.REFUSED,
    KafkaError.INVALID_TIMESTAMP: Refusal.REFUSED,
    KafkaError.POLICY_VIOLATION: Refusal.REFUSED,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT: Refusal.REFUSED,
    KafkaError._INVALID_ARG: Refusal.REFUSED,  # noqa: SLF001  # librdkafka's own errors are named so
}
TOPIC_ERRORS = {
    KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001  # librdkafka's own errors are named so
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}
# What leaves a producer's identity in doubt, which a broker may then refuse for ever, or its queue with events that
# would go out behind newer ones of their key: the next set starts with a new producer.
SPENT_BY = {
    KafkaError._MSG_TIMED_OUT,  # noqa: SLF001  # librdkafka's own errors are named so
    KafkaError._FATAL,  # noqa: SLF001
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.PRODUCER_FENCED,
    KafkaError.UNKNOWN_PRODUCER_ID,
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
}


class KafkaSink:
    """Kafka. `properties` are librdkafka's, for the brokers and how to trust them; the time-out is in seconds.

    An event is a message of CloudEvents' Kafka binding, in binary mode. A topic's `max.message.bytes` must be 128 KiB
    or more, and `message.max.bytes` in `properties` what the largest topic takes (1,000,000 by default).

    Raises:
        ValueError: librdkafka doesn't take a property; the text names it.
    """

    def __init__(self, properties: Mapping[str, str], within_s: float = SEND_WITHIN_S) -> None:
        self._within_s = within_s
        self._settings = {
            **SETTINGS,
            "message.timeout.ms": round(within_s * GIVE_UP_AFTER * 1000),
            "topic.metadata.propagation.max.ms": round(within_s * MISSING_FOR * 1000),
            **properties,
        }
        self._is_closed = False
        self._sending = 0
        self._idle: asyncio.Task[None] | None = None
        self._told: set[int] = set()
        self._renewing = threading.Lock()
        try:
            self._producer = self._new_producer()
        except KafkaException as error:
            raise ValueError(error.args[0].str()) from None

    async def send(self, messages: Sequence[Message]) -> list[Delivery]:
        """Send a set. A topic isn't found where the broker says so when asked, and never because it is silent."""
        if self._idle is None:
            self._idle = asyncio.create_task(self._poll_when_idle())
        self._sending += 1
        try:
            return await asyncio.to_thread(self._send, messages)
        finally:
            self._sending -= 1

    async def close(self) -> None:
        """Give up what is under way and disconnect."""
        self._is_closed = True
        if self._idle is not None:
            self._idle.cancel()
        await asyncio.to_thread(self._producer.close)

    async def _poll_when_idle(self) -> None:
        # What the library tells of its connections waits to be polled, without a bound.
        while True:
            await asyncio.sleep(IDLE_POLL_S)
            if not self._sending:
                self._producer.poll(0)

    def _new_producer(self) -> "_Producer":
        return _Producer(Producer({**self._settings, "error_cb": self._on_error}))

    def _on_error(self, error: KafkaError) -> None:
        # Once each until it works again: attempts to reconnect never end.
        if error.code() not in self._told:
            self._told.add(error.code())
            log.warning("Kafka is in trouble", error=error.str())

    def _usable_producer(self) -> "_Producer":
        with self._renewing:
            if self._producer.is_spent.is_set():
                self._producer.close()
                self._producer = self._new_producer()
            return self._producer

    def _send(self, messages: Sequence[Message]) -> list[Delivery]:
        deadline = time.monotonic() + self._within_s
        producer = self._usable_producer()

        def is_over() -> bool:
            return self._is_closed or producer.is_spent.is_set() or time.monotonic() >= deadline

        reports = _Reports(len(messages))
        for index, message in enumerate(messages):
            if is_over():
                break
            while not producer.takes(message, reports, index) and not is_over():
                producer.poll(POLL_S)
        while reports.awaited and not is_over():
            producer.poll(POLL_S)
        if reports.awaited:
            producer.is_spent.set()
        topics = {messages[index].topic for index in reports.without_topic}
        judged = {topic: producer.judge(topic, deadline) for topic in topics}
        for index in reports.without_topic:
            reports.deliveries[index] = judged[messages[index].topic]
        if Receipt.ACKNOWLEDGED in reports.deliveries:
            self._told.clear()
        # A copy: reports may still come.
        return list(reports.deliveries)


class _Reports:
    """What was reported of a set's messages so far. Several threads may poll, so each step is atomic."""

    def __init__(self, count: int) -> None:
        self.deliveries: list[Delivery] = [Receipt.NOT_ACKNOWLEDGED] * count
        self.awaited: set[int] = set()
        self.without_topic: list[int] = []

    def report(self, index: int, error: KafkaError | None) -> None:
        """Take a report in."""
        if error is None:
            self.deliveries[index] = Receipt.ACKNOWLEDGED
        elif error.code() in TOPIC_ERRORS:
            self.without_topic.append(index)
        else:
            self.deliveries[index] = REFUSALS.get(error.code(), Receipt.NOT_ACKNOWLEDGED)
        self.awaited.discard(index)


@dataclass(frozen=True, slots=True)
class _Producer:
    """The library's producer, and whether the next set needs a new one."""

    library: Producer
    is_spent: threading.Event = field(default_factory=threading.Event)

    def poll(self, within_s: float) -> None:
        """Take in what the library reports."""
        try:
            self.library.poll(within_s)
        except KafkaException as failure:
            self._take_in(failure.args[0])

    def _take_in(self, error: KafkaError) -> KafkaError:
        if error.fatal() or error.code() in SPENT_BY:
            self.is_spent.set()
        return error

    def _on_delivery(self, reports: _Reports, index: int, error: KafkaError | None, _message: KafkaMessage) -> None:
        reports.report(index, error and self._take_in(error))

    def takes(self, message: Message, reports: _Reports, index: int) -> bool:
        """Queue a message, or report at once why it can't be; False where the queue is full."""
        bound = to_binary(binary_event(message), FORMAT)
        reports.awaited.add(index)
        try:
            self.library.produce(
                message.topic,
                bound.value,
                message.key,
                headers=list(bound.headers.items()),
                on_delivery=partial(self._on_delivery, reports, index),
            )
        except BufferError:
            reports.awaited.discard(index)
            return False
        except KafkaException as failure:
            reports.report(index, self._take_in(failure.args[0]))
        return True

    def judge(self, topic: str, deadline: float) -> Delivery:
        """Ask the broker whether a topic exists: what the library knows of it may be old."""
        within_s = min(max(deadline - time.monotonic(), POLL_S), ASK_WITHIN_S)
        try:
            error = self.library.list_topics(topic, within_s).topics[topic].error
        except KafkaException as failure:
            self._take_in(failure.args[0])
            return Receipt.NOT_ACKNOWLEDGED
        is_unknown = error is not None and error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        return Refusal.TOPIC_NOT_FOUND if is_unknown else Receipt.NOT_ACKNOWLEDGED

    def close(self) -> None:
        """Give up what is queued and under way."""
        self.library.purge()
        try:
            self.library.flush(CLOSE_WITHIN_S / 2)
        except KafkaException as failure:
            self._take_in(failure.args[0])
