"""Plans of models larger than a node, as docs/operations.md shows them; no GPU is needed."""

import pytest

from configs.schema import Config
from nn.build import build_plan, open_source, planned_hardware
from nn.planning.memory_estimate import plan_memory
from nn.planning.plan import TablePlan
from nn.training.dense_optimizer import dense_rule
from tests.helpers.composed import compose_config

GIB = 2**30
ONE_TABLE = [
    *("mode=plan", "device=cuda", "data.synthetic.cardinalities=[1258291200]"),
    *("model.embedding_dim=128", "model.bottom_mlp=[512,256,128]", "sharding.world_size=8"),
    *("sharding.hbm_gib=139", "train.batch_size=65536"),
]


def plan_of(config: Config) -> tuple[list[TablePlan], list[float]]:
    """Return the plan, and the estimated peak memory per rank in GiB."""
    source, hardware = open_source(config), planned_hardware(config)
    _, rows = build_plan(config, source, hardware)
    states = dense_rule(config.effective_optimizer).states_per_weight
    memory = plan_memory(config, source.spec, rows, hardware.world_size, states)
    return rows, [rank.total / GIB for rank in memory]


def test_nvidias_largest_variant_fits_on_four_nodes_of_eight():
    config = compose_config(
        *("mode=plan", "experiment=dlrm_criteo_t0", "model.embedding_dim=512", "device=cuda"),
        *("model.bottom_mlp=[512,256,512]", "sharding.world_size=32"),
        *("sharding.local_world_size=8", "sharding.hbm_gib=79"),
    )
    rows, peaks = plan_of(config)
    assert sum(row.num_embeddings for row in rows) * 512 * 4 / GIB == pytest.approx(1683.8, abs=0.1)
    assert len(peaks) == 32
    assert 1683.8 / 32 < max(peaks) < 79
    # No GPU holds the largest table, and no single node all of them.
    largest = max(rows, key=lambda row: row.num_embeddings)
    assert largest.sharding == "column_wise"
    assert {rank // 8 for rank in largest.ranks} == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["row_wise", "column_wise"])
def test_a_table_of_600_gib_is_cut_over_eight_gpus(kind):
    config = compose_config(*ONE_TABLE, f"sharding.types=[{kind}]", "optimizer.embedding_name=sgd")
    [row], peaks = plan_of(config)
    assert (row.sharding, len(set(row.ranks))) == (kind, 8)
    assert all(75 <= peak < 76 for peak in peaks)


def test_a_plan_that_does_not_fit_says_how_many_ranks_would():
    with pytest.raises(ValueError, match=r"they take 1200\.0 GiB, .* start 10 ranks or more"):
        plan_of(compose_config(*ONE_TABLE, "sharding.types=[row_wise]"))
