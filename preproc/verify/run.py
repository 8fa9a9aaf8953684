"""Verification of a dataset directory: read every byte, and report the file and row of mistakes.

Opening a dataset checks only its spec and sizes, and stops at the first mistake. Verification reads every
byte once, in chunks, and counts all mistakes. A directory without `metadata`, as NVIDIA's preprocessing
writes it, has no checksums to compare with. All other checks apply to it too.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np

from configs.preproc_schema import PreprocConfig
from dataloading.dataset.feature_spec import FeatureSpec, measured
from dataloading.dataset.open_dataset import open_dataset
from preproc.report.console import LabelSum, Progress, SplitSummary, print_splits
from preproc.verify.binary import FileTask, file_tasks, listed_in, listed_rows, num_rows_of
from preproc.verify.vocabulary import vocabulary_mistakes

CHUNK_BYTES = 1 << 22
"""Bytes per read and thread; memory is a few times that per thread, for any size of the dataset."""
READ_ROWS = 4096


@dataclass(slots=True)
class Findings:
    num_wrong: int = 0  # total of wrong values and files
    lines: list[str] = field(default_factory=list)
    splits: dict[str, SplitSummary] = field(default_factory=dict)  # rows and labels per split

    def add(self, path: Path, text: str, count: int = 1) -> None:
        self.num_wrong += count
        self.lines.append(f"{path}: {text}")


def run_verify(config: PreprocConfig, progress: Progress) -> None:
    """Verify `config.path` and print the mistakes; SystemExit(1) if there are any, ValueError if the spec cannot be read."""
    assert config.path is not None
    spec = FeatureSpec.load(config.path, measure=False)
    tasks = list(file_tasks(spec))
    total = sum(task.path.stat().st_size for task in tasks)
    num_read, lock = 0, Lock()
    with progress.phase("verify") as phase:
        phase.total = total

        def advance(num_bytes: int) -> None:
            nonlocal num_read
            with lock:
                num_read += num_bytes
                rate = num_read / max(progress.seconds, 1e-9) / 1e6
                phase.detail = f"{num_read / 1e9:,.2f} of {total / 1e9:,.2f} GB, {rate:,.0f} MB/s"
                phase.update(num_read)

        findings = verify(tasks, config.threads or os.cpu_count() or 1, advance)
        phase.name = f"verify {len(tasks)} files, {total / 1e6:,.1f} MB"
    root = Path(config.path)
    for name, files in spec.splits.items():
        if spec.labels[0].name in files.absent and not files.parquet:
            # The rows of a split are counted while its labels are read.
            findings.splits[name] = SplitSummary(num_rows_of(spec, name, files))
        split = findings.splits[name]
        held = [label for label in spec.labels if label.name in split.labels]
        split.labels = {label.name: split.labels[label.name] for label in held}
        for label in held:
            where = files.parquet[0].parent if files.parquet else files.columns[label.name]
            ones = split.labels[label.name].total
            if label.is_binary and split.rows and ones in (0, split.rows):
                same = f"every {spec.title(label)} is {int(ones > 0)}; nothing to learn or score"
                findings.add(where, same)
        where = files.parquet[0].parent if files.parquet else root
        written = listed_rows(spec, name)
        if files.parquet and written is not None and written != split.rows:
            findings.add(where, f"{split.rows:,} rows, want the {written:,} of the spec")
    if spec.sequences:
        with progress.phase("read the events of every row"):
            for path, text in event_mistakes(spec):
                findings.add(path, text)
    if not findings.num_wrong:
        with progress.phase("compare ids with vocabularies"):
            for path, text in vocabulary_mistakes(spec, config.fitted):
                findings.add(path, text)
    for line in sorted(findings.lines):
        progress.say(f"wrong: {line}")
    readable = {name: split for name, split in findings.splits.items() if split.rows}
    print_splits(progress.console, readable)
    if not listed_in(spec, "files"):
        progress.say(
            "the spec lists no checksums (metadata.files), so only sizes and values were checked"
        )
    rate = total / max(progress.seconds, 1e-9) / 1e6
    outcome = f"{findings.num_wrong:,} wrong" if findings.num_wrong else "nothing wrong"
    progress.say(f"{config.path}: {outcome} ({rate:,.0f} MB/s)")
    if findings.num_wrong:
        raise SystemExit(1)


def event_mistakes(spec: FeatureSpec) -> Iterator[tuple[Path, str]]:
    """Yield (directory, first mistake) of the splits whose events or rows a reader refuses."""
    assert spec.root is not None
    try:
        source = open_dataset(measured(spec))
    except ValueError as error:
        yield spec.root, str(error)
        return
    for split in spec.splits:
        num_rows = source.num_rows(split)
        try:
            for start in range(0, num_rows, READ_ROWS):
                source.read(split, np.array([[start, min(start + READ_ROWS, num_rows)]]))
        except ValueError as error:
            yield spec.root / split, f"the first mistake that a reader finds: {error}"


def verify(tasks: list[FileTask], threads: int, advance: Callable[[int], None]) -> Findings:
    """Read every file of `tasks`, several at a time; `advance` is called with the bytes of each chunk."""
    findings = Findings()
    with ThreadPoolExecutor(threads) as pool:
        running = {pool.submit(_verify_file, task, advance): task for task in tasks}
        try:
            for done in as_completed(running):
                part = done.result()
                findings.num_wrong += part.num_wrong
                findings.lines += part.lines
                for split, summary in part.splits.items():
                    whole = findings.splits.setdefault(split, SplitSummary(0))
                    # Files of Parquet add up, and each label has a binary file of all rows.
                    is_part = running[done].parquet is not None
                    whole.rows = summary.rows + is_part * whole.rows
                    for name, label in summary.labels.items():
                        whole.labels.setdefault(name, LabelSum(0, label.is_binary))
                        whole.labels[name].total += label.total
        finally:
            pool.shutdown(cancel_futures=True)
    order = dict.fromkeys(task.split for task in tasks if task.split)
    findings.splits = {split: findings.splits[split] for split in order}
    return findings


def _verify_file(task: FileTask, advance: Callable[[int], None]) -> Findings:
    findings = Findings()
    crc32 = num_wrong = num_items = 0
    labels = {task.label.name: LabelSum(0, task.label.is_binary)} if task.label else {}
    first = ""
    with task.path.open("rb") as stream:
        while data := stream.read(CHUNK_BYTES):
            advance(len(data))
            if task.crc32 is not None:
                crc32 = zlib.crc32(data, crc32)
            if task.column is None:
                continue
            column = task.column
            items = np.frombuffer(data, column.dtype, len(data) // column.dtype.itemsize)
            wrong = column.wrong(items)
            if not num_wrong and wrong.any():
                at = int(wrong.argmax())
                first = f"{items[at]} at {column.where(num_items + at)}"
            num_wrong += int(np.count_nonzero(wrong))
            for label in labels.values():
                label.add(items)
            num_items += len(items)
    got = task.path.stat().st_size
    if task.num_bytes is not None and got != task.num_bytes:
        state = "truncated" if got < task.num_bytes else "too long"
        findings.add(task.path, f"{state}: {got:,} bytes, want {task.num_bytes:,}")
    elif task.crc32 is not None and f"{crc32:08x}" != task.crc32:
        changed = (
            f"its bytes have changed since it was written: CRC-32 {crc32:08x}, want {task.crc32}"
        )
        findings.add(task.path, changed)
    if num_wrong:
        assert task.column is not None
        findings.add(task.path, f"{num_wrong:,} {task.column.kind}, the first {first}", num_wrong)
    if task.parquet:
        from preproc.verify.parquet import check_values

        num_items, labels, mistakes = check_values(task.path, task.parquet, task.split or "")
        for text, count in mistakes:
            findings.add(task.path, text, count)
    if task.split:
        findings.splits[task.split] = SplitSummary(num_items, labels)
    return findings
