"""Bytes that a step sends: those of the plan are those that the collectives are given."""

from dataclasses import replace
from math import prod

import pytest
import torch.distributed as dist

from nn.build import build_plan, hardware_of, open_source, planned_hardware
from nn.planning.exchange import Link, busiest_links, planned_exchange
from nn.planning.plan import Hardware, TablePlan
from nn.planning.row_requests import requests_of
from tests.helpers.command import run_command
from tests.helpers.composed import Built, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed

SMALL = [
    *("data.synthetic.train_rows=4096", "data.synthetic.test_rows=256", "device=cpu"),
    *("data.synthetic.cardinalities=[5000,40,7,300,1000]", "data.synthetic.num_numerical=3"),
    *("model.embedding_dim=8", "model.bottom_mlp=[16,8]", "model.top_mlp=[16,1]"),
    *("train.batch_size=256", "eval.batch_size=256", "optimizer.name=adagrad"),
]
SEVERAL_IDS = "data.synthetic.hotness=[1,2,1,3,1]"
LAYOUTS = {
    "whole tables": ["sharding.types=[table_wise]"],
    "several ids": ["sharding.types=[table_wise]", SEVERAL_IDS],
    "halves of columns": ["sharding.tables={cat_0: {type: column_wise}}"],
    "a replica": ["sharding.tables={cat_1: {type: data_parallel}}"],
    "rows": ["sharding.types=[row_wise]"],
    "rows of 16 bits": ["sharding.types=[row_wise]", "model.embedding_dtype=bf16"],
    "rows in two memories": [
        *("sharding.types=[row_wise]", "sharding.tables={cat_0: {tier: host, cache: 0.5}}"),
    ],
    "rows of whole tables": ["sharding.types=[table_wise]", "sharding.exchange=rows"],
    "least": ["sharding.types=[table_wise]", "sharding.exchange=least", SEVERAL_IDS],
    "a replica in rows": ["sharding.tables={cat_1: {type: data_parallel, exchange: rows}}"],
    "groups": ["sharding.group_size=1", SEVERAL_IDS],
    "rows of groups": ["sharding.group_size=1", "sharding.exchange=rows"],
    "both": ["sharding.tables={cat_0: {type: row_wise}, cat_1: {type: data_parallel}}"],
}


def sent_by_a_step(overrides: list[str]) -> dict[str, list[int]]:
    """Return the bytes that a rank sends to each rank in one training step, and those of the all-reduces it takes part in."""
    with ranks_of_cpu() as ranks:
        return _sent_by_a_step(build(compose_config(*overrides)), ranks.world_size)


def _sent_by_a_step(built: Built, world_size: int) -> dict[str, list[int]]:
    sent: dict[str, list[int]] = {"all_to_all": [0] * world_size, "all_reduce": [0]}
    sent["messages"] = [0] * world_size
    own_all_to_all, own_all_reduce = dist.all_to_all_single, dist.all_reduce
    own_all_gather = dist.all_gather_into_tensor

    def all_gather(gathered, vectors, **options):
        for other in dist.get_process_group_ranks(options["group"]):
            sent["all_to_all"][other] += vectors.numel() * vectors.element_size()
        return own_all_gather(gathered, vectors, **options)

    def all_to_all(output, vectors, output_sizes=None, input_sizes=None, **options):
        sizes = input_sizes or [len(vectors) // world_size] * world_size
        per_row = prod(vectors.shape[1:]) * vectors.element_size()
        others = dist.get_process_group_ranks(options.get("group") or dist.group.WORLD)
        for other, size in zip(others, sizes, strict=True):
            sent["all_to_all"][other] += size * per_row
            sent["messages"][other] += size > 0
        return own_all_to_all(output, vectors, output_sizes, input_sizes, **options)

    def all_reduce(tensor, *args, **options):
        if tensor.numel() > 1:
            sent["all_reduce"][0] += tensor.numel() * tensor.element_size()
        return own_all_reduce(tensor, *args, **options)

    prefetcher = built.prefetcher(0, 4)
    built.step.train(0, prefetcher)
    # From here on: the ids of the batch after the next, and the vectors of the next one.
    dist.all_to_all_single, dist.all_reduce = all_to_all, all_reduce
    dist.all_gather_into_tensor = all_gather
    try:
        built.step.train(1, prefetcher)
    finally:
        dist.all_to_all_single, dist.all_reduce = own_all_to_all, own_all_reduce
        dist.all_gather_into_tensor = own_all_gather
    [rows] = built.step.runner.request_capacity.facts()["rows"].values() or [[]]
    sent["capacity"] = rows
    [merged] = built.step.runner.request_capacity.facts().get("merged", {}).values() or [[]]
    sent["merged"] = merged
    built.step.close()
    return sent


def planned(overrides: list[str], world_size: int, local_world_size: int) -> list[list[Link]]:
    config = compose_config(*overrides)
    source = open_source(config)
    hardware = hardware_of(config, "cpu", world_size, local_world_size)
    _, rows = build_plan(config, source, hardware)
    return planned_exchange(config, source.spec, rows, hardware)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_collectives_send_what_is_planned(layout):
    overrides = [*SMALL, *LAYOUTS[layout]]
    asks = layout not in ("whole tables", "several ids", "halves of columns", "rows of 16 bits")
    for rank, (sent, (within, between)) in enumerate(
        zip(run_distributed(sent_by_a_step, 2, overrides), planned(overrides, 2, 2), strict=True)
    ):
        dense = within.sent["dense gradients"]
        # Of a ring of two, each sends all bytes once; one number more is summed with the gradients.
        assert dense == sent["all_reduce"][0] - 4
        # How many rows a rank asks for is expected, not known.
        tolerance = 0.15 if asks else 0
        assert within.num_bytes - dense == pytest.approx(
            sent["all_to_all"][1 - rank], rel=tolerance
        )
        assert not any(between.sent.values())


@pytest.mark.parametrize("layout", ["vectors", "rows", "both"])
@pytest.mark.parametrize("way", ["group_size=2", "two_hops=true", "two_hops=false"])
def test_nodes_send_what_is_planned(layout, way, monkeypatch):
    """With the capacities that the run has measured, bytes and messages within and between nodes are those of the plan."""
    exchange = "rows" if layout == "rows" else "vectors"
    has_groups, has_two_hops = way.startswith("group"), way.endswith("true")
    tables = "{cat_0: {type: row_wise, exchange: rows}, cat_1: data_parallel, cat_3: column_wise}"
    overrides = [*SMALL, SEVERAL_IDS, f"sharding.{way}", f"sharding.exchange={exchange}"]
    overrides += [f"sharding.tables={tables}"] * (layout == "both")
    counted = run_distributed(sent_by_a_step, 4, overrides, local_world_size=2)
    capacity, merged = counted[0]["capacity"], counted[0]["merged"]
    assert len(merged) == (has_groups and layout != "vectors")
    assert all(
        most < 2 * one for most, one in zip(sum(merged, ()), sum(capacity, ()), strict=False)
    )
    merged = merged or [()] * len(capacity)

    def measured(*arguments):
        sizes = zip(requests_of(*arguments), capacity, merged, strict=True)
        return [replace(asked, capacity=rows, merged=most) for asked, rows, most in sizes]

    monkeypatch.setattr("nn.planning.exchange.requests_of", measured)
    for rank, (sent, links) in enumerate(zip(counted, planned(overrides, 4, 2), strict=True)):
        to = sent["all_to_all"]
        own, others = rank ^ 1, [other for other in range(4) if other // 2 != rank // 2]
        counts = to[own], sum(to[x] for x in others)
        for link, count in zip(links, counts, strict=True):
            assert link.num_bytes - link.sent["dense gradients"] == count
        # In two hops, and of groups but ids of vectors, nothing goes to the other number of the other node.
        assert (to[3 - rank] == 0) == (has_two_hops or (has_groups and layout == "rows"))
        if not has_groups:
            messages = sent["messages"]
            counts = messages[own], sum(messages[x] for x in others)
            assert tuple(link.messages for link in links) == counts


def test_all_bytes_of_nodes_with_one_rank_pass_between_nodes():
    overrides = [*SMALL, "sharding.within_us=1e-9", "sharding.between_us=1e-9"]
    one_node, two_nodes = (planned(overrides, 2, local) for local in (2, 1))
    assert [between.sent for _, between in two_nodes] == [within.sent for within, _ in one_node]
    [fast], [slow] = (busiest_links(way) for way in (one_node, two_nodes))
    assert (fast.name, slow.name) == ("within a node", "between nodes")
    assert slow.num_bytes == fast.num_bytes == max(within.num_bytes for within, _ in one_node)
    assert slow.ms == pytest.approx(fast.ms * 394 / 50)


def test_a_rank_sends_half_of_its_vectors_to_the_other_of_two_nodes():
    config = compose_config(*SMALL, "device=cuda", "sharding.hbm_gib=1", "train.amp=bf16")
    table = TablePlan("cat_0", 5000, 8, 1, "table_wise", "fused", (1,), (160_000,))
    first, second, *others = (
        (within.sent, between.sent)
        for within, between in planned_exchange(
            config, open_source(config).spec, [table], Hardware("cuda", 4, 2, 2**30, 2**30)
        )
    )
    batch, size = 64, 2 * 8
    assert second[0] | second[1] == {
        **{"ids": 0, "embeddings": 2 * batch * size, "gradients": 0},
        "dense gradients": second[1]["dense gradients"],
    }
    assert [sent["embeddings"] for sent in second] == [batch * size, 2 * batch * size]
    assert first[0]["gradients"] == batch * size
    assert first[0]["ids"] == 4 * batch
    assert [between["gradients"] for _, between in others] == [batch * size] * 2
    # A ring of four passes one of two hops on to the other node.
    assert first[0]["dense gradients"] == first[1]["dense gradients"]


def test_nothing_is_sent_alone():
    config = compose_config(*SMALL)
    source, hardware = open_source(config), planned_hardware(config)
    _, rows = build_plan(config, source, hardware)
    [alone] = planned_exchange(config, source.spec, rows, hardware)
    assert [link.num_bytes for link in alone] == [0, 0]
    assert busiest_links([alone]) == []


def test_owners_of_one_shard_exchange_gradients_between_groups():
    config = compose_config(*SMALL, "device=cuda", "sharding.hbm_gib=1", "train.amp=bf16")
    table = TablePlan("cat_0", 5000, 8, 1, "table_wise", "fused", (1,), (160_000,))
    hardware = Hardware("cuda", 4, 2, 2**30, 2**30, group_size=2)
    links = planned_exchange(config, open_source(config).spec, [table], hardware)
    first, second, third, _ = ((within.sent, between.sent) for within, between in links)
    batch, size = 64, 2 * 8
    assert second[0]["embeddings"] == batch * size
    assert second[1]["embeddings"] == second[0]["gradients"] == 0
    assert second[1]["gradients"] == 2 * batch * size
    assert first[0]["gradients"] == third[0]["gradients"] == batch * size
    assert first[1]["gradients"] == third[1]["gradients"] == 0
    assert first[0]["ids"] == first[1]["ids"] == 4 * batch


def test_the_plan_of_several_nodes_compares_one_group_with_a_group_a_node():
    nodes = ["sharding.world_size=4", "sharding.local_world_size=2", "sharding.between_gb_s=1"]
    for exchange, us, less in (
        ("vectors", 1e-9, "one group,"),
        ("null", 1e-9, "groups of 2,"),
        ("vectors", 1000, "two hops,"),
    ):
        more = [
            f"sharding.exchange={exchange}",
            "sharding.within_us=1e-9",
            f"sharding.between_us={us}",
        ]
        ended = run_command(*SMALL, "mode=plan", *nodes, *more)
        lines = dict(line.split("  ", 1) for line in ended.out.splitlines() if "  " in line)
        sent = {way: lines[way].split() for way in ("one group", "two hops", "groups of 2")}
        for words in sent.values():
            assert words[1:5] == ["MB", "within", "a", "node"]
        assert lines["less"].strip().startswith(less)
    alone = run_command(*SMALL, "mode=plan", "sharding.world_size=2")
    assert "one group" not in alone.out


def test_least_bytes_of_groups_of_one_rank_are_those_of_rows():
    config = compose_config(*SMALL, "sharding.group_size=1", "sharding.exchange=least")
    source = open_source(config)
    for world_size, wanted in ((1, {"vectors"}), (2, {"rows"})):
        hardware = hardware_of(config, "cpu", world_size, world_size)
        _, rows = build_plan(config, source, hardware)
        # The ids of the largest table hardly repeat.
        assert {row.exchange for row in rows if row.num_embeddings <= 40} == wanted
