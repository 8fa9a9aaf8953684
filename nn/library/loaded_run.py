"""A finished or running training as an object: its options, its model on one device, its metrics, and predictions."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import torch
from torch import Tensor

from configs.messages import shown
from configs.schema import Config
from dataloading.arrow_table import SPLIT, arrow_table, features_source
from dataloading.batch import Batch
from dataloading.dataset.batch_layout import BatchLayout
from dataloading.dataset.documents import read_json, resolved
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.loader import READERS, Loader, LoaderSettings
from nn.build import stored_key_maps
from nn.checkpoint.compatibility import vocabulary_mismatch
from nn.checkpoint.directory import BEST, CHECKPOINTS, list_checkpoints, read_facts
from nn.checkpoint.saved import SavedModel
from nn.checkpoint.tensor_index import read_index
from nn.embedding.multi_hot import MultiHot, expand
from nn.library.torch_state import check_torch_state
from nn.models.description import read_description
from nn.models.ranking_model import RankingModel
from nn.models.tasks import Task, scores_of, tasks_of_run
from nn.observability.records import CONFIG, METRICS, MODEL, SUMMARY, read_records
from nn.saved_config import load_saved_config
from nn.scores.score_file import score_columns
from nn.scores.unknown_values import UnknownValues
from nn.training.limits import Day
from nn.training.train_step import autocast

if TYPE_CHECKING:
    from preproc.raw_tables import RawTables


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory, loaded: `Run.load("runs/a")`.

    `spec`: features and labels as the dataset has them, without files. `checkpoint`: directory of the loaded checkpoint.
    `model`: tables and dense component on one device, in evaluation mode. With `train.ema_decay` the dense component has its
    average, as in evaluation. `tasks`: the labels that the model predicts, in the order of its logits. `raw`: the fit that
    turns raw values into ids and numbers; None if `predict` takes these.
    """

    directory: Path
    config: Config
    spec: FeatureSpec
    checkpoint: Path
    num_steps: int
    model: RankingModel
    tasks: list[Task]
    device: torch.device
    raw: "RawTables | None" = None

    @classmethod
    def load(
        cls,
        directory: Path | str,
        *,
        checkpoint: str | None = None,
        device: torch.device | str = "cpu",
        fitted: Path | str | None = None,
        trusted: bool = False,
    ) -> Self:
        """Load a checkpoint of a run directory, whatever number of ranks has written it.

        Files are read as numbers and plain JSON or yaml, and every checksum of the loaded tensors is compared.

        `checkpoint`: `step_N` or `best`; None for the best, or the latest where no evaluation has found a best one, as at the
        beginning of a day. `fitted`: dataset directory whose fit transforms the raw values that `predict` gets; None: it gets ids
        and numbers. `trusted`: whether a model outside the project, `package.module:Class`, may be imported.

        Raises ValueError: there is no such checkpoint, or `fitted` has no fit or other features, or a file is missing, damaged
        or contradicts the others.
        """
        check_torch_state(computes=False)
        directory = Path(directory)
        paths = _checkpoints(directory, checkpoint)
        config = load_saved_config(directory / CONFIG, trusted=trusted)
        description = read_description(directory / MODEL, trusted=trusted)
        saved = _first_that_fits(paths, description.spec.fingerprint(), directory)
        raw = (
            None
            if fitted is None
            else _raw_tables(Path(fitted).absolute(), description.stored, saved.facts)
        )
        model = description.build(seed=None)
        saved.fill(model.state_dict())
        return cls(
            # The working directory may change.
            directory=directory.absolute(),
            config=config,
            spec=description.stored,
            checkpoint=saved.path.absolute(),
            num_steps=saved.facts["num_steps"],
            model=model.to(device).eval(),
            tasks=tasks_of_run(config, description.stored),
            device=torch.device(device),
            raw=raw,
        )

    def records(self) -> list[dict[str, Any]]:
        """Return the records of training and evaluation so far, oldest first (docs/operations.md names their keys).

        Raises ValueError: metrics.jsonl is damaged. Raises OSError: it cannot be read.
        """
        return read_records(self.directory / METRICS)[1]

    def metrics(self) -> pa.Table:
        """Return the records as a table; a number that a record lacks is null.

        Raises ValueError: metrics.jsonl is damaged. Raises OSError: it cannot be read.
        """
        records = self.records()
        keys = dict.fromkeys(key for record in records for key in record)
        return pa.table({key: [record.get(key) for record in records] for key in keys})

    def summary(self) -> dict[str, Any] | None:
        """Return the result of the run; None if it has not finished."""
        path = self.directory / SUMMARY
        return read_json(path) if path.exists() else None

    def predict(self, table: Any, *, batch_size: int = 8192) -> Any:
        """Return the scores of rows: per label the probability of a 1, or the number of a regression label.

        They are those of `mode=predict`. Labels need not be there. With the dataset's column of keep rates, if it has one,
        scores are corrected by them; a table without is not corrected, with a warning.

        `table`: a pandas DataFrame or an Arrow table. After `Run.load(fitted=...)` it has the columns of the raw data,
        or of the query over it, with their values; else a column per feature with ids and numbers as the dataset has
        them. Features and numbers of a sequence group are lists, oldest event first; without a column of moments, named
        like the group, its times are ages in seconds.

        Returns:
            A table of the same kind with the float64 column `score`, or `score_<label>` of several labels. That of a DataFrame
            has its index.

        Raises ValueError: a column is missing or of another type, or a value is missing, not finite or outside its table.
        """
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size={shown(batch_size)}; want a whole number of at least 1")
        rows, as_given = arrow_table(table)
        names = score_columns([task.name for task in self.tasks])
        if rows.num_rows == 0:
            return as_given(pa.table({name: pa.array([], pa.float64()) for name in names}))
        if self.raw is not None:
            rows = self.raw.transformed(rows)
            unknown = UnknownValues(self.raw.spec)
            unknown.add(rows)
            if unknown.note is not None:
                warnings.warn(unknown.note, stacklevel=2)
        scores = torch.cat([self._scores(batch) for batch in self._batches(rows, batch_size)])
        columns = {name: scores[:, index].numpy() for index, name in enumerate(names)}
        return as_given(pa.table(columns))

    def _batches(self, rows: pa.Table, batch_size: int) -> Iterator[Batch]:
        spec = self.spec.with_event_weights(self.config.model.event_weights)
        if spec.keep_rate is not None and spec.keep_rate.name not in rows.column_names:
            warnings.warn(
                f"the table has no keep rates, column {spec.keep_rate.name}; its scores are not corrected by them",
                stacklevel=3,
            )
            spec = replace(spec, keep_rate=None)
        source = features_source(rows, spec, "the table")
        maps = stored_key_maps(self.config, self.spec, read_index(self.checkpoint))
        settings = LoaderSettings(batch_size=batch_size, workers=1)
        loader = Loader(source, SPLIT, settings, key_maps=maps)
        multi_hot = MultiHot(
            self.spec, self.config.data.multi_hot, self.config.data.workers or READERS
        )
        cpu = torch.device("cpu")
        added = {name: multi_hot.lookup_table(name, cpu) for name in multi_hot.hotness}
        for batch in loader.batches(0, loader.steps_per_epoch):
            if added:
                batch = _expanded(batch, multi_hot.expanded_spec(batch.layout.spec), added)
            yield batch.to(self.device)

    @torch.no_grad()
    def _scores(self, batch: Batch) -> Tensor:
        # Not the caller's, if this is within one.
        outer = torch.autocast(self.device.type, enabled=False)
        with outer, autocast(self.config.train.amp, self.device.type):
            logits = self.model(batch)
        return scores_of(self.tasks, logits, batch.keep_rates)[: batch.num_valid].cpu()


def _raw_tables(fitted: Path, spec: FeatureSpec, facts: Mapping[str, Any]) -> "RawTables":
    """Return the fit of a dataset; ValueError if it is not that of the features `spec` and of the checkpoint's facts."""
    # Only raw values need DuckDB.
    from preproc.raw_tables import RawTables

    raw = RawTables(fitted)
    if raw.spec.fingerprint() != spec.fingerprint():
        raise ValueError(
            f"fitted={fitted} has other features, or tables of other sizes, than the dataset that the run was trained on; name "
            "that one"
        )
    problem = vocabulary_mismatch(facts, raw.spec.metadata)
    if problem is not None:
        raise ValueError(
            f"the run {problem}; set fitted to the dataset that it was trained on, instead of {fitted}"
        )
    return raw


def _first_that_fits(paths: list[Path], fingerprint: str, directory: Path) -> SavedModel:
    """Return the first checkpoint of these features.

    Raises ValueError: one before it cannot be read; or there is none, since model.json is already that of a day that has none.
    """
    for path in paths:
        try:
            saved = SavedModel(path, read_facts(path), read_index(path))
        except ValueError as error:
            raise ValueError(f"{path} cannot be loaded: {error}") from None
        if fingerprint == saved.facts["feature_spec"]:
            return saved
    raise ValueError(
        f"{paths[0]} was trained on other features than {directory / MODEL} names; copy the run directory again or, while it "
        "trains another day, wait for its first checkpoint"
    )


def _checkpoints(directory: Path, name: str | None) -> list[Path]:
    """Return the checkpoint of this name; without a name, all of a run directory in the order in which they are preferred.

    Raises ValueError: there is none.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory}: no such directory; name a run directory")
    folder = directory / CHECKPOINTS
    found = list_checkpoints(folder)
    if not found:
        raise ValueError(
            f"{directory} has no complete checkpoint; name the directory of a run that has saved one (checkpoint.save=true)"
        )
    steps = [path.name for path in found]
    best = folder / BEST
    target = resolved(best).name if best.is_symlink() else None
    if name is None:
        # The newest one may be damaged.
        latest = next((day for path in found if (day := _day(path)) is not None), None)
        if target in steps and _day(folder / target) == latest:
            found.sort(key=lambda path: path.name != target)
        return found
    if name == BEST and target is not None:
        name = target
    if name not in steps:
        raise ValueError(f"{folder} has no checkpoint {shown(name)}, only {', '.join(steps[::-1])}")
    return [folder / name]


def _day(checkpoint: Path) -> int | None:
    """Return the number of the day that a checkpoint was trained on; None if it cannot be read."""
    try:
        return Day.of_facts(read_facts(checkpoint)).number
    except ValueError:
        return None


def _expanded(batch: Batch, spec: FeatureSpec, tables: Mapping[str, Tensor]) -> Batch:
    layout = batch.layout
    expanded = batch.in_layout(BatchLayout.of(spec, layout.rows, layout.doublings))
    for name, table in tables.items():
        ids = expand(batch.feature(name).values(), table)
        expanded.feature(name).values().copy_(ids.flatten())
    return expanded
