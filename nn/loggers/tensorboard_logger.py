"""Logger to TensorBoard: `tensorboard/train` and `tensorboard/test`, whose equal names share a chart, and hyperparameters.

tensorboard/        options as text, and as hyperparameters of the HParams page
tensorboard/train/  numbers of training records
tensorboard/test/   numbers of evaluations
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.record_writer import RecordWriter

from dataloading.dataset.durable_files import AppendedFile
from nn.loggers.run_logger import LoggedRun, flat_options

FOLDER = "tensorboard"
PREFIX = "events.out.tfevents"
HYPERPARAMETERS = ("recipe", "seed", "model", "optimizer", "scheduler", "train")
"""Options and sections that change what is learnt, and are no names of files."""


class TensorBoardLogger:
    def __init__(self) -> None:
        self._events: dict[str, _Events] = {}
        self._has_plain_loss = False

    def start(self, run: LoggedRun) -> None:
        """Open the event files, and write the options."""
        # The loss of a task without options is its log loss.
        self._has_plain_loss = not run.config.get("tasks")
        directory = run.directory / FOLDER
        # TensorBoard would otherwise show events of an earlier attempt after the checkpoint.
        purge_step = run.first_step if directory.exists() else None
        directory.mkdir(exist_ok=True)
        for group in ("", "train", "test"):
            self._events[group] = _Events(directory / group, purge_step)
        options = self._events[""]
        options.add_summary(_text("config", run.config_yaml), run.first_step)
        values = dict(hyperparameters(run.config))
        options.add_summary(hparams_pb(values, trial_id=str(run.directory)), run.first_step)

    def record(self, group: str, step: int, numbers: Mapping[str, float]) -> None:
        """Add numbers; the log loss of an evaluation joins the chart of the training loss if both are the same loss."""
        events = self._events["train" if group == "train" else "test"]
        for name, value in numbers.items():
            if name == "epoch":
                continue
            is_loss = name == "log_loss" and self._has_plain_loss
            events.add("loss" if is_loss else name, value, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Do nothing: the HParams page shows the latest numbers of each chart."""

    def close(self) -> None:
        for events in self._events.values():
            events.close()


def hyperparameters(config: Mapping[str, Any]) -> Iterator[tuple[str, str | float | bool]]:
    """Yield (dotted key, value) of the options that change what is learnt; null ones are left out."""
    chosen = {key: config.get(key) for key in HYPERPARAMETERS}
    for key, value in flat_options(chosen):
        if isinstance(value, list):
            yield key, str(value)
        elif value is not None and value != {}:
            yield key, value


def _text(tag: str, yaml: str) -> Summary:
    """Return a text as Markdown shows code: every line indented by four spaces."""
    tensor_text = "".join(f"    {line}\n" for line in yaml.splitlines())
    value = Summary.Value(tag=tag, metadata=create_summary_metadata(None, None))
    value.tensor.dtype = DT_STRING
    value.tensor.tensor_shape.CopyFrom(TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]))
    value.tensor.string_val.append(tensor_text.encode())
    return Summary(value=[value])


class _Events:
    """A new event file in a directory, which is created; each record is in the file when its method returns.

    TensorBoard's own writer is a thread: an error there, such as a full disk, ends in a traceback and reaches the run late.

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
        self.add_summary(Summary(value=[Summary.Value(tag=tag, simple_value=value)]), step)

    def add_summary(self, summary: Summary, step: int) -> None:
        self._add(Event(step=step, summary=summary))

    def close(self) -> None:
        self._file.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        # All of a stream that the writer uses; a record is one write.
        stream = SimpleNamespace(write=self._file.append)
        RecordWriter(stream).write(event.SerializeToString())
