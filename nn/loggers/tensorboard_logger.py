"""Logger to TensorBoard: `tensorboard/train` and `tensorboard/test`, whose equal names share a chart, and hyperparameters.

tensorboard/        options as text, and as hyperparameters of the HParams page
tensorboard/train/  numbers of training records
tensorboard/test/   numbers of evaluations
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.metadata import create_summary_metadata

from nn.loggers.run_logger import LoggedRun, flat_options
from nn.loggers.tensorboard_events import TensorBoardEvents

FOLDER = "tensorboard"
HYPERPARAMETERS = ("recipe", "seed", "model", "optimizer", "scheduler", "train")
"""Options and sections that change what is learnt, and are no names of files."""


class TensorBoardLogger:
    def __init__(self) -> None:
        self._events: dict[str, TensorBoardEvents] = {}
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
            self._events[group] = TensorBoardEvents(directory / group, purge_step)
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
