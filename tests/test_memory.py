"""What a GPU is said to hold beside its tables: against peaks measured on H200, and rules of how it grows."""

from dataclasses import asdict

import pytest

from nn.build import build_plan, open_source, planned_hardware
from nn.memory import RankMemory, dense_layers, plan_memory
from nn.plan import TablePlan
from tests.command import run_command
from tests.composed import TINY, compose_config

GIB = 2**30
ON_H200 = ["device=cuda", "sharding.hbm_gib=139.8"]


def ranks_of(recipe: str, *overrides: str, world_size: int = 1) -> list[RankMemory]:
    config = compose_config(
        *ON_H200, f"sharding.world_size={world_size}", *overrides, recipe=recipe
    )
    source = open_source(config)
    _, plan = build_plan(config, source, planned_hardware(config))
    return plan_memory(config, source.spec, plan, world_size)


@pytest.mark.parametrize(
    ("experiment", "world_size", "batch_size", "measured_gib"),
    [  # benchmarks/README.md
        ("dlrm_criteo_t15", 1, 65_536, 17.4),
        ("dlrm_criteo_t15", 2, 65_536, 9.9),
        ("dlrm_criteo_t15", 4, 65_536, 6.0),
        ("dlrm_criteo_t15", 4, 262_144, 7.5),
        ("dlrm_criteo_t3", 1, 65_536, 86.5),
        ("dlrm_criteo_t3", 2, 65_536, 49.3),
        ("dlrm_criteo_t0", 4, 65_536, 116.4),
        ("dcnv2_criteo_t15", 1, 65_536, 51.8),
    ],
)
def test_the_peak_is_within_a_twentieth_of_what_was_measured(
    experiment, world_size, batch_size, measured_gib
):
    recipe = experiment.split("_")[0]
    overrides = [f"experiment={experiment}", f"train.batch_size={batch_size}"]
    planned = ranks_of(recipe, *overrides, world_size=world_size)[0].total / GIB
    assert planned == pytest.approx(measured_gib, rel=0.05)


def test_layers_are_those_of_the_network_with_padded_inputs():
    config = compose_config(*TINY)
    spec = open_source(config).spec
    # 3 numerical features padded to 8; 6 vectors make 8 + 15 products, padded to 24
    assert dense_layers(config, spec) == [(8, 16), (16, 8), (24, 16), (16, 1)]


def test_each_term_is_what_its_shapes_say():
    config = compose_config(*TINY, "data.synthetic.hotness=[1,2,1,1,3]", "train.amp=off")
    spec = open_source(config).spec
    tables = [
        TablePlan("whole", 500, 8, 1.0, "table_wise", "fused", (0,), (1000,)),
        TablePlan("cut", 40, 8, 2.0, "column_wise", "fused", (0, 1), (200, 200), 7),
        TablePlan("rows", 300, 8, 3.0, "row_wise", "fused", (0, 1), (50, 50)),
        TablePlan("copied", 7, 8, 1.0, "data_parallel", "dense", (0, 1), (9, 9)),
    ]
    first, second = plan_memory(config, spec, tables, world_size=2)
    assert (first.tables, second.tables) == (1259, 259)
    assert first.dense_tables == second.dense_tables == 4 * 7 * 8
    assert first.expansion == second.expansion == 7
    # weights and biases of four layers; weight, gradient and adagrad's sum
    parameters = 8 * 16 + 16 + 16 * 8 + 8 + 24 * 16 + 16 + 16 + 1
    assert first.dense_half == 4 * 3 * parameters
    # 64 rows in all, 32 here: 8 columns of one table, 4 of another, 8 of partial sums, 8 of the copy
    elements = 64 * 8 + 64 * 4 + 64 * 8 + 32 * 8
    assert first.lookups == 2 * 4 * elements
    ids = 64 * 1 + 64 * 2 + 64 * 3 / 2 + 32 * 1
    assert first.update == 3 * 12 * ids
    assert second.update == 3 * 12 * (ids - 64)
    # 3 numbers and a label, 8 ids a row
    assert first.batches == 3 * 32 * (4 * 4 + 8 * 8) + 3 * 8 * ids
    # embeddings that came home, the inputs of all layers, and two gradients of the widest
    home = 32 * 5 * 8 * 4
    assert first.dense_pass == max(home + (8 + 16 + 24 + 16 + 2 * 24) * 32 * 4, home + 4 * elements)
    assert first.total == sum(asdict(first).values())


def test_16_bit_halves_activations_and_embeddings_and_keeps_a_copy_of_the_weights():
    full, half = (
        ranks_of("dlrm", *TINY, f"train.amp={amp}", *ON_H200)[0] for amp in ("off", "bf16")
    )
    assert half.lookups * 2 == full.lookups
    assert half.dense_pass * 2 == full.dense_pass
    assert half.dense_half * 6 == full.dense_half * 7


def test_a_plan_for_gpus_tells_the_peak_and_whether_it_fits():
    plan = ["mode=plan", *TINY, "device=cuda", "train.batch_size=65536"]
    fits = run_command(*plan, "sharding.hbm_gib=1").out
    assert "GiB at its peak on rank 0" in fits
    assert "too much" not in fits
    assert "lower train.batch_size" in run_command(*plan, "sharding.hbm_gib=0.05").out
    assert "at its peak" not in run_command("mode=plan", *TINY).out
