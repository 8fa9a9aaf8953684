"""Parts of a stream from a topic of Kafka: its messages, a JSON object each, become datasets by the fit of another one.

A part tells in its spec where the next one begins. So the newest part says where a start goes on, whenever the one before
was killed: no message is lost, and none comes twice.
"""

import os
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from configs.console import command_console
from configs.messages import require_package, shown
from configs.preproc_schema import PreprocConfig, topic_of
from configs.table_schema import TableConfig
from dataloading.dataset.dataset_directory import write_spec
from dataloading.dataset.documents import read_yaml
from dataloading.dataset.durable_files import exclusive, put_in_place
from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec
from dataloading.stream_source import OFFSETS
from preproc.report.console import Progress
from preproc.table.pipeline.build import build_table
from preproc.table.pipeline.order import NoRowsError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message

NEXT = ".next"
"""Directory below the output of the part that is being made, which a killed start leaves."""
ANSWER_S = 30.0
MOST_AT_ONCE = 10_000


def follow_topic(config: PreprocConfig) -> None:
    """Add parts to `config.output` until no message came for `kafka.idle_s`.

    Raises ValueError: the topic is not there, or no longer has the messages that come next; or messages are no rows of the
    table, as of `build_table`.
    """
    require_package("confluent_kafka", f"source={config.source}")
    output, (servers, topic) = Path(config.output or ""), topic_of(config.source) or ("", "")
    output.mkdir(parents=True, exist_ok=True)
    progress = Progress(command_console())
    with exclusive(output, f"is adding parts to {output}"):
        parts = sorted(path.parent for path in output.glob(f"{topic}-{'[0-9]' * 12}/{SPEC_NAME}"))
        number, begins = 0, dict[str, int]()
        if parts:
            number = int(parts[-1].name[-12:])
            begins = FeatureSpec.load(parts[-1], measure=False).metadata.get(OFFSETS, begins)
        with closing(_consumer(config, servers, topic, begins)) as consumer:
            while messages := _collected(consumer, config):
                begins |= {str(m.partition()): (m.offset() or 0) + 1 for m in messages}
                path = output / f"{topic}-{number + 1:012}"
                try:
                    rows = _write_part(config, path, messages, begins)
                except NoRowsError:
                    progress.say(f"no part of {len(messages):,} messages, none of them a row")
                    continue
                number += 1
                progress.say(f"{path}: {rows:,} rows of {len(messages):,} messages")


def _consumer(
    config: PreprocConfig, servers: str, topic: str, begins: dict[str, int]
) -> "Consumer":
    """Return a client that reads each partition of the topic from its offset in `begins`, or from its first message."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaException, TopicPartition

    path = config.kafka.settings
    settings = read_yaml(Path(path)) if path else {}
    if not isinstance(settings, dict):
        raise ValueError(f"kafka.settings={path}: want names and values, as ssl.ca.location: FILE")
    settings |= {
        "bootstrap.servers": servers,
        # The client wants a name. The parts, not the broker, remember what was read.
        "group.id": f"parts-of-{topic}",
        "enable.auto.commit": False,
        # A message that is gone must not be passed over in silence.
        "auto.offset.reset": "error",
    }
    try:
        consumer = Consumer(settings)
        found = consumer.list_topics(topic, timeout=ANSWER_S).topics[topic]
    except KafkaException as error:
        raise ValueError(f"{config.source}: {error.args[0].str()}") from None
    if found.error is not None:
        raise ValueError(f"{config.source}: the broker has no topic {shown(topic)}; create it")
    consumer.assign(
        [TopicPartition(topic, p, begins.get(str(p), OFFSET_BEGINNING)) for p in found.partitions]
    )
    return consumer


def _collected(consumer: "Consumer", config: PreprocConfig) -> "list[Message]":
    """Return the messages of the next part; none if none came for `kafka.idle_s`."""
    options, messages, since = config.kafka, list["Message"](), time.monotonic()
    while (count := options.part_rows - len(messages)) > 0:
        limit_s = options.part_s if messages else options.idle_s
        if limit_s is not None and time.monotonic() - since >= limit_s:
            break
        found = consumer.consume(min(count, MOST_AT_ONCE), timeout=0.2)
        if found and not messages:
            since = time.monotonic()
        for message in found:
            if (error := message.error()) is not None:
                raise ValueError(
                    f"{config.source}, partition {message.partition()}: {error.str()}; if messages are gone, name a new output"
                )
        messages += found
    return messages


def _write_part(
    config: PreprocConfig, path: Path, messages: "list[Message]", begins: dict[str, Any]
) -> int:
    """Write the part of some messages, whole with the next offsets or not at all; return its rows. NoRowsError: none is one."""
    work = path.parent / NEXT
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    lines, part = str(work / "messages.jsonl"), work / path.name
    with open(lines, "wb") as stream:
        for message in messages:
            # In JSON a line break stands between values only. A message without a value deletes a key, and is no row.
            if value := message.value():
                stream.write(value.replace(b"\n", b" ").replace(b"\r", b" ") + b"\n")
    if not os.path.getsize(lines):
        raise NoRowsError("the messages have no values")
    table = TableConfig.of(config.table)
    sources = {
        name: replace(source, files=lines) if source.files == config.source else source
        for name, source in table.sources.items()
    }
    of_part = replace(config, source=lines, output=str(part), plot=False)
    build_table(of_part, replace(table, sources=sources), Progress(Console(quiet=True)))
    spec = FeatureSpec.load(part)
    write_spec(replace(spec, metadata=spec.metadata | {OFFSETS: begins}), part)
    put_in_place(part, path)
    shutil.rmtree(work)
    return spec.rows_of("train")
