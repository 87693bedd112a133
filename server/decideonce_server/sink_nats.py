"""Events to NATS JetStream."""

import asyncio
import itertools
import json
import re
import string
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import nats.errors
import nats.js.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import Header
from nats.js.client import NO_RESPONDERS_STATUS

from decideonce_server.sink import CLOSE_WITHIN_S, SEND_WITHIN_S, Delivery, Message, Receipt, Refusal

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
        self._client: Client | None = None
        self._connecting = asyncio.Lock()
        self._reconnected = asyncio.Event()
        # Replies come to one inbox, each with a number for its last part.
        self._inbox = ""
        self._numbers = itertools.count()
        self._awaited: dict[str, tuple[_Set, int]] = {}
        self._told = ""

    async def send(self, messages: Sequence[Message]) -> list[Delivery]:
        """Send a set. A topic isn't found where JetStream, when asked, knows no stream of that subject.

        That nobody answers on the subject isn't enough: it is so too while a stream has no leader.
        """
        under_way = _Set(messages)
        deadline = asyncio.get_running_loop().time() + self._within_s
        try:
            async with asyncio.timeout_at(deadline):
                client = await self._connected()
                await self._publish(client, under_way, deadline)
                await under_way.is_complete.wait()
                await under_way.judge(client)
        except (OSError, nats.errors.Error) as error:  # a TimeoutError is an OSError
            self._tell(error)
        finally:
            self._forget(under_way)
        if Receipt.ACKNOWLEDGED in under_way.deliveries:
            self._told = ""
        return under_way.deliveries

    async def close(self) -> None:
        """Give up what is under way and disconnect."""
        self._give_up()
        if self._client is None:
            return
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                await self._client.close()
        except (OSError, nats.errors.Error) as error:
            self._tell(error)

    async def _connected(self) -> Client:
        async with self._connecting:
            client = self._client
            if client is None or client.is_closed:
                client = await self._connect()
        # Nothing is handed over meanwhile: the library would keep it, and send it behind what comes later.
        self._reconnected.clear()
        if not client.is_connected:
            await self._reconnected.wait()
        return client

    async def _connect(self) -> Client:
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
            self._inbox = client.new_inbox()
            await client.subscribe(f"{self._inbox}.*", cb=self._on_reply)
        except BaseException:
            await client.close()
            raise
        self._client = client
        return client

    async def _publish(self, client: Client, under_way: "_Set", deadline: float) -> None:
        for index, message in enumerate(under_way.messages):
            if not client.is_connected:
                raise nats.errors.ConnectionReconnectingError
            headers = _headers(message)
            if _size(headers, message) > client.max_payload:
                under_way.settle(index, Refusal.MESSAGE_TOO_LARGE)
            elif _SUBJECT.fullmatch(message.topic) is None:
                under_way.settle(index, Refusal.REFUSED)
            else:
                number = str(next(self._numbers))
                self._awaited[number] = under_way, index
                await client.publish(message.topic, message.payload, reply=f"{self._inbox}.{number}", headers=headers)
            # The library swallows a cancellation while it flushes.
            if asyncio.get_running_loop().time() >= deadline:
                raise TimeoutError

    async def _on_reply(self, reply: Msg) -> None:
        under_way, index = self._awaited.pop(reply.subject.rpartition(".")[2], (None, 0))
        if under_way is None:
            return
        if (reply.headers or {}).get(Header.STATUS) == NO_RESPONDERS_STATUS:
            under_way.without_stream.append(index)
            under_way.settle(index, Receipt.NOT_ACKNOWLEDGED)
        else:
            under_way.settle(index, _delivery(reply.data))

    async def _on_error(self, error: Exception) -> None:
        if forbidden := _FORBIDDEN.search(str(error)):
            for under_way, index in list(self._awaited.values()):
                if under_way.messages[index].topic.lower() == forbidden["subject"]:
                    under_way.settle(index, Refusal.REFUSED)
        self._tell(error)

    async def _on_disconnected(self) -> None:
        self._give_up()

    async def _on_reconnected(self) -> None:
        self._reconnected.set()

    def _give_up(self) -> None:
        for under_way in {under_way for under_way, _ in self._awaited.values()}:
            under_way.is_complete.set()

    def _forget(self, under_way: "_Set") -> None:
        for number in [number for number, (one, _) in self._awaited.items() if one is under_way]:
            del self._awaited[number]

    def _tell(self, error: Exception) -> None:
        # Once until it works again: attempts to reconnect never end.
        if self._told != type(error).__name__:
            self._told = type(error).__name__
            log.warning("NATS is in trouble", error=str(error) or self._told)


class _Set:
    """A set on its way, and what is known of its delivery so far."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.deliveries: list[Delivery] = [Receipt.NOT_ACKNOWLEDGED] * len(messages)
        self.without_stream: list[int] = []
        self.is_complete = asyncio.Event()
        self._open = set(range(len(messages)))
        if not messages:
            self.is_complete.set()

    def settle(self, index: int, delivery: Delivery) -> None:
        """Take in a message's delivery."""
        self.deliveries[index] = delivery
        self._open.discard(index)
        if not self._open:
            self.is_complete.set()

    async def judge(self, client: Client) -> None:
        """Ask JetStream for the streams of the subjects on which nobody answered."""
        judged: dict[str, Delivery] = {}
        for index in self.without_stream:
            topic = self.messages[index].topic
            if topic not in judged:
                judged[topic] = await _judge(client, topic)
            self.deliveries[index] = judged[topic]


def _headers(message: Message) -> dict[str, str]:
    headers = {f"ce-{name}": quote(value, safe=_PLAIN) for name, value in message.attributes.items()}
    headers[Header.MSG_ID] = str(message.id)
    return headers


def _size(headers: Mapping[str, str], message: Message) -> int:
    """Count the bytes that the server counts: a version line and an empty line, and a line for each header."""
    lines = sum(len(name) + len(": ") + len(value) + len("\r\n") for name, value in headers.items())
    return len("NATS/1.0\r\n") + lines + len("\r\n") + len(message.payload)


def _delivery(data: bytes) -> Delivery:
    try:
        reply = json.loads(data)
    except ValueError:
        return Receipt.NOT_ACKNOWLEDGED
    # Only a stream's word counts: whoever listens on a subject can answer.
    if not isinstance(reply, dict) or ("stream" not in reply and "error" not in reply):
        return Receipt.NOT_ACKNOWLEDGED
    error = reply.get("error")
    if error is None:
        return Receipt.ACKNOWLEDGED
    if error["err_code"] in TOO_LARGE_CODES:
        return Refusal.MESSAGE_TOO_LARGE
    if error["code"] == HTTPStatus.BAD_REQUEST and error["err_code"] != ACCOUNT_LIMIT_CODE:
        return Refusal.REFUSED
    return Receipt.NOT_ACKNOWLEDGED


async def _judge(client: Client, topic: str) -> Delivery:
    try:
        await client.jetstream(timeout=ASK_WITHIN_S).find_stream_name_by_subject(topic)
    except nats.js.errors.NotFoundError:
        return Refusal.TOPIC_NOT_FOUND
    except nats.errors.Error:
        return Receipt.NOT_ACKNOWLEDGED
    return Receipt.NOT_ACKNOWLEDGED
