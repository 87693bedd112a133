"""The port to where events are sent: a broker of messages, or a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Protocol, TypeAlias
from uuid import UUID

SEND_WITHIN_S = 10.0
CLOSE_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class Message:
    """One event on its way out.

    `id` is the event's, `topic` a Kafka topic or NATS subject, `key` ("tenant/operation_key") what orders and
    partitions, `attributes` those of CloudEvents 1.0 under their own names, as text, and `payload` the event's data.
    """

    id: UUID
    topic: str
    key: str
    attributes: Mapping[str, str]
    payload: bytes


class Receipt(Enum):
    """Whether the sink has a message for good. Not acknowledged: it may have it or not, so it is to be sent again."""

    ACKNOWLEDGED = auto()
    NOT_ACKNOWLEDGED = auto()


class Refusal(StrEnum):
    """Why a message can't be sent, however often it is tried.

    REFUSED: the broker's permanent error for this message, such as an invalid record or a topic that isn't ours.
    """

    MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
    TOPIC_NOT_FOUND = "TOPIC_NOT_FOUND"
    REFUSED = "REFUSED"


Delivery: TypeAlias = Receipt | Refusal


class Sink(Protocol):
    """Where events are sent. It connects when it is first used, and again for ever after."""

    async def send(self, messages: Sequence[Message]) -> list[Delivery]:
        """Send a set, and give each message's delivery in the same order, within the sink's time-out.

        No two messages of a set have the same key: nothing is promised about their order. A message that isn't
        acknowledged may still arrive shortly after.
        """

    async def close(self) -> None:
        """Give up what is under way and disconnect, within CLOSE_WITHIN_S. The sink can't be used again."""
