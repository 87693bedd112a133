"""Events to NATS JetStream."""

import asyncio
import re
import string
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import Header, PubAck

from decideonce_server.sink import CLOSE_WITHIN_S, SEND_WITHIN_S, Message, Outcome, Receipt, Refusal

log = structlog.get_logger()

RECONNECT_EACH_S = 1
# A server whose host is gone is left after two pings without an answer.
PING_EACH_S = 10
ASK_WITHIN_S = 1.0

# JetStream's own numbers (nats-server, server/errors.json): the message or its headers exceed what the stream takes ...
TOO_LARGE_CODES = {10054, 10097}
# ... and the account's limits are exceeded, which is no fault of the message, though told as one.
ACCOUNT_LIMIT_CODE = 10002

# What CloudEvents' NATS binding leaves as it is in a header's value: visible ASCII but the quote and percent signs.
_PLAIN = string.punctuation.replace('"', "").replace("%", "")
_SUBJECT = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)*")
# As the library gives it, in lower case.
_FORBIDDEN = re.compile(r'permissions violation for publish to "(?P<subject>[^"]*)"')


class NatsSink:
    """NATS JetStream. `servers` are URLs, `options` the library's for how to trust them; the time-out is in seconds.

    An event is a message of CloudEvents' NATS binding, in binary mode: each attribute is a header "ce-NAME", its value
    percent-encoded. "Nats-Msg-Id" is the event's id, by which a stream drops what it already has; that counts as
    acknowledged. Besides the topics, the user must be allowed to ask "$JS.API.STREAM.NAMES".
    """

    def __init__(
        self, servers: Sequence[str], options: Mapping[str, Any] | None = None, within_s: float = SEND_WITHIN_S
    ) -> None:
        self._servers = list(servers)
        self._options = dict(options or {})
        self._within_s = within_s
        self._client = Client()
        self._jetstream: JetStreamContext | None = None
        self._connecting = asyncio.Lock()
        self._reconnected = asyncio.Event()
        self._sets: set[_Set] = set()
        self._told = ""

    async def send(self, messages: Sequence[Message]) -> list[Outcome]:
        """Send a set. A topic isn't found where JetStream, when asked, knows no stream of that subject.

        That nobody answers on the subject isn't enough: it is so too while a stream has no leader.
        """
        under_way = _Set(messages, asyncio.get_running_loop().time() + self._within_s)
        self._sets.add(under_way)
        try:
            async with asyncio.timeout(self._within_s):
                jetstream = await self._connected()
                await under_way.publish(self._client, jetstream)
                await under_way.judge(jetstream)
        except (OSError, nats.errors.Error) as error:  # a TimeoutError is an OSError
            self._tell(error)
        finally:
            self._sets.remove(under_way)
            under_way.give_up()
        if Receipt.ACKNOWLEDGED in under_way.outcomes:
            self._told = ""
        return under_way.outcomes

    async def close(self) -> None:
        """Give up what is under way and disconnect."""
        for under_way in self._sets:
            under_way.give_up()
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._client.close()
        except (OSError, nats.errors.Error) as error:
            self._tell(error)

    async def _connected(self) -> JetStreamContext:
        async with self._connecting:
            jetstream = self._jetstream
            if jetstream is None or self._client.is_closed:
                jetstream = await self._connect()
        # Nothing is handed over meanwhile: the library would keep it, and send it behind what comes later.
        self._reconnected.clear()
        if not self._client.is_connected:
            await self._reconnected.wait()
        return jetstream

    async def _connect(self) -> JetStreamContext:
        client = Client()
        try:
            await client.connect(
                self._servers,
                name="decideonce",
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_EACH_S,
                ping_interval=PING_EACH_S,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                **self._options,
            )
        except BaseException:
            await client.close()
            raise
        self._client = client
        self._jetstream = client.jetstream(timeout=ASK_WITHIN_S)
        return self._jetstream

    async def _on_error(self, error: Exception) -> None:
        if forbidden := _FORBIDDEN.search(str(error)):
            for under_way in self._sets:
                under_way.refuse(forbidden["subject"])
        self._tell(error)

    async def _on_disconnected(self) -> None:
        for under_way in self._sets:
            under_way.give_up()

    async def _on_reconnected(self) -> None:
        self._reconnected.set()

    def _tell(self, error: Exception) -> None:
        if self._told != type(error).__name__:
            self._told = type(error).__name__
            log.warning("NATS is in trouble", error=str(error) or self._told)


class _Set:
    """A set on its way, and what is known of its outcome so far; `deadline` is by the event loop's clock."""

    def __init__(self, messages: Sequence[Message], deadline: float) -> None:
        self.outcomes: list[Outcome] = [Receipt.NOT_ACKNOWLEDGED] * len(messages)
        self._messages = messages
        self._deadline = deadline
        self._acks: dict[int, asyncio.Future[PubAck]] = {}
        self._without_stream: list[int] = []

    async def publish(self, client: Client, jetstream: JetStreamContext) -> None:
        """Send all, then wait for what was acknowledged.

        Raises:
            TimeoutError: the deadline has passed.
            nats.errors.Error: the connection is lost.
        """
        for index, message in enumerate(self._messages):
            # The library swallows a cancellation while it flushes, so the clock is asked too.
            if asyncio.get_running_loop().time() >= self._deadline:
                raise TimeoutError
            if not client.is_connected:
                raise nats.errors.ConnectionReconnectingError
            headers = _headers(message)
            if _size(headers, message) > client.max_payload:
                self.outcomes[index] = Refusal.MESSAGE_TOO_LARGE
            elif _SUBJECT.fullmatch(message.topic) is None:
                self.outcomes[index] = Refusal.REFUSED
            else:
                self._acks[index] = await jetstream.publish_async(message.topic, message.payload, headers=headers)
                self._acks[index].add_done_callback(partial(self._acknowledged, index))
        if self._acks:
            await asyncio.wait(self._acks.values())

    def _acknowledged(self, index: int, ack: asyncio.Future[PubAck]) -> None:
        if ack.cancelled():
            return
        failure = ack.exception()
        if failure is None:
            self.outcomes[index] = Receipt.ACKNOWLEDGED
        elif isinstance(failure, nats.js.errors.NoStreamResponseError):
            self._without_stream.append(index)
        elif isinstance(failure, nats.js.errors.APIError):
            self.outcomes[index] = _outcome(failure)
        else:
            self.outcomes[index] = Refusal.REFUSED

    async def judge(self, jetstream: JetStreamContext) -> None:
        """Ask JetStream for the streams of the subjects on which nobody answered."""
        judged: dict[str, Outcome] = {}
        for index in self._without_stream:
            topic = self._messages[index].topic
            if topic not in judged:
                judged[topic] = await _judge(jetstream, topic)
            self.outcomes[index] = judged[topic]

    def refuse(self, subject: str) -> None:
        """Take in that the server doesn't let this user publish to a subject, given in lower case."""
        for index, ack in self._acks.items():
            if not ack.done() and self._messages[index].topic.lower() == subject:
                ack.set_exception(nats.errors.Error("nats: permissions violation"))

    def give_up(self) -> None:
        """Wait for nothing any more."""
        for ack in self._acks.values():
            ack.cancel()


def _headers(message: Message) -> dict[str, str]:
    headers = {f"ce-{name}": quote(value, safe=_PLAIN) for name, value in message.attributes.items()}
    headers[Header.MSG_ID] = str(message.id)
    return headers


def _size(headers: Mapping[str, str], message: Message) -> int:
    """Count the bytes that the server counts: a version line and an empty line, and a line for each header."""
    lines = sum(len(name) + len(": ") + len(value) + len("\r\n") for name, value in headers.items())
    return len("NATS/1.0\r\n") + lines + len("\r\n") + len(message.payload)


def _outcome(failure: nats.js.errors.APIError) -> Outcome:
    if failure.err_code in TOO_LARGE_CODES:
        return Refusal.MESSAGE_TOO_LARGE
    if isinstance(failure, nats.js.errors.BadRequestError) and failure.err_code != ACCOUNT_LIMIT_CODE:
        return Refusal.REFUSED
    return Receipt.NOT_ACKNOWLEDGED


async def _judge(jetstream: JetStreamContext, topic: str) -> Outcome:
    try:
        await jetstream.find_stream_name_by_subject(topic)
    except nats.js.errors.NotFoundError:
        return Refusal.TOPIC_NOT_FOUND
    except nats.errors.Error:
        return Receipt.NOT_ACKNOWLEDGED
    return Receipt.NOT_ACKNOWLEDGED
