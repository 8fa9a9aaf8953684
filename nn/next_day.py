"""The next day of a run: whether its data follow those of the run, and the evaluations on other days than the trained one."""

from collections.abc import Mapping
from dataclasses import replace
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import Config, DayToTrain
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.file_states import changed_data
from dataloading.dataset.source import BatchTarget, Columns, DerivedSource, Source
from dataloading.lineage import VOCABULARY, Lineage
from dataloading.storage.local_copy import local_path
from nn.build import open_source
from nn.checkpoint.run_facts import ENDS_DAY
from nn.checkpoint.tensor_index import read_index
from nn.distributed.process_group import Ranks
from nn.embedding.declared_tables import table_of_feature, tables_of_feature
from nn.models.registry import declared_tables
from nn.training.limits import Day
from nn.training.lr_scheduler import has_ended

RETIRED = "retired"
"""Column of a later day's vocabulary (`preproc/table/extension.py`)."""

CHANGES = ("scheduler.",)
"""Settings that may change at the start of a day."""


def day_to_train(
    config: Config, spec: FeatureSpec, facts: Mapping[str, Any], now: Mapping[str, Any]
) -> Day:
    """Return the day that a run trains from a checkpoint of its own.

    Raises ValueError: with `day=next`, the dataset does not follow the checkpoint's, or the checkpoint's day is incomplete.
    """
    before = Day.of_facts(facts)
    if config.day is not DayToTrain.next or not changed_data(facts, now):
        return before
    path = facts["config"]["data"]["path"]
    lineage = Lineage.of(spec.metadata)
    if not config.checkpoint.allow_changes:
        where = f"data.path={config.data.path}"
        may_allow = "or checkpoint.allow_changes=true if the ids that both have mean the same"
        if lineage.parent is None:
            raise ValueError(
                f"{where} does not say which dataset it follows; make it with python -m preproc mode=extend fitted={path}, "
                + may_allow
            )
        if lineage.parent != before.identity:
            raise ValueError(
                f"{where} is day {lineage.day} after another fit than that of data.path={path}, which "
                f"run_dir={config.run_dir} was trained on; set it to the day that was extended from {path}, {may_allow}"
            )
    if not facts["trainer"][ENDS_DAY]:
        raise ValueError(
            f"run_dir={config.run_dir} has not finished the day of data.path={path}, step {facts['num_steps']:,} is its "
            "latest checkpoint; run that to its end first, with its data.path"
        )
    first = facts["num_steps"]
    if has_ended(first, config.scheduler):
        raise ValueError(
            f"the schedule has ended before step {first:,}, so that day=next would train with a learning rate of 0; set "
            "scheduler.decay_start_step=null, or a later one"
        )
    return Day(before.number + 1, first, lineage.identity, path, is_new=True)


def next_day_hint(config: Config, spec: FeatureSpec, facts: Mapping[str, Any]) -> str:
    """Return the remedy for data that follow those of the run; empty for others."""
    parent = Lineage.of(spec.metadata).parent
    if config.day is None and parent is not None and parent == Day.of_facts(facts).identity:
        return (
            f"data.path={config.data.path} is the day after that of run_dir={config.run_dir}; set day=next to train it, "
            "or data.path to the dataset that the run was trained on"
        )
    return ""


def first_day(source: Source) -> Day:
    """Return the day of a run that starts from nothing of its own."""
    return Day(identity=Lineage.of(source.spec.metadata).identity)


def as_known(config: Config, source: Source, checkpoint: Path) -> Source:
    """Return the rows of a new day as the model of a checkpoint sees them: values that are new have id 0."""
    tensors = read_index(checkpoint).tensors
    tables = table_of_feature(declared_tables(config.model, source.spec))
    known = {name: tensors[f"tables.{table}.weight"].size[0] for name, table in tables.items()}
    return KnownIdsSource(source, known)


def retired_rows(config: Config, spec: FeatureSpec) -> dict[str, np.ndarray]:
    """Return the numbers of the rows, per table, whose values are retired on the day of a dataset."""
    from dataloading.dataset.parquet_files import open_file

    found: dict[str, np.ndarray] = {}
    for feature, tables in tables_of_feature(declared_tables(config.model, spec)).items():
        path = (spec.root or Path()) / VOCABULARY / f"{feature}.parquet"
        if not path.is_file():
            continue
        with open_file(path) as file:
            if RETIRED not in file.schema_arrow.names:
                continue
            rows = file.read(columns=["id", RETIRED])
        retired = rows["id"].filter(rows[RETIRED]).to_numpy()
        found |= {table: retired for table in tables if len(retired)}
    return found


def open_previous_day(
    config: Config, day: Day, spec: FeatureSpec, ranks: Ranks, logger: Logger
) -> Source | None:
    """Open the dataset of the day before, for a step of `spec`; None, with a note, if it is gone, and on the first day."""
    path = day.previous
    if path is None:
        return None
    problem = ranks.run_on_rank0(lambda: _problem(path))
    if problem is not None:
        logger.info(f"note: no evaluation on day {day.number - 1}: {problem}")
        return None
    return open_source(replace(config, data=replace(config.data, path=path)), spec)


def _problem(path: str) -> str | None:
    """Return why a dataset cannot be read any more, or None."""
    try:
        FeatureSpec.load(local_path(path))
    except ValueError as error:
        return str(error)
    return None


class KnownIdsSource(DerivedSource):
    """Rows of another source as a model of fewer ids sees them: new values are unknown to it.

    `known`: rows of the model's table per feature; larger ids become 0, that of missing and unknown values.
    """

    def __init__(self, source: Source, known: Mapping[str, int]) -> None:
        super().__init__(source)
        self._known = [known[feature.name] for feature in source.spec.categorical]

    def read(self, split: str, runs: np.ndarray, into: BatchTarget | None = None) -> Columns:
        columns = self._source.read(split, runs, into)
        for ids, known in zip(columns.ids, self._known, strict=True):
            ids[ids >= known] = 0
        return columns
