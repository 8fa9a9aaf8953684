"""Memory estimate of a GPU: against peaks measured on H200, term by term, and how it grows."""

from dataclasses import asdict

import pytest
import torch

from benchmarks.rows import ROWS
from nn.build import build_plan, open_source, planned_hardware
from nn.models.registry import build_meta
from nn.sharding.memory_estimate import RankMemory, plan_memory, update_bytes
from nn.sharding.plan import TablePlan
from nn.training.dense_optimizer import dense_rule
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, compose_config

GIB = 2**30
ON_H200 = ["device=cuda", "sharding.hbm_gib=139.8"]


def ranks_of(recipe: str, *overrides: str, world_size: int = 1) -> list[RankMemory]:
    config = compose_config(
        *ON_H200, f"sharding.world_size={world_size}", *overrides, recipe=recipe
    )
    source = open_source(config)
    _, plan = build_plan(config, source, planned_hardware(config))
    states = dense_rule(config.effective_optimizer).states_per_weight
    return plan_memory(config, source.spec, plan, world_size, states)


@pytest.mark.parametrize(
    ("name", "measured_gib"),
    [  # benchmarks/README.md
        ("dlrm_t15_1", 17.0),
        ("dlrm_t15_4", 5.8),
        ("dlrm_t15_4_weak", 7.2),
        ("dlrm_t0_4", 116.4),
        ("dcnv2_t15_1", 52.2),
        ("dcnv2_mlperf_1", 124.3),
        ("dcnv2_mlperf_4", 35.7),
        ("dlrm_t15_1_fp16", 18.9),
        ("dlrm_t15_1_fp32", 18.2),
    ],
)
def test_the_peak_is_within_a_fortieth_of_what_was_measured(name, measured_gib):
    row = ROWS[name]
    overrides = [f"experiment={row.experiment}", *row.overrides]
    planned = ranks_of(row.recipe, *overrides, world_size=row.world_size)[0].total / GIB
    assert planned == pytest.approx(measured_gib, rel=0.025)


def test_layers_are_those_of_the_network_with_padded_inputs():
    config = compose_config(*TINY)
    spec = open_source(config).spec
    # 3 numerical features padded to 8; 6 vectors make 8 + 15 products, padded to 24
    assert build_meta(config.model, spec).linear_layers() == [(8, 16), (16, 8), (24, 16), (16, 1)]


def test_each_term_is_what_its_shapes_say():
    config = compose_config(*TINY, "data.synthetic.hotness=[1,2,1,1,3]", "train.amp=off")
    spec = open_source(config).spec
    tables = [
        TablePlan("whole", 500, 8, 1.0, "table_wise", "fused", (0,), (1000,)),
        TablePlan("cut", 40, 8, 2.0, "column_wise", "fused", (0, 1), (200, 200), 7),
        TablePlan("rows", 300, 8, 3.0, "row_wise", "fused", (0, 1), (50, 50)),
        TablePlan("copied", 7, 8, 1.0, "data_parallel", "dense", (0, 1), (9, 9)),
    ]
    first, second = plan_memory(config, spec, tables, 2, 1)
    assert (first.tables, second.tables) == (1259, 259)
    assert first.dense_tables == second.dense_tables == 4 * 7 * 8
    assert first.expansion == second.expansion == 7
    # weights and biases of four layers; weight, gradient and adagrad's sum
    parameters = 8 * 16 + 16 + 16 * 8 + 8 + 24 * 16 + 16 + 16 + 1
    assert first.dense_half == 4 * 3 * parameters
    # 64 rows in total, 32 here: 8 columns of one table, 4 of another, 8 of partial sums, sent and returned; 5 local
    elements = 64 * 8 + 64 * 4 + 64 * 8
    local = 32 * 5 * 8 * 4
    assert first.lookups == 2 * 4 * elements + local
    ids = 64 * 1 + 64 * 2 + 64 * 3 / 2 + 32 * 1
    assert first.update == 3 * 12 * ids + update_bytes(ids, 8)
    assert second.update == 3 * 12 * (ids - 64) + update_bytes(ids - 64, 8)
    # 3 numbers and a label, 8 ids per row
    assert first.batches == 3 * 32 * (4 * 4 + 8 * 8) + 3 * 8 * ids
    # the inputs of all layers, and two gradients of the widest
    assert first.dense_pass == (8 + 16 + 24 + 16 + 2 * 24) * 32 * 4
    # twice as many rows, local and sent; its widest layer takes less than the dense pass
    assert first.evaluation == 2 * (local + 4 * elements + 3 * 8 * ids)
    assert first.total == sum(asdict(first).values())


def test_layers_that_keep_more_than_inputs_are_counted():
    def dense_pass(*overrides: str) -> int:
        return ranks_of("dlrm", *TINY, "model.top_mlp=[32,16,1]", *ON_H200, *overrides)[
            0
        ].dense_pass

    # Dropout is part of ReLU's kernels. A normalization keeps its input, and dropout after it has an output of its own.
    plain, column = dense_pass("train.amp=off"), 64 * 4
    assert dense_pass("train.amp=off", "model.dropout=0.5") == plain
    normalised = dense_pass("train.amp=off", "model.batch_norm=true")
    assert normalised == plain + (32 + 16) * column
    both = dense_pass("train.amp=off", "model.batch_norm=true", "model.dropout=0.5")
    assert both == normalised + (32 + 16) * column


def test_evaluation_in_batches_of_the_same_size_needs_no_further_memory():
    assert ranks_of("dlrm", *TINY, *ON_H200, "eval.batch_size=64")[0].evaluation == 0


@pytest.mark.parametrize("columns", [16, 128])
def test_the_update_takes_as_much_as_its_levels(columns):
    _levels = pytest.importorskip("nn.embedding.triton_launcher")._levels
    counts = [40_000, 3, 500, 9_000]
    made = [
        tensor
        for level in _levels([0, 40_000, 40_003, 40_503], counts, 32, columns, torch.device("cpu"))
        for tensor in (level.blocks, level.sums, level.sums_keys, level.sums_counts)
    ]
    total = sum(each.nbytes for each in made) + 4 * sum(counts)
    assert update_bytes(sum(counts), columns) == pytest.approx(total, rel=0.01)


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
