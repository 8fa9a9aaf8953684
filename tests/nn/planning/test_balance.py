"""Balance of a plan: tables change ranks while that helps, and column shards on one rank become one."""

from copy import deepcopy

import pytest
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.planner.types import Storage
from torchrec.distributed.types import ParameterSharding

from nn.planning import planner
from nn.planning.balance import ShardCost, balance, join_columns
from tests.helpers.composed import losses_of_cases
from tests.helpers.distributed import run_distributed
from tests.nn.sharding.test_sharded_embeddings import NUM_STEPS, case


def sharding(kind: str, *shards: tuple[int, int, int]) -> ParameterSharding:
    """A table of 10 rows whose shards are (first column, columns, rank)."""
    spec = [
        ShardMetadata([0, first], [10, columns], f"rank:{rank}/cpu")
        for first, columns, rank in shards
    ]
    ranks = [rank for *_, rank in shards]
    return ParameterSharding(kind, "fused", ranks, EnumerableShardingSpec(spec))


def placed(plan: dict[str, ParameterSharding]) -> dict[str, list[tuple[int, int, int]]]:
    return {
        name: [
            (shard.shard_offsets[1], shard.shard_sizes[1], shard.placement.rank())
            for shard in table.sharding_spec.shards
        ]
        for name, table in plan.items()
    }


def whole(times: dict[str, tuple[float, int]], memory: int = 1) -> tuple[dict, dict]:
    """A plan of table-wise tables, name -> (ms, rank), and their costs."""
    plan = {name: sharding("table_wise", (0, 8, rank)) for name, (_, rank) in times.items()}
    costs = {
        (name, "table_wise", (10, 8)): ShardCost(ms, ms / 2, Storage(hbm=0, ddr=memory))
        for name, (ms, _) in times.items()
    }
    return plan, costs


def times_by_rank(plan: dict, costs: dict, world_size: int) -> list[float]:
    times = [0.0] * world_size
    for name, table in plan.items():
        for shard in table.sharding_spec.shards:
            size = tuple(shard.shard_sizes)
            times[shard.placement.rank()] += costs[name, table.sharding_type, size].ms
    return times


def test_a_swap_helps_where_no_move_does():
    plan, costs = whole({"a": (5, 0), "b": (4, 0), "c": (3, 1), "d": (4, 1)})
    assert times_by_rank(plan, costs, 2) == [9, 7]
    balance(plan, costs, 2, "cpu", 2)
    assert times_by_rank(plan, costs, 2) == [8, 8]
    for table in plan.values():
        (shard,) = table.sharding_spec.shards
        assert table.ranks == [shard.placement.rank()]


@pytest.mark.parametrize(("memory", "moves"), [({}, True), ({"a": 3, "b": 3, "c": 5}, False)])
def test_no_rank_becomes_fuller_than_the_fullest_was(memory, moves):
    plan, costs = whole({"a": (4, 0), "b": (4, 0), "c": (1, 1)})
    for name, size in memory.items():
        key = (name, "table_wise", (10, 8))
        costs[key] = ShardCost(costs[key].ms, 0.5, Storage(hbm=0, ddr=size))
    before = placed(plan)
    balance(plan, costs, 2, "cpu", 2)
    assert times_by_rank(plan, costs, 2) == ([4, 5] if moves else [8, 1])
    assert (placed(plan) != before) == moves


def test_shards_of_a_table_are_not_moved_together_onto_a_rank():
    plan, costs = whole({"a": (9, 0)})
    plan["b"] = sharding("column_wise", (0, 4, 0), (4, 4, 1))
    costs["b", "column_wise", (10, 4)] = ShardCost(2, 1, Storage(hbm=0, ddr=1))
    before = placed(plan)
    balance(plan, costs, 2, "cpu", 2)
    assert placed(plan) == before


def test_column_shards_on_one_rank_become_one():
    plan = {
        "whole": sharding("table_wise", (0, 8, 1)),
        "apart": sharding("column_wise", (0, 4, 1), (4, 4, 0)),
        "together": sharding("column_wise", (0, 4, 1), (4, 4, 1)),
        "two of three": sharding("column_wise", (0, 4, 1), (4, 4, 0), (8, 4, 1)),
    }
    expected = placed(deepcopy(plan))
    join_columns(plan)
    expected |= {"together": [(0, 8, 1)], "two of three": [(0, 8, 1), (8, 4, 0)]}
    assert placed(plan) == expected
    kinds = {name: table.sharding_type for name, table in plan.items()}
    assert kinds == {
        "whole": "table_wise",
        "apart": "column_wise",
        "together": "table_wise",
        "two of three": "column_wise",
    }
    assert plan["two of three"].ranks == [1, 0]


JOINED = ("dlrm", "multi_hot", "adagrad")


def losses_with_joined_shards(num_steps: int) -> tuple[list[list[float]], int]:
    """Train column-wise tables of 8 columns in three shards, two of them on one rank; return how often some were joined."""
    joined = 0
    original = planner.join_columns

    def join(plan):
        nonlocal joined
        for table in plan.values():
            table.sharding_spec = EnumerableShardingSpec(
                [
                    ShardMetadata([0, first], [table.sharding_spec.shards[0].shard_sizes[0], 4], at)
                    for first, at in ((0, "rank:0/cpu"), (4, "rank:1/cpu"), (8, "rank:0/cpu"))
                ]
            )
        original(plan)
        joined += sum(len(table.sharding_spec.shards) == 2 for table in plan.values())

    planner.join_columns = join
    try:
        options = [*case(*JOINED, "column_wise"), "model.embedding_dim=12"]
        return losses_of_cases([[*options, "model.bottom_mlp=[16,12]"]], num_steps), joined
    finally:
        planner.join_columns = original


def test_two_ranks_train_joined_shards_as_one_trains_whole_tables():
    options = [*case(*JOINED, "table_wise"), "model.embedding_dim=12", "model.bottom_mlp=[16,12]"]
    [one] = losses_of_cases([options], NUM_STEPS)
    ([two], joined), _ = run_distributed(losses_with_joined_shards, 2, NUM_STEPS)
    assert joined == 5
    assert two == pytest.approx(one, rel=1e-6)
    assert one[-1] != one[0]
