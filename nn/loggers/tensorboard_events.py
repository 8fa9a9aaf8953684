"""TensorBoard's event file, written record by record.

TensorBoard's own writer is a thread: an error there, such as a full disk, ends in a traceback and reaches the run late.
"""

import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from dataloading.dataset.durable_files import AppendedFile

PREFIX = "events.out.tfevents"


class TensorBoardEvents:
    """A new event file in a directory, which is created; each record is in the file when its method returns.

    TensorBoard leaves out what earlier files have from `purge_step` on; None keeps all.
    """

    def __init__(self, directory: Path, purge_step: int | None = None) -> None:
        directory.mkdir(exist_ok=True)
        # TensorBoard reads the files in the order of their names, also where the clock was set back between two starts.
        times = [path.name.split(".")[3] for path in directory.glob(f"{PREFIX}.*.*")]
        latest = max((int(text) for text in times if text.isdecimal()), default=0)
        now = max(round(time.time()), latest + 1)
        name = f"{PREFIX}.{now}.{socket.gethostname()}.{os.getpid()}"
        attempt = 0
        while (path := directory / f"{name}.{attempt}").exists():
            attempt += 1
        self._file = AppendedFile(path, is_text=False)
        self._add(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, tag: str, value: float, step: int) -> None:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        self._add(Event(step=step, summary=summary))

    def add_summary(self, summary: Summary, step: int) -> None:
        self._add(Event(step=step, summary=summary))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        RecordWriter(_Pieces(self._file)).write(event.SerializeToString())


class _Pieces:
    """The part of a stream that `RecordWriter` uses; a record is one write."""

    def __init__(self, file: AppendedFile) -> None:
        self._file = file

    def write(self, piece: bytes) -> None:
        self._file.append(piece)
