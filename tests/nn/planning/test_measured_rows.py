"""The batches of a plan: some of the train loader's, read where training is planned."""

import numpy as np
import pytest

from configs.schema import Config
from dataloading.dataset import parquet_writer
from nn import build
from nn.build import build_train_loader, checked_plan, open_source, planned_hardware, without_a_node
from nn.distributed.process_group import ranks_from_environment
from nn.models.registry import declared_tables as declared
from nn.planning.plan import TablePlan
from nn.planning.row_requests import requests_of
from nn.sharding.request_capacity import capacity_for, most_expected
from tests.helpers.command import run_command
from tests.helpers.composed import compose_config
from tests.helpers.datasets import make_loader
from tests.helpers.sequence_models import overrides, write_sequences

ITEMS = ("item", "hist_item")


def items_of(config: Config) -> TablePlan:
    plan = checked_plan(config, open_source(config), planned_hardware(config))[1]
    return next(table for table in plan if table.table == "item")


def test_row_groups_are_read_as_the_loader_reads_them(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_ROWS", 8)
    monkeypatch.setattr("dataloading.dataset.parquet.KEPT_BYTES", 0)
    options = overrides("din", write_sequences(tmp_path / "data"))
    config = compose_config(*options, "data.shuffle_block=3")
    loader = build_train_loader(config, open_source(config), ranks_from_environment("cpu"))
    counts = []
    for step in loader.spread_steps():
        batch = loader.batch(step)
        asked = np.unique(np.concatenate([batch.feature(name).values() for name in ITEMS]))
        counts.append(int((asked >= 0).sum()))
    assert len(counts) == 6, "every full batch of 16 of 96 rows"
    assert items_of(config).batch_rows == (most_expected(counts),)


def test_groups_merge_the_rows_of_their_ranks(tmp_path):
    options = overrides("din", write_sequences(tmp_path / "data"))
    on_gpus = ("device=cuda", "sharding.hbm_gib=1", "sharding.types=[row_wise]")
    groups = ("mode=plan", "sharding.world_size=4", "sharding.group_size=2", *on_gpus)
    config = compose_config(*options, *groups, "data.shuffle_block=0")
    source = open_source(config)
    # Of ranks 0 and 1, which have four rows each.
    settings = {"batch_size": 16, "world_size": 4, "balances_events": True}
    loaders = [make_loader(source, "train", rank=rank, **settings) for rank in range(2)]
    counts = []
    for step in loaders[0].spread_steps():
        runs = np.concatenate([loader.rows(step).runs for loader in loaders])
        names = [feature.name for feature in source.spec.categorical]
        columns = dict(zip(names, source.read("train", runs).ids, strict=True))
        rows = np.unique(np.concatenate([columns[name] for name in ITEMS]))
        counts.append((int((rows < 150).sum()), int((rows >= 150).sum())))
    wanted = tuple(map(most_expected, zip(*counts, strict=True)))
    found = items_of(config)
    assert found.group_rows == wanted
    assert all(0 < own < merged for own, merged in zip(found.batch_rows, wanted, strict=True))
    asked, twice = (requests_of(config, source.spec, [found], 4, rows)[0] for rows in (4, 8))
    assert asked.merged == tuple(map(capacity_for, wanted))
    assert twice.merged == tuple(capacity_for(2 * rows) for rows in wanted)


def test_rows_are_scored_of_a_dataset_without_a_training_split(tmp_path):
    options = overrides("din", write_sequences(tmp_path / "data"))
    run = tmp_path / "run"
    trained = run_command(*options, f"run_dir={run}", "train.max_steps=2")
    assert trained.exit_code == 0, trained.err
    others = write_sequences(tmp_path / "others", {"test": 40})
    restored = f"checkpoint.restore={run / 'checkpoints/step_2'}"
    output = f"output={tmp_path / 'scores.parquet'}"
    ended = run_command(*overrides("din", others), "mode=predict", restored, output)
    assert ended.exit_code == 0, ended.err
    assert "40 rows" in ended.out
    # A plan does without batches.
    config = compose_config(*overrides("din", others), "mode=plan")
    assert items_of(config).batch_rows == ()


def test_a_plan_for_a_node_less_reads_no_rows(tmp_path, monkeypatch):
    options = overrides("din", write_sequences(tmp_path / "data"))
    nodes = ("mode=plan", "sharding.world_size=4", "sharding.local_world_size=2")
    config = compose_config(*options, *nodes)
    source = open_source(config)
    monkeypatch.setattr(type(source), "read", lambda *_: pytest.fail("rows are read"))
    less = without_a_node(config, source, planned_hardware(config))
    assert less == "the tables fit 2 x cpu, on which the run would resume"


def test_a_plan_declares_its_tables_once(monkeypatch):
    calls = []
    monkeypatch.setattr(build, "declared_tables", lambda *of: calls.append(of) or declared(*of))
    config = compose_config("mode=plan")
    checked_plan(config, open_source(config), planned_hardware(config))
    assert len(calls) == 1
