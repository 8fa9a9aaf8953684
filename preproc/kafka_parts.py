"""Parts of a stream from a topic of Kafka: its messages, a JSON object each, become datasets by the fit of another one.

A part tells in its spec where the next one begins. So the newest part says where a start goes on, whenever the one before
was killed: no message is lost, and none comes twice.
"""

import json
import re
import shutil
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from configs.console import command_console
from configs.messages import printable, require_package, shortened, shown
from configs.preproc_schema import OnBad, PreprocConfig, topic_of
from configs.table_schema import TableConfig
from dataloading.dataset.dataset_directory import write_spec
from dataloading.dataset.documents import read_yaml
from dataloading.dataset.durable_files import exclusive, put_in_place, replace_text
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
CHECKED_BYTES = 4 << 20
NO_BREAKS = bytes.maketrans(b"\r\n", b"  ")
NAMES = """
SELECT CASE WHEN json_type(json_) = 'OBJECT' AND len(json_keys(json_)) = len(list_distinct(json_keys(json_)))
    AND NOT list_contains(json_keys(json_), '') AND NOT contains(json_pretty(json_), chr(10) || repeat('    ', 128))
THEN CAST(to_json(json_keys(json_)) AS VARCHAR) END
FROM (SELECT try_cast(try(decode(line_)) AS JSON) AS json_ FROM (SELECT unnest(?::BLOB[]) AS line_))
"""
"""Names in a line; null if the reader of tables does not take it: with a name twice or empty, or deeper than 127."""
Lines = tuple[dict[str, bytes], list[str]]
"""JSON objects by where they are, and where the other messages are, and why they are none of the table."""


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
            if not (isinstance(begins, dict) and begins) or not all(
                type(p) is str and p.isdecimal() and type(at) is int and 0 <= at < 2**63
                for p, at in begins.items()
            ):
                raise ValueError(
                    f"{parts[-1] / SPEC_NAME}: metadata.{OFFSETS} is {shown(begins)}, want the next offset of each partition, as "
                    "{'0': 12}; restore the file, or name a new output"
                )
        with closing(_consumer(config, servers, topic, begins)) as consumer:
            while messages := _collected(consumer, config, begins):
                begins |= {str(m.partition()): (m.offset() or 0) + 1 for m in messages}
                path = output / f"{topic}-{number + 1:012}"
                lines = _lines_of(config, messages)
                told = f"{len(messages):,} messages"
                told += f", {len(lines[1]):,} of them left out" if lines[1] else ""
                try:
                    rows = _write_part(config, path, lines, begins)
                except NoRowsError:
                    progress.say(f"no part of {told}, none of them a row")
                    continue
                number += 1
                progress.say(f"{path}: {rows:,} rows of {told}")


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
    if missing := {*map(int, begins)} - {*found.partitions}:
        raise ValueError(
            f"{config.source}: the broker has no partition {min(missing)}, of which messages were read; if messages are gone, "
            "name a new output"
        )
    consumer.assign(
        [TopicPartition(topic, p, begins.get(str(p), OFFSET_BEGINNING)) for p in found.partitions]
    )
    return consumer


def _collected(
    consumer: "Consumer", config: PreprocConfig, begins: dict[str, int]
) -> "list[Message]":
    """Return the messages of the next part; none if none came for `kafka.idle_s`.

    Raises ValueError: the broker has not the messages before those of `begins` any more, as an emptied topic.
    """
    options, messages, since = config.kafka, list["Message"](), time.monotonic()
    while (count := options.part_rows - len(messages)) > 0:
        limit_s = options.part_s if messages else options.idle_s
        waited_s = time.monotonic() - since
        if not messages and waited_s >= min(ANSWER_S, limit_s or ANSWER_S):
            _check_end(consumer, config, begins)
        if limit_s is not None and waited_s >= limit_s:
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


def _check_end(consumer: "Consumer", config: PreprocConfig, begins: dict[str, int]) -> None:
    """Raise ValueError if the topic ends before the messages of `begins`.

    Some brokers answer an offset behind their last message by none, as if more were to come. It is asked after a time without
    messages, since a broker that takes over may know less for a moment.
    """
    from confluent_kafka import TopicPartition

    _, topic = topic_of(config.source) or ("", "")
    for partition, next_ in begins.items():
        asked = TopicPartition(topic, int(partition))
        low, high = consumer.get_watermark_offsets(asked, cached=True)
        if 0 <= high < next_:
            raise ValueError(
                f"{config.source}, partition {partition}: the next message is {next_:,}, and the broker has {low:,} to {high:,}; "
                "if messages are gone, name a new output"
            )


def _lines_of(config: PreprocConfig, messages: "list[Message]") -> Lines:
    """Return the lines of messages; ValueError if one is no object with the usual names, under `on_bad=fail`."""
    from preproc.work_directory import connected

    # In JSON a line break stands between values only. A message without a value deletes a key, and is no row.
    lines = {
        f"partition {message.partition()}, offset {message.offset()}": value.translate(NO_BREAKS)
        for message in messages
        if (value := message.value())
    }
    values, found, known = [*lines.values()], list[str | None](), dict[str | None, str | None]()
    # The query takes some 50 times the bytes of its lines.
    at_once = max(1, CHECKED_BYTES // max(map(len, values), default=1))
    with connected({"threads": 1}) as connection:
        for i in range(0, len(values), at_once):
            rows = connection.execute(NAMES, [values[i : i + at_once]]).fetchall()
            found += [known.setdefault(names, names) for (names,) in rows]
    reasons = _mistakes(found)
    others = [
        f"{where}: {reason}: {shortened(printable(line.decode(errors='replace')), 80)}"
        for (where, line), names in zip(lines.items(), found, strict=True)
        if (reason := reasons.get(names))
    ]
    if others and config.on_bad is OnBad.fail:
        raise ValueError(
            f"{config.source}, {others[0]}; correct what sends them, and set on_bad=skip to leave them out"
        )
    return dict(compress(lines.items(), (names not in reasons for names in found))), others


def _mistakes(found: list[str | None]) -> dict[str | None, str]:
    """Return why messages with some names are left out: SQL does not tell names by their case, so the usual spelling counts."""
    counts, lists = Counter[str](), {names: json.loads(names or "[]") for names in {*found}}
    for names, count in Counter(found).items():
        counts.update(dict.fromkeys(lists[names], count))
    # In bytes ASCII alone has a lower case, as for DuckDB.
    usual = {name.encode().lower(): name for name, _ in reversed(counts.most_common())}
    reasons: dict[str | None, str] = {None: "no JSON object"}
    for names in lists:
        for name in lists[names]:
            if (other := usual[name.encode().lower()]) != name:
                reasons[names] = f"{shown(name)} is {shown(other)} in other messages"
    return reasons


def _write_part(config: PreprocConfig, path: Path, lines: Lines, begins: dict[str, Any]) -> int:
    """Write the part of some messages, whole with the next offsets or not at all; return its rows. NoRowsError: none is one."""
    work = path.parent / NEXT
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    source, part = str(work / "messages.jsonl"), work / path.name
    objects, others = lines
    with open(source, "wb") as stream:
        stream.writelines(line + b"\n" for line in objects.values())
    if not objects:
        raise NoRowsError("the messages have no values")
    table = TableConfig.of(config.table)
    sources = {
        name: replace(of, files=source) if of.files == config.source else of
        for name, of in table.sources.items()
    }
    of_part = replace(config, source=source, output=str(part), plot=False)
    # Rows are named by the file, which nobody sees.
    places, row = [*objects], re.compile(rf"{re.escape(source)}(?:, row |\t)(\d+)(?:: |\t)")
    placed = partial(row.sub, lambda found: f"{places[int(found[1]) - 1]}: ")
    try:
        build_table(of_part, replace(table, sources=sources), Progress(Console(quiet=True)))
    except ValueError as error:
        if row.match(str(error)) is None:
            raise
        raise ValueError(f"{config.source}, {placed(str(error))}") from None
    if config.on_bad is OnBad.quarantine:
        rows = placed((part / "bad_rows.tsv").read_text("utf-8"))
        replace_text(part / "bad_rows.tsv", rows + "".join(f"{other}\n" for other in others))
    spec = FeatureSpec.load(part)
    write_spec(replace(spec, metadata=spec.metadata | {OFFSETS: begins}), part)
    put_in_place(part, path)
    shutil.rmtree(work)
    return spec.rows_of("train")
