"""The first batch of a plan: that of the train loader, read where training is planned."""

import numpy as np
import pytest

from configs.schema import Config
from dataloading.dataset import parquet_writer
from nn.build import build_train_loader, checked_plan, open_source, planned_hardware, without_a_node
from nn.distributed.process_group import ranks_from_environment
from nn.planning.plan import TablePlan
from tests.helpers.command import run_command
from tests.helpers.composed import compose_config
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
    batch = loader.batch(0)
    asked = np.unique(np.concatenate([batch.feature(name).values() for name in ITEMS]))
    assert items_of(config).batch_rows == (len(asked[asked >= 0]),)


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
    # A plan does without a first batch.
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
