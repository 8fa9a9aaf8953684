"""Exchanges within the node first: they train with the bits of exchanges in one hop, and speak with fewer ranks."""

import os
from unittest.mock import patch

import pytest

from nn.distributed.all_to_all import has_two_hops
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, needs_gpus
from tests.nn.sharding.test_groups import (
    KINDS,
    OF_DATA,
    all_kinds,
    assert_same_bits,
    options,
    train,
)
from tests.nn.training.test_train_step import ragged, whole

__all__ = ["ragged"]

RANKS, IN_NODE = 4, 2
TWO_HOPS = "sharding.two_hops=true"
LAYOUTS = {
    layout: [
        *TINY,
        "optimizer.name=adagrad",
        f"sharding.types=[{layout}]",
        f"sharding.exchange={of}",
    ]
    for layout, of in (("table_wise", "rows"), ("column_wise", "vectors"), ("row_wise", "vectors"))
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, ragged):
    """Return (losses, weights) of each rank by kind, in one hop and in two."""
    root = tmp_path_factory.mktemp("hops")
    of_kinds = all_kinds(root, ragged) | LAYOUTS
    cases = [
        ([*case, *more], None, False) for case in of_kinds.values() for more in ([], [TWO_HOPS])
    ]
    on_ranks = run_distributed(train, RANKS, cases, root, local_world_size=IN_NODE)
    by_case = list(zip(*on_ranks, strict=True))
    return dict(zip(of_kinds, zip(by_case[::2], by_case[1::2], strict=True), strict=True))


@pytest.mark.parametrize("kind", [*KINDS, *OF_DATA, *LAYOUTS])
def test_two_hops_have_the_bits_of_one(trained, kind):
    one, two = trained[kind]
    assert [losses for losses, _ in two] == [losses for losses, _ in one]
    assert_same_bits(*(whole([weights for _, weights in ranks]) for ranks in (two, one)))


def test_one_node_and_nodes_of_one_rank_have_one_hop():
    for in_node, wanted in ((4, False), (2, True), (1, False)):
        assert run_distributed(hops_of, RANKS, None, local_world_size=in_node) == [wanted] * RANKS


def hops_of(in_node: list[int] | None) -> bool | str:
    """Return whether there are two hops, or why there are no ranks, on nodes as launched or of so many ranks."""
    more = {}
    if in_node is not None:
        ranks_here = str(in_node[int(os.environ["RANK"])])
        more = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": ranks_here}
    try:
        with patch.dict(os.environ, more), ranks_of_cpu() as ranks:
            return has_two_hops(ranks)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("in_node", [[2, 2, 1, 1], [3, 3, 3, 1]])
def test_nodes_of_unequal_size_are_refused_by_all_ranks(in_node):
    """One that plans for its own node's ranks broke with the first node's, or waited for a node that had refused."""
    texts = run_distributed(hops_of, RANKS, in_node)
    wanted = f"the nodes have 1 to {max(in_node)} ranks; start as many on every node"
    assert len(set(texts)) == 1
    assert texts[0].startswith(wanted)


def test_two_hops_and_groups_are_refused():
    ended = run_command(*TINY, TWO_HOPS, "sharding.group_size=2")
    assert ended.exit_code == 2
    assert (
        "and sharding.group_size=2 over groups that hold the same ones; set one of them"
        in ended.err
    )


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "bf16"])
@pytest.mark.parametrize("world_size", [pytest.param(RANKS, marks=needs_gpus(RANKS))])
def test_gpus_in_two_hops_have_the_bits_of_one_captured_or_launched(tmp_path, kind, world_size):
    """Of four GPUs as two nodes."""
    case = [*options(kind), *ON_GPU, "train.tf32=false"]
    cases = [
        ([*case, f"train.capture={captures}", *more], None, False)
        for captures in (True, False)
        for more in ([], [TWO_HOPS])
    ]
    on_ranks = run_distributed(train_as_two_nodes, world_size, cases, tmp_path)
    wanted, *others = zip(*on_ranks, strict=True)
    for found in others:
        assert [losses for losses, _ in found] == [losses for losses, _ in wanted]
        assert_same_bits(*(whole([weights for _, weights in ranks]) for ranks in (found, wanted)))


def train_as_two_nodes(cases: list[tuple], directory) -> list[tuple]:
    """Train on GPUs, each with its own number, where the launcher counts two per node."""
    nodes = patch.dict(os.environ, LOCAL_WORLD_SIZE=str(IN_NODE))
    # On two machines a launcher would count from 0 on each.
    with nodes, patch("nn.distributed.process_group.check_variables"):
        return train(cases, directory, "cuda")
