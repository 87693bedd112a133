"""Publishes events: reads them from the outbox, sends them to the sink, and deletes them once the sink has them.

At least once, and in order per operation key: only the holder of a bucket's lease reads it, and of one key's events the
next is sent when the one before is acknowledged and deleted. A sink that can't be reached is an outage: it is tried
again, with backoff, for as long as it takes. An event that the sink refuses for good is parked, and holds back only the
later events of its own key.
"""

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from uuid import UUID, uuid4

import structlog
import tenacity
from google.protobuf.message import DecodeError
from opentelemetry import metrics

from decideonce_server import measures
from decideonce_server.backoff import pause_s
from decideonce_server.cloudevent import PayloadFormat, message_of
from decideonce_server.database import Database
from decideonce_server.errors import LedgerUnavailable
from decideonce_server.outbox import Backlog, Event, Outbox
from decideonce_server.outbox_buckets import BucketLeases
from decideonce_server.sink import Delivery, Message, Receipt, Refusal, Sink

# How many events are read, and sent, at once.
SET_MAX = 1000
# How long an event waits at most before it is looked for: with sending, well under 250 ms.
POLL_INTERVAL_S = 0.18
# From a set that wasn't full to the next: sets of a handful cost nearly what full ones do.
SET_INTERVAL_S = 0.05
# Longer than an interval, a set's sending up to its time-out, and a pause: who is slow keeps its buckets.
LEASE = timedelta(seconds=15)
RENEW_INTERVAL_S = 2.0
BACKLOG_INTERVAL_S = 5.0
# Of a publisher's time, the part that counting takes at most: a long backlog takes long to count.
COUNTING_SHARE = 0.05
# Between two tries while the sink can't be reached.
BACKOFF = tenacity.wait_random_exponential(multiplier=0.1, max=2.0)

log = structlog.get_logger()


class Publisher:
    """Publishes what waits in the buckets that it holds, until stopped."""

    def __init__(
        self,
        database: Database,
        sink: Sink,
        payload_format: PayloadFormat = PayloadFormat.PROTOBUF,
        *,
        lease: timedelta = LEASE,
    ) -> None:
        self._outbox = Outbox(database)
        self._leases = BucketLeases(database, uuid4(), lease)
        self._renew_interval_s = min(RENEW_INTERVAL_S, lease.total_seconds() / 5)
        self._sink = sink
        self._payload_format = payload_format
        self._stopping = asyncio.Event()
        self._buckets: deque[int] = deque()
        self._renew_at = 0.0
        self._backlog_at = 0.0
        self._backlog = Backlog(0, None, 0)
        self._failures = 0
        meter = metrics.get_meter("decideonce")
        self._published = meter.create_counter("outbox_published", description="Events that the sink acknowledged")
        self._retries = meter.create_counter("outbox_retries", description="Events that were sent and not acknowledged")
        self._parked = meter.create_counter("outbox_parkings", description="Events that the sink refused for good")
        for counter in (self._published, self._retries):
            counter.add(0)
        for refusal in Refusal:
            self._parked.add(0, {"reason": refusal.value})
        measures.gauge("outbox_pending", "Events that wait to be published", lambda: self._backlog.pending)
        measures.gauge(
            "outbox_parked", "Events that can't be published, until an operator helps", lambda: self._backlog.parked
        )
        measures.gauge("outbox_lag", "Age of the oldest event that waits", lambda: age_s(self._backlog.oldest), "s")

    async def run(self) -> None:
        """Publish until stopped; then end the set that is under way, and give the buckets back.

        Cancelled, give up that set; its buckets stay leased until what was sent of it has arrived.
        """
        try:
            while not self._stopping.is_set():
                await self._publish_and_pause()
            await self._leases.release()
        except LedgerUnavailable:
            log.warning("buckets not given back: the ledger can't be reached; their leases run out")
        finally:
            await self._sink.close()

    async def _publish_and_pause(self) -> None:
        began = time.monotonic()
        try:
            interval_s = await self._round()
        except LedgerUnavailable:
            log.warning("events not published: the ledger can't be reached")
            interval_s = POLL_INTERVAL_S
        if self._failures:
            await self._pause(pause_s(BACKOFF, self._failures))
        else:
            await self._pause(began + interval_s - time.monotonic())

    def stop(self) -> None:
        """Have `run` end."""
        self._stopping.set()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()

    async def _round(self) -> float:
        """Publish what waits, up to one set of each key's next events and theirs.

        Gives the time from its beginning to the next one's, in s, if it doesn't take longer itself.
        """
        await self._hold()
        await self._count()
        events = await self._outbox.waiting(self._buckets, SET_MAX) if self._buckets else []
        if not events:
            # Others sent what this one couldn't: what comes next is no retry.
            self._failures = 0
            return POLL_INTERVAL_S
        # The buckets that come after those of a full set are read first next time.
        self._buckets.rotate(-max(1, len({event.bucket for event in events})))
        queues: dict[tuple[str, str, str], deque[Event]] = defaultdict(deque)
        for event in events:
            queues[event.tenant, event.operation, event.operation_key].append(event)
        while queues and not self._stopping.is_set():
            queues = await self._send_next(queues.values())
            await self._hold()
            held = set(self._buckets)
            queues = {key: queue for key, queue in queues.items() if queue[0].bucket in held}
        return SET_INTERVAL_S if len(events) < SET_MAX else 0.0

    async def _hold(self) -> None:
        """Renew the leases when it is time to. Nothing is being sent meanwhile, so a bucket can be given back."""
        now = time.monotonic()
        if now < self._renew_at:
            return
        held = set(await self._leases.hold())
        self._renew_at = now + self._renew_interval_s
        kept = [bucket for bucket in self._buckets if bucket in held]
        self._buckets = deque([*kept, *sorted(held.difference(kept))])

    async def _count(self) -> None:
        """Count the backlog when it is time to; where that fails, events go out nevertheless."""
        began = time.monotonic()
        if began < self._backlog_at:
            return
        try:
            self._backlog = await self._outbox.backlog()
        except LedgerUnavailable:
            log.warning("backlog not counted: the ledger can't be reached, or takes too long")
        ended = time.monotonic()
        self._backlog_at = ended + max(BACKLOG_INTERVAL_S, (ended - began) / COUNTING_SHARE)

    async def _send_next(self, queues: Iterable[deque[Event]]) -> dict[tuple[str, str, str], deque[Event]]:
        """Send the next event of each key; give those keys that may go on."""
        heads = [(queue[0], queue) for queue in queues]
        deliveries = await self._send([event for event, _ in heads])
        sent = [
            event for (event, _), delivery in zip(heads, deliveries, strict=True) if delivery is Receipt.ACKNOWLEDGED
        ]
        refused = [
            (event, delivery)
            for (event, _), delivery in zip(heads, deliveries, strict=True)
            if isinstance(delivery, Refusal)
        ]
        self._failures = 0 if sent or refused else self._failures + 1
        self._retries.add(len(heads) - len(sent) - len(refused))
        if self._failures == 1:
            log.warning("events not published: the sink doesn't acknowledge them; trying again", events=len(heads))
        deleted = await self._outbox.published(self._leases.holder, sent) if sent else 0
        self._published.add(deleted)
        parked = await self._park(refused) if refused else 0
        if lost := len(sent) - deleted + len(refused) - parked:
            log.warning("leases of buckets were lost: others publish them", events=lost)
            self._renew_at = 0.0
            return {}
        going = {event.id for event in sent}
        return {
            (event.tenant, event.operation, event.operation_key): rest
            for event, queue in heads
            if event.id in going and (rest := _without_first(queue))
        }

    async def _send(self, events: Sequence[Event]) -> list[Delivery]:
        messages: list[Message | None] = []
        for event in events:
            try:
                messages.append(message_of(event, self._payload_format))
            except (DecodeError, ValueError, OverflowError):
                messages.append(None)
        deliveries = iter(await self._sink.send([message for message in messages if message is not None]))
        return [Refusal.REFUSED if message is None else next(deliveries) for message in messages]

    async def _park(self, refused: Sequence[tuple[Event, Refusal]]) -> int:
        parked = await self._outbox.park(
            self._leases.holder,
            [event for event, _ in refused],
            [refusal.value for _, refusal in refused],
        )
        for event, refusal in refused:
            if event.id in parked:
                self._parked.add(1, {"reason": refusal.value})
                log.error("event parked", event_id=str(event.id), topic=event.topic, reason=refusal.value)
        return len(parked)


def age_s(event_id: UUID | None) -> float:
    """Tell how old an event is by the time in its id (a UUIDv7, RFC 9562), in seconds; 0 for none."""
    return 0.0 if event_id is None else max(0.0, time.time() - (event_id.int >> 80) / 1000)


def _without_first(queue: deque[Event]) -> deque[Event]:
    queue.popleft()
    return queue
