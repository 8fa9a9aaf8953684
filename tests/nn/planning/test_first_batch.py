"""The first batch of a plan: that of the train loader, read where training is planned."""

import numpy as np

from configs.schema import Config
from dataloading.dataset import parquet_writer
from nn.build import build_train_loader, checked_plan, open_source, planned_hardware
from nn.distributed.process_group import ranks_from_environment
from nn.planning.plan import TablePlan
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
