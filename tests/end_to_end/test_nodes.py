"""Two nodes of two ranks each, emulated on one machine: rank numbers, plans, and equal training."""

import errno
import json
import os
import re
import time
from unittest.mock import patch

import pytest

from configs.schema import ShardingType
from nn import session
from nn.distributed.errors import Rank0Error
from nn.distributed.process_group import ranks_from_environment
from nn.embedding.optimizer import table_rule
from nn.observability.console import make_console
from tests.helpers.command import Ended, run_command
from tests.helpers.composed import TINY, build, compose_config, losses_of_cases, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.nn.planning.test_planner import GIB, plan_mlperf, rows_of

NODES = [{0, 1}, {2, 3}]
NUM_STEPS = 4
RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.005}
# Nodes matter to table_row_wise, with each optimizer. tests/nn/training/test_train_step.py trains each of the other shardings
# with each optimizer.
CASES = [
    *((rule, "table_row_wise") for rule in RATES),
    ("sgd", "data_parallel"),
    ("adagrad", "column_wise"),
    ("rowwise_adagrad", "row_wise"),
    ("adam", "table_wise"),
]


def on_two_nodes(function, *args) -> list:
    """Return the results of `function` on four ranks, two per node."""
    return run_distributed(function, 4, *args, local_world_size=2)


def case(rule: str, layout: str) -> list[str]:
    tables = ",".join(f"cat_{index}:{layout}" for index in range(5))
    return [
        *TINY,
        "data.synthetic.hotness=[3,1,2,5,1]",
        f"optimizer.name={rule}",
        f"optimizer.lr={RATES[rule]}",
        "optimizer.eps=0.01",
        f"sharding.tables={{{tables}}}",
    ]


def rank_numbers() -> tuple[int, int, int, int]:
    ranks = ranks_from_environment("cpu")
    return ranks.rank, ranks.local_rank, ranks.world_size, ranks.local_world_size


def rows_held(overrides: list[str]) -> dict[str, tuple[int, int]]:
    """Return table -> (first row, number of rows) of this rank's shards."""
    with ranks_of_cpu():
        shards = build(compose_config(*overrides)).step.tables.shards()
        return {shard.table: (shard.row_offset, len(shard.weight)) for shard in shards}


def planned_by_command(overrides: list[str]) -> str:
    return run_command(*overrides, "mode=plan").out


def test_ranks_are_numbered_over_nodes_and_within_each():
    assert on_two_nodes(rank_numbers) == [(0, 0, 4, 2), (1, 1, 4, 2), (2, 0, 4, 2), (3, 1, 4, 2)]


def test_a_table_row_wise_table_is_shared_by_the_ranks_of_one_node():
    rows = rows_of(
        [1001] * 6, world_size=4, local_world_size=2, types=[ShardingType.table_row_wise]
    )
    assert {row.sharding for row in rows} == {"table_row_wise"}
    held = [set(row.ranks) for row in rows]
    assert all(ranks in NODES for ranks in held)
    assert all(node in held for node in NODES), "one node holds everything"
    assert [row.bytes_per_rank for row in rows] == [(501 * 128 * 4, 500 * 128 * 4)] * 6


def test_shards_are_on_the_ranks_of_the_plan():
    held = on_two_nodes(rows_held, case("adagrad", "table_row_wise"))
    for table, num_embeddings in zip(
        [f"cat_{index}" for index in range(5)], [500, 40, 7, 300, 1000], strict=True
    ):
        on_rank = [rows.get(table) for rows in held]
        holders = {rank for rank, rows in enumerate(on_rank) if rows is not None}
        first = -(-num_embeddings // 2)
        assert holders in NODES
        shards = [on_rank[rank] for rank in sorted(holders)]
        assert shards == [(0, first), (first, num_embeddings - first)]


@pytest.mark.parametrize("others", [[], ["sharding.world_size=8", "sharding.local_world_size=4"]])
def test_nodes_of_unequally_many_ranks_plan_nothing(others):
    """The second node refused 3 ranks of 2 by itself, and the first one waited for its ranks without end."""
    ended = run_distributed(planned_on_unequal_nodes, 3, [*case("sgd", "row_wise"), *others])
    refusal = "error: the nodes have 1 to 2 ranks; start as many on every node (torchrun's --nproc-per-node)"
    assert [(each.exit_code, each.out, each.err.strip()) for each in ended] == [
        (2, "", refusal),
        (2, "", refusal),
        (2, "", ""),
    ]


def planned_on_unequal_nodes(overrides: list[str]) -> Ended:
    """Return what a rank prints on nodes of one rank and of two."""
    local_rank, in_node = [(0, 1), (0, 2), (1, 2)][int(os.environ["RANK"])]
    with patch.dict(os.environ, LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(in_node)):
        return run_command(*overrides, "mode=plan", "train.batch_size=48")


@pytest.mark.parametrize("local_world_size", [2, 8])
def test_a_sharded_table_stays_within_a_node_with_fast_links(local_world_size):
    rows = plan_mlperf(
        world_size=16,
        local_world_size=local_world_size,
        memory=200 * GIB,
        types=[ShardingType.row_wise, ShardingType.table_row_wise],
    )
    assert {row.sharding for row in rows} == {"table_row_wise"}
    for row in rows:
        assert len(row.ranks) == local_world_size
        assert len({rank // local_world_size for rank in row.ranks}) == 1


def test_fewer_tables_are_row_wise_over_many_nodes():
    """Sixteen GPUs in one host, and in eight hosts."""
    types = [ShardingType.table_wise, ShardingType.row_wise]
    one, eight = (
        plan_mlperf(world_size=16, local_world_size=ranks_per_node, memory=200 * GIB, types=types)
        for ranks_per_node in (16, 2)
    )
    num_row_wise = [sum(row.sharding == "row_wise" for row in rows) for rows in (one, eight)]
    assert num_row_wise == [2, 1]


def test_the_plan_for_absent_nodes_equals_that_of_running_ones():
    overrides = [*case("sgd", "table_row_wise"), "sharding.host_gib=4"]
    running = on_two_nodes(planned_by_command, overrides)[0]
    absent = run_command(
        *overrides, "mode=plan", "sharding.world_size=4", "sharding.local_world_size=2"
    ).out
    assert "table_row_wise" in absent
    measured = re.compile(
        r"measured\s+sharding\.within_gb_s=\S+\s+sharding\.within_us=\S+\s+sharding\.between_gb_s=\S+\s+"
        r"sharding\.between_us=\S+,\s+by\s+an\s+all-to-all\s+of\s+these\s+ranks\n"
    )
    assert len(measured.findall(running)) == 1
    assert absent == measured.sub("", running)


def test_1024_ranks_are_planned_in_a_minute():
    nodes = ["sharding.world_size=1024", "sharding.local_world_size=8", "sharding.hbm_gib=139"]
    start = time.monotonic()
    ended = run_command("experiment=dlrm_criteo_t15", "mode=plan", "device=cuda", *nodes)
    assert ended.exit_code == 0
    assert time.monotonic() - start < 60
    assert "plan for   1024 x cuda on 128 nodes" in ended.out
    for way in ("one group", "two hops", "groups of 8"):
        assert re.search(rf"^{way} .* between nodes in [\d,]+ messages", ended.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "the tables fit 4 x cpu, on which the run would resume"),
        (["sharding.world_size=2"], None),
        (["sharding.group_size=6"], "the run cannot go on: sharding.group_size=6 does not divide"),
        (["sharding.host_gib=0.00004"], "the run cannot go on: the tables do not fit"),
        (["train.batch_size=6"], "the run cannot go on: train.batch_size=6 must be divisible by 4"),
    ],
)
def test_a_plan_of_several_nodes_says_whether_one_less_suffices(options, says):
    nodes = ["sharding.world_size=6", "sharding.local_world_size=2", "train.batch_size=48"]
    out = run_command(*case("sgd", "row_wise"), "mode=plan", *nodes, *options).out
    assert ("less a node" in out) == (says is not None)
    assert says is None or says in " ".join(out.split())


def refusal_of_training(overrides: list[str]) -> str:
    """Return what a rank is told where rank 0 cannot read what a plan for a node less needs."""

    def unreadable(*_: object) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(session, "without_a_node", unreadable)
        with (
            pytest.raises(Rank0Error) as refused,
            session.open_session(compose_config(*overrides), "", make_console(1)),
        ):
            pass
    return str(refused.value)


def test_all_ranks_learn_that_the_plan_for_a_node_less_has_failed(tmp_path):
    options = [*case("sgd", "row_wise"), f"run_dir={tmp_path / 'run'}"]
    told = run_distributed(refusal_of_training, 2, options)
    assert os.strerror(errno.EIO) in told[0]
    assert told[1] == told[0]


@pytest.fixture(scope="module")
def losses() -> dict[str, dict]:
    """Losses of one process by optimizer, where no table is sharded, and of two nodes by case."""
    one = losses_of_cases([case(rule, "table_wise") for rule in RATES], NUM_STEPS)
    nodes = on_two_nodes(losses_of_cases, [case(*chosen_case) for chosen_case in CASES], NUM_STEPS)
    assert all(losses == nodes[0] for losses in nodes), "ranks disagree about the global loss"
    return {
        "one": dict(zip(RATES, one, strict=True)),
        "nodes": dict(zip(CASES, nodes[0], strict=True)),
    }


@pytest.mark.parametrize("each", CASES, ids="-".join)
def test_two_nodes_train_as_one_process(losses, each):
    one = losses["one"][each[0]]
    assert losses["nodes"][each] == pytest.approx(one, rel=1e-6)
    assert one[-1] != one[0]


# A state per row, and states per element.
@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam"])
def test_a_checkpoint_of_two_nodes_resumes_in_one_process(losses, tmp_path, rule):
    """Train on two nodes and resume in one process; compare with one process throughout."""
    first = [*case(rule, "table_row_wise"), "train.max_steps=2", "log.every=1"]
    second = [*case(rule, "table_wise"), f"train.max_steps={NUM_STEPS}", "log.every=1"]
    ended = on_two_nodes(run_command, *first, f"run_dir={tmp_path / 'nodes'}")
    assert [(result.exit_code, result.err) for result in ended] == [(0, "")] * 4
    restore = f"checkpoint.restore={tmp_path / 'nodes' / 'checkpoints' / 'step_2'}"
    assert run_command(*second, restore, f"run_dir={tmp_path / 'rest'}").exit_code == 0
    rest = [
        json.loads(line)["loss"]
        for line in (tmp_path / "rest" / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert len(rest) == NUM_STEPS - 2
    assert rest == pytest.approx(losses["one"][rule][2:], rel=1e-6)


def test_rowwise_adagrad_tables_may_be_cut_by_rows():
    row, *_ = rows_of(
        [1000],
        rule=table_rule("rowwise_adagrad"),
        world_size=4,
        local_world_size=2,
        tables={"cat_0": "table_row_wise"},
    )
    assert list(row.bytes_per_rank) == [500 * (128 * 4 + 4)] * 2
