"""Sharding plans with the real properties of tables and hardware, errors when tables do not fit, and known traps.

The MLPerf numbers are those of the TorchRec reference (`torchrec_dlrm`): the planner's defaults put tables of this set
into unified memory, and load one of four ranks with 2.29 times the mean.
"""

import logging
from dataclasses import replace

import pytest
import torch

from configs.schema import (
    Exchange,
    ModelConfig,
    ShardingConfig,
    ShardingType,
    TableDtype,
    Tier,
    table_optimizers,
)
from nn.build import build_plan, planned_hardware
from nn.embedding.declared_tables import one_table_per_feature
from nn.embedding.optimizer import TableRule, table_rule
from nn.planning.plan import Hardware, TablePlan, lookups_by_rank
from nn.planning.plan_problem import PlanProblem
from nn.planning.planner import plan_tables
from nn.planning.table_sizes import table_bytes
from nn.tiers.traffic import IdTraffic, power_law_share
from tests.helpers.composed import TINY, compose_config, losses_of_cases
from tests.helpers.datasets import synthetic_source

GIB = 2**30
H200 = 139 * GIB
RULES = {name: table_rule(name) for name in table_optimizers()}
SGD, ADAGRAD, ROWWISE, ADAM = (
    RULES[name] for name in ("sgd", "adagrad", "rowwise_adagrad", "adam")
)
WHOLE_OR_COPIED = [ShardingType.table_wise, ShardingType.data_parallel]

# fmt: off
MLPERF_ROWS = [
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10,
    2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
]
MLPERF_HOTNESS = [
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
]
# fmt: on


def plan_of(
    rows: list[int],
    *,
    hotness: list[int] | None = None,
    dim: int = 128,
    rule: TableRule = SGD,
    device: str = "cuda",
    world_size: int = 1,
    local_world_size: int | None = None,
    memory: int = H200,
    batch_size: int = 16,
    expansion_bytes: dict[str, int] | None = None,
    dtype: TableDtype = TableDtype.fp32,
    **sharding,
):
    """TorchRec's plan and ours; `memory` is that of a rank. Without `tiers`, no table may lie in host memory."""
    sharding = {"tiers": [Tier.device]} | sharding
    spec = synthetic_source(cardinalities=rows, hotness=hotness or []).spec
    model = ModelConfig(embedding_dim=dim, embedding_dtype=dtype)
    tables = one_table_per_feature(model, spec)
    local = local_world_size or world_size
    on_gpu = device == "cuda"
    hardware = Hardware(
        device, world_size, local, memory if on_gpu else 0, 512 * GIB if on_gpu else memory * local
    )
    rows_of_table = {table.name: table.num_embeddings for table in tables}

    def traffic_of(name: str) -> IdTraffic:
        return IdTraffic(power_law_share(rows_of_table[name], 0.0), rows_of_table[name])

    problem = PlanProblem(
        tables,
        spec,
        ShardingConfig(**sharding),
        rule,
        hardware,
        batch_size,
        expansion_bytes or {},
        3 * batch_size,
        traffic_of,
    )
    return plan_tables(problem)


def rows_of(*args, **changes) -> list[TablePlan]:
    return plan_of(*args, **changes)[1]


def plan_mlperf(**changes) -> list[TablePlan]:
    options = {"hotness": MLPERF_HOTNESS, "rule": ADAGRAD, "batch_size": 16_384}
    return rows_of(MLPERF_ROWS, **(options | changes))


def bytes_by_rank(rows: list[TablePlan], world_size: int) -> list[int]:
    used = [0] * world_size
    for row in rows:
        for rank, size in zip(row.ranks, row.bytes_per_rank, strict=True):
            used[rank] += size
    return used


def most_lookups_over_mean(rows: list[TablePlan], world_size: int) -> float:
    """Lookups per sample by the true hotness, whatever the plan assumed: of the busiest rank over the mean."""
    true_rows = [
        replace(row, hotness=hotness) for row, hotness in zip(rows, MLPERF_HOTNESS, strict=True)
    ]
    lookups = lookups_by_rank(true_rows, world_size)
    return max(lookups) / (sum(lookups) / world_size)


def test_the_mlperf_tables_have_their_documented_size():
    rows = plan_mlperf(rule=SGD)
    assert sum(row.num_embeddings for row in rows) == 204_184_588
    assert bytes_by_rank(rows, 1)[0] / GIB == pytest.approx(97.36, abs=0.005)


def test_two_h200_hold_the_mlperf_tables_with_adagrad_and_without_unified_memory():
    rows = plan_mlperf(world_size=2)
    assert {(row.sharding, row.kernel) for row in rows} <= {
        ("table_wise", "fused"),
        ("column_wise", "fused"),
        ("data_parallel", "dense"),
    }
    used = bytes_by_rank(rows, 2)
    assert max(used) < 0.9 * H200
    # 5 of the 6 large tables went to unified memory when the planner was left to believe in 32 GiB.
    assert sum(used) / GIB == pytest.approx(194.7, abs=0.2)


@pytest.mark.parametrize(
    ("batch_size", "replicated"),
    [(32_768, {100, 4096}), (32_760, set()), (40_000, {100, 4096, 5000})],
)
def test_tables_far_smaller_than_a_batch_are_replicated_and_no_others(batch_size, replicated):
    rows = rows_of([100, 4096, 5000, 1_000_000], world_size=2, batch_size=batch_size)
    assert {row.num_embeddings for row in rows if row.sharding == "data_parallel"} == replicated
    (row, *_) = rows_of([100], world_size=2, batch_size=40_000, types=[ShardingType.table_wise])
    assert row.sharding == "table_wise"


def test_what_would_need_unified_memory_does_not_fit():
    with pytest.raises(ValueError, match="the tables do not fit"):
        plan_mlperf(world_size=2, memory=32 * GIB)


def test_one_h200_holds_the_mlperf_tables_with_one_state_a_row_only():
    with pytest.raises(ValueError, match=r"they take 194\.7 GiB, and 1 x 125\.1 GiB are usable"):
        plan_mlperf()
    rows = plan_mlperf(rule=ROWWISE)
    assert {(row.sharding, row.kernel) for row in rows} == {("table_wise", "fused")}
    assert bytes_by_rank(rows, 1) == [204_184_588 * (128 * 4 + 4)]


@pytest.mark.parametrize("batch_size", [8192, 16_384, 65_536])
def test_hotness_balances_the_ranks(batch_size):
    """A column shard looks up all ids of its table: 100 of 314 on each of two of four ranks."""
    for world_size, limit in ((2, 1.15), (4, 1.3)):
        balanced = plan_mlperf(world_size=world_size, batch_size=batch_size)
        assert most_lookups_over_mean(balanced, world_size) < limit
        one_hot = plan_mlperf(world_size=world_size, hotness=[1] * 26)
        assert most_lookups_over_mean(one_hot, world_size) > limit + 0.1
        assert [row.hotness for row in balanced] == MLPERF_HOTNESS
    # The ranks beside the halves have nothing of them to do, and the halves' ranks nothing else.
    lookups = lookups_by_rank(plan_mlperf(world_size=4), 4)
    assert sorted(lookups) == pytest.approx([57, 57, 100, 100], abs=3)


def test_a_table_with_more_lookups_than_a_rank_should_do_is_cut_unasked():
    """It is cut in two; tables that are neither large nor hot stay whole."""
    for world_size in (4, 8):
        rows = plan_mlperf(world_size=world_size)
        cut = {row.table: len(row.ranks) for row in rows if row.sharding == "column_wise"}
        assert cut["cat_20"] == 2
        assert "cat_10" not in cut
    two = plan_mlperf(world_size=2, rule=SGD)
    assert "column_wise" not in {row.sharding for row in two}


def test_a_table_larger_than_a_gpu_is_cut_unasked():
    rows = rows_of([80_000_000, 1000], world_size=2, memory=32 * GIB)
    assert (rows[0].sharding, rows[0].ranks) == ("column_wise", (0, 1))
    assert rows[0].bytes_per_rank == (80_000_000 * 64 * 4,) * 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("rule", "size"),
    [
        (SGD, 1000 * 16 * 4),
        (ADAGRAD, 1000 * 16 * 8),
        (ROWWISE, 1000 * (16 * 4 + 4)),
        (ADAM, 1000 * 16 * 12),
    ],
)
def test_bytes_are_those_of_weights_and_state(rule, size, device):
    [row] = rows_of([1000], dim=16, rule=rule, device=device)
    assert row.bytes_per_rank == (size,)


@pytest.mark.parametrize("dtype", list(TableDtype))
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_the_planner_counts_the_same_bytes(rule, device, dtype):
    """TorchRec's own estimate decides what fits; it agrees with ours within 2 %."""
    weight_bytes = 4 if dtype is TableDtype.fp32 else 2
    size = table_bytes(1_000_000, 64, rule, weight_bytes=weight_bytes)
    options = {"dim": 64, "rule": rule, "device": device, "reserve": 0.0, "dtype": dtype}
    [row] = rows_of([1_000_000], memory=int(1.02 * size), **options)
    assert row.bytes_per_rank == (size,)
    with pytest.raises(ValueError, match="the tables do not fit"):
        rows_of([1_000_000], memory=int(0.98 * size), **options)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_reserve_is_kept_free_on_every_device(device):
    options = {"dim": 64, "device": device, "memory": 300_000_000}
    assert rows_of([1_000_000], reserve=0.1, **options)
    with pytest.raises(ValueError, match=r"less sharding\.reserve=0\.2"):
        rows_of([1_000_000], reserve=0.2, **options)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("layout", "ranks", "parts"),
    [
        ("table_wise", 1, [1001 * 16]),
        ("column_wise", 2, [1001 * 8, 1001 * 8]),
        ("row_wise", 2, [501 * 16, 500 * 16]),
        ("data_parallel", 2, [1001 * 16, 1001 * 16]),
    ],
)
def test_an_override_is_obeyed_and_its_parts_are_counted(layout, ranks, parts, device):
    row, other = rows_of(
        [1001, 1000],
        hotness=[3, 1],
        dim=16,
        device=device,
        world_size=2,
        rule=ADAGRAD,
        tables={"cat_0": layout},
        types=[ShardingType.table_wise],
    )
    assert (row.table, row.num_embeddings, row.embedding_dim, row.hotness) == ("cat_0", 1001, 16, 3)
    assert (row.sharding, len(row.ranks)) == (layout, ranks)
    assert list(row.bytes_per_rank) == [part * 8 for part in parts]
    assert row.kernel == ("dense" if layout == "data_parallel" else "fused")
    assert (other.sharding, len(other.ranks)) == ("table_wise", 1)


@pytest.mark.parametrize(
    ("dim", "world_size", "slices"), [(128, 4, 2), (64, 2, 2), (12, 4, 3), (12, 2, 1), (4, 2, 1)]
)
def test_columns_are_cut_into_equal_multiples_of_four(dim, world_size, slices):
    rows = rows_of([1000] * 9, dim=dim, world_size=world_size, tables={"cat_0": "column_wise"})
    assert rows[0].sharding == "column_wise"
    assert len(rows[0].ranks) == slices


def test_one_rank_holds_every_table_whole_and_fused():
    rows = plan_mlperf(rule=SGD)
    assert {(row.sharding, row.kernel, row.ranks) for row in rows} == {
        ("table_wise", "fused", (0,))
    }


@pytest.mark.doors
def test_every_kernel_is_one_that_the_wheels_hold():
    """Unified memory is slow and SSD tables are not built: only these two kernels are ever planned."""
    for world_size in (2, 4, 8):
        for types in (list(ShardingType), WHOLE_OR_COPIED):
            rows = plan_mlperf(world_size=world_size, types=types)
            assert {row.kernel for row in rows} <= {"fused", "dense"}
            assert {row.sharding for row in rows if row.kernel == "dense"} <= {"data_parallel"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_two_nodes_of_two_ranks_are_numbered_rightly(device):
    """Without local_world_size TorchRec places shards on cuda:2 and cuda:3 of the second node."""
    layouts = ["row_wise", "column_wise", "data_parallel", *["table_wise"] * 4]
    plan, rows = plan_of(
        [100_000] * 7,
        dim=16,
        device=device,
        world_size=4,
        local_world_size=2,
        tables={f"cat_{index}": layout for index, layout in enumerate(layouts)},
    )
    placements = {
        str(shard.placement)
        for table in plan.plan["embeddings"].values()
        if table.sharding_spec is not None
        for shard in table.sharding_spec.shards
    }
    local = range(4) if device == "cpu" else [0, 1, 0, 1]
    wanted = {
        f"rank:{rank}/{'cpu' if device == 'cpu' else f'cuda:{index}'}"
        for rank, index in zip(range(4), local, strict=True)
    }
    assert placements == wanted
    assert rows[0].ranks == rows[2].ranks == (0, 1, 2, 3)
    # Each rank has a table or a shard of one; how many of them depends on what the two links cost.
    assert {row.ranks[0] for row in rows[3:]} | set(rows[1].ranks) == {0, 1, 2, 3}


def test_what_does_not_fit_is_said_with_numbers_and_remedies():
    with pytest.raises(ValueError, match="the tables do not fit") as caught:
        rows_of([8_000_000, 4_000_000, 10], rule=ADAM, world_size=2, memory=8 * GIB)
    assert str(caught.value).startswith(
        "the tables do not fit: with adam state they take 17.2 GiB, and 2 x 7.2 GiB are usable "
        "(8.0 GiB per rank less sharding.reserve=0.1); the largest are cat_0 11.4 GiB, cat_1 5.7 "
        "GiB, cat_2 0.0 GiB. Either start 3 ranks or more, add row_wise to sharding.types, choose "
        "an optimizer with less state (optimizer.embedding_name=rowwise_adagrad or sgd), store "
        "weights in 16 bits (model.embedding_dtype=bf16), keep large tables in host memory "
        "(sharding.tiers=[device,host]), lower model.embedding_dim, or raise the frequency limit "
        "of the dataset. TorchRec's planner: "
        "Unable to find a plan"
    )


def test_only_remedies_that_help_are_named():
    options = {"memory": 8 * GIB, "world_size": 2}
    with pytest.raises(ValueError, match="the tables do not fit") as caught:
        rows_of([20_000_000], types=WHOLE_OR_COPIED, **options)
    # No number of ranks holds a whole table that one rank cannot.
    assert "Either add row_wise or column_wise to sharding.types, store" in str(caught.value)
    with pytest.raises(ValueError, match="the tables do not fit") as caught:
        rows_of([60_000_000], types=list(ShardingType), **options)
    assert "Either start 4 ranks or more, store weights in 16 bits" in str(caught.value)
    with pytest.raises(ValueError, match="the tables do not fit") as caught:
        rows_of([11_000_000] * 3, types=WHOLE_OR_COPIED, world_size=2, memory=9 * GIB)
    # 15.7 GiB in three tables: the sum fits 2 x 8.1 GiB, the tables do not.
    assert "Either start 3 ranks or more, add row_wise" in str(caught.value)


def test_logging_is_heard_again_after_planning():
    rows_of([1000], world_size=2)
    with pytest.raises(ValueError, match="do not fit"):
        rows_of([1_000_000], memory=1000)
    assert logging.getLogger("torchrec").isEnabledFor(logging.WARNING)


def test_an_override_of_an_unknown_table_names_it_and_the_tables():
    with pytest.raises(
        ValueError, match=r"^sharding\.tables names cat_2\.bin, cat_9, but the "
    ) as e:
        rows_of([10, 20], world_size=2, tables={"cat_9": "row_wise", "cat_2.bin": "row_wise"})
    assert str(e.value).endswith("but the tables are cat_0, cat_1; correct the names")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_expands_ids_takes_memory_where_the_table_lies(device):
    size = table_bytes(1_000_000, 64, SGD)
    options = {"dim": 64, "device": device, "reserve": 0.0, "memory": int(1.5 * size)}
    [without] = rows_of([1_000_000], **options)
    [fitting] = rows_of([1_000_000], expansion_bytes={"cat_0": size // 4}, **options)
    assert (without.expansion_bytes, fitting.expansion_bytes) == (0, size // 4)
    with pytest.raises(
        ValueError, match=r"with sgd state and the expansion of their ids they take 0\.4"
    ):
        rows_of([1_000_000], expansion_bytes={"cat_0": int(0.6 * size)}, **options)


def test_every_rank_with_a_part_of_a_table_expands_its_ids():
    [row] = rows_of(
        [1000],
        dim=16,
        world_size=2,
        tables={"cat_0": "column_wise"},
        expansion_bytes={"cat_0": 8000},
    )
    assert (row.ranks, row.bytes_per_rank, row.expansion_bytes) == ((0, 1), (32_000, 32_000), 8000)


def test_a_row_with_one_state_is_never_cut():
    refused = r"^table cat_1 would be column_wise, but rowwise_adagrad keeps one state per row"
    with pytest.raises(ValueError, match=refused):
        rows_of([10, 20], rule=ROWWISE, world_size=2, tables={"cat_1": "column_wise"})
    rows = plan_mlperf(rule=ROWWISE, world_size=4)
    assert "column_wise" not in {row.sharding for row in rows}


def exchanged(**options) -> list[str]:
    """Two ranks have 1,024 samples each: of 10 and 300 rows fewer are distinct, of a million nearly all."""
    options = {"world_size": 2, "batch_size": 1024, "types": [ShardingType.table_wise]} | options
    return [row.exchange for row in rows_of([10, 300, 10**6], **options)]


def test_rows_are_sent_of_tables_with_fewer_rows_than_samples_if_asked_for():
    assert exchanged() == ["vectors"] * 3
    assert exchanged(exchange=Exchange.least) == ["rows", "rows", "vectors"]
    assert exchanged(exchange=Exchange.rows) == ["rows"] * 3
    kept = {"cat_0": {"exchange": "vectors"}, "cat_2": {"exchange": "rows"}}
    assert exchanged(exchange=Exchange.least, tables=kept) == ["vectors", "rows", "rows"]
    # Nothing is sent alone, nor of a replicated table.
    assert exchanged(exchange=Exchange.least, world_size=1) == ["vectors"] * 3
    replicated = {"cat_0": "data_parallel"}
    assert exchanged(exchange=Exchange.least, tables=replicated)[0] == "vectors"
    # A vector of several ids is fewer bytes than their rows.
    assert exchanged(exchange=Exchange.least, hotness=[9, 9, 9]) == ["rows", "rows", "vectors"]


def test_rows_of_row_wise_tables_are_sent_if_their_ids_are_few():
    row_wise = {"types": [ShardingType.row_wise]}
    assert exchanged(**row_wise, hotness=[1, 2, 3]) == ["rows", "rows", "vectors"]
    assert exchanged(**row_wise, dtype=TableDtype.bf16) == ["vectors"] * 3
    assert exchanged(**row_wise, exchange=Exchange.vectors) == ["vectors"] * 3


def test_rows_that_cannot_be_sent_are_refused():
    with pytest.raises(ValueError, match="cat_0 has weights of 16 bits, and exchange: rows is for"):
        exchanged(exchange=Exchange.rows, dtype=TableDtype.bf16)
    columns = {"cat_0": {"type": "column_wise", "exchange": "rows"}}
    with pytest.raises(ValueError, match="cat_0 of 128 columns to column_wise, which is for"):
        exchanged(tables=columns)


def planned_from_command_line(*overrides: str) -> list[TablePlan]:
    config = compose_config(*TINY, "mode=plan", *overrides)
    source = synthetic_source(cardinalities=[50, 60])
    return build_plan(config, source, planned_hardware(config))[1]


def test_a_plan_may_be_made_for_ranks_and_memory_that_are_not_there():
    gpus = ["device=cuda", "sharding.hbm_gib=139", "sharding.world_size=16", "train.batch_size=64"]
    rows = planned_from_command_line(*gpus, "sharding.tables={cat_0:data_parallel}")
    assert rows[0].ranks == tuple(range(16))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["sharding.world_size=6", "sharding.local_world_size=4"],
            r"^sharding\.world_size=6 is no multiple of sharding\.local_world_size=4; all nodes",
        ),
        (["sharding.world_size=3"], r"^train\.batch_size=64 must be divisible by 3 ranks"),
        (["sharding.host_gib=0.00001"], r"^the tables do not fit: with adagrad state they take"),
    ],
)
def test_a_plan_that_cannot_be_says_why(overrides, message):
    with pytest.raises(ValueError, match=message):
        planned_from_command_line(*overrides)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU says itself how much memory it has")
def test_a_plan_for_gpus_asks_for_their_memory_where_there_are_none():
    with pytest.raises(
        ValueError, match=r"^there is no GPU whose memory could be used .* sharding\.hbm_gib"
    ):
        planned_from_command_line("device=cuda")


def test_replicated_tables_are_trained_by_the_tables_rule():
    """TorchRec leaves them to the dense component's optimizer, so that the number of GPUs would change what is learnt."""
    layouts = ["table_wise", "data_parallel"]
    tables = [",".join(f"cat_{index}:{layout}" for index in range(5)) for layout in layouts]
    rules = ["optimizer.name=sgd", "optimizer.lr=0.5", "optimizer.embedding_name=adagrad"]
    own = [*TINY, *rules, "optimizer.embedding_lr=0.05", "optimizer.eps=0.01"]
    sharded, replicated, by_the_dense_rule = losses_of_cases(
        [
            *([*own, f"sharding.tables={{{each}}}"] for each in tables),
            [*TINY, "optimizer.name=sgd", "optimizer.lr=0.5"],
        ],
        10,
    )
    assert replicated == pytest.approx(sharded, rel=1e-6)
    assert by_the_dense_rule != pytest.approx(sharded, rel=1e-3)


@pytest.mark.parametrize("world_size", [2, 4])
def test_column_wise_alone_cuts_every_table(world_size):
    rows = rows_of([1000, 50, 7], dim=16, world_size=world_size, types=[ShardingType.column_wise])
    assert {row.sharding for row in rows} == {"column_wise"}


def test_column_wise_alone_leaves_rowwise_adagrad_nothing_to_choose():
    with pytest.raises(
        ValueError, match=r"rowwise_adagrad keeps one state per row.*choose table_wise, row_wise"
    ):
        rows_of(
            [1000, 50],
            dim=16,
            world_size=2,
            rule=ROWWISE,
            types=[ShardingType.column_wise],
        )
