"""The benchmarks beside TorchRec: their batches are the recipe's, and the planner gets the row's sharding types and caches."""

from dataclasses import replace

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from benchmarks.dataset import ragged_dataset
from benchmarks.peers.torchrec_events import EventModel
from benchmarks.peers.torchrec_job import Trained, constraints, read_batch
from benchmarks.peers.with_torchrec import HEAD, speed_line
from benchmarks.rows import ROWS
from dataloading.batch_reader import BatchReader
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.partition import RankRows
from dataloading.synthetic import SyntheticSource
from nn.models.ranking_model import RankingModel
from nn.models.registry import build_dense, declared_tables
from tests.helpers.datasets import write_clicks


def test_a_batch_has_the_rows_of_the_dataset(tmp_path):
    spec = FeatureSpec.load(ragged_dataset(write_clicks(tmp_path / "clicks"), 1, 0.0))
    source = open_dataset(spec)
    batch = read_batch(source, 32, 16)
    columns = source.read("train", np.array([[32, 48]]))
    assert np.array_equal(batch.dense_features, columns.numerical)
    assert np.array_equal(batch.labels, columns.labels)
    sparse = batch.sparse_features
    assert sparse.keys() == ["user", "item"]
    assert np.array_equal(sparse["user"].values(), columns.ids[0])
    assert np.array_equal(sparse["user"].lengths(), columns.lengths[0])
    assert np.array_equal(sparse["item"].values(), columns.ids[1])
    assert sparse["item"].lengths().tolist() == [1] * 16
    beyond = read_batch(source, source.num_rows("train") * 5 + 3, 16)
    assert len(beyond.labels) == 16


def test_the_planner_gets_the_sharding_types_of_the_row(tmp_path):
    spec = FeatureSpec.load(write_clicks(tmp_path))
    found = constraints(ROWS["dlrm_t15_2_rows"].config(), spec)
    assert [table.sharding_types for table in found.values()] == [["row_wise"], ["row_wise"]]
    single = replace(ROWS["dlrm_t15_2"], overrides=("sharding.tables={item: row_wise}",)).config()
    user, item = constraints(single, spec).values()
    assert item.sharding_types == ["row_wise"]
    assert user.sharding_types == ["table_wise", "column_wise", "data_parallel"]


def test_a_line_has_as_many_cells_as_the_head():
    speeds = {"min": 1e6, "median": 2e6, "max": 3e6}
    result = {"row": "dlrm_t15_1", "dense": "compiled", "world_size": 1, "global_batch_size": 64}
    line = speed_line(result | {"samples_per_s": speeds, "peak_hbm_bytes": None})
    assert line.count("|") == HEAD.splitlines()[0].count("|")
    assert "1.00 / **2.00** / 3.00 | none" in line


def test_behind_torchrecs_tables_a_row_with_events_has_the_recipes_loss():
    small = {"cardinalities": "[50,40,21]", "history_length": "5", "history_max_length": "12"}
    row = ROWS["sasrec_1_events"]
    config = replace(row, synthetic=tuple((dict(row.synthetic) | small).items())).config()
    source = SyntheticSource(config.data.synthetic, config.seed)
    spec, model = source.spec, config.model
    declared, dense = declared_tables(model, spec), build_dense(model, spec)
    ours = RankingModel(declared, dense, 0, {"movieId"}, spec.sequences)
    rows = RankRows(np.array([[0, 16]]), 16, 16, 16, np.arange(16, dtype=np.int32))
    batch = BatchReader(source, "train", pin=False).read(rows)
    wanted = binary_cross_entropy_with_logits(ours(batch), batch.labels)
    wanted.backward()
    inner = EventModel(config, spec).to_empty(device="cpu")
    theirs = Trained(inner, torch.device("cpu"), is_compiled=False)
    inner.rest.dense.load_state_dict(dense.state_dict())
    tables = {**inner.rows.embeddings, **inner.bags.embedding_bags}
    for name, table in tables.items():
        table.weight.data.copy_(ours.tables[name])
    loss, _ = theirs(read_batch(source, 0, 16))
    loss.backward()
    assert torch.allclose(loss, wanted)
    for name, table in tables.items():
        assert torch.allclose(table.weight.grad, ours.tables[name].grad, atol=1e-8), name
