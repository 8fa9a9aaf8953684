"""Tables that adjoin in memory are looked up and updated together, with the results of each alone."""

from dataclasses import replace

import pytest
import torch

from configs.schema import OptimizerConfig, OptimizerName
from nn.embedding.adjacent_tables import adjacent_tables
from nn.embedding.embedding_bags import RADIX_SORT_IDS, LocalEmbeddingBags
from nn.embedding.local_tables import LocalTable, UpdateScalars

CPU = torch.device("cpu")
# Rows and hotness: the second and the third are alike and adjoin, and so are the last two.
TABLES = [(5, 2), (300, 1), (40, 1), (7, 2), (30, 2)]
DIM = 4


def adjoining(dtype: torch.dtype = torch.float32) -> list[LocalTable]:
    torch.manual_seed(1)
    rows = [each for each, _ in TABLES]
    weights = torch.randn(sum(rows), DIM).to(dtype).split(rows)
    sums = torch.rand(sum(rows)).split(rows)
    return [
        LocalTable(f"c{index}", hotness, weight, {"momentum1": total})
        for index, ((_, hotness), weight, total) in enumerate(
            zip(TABLES, weights, sums, strict=True)
        )
    ]


def apart(parts: list[LocalTable]) -> list[LocalTable]:
    return [
        replace(
            part, weight=part.weight.clone(), state={k: v.clone() for k, v in part.state.items()}
        )
        for part in parts
    ]


def trained(parts: list[LocalTable], num_samples: int) -> list[torch.Tensor]:
    """What was looked up, weights and state after two updates."""
    config = OptimizerConfig(name=OptimizerName.rowwise_adagrad, lr=0.1)
    scalars = UpdateScalars(config, 0.5, CPU)
    scalars.set(0, 0.1)
    group = LocalEmbeddingBags(parts, num_samples, config, scalars, torch.float32, CPU)
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(2):
        ids = [
            torch.randint(rows, (num_samples * hotness,), generator=generator)
            for rows, hotness in TABLES
        ]
        ids = torch.cat(ids).int()
        found.append(torch.empty(num_samples, group.num_columns))
        group.look_up(ids, found[-1])
        gradients = torch.randn(num_samples, group.num_columns, generator=generator)
        group.update(group.sort(ids), gradients, torch.ones(1, dtype=torch.int32))
    return [*found, *(each for part in parts for each in (part.weight, *part.state.values()))]


def test_parts_of_one_memory_and_hotness_are_one_table():
    parts = adjoining()
    assert [(span.first, span.end) for span in adjacent_tables(parts)] == [(0, 1), (1, 3), (3, 5)]
    assert torch.equal(adjacent_tables(parts)[1].table.weight[300:], parts[2].weight)
    assert len(adjacent_tables(apart(parts))) == len(parts)
    assert len(adjacent_tables([parts[1], parts[0], parts[2]])) == 3
    assert len(adjacent_tables([parts[1], replace(parts[2], state=apart(parts)[2].state)])) == 2
    assert len(adjacent_tables(adjoining(torch.bfloat16))) == len(parts)
    assert adjacent_tables([]) == []


@pytest.mark.parametrize("num_samples", [50, 2000], ids=["few ids", "many ids"])
def test_together_they_learn_what_they_learn_apart(num_samples):
    together = trained(adjoining(), num_samples)
    for one, other in zip(together, trained(apart(adjoining()), num_samples), strict=True):
        assert torch.equal(one, other)


def test_ids_that_are_filled_up_are_sorted_as_others():
    parts = apart(adjoining())
    group = LocalEmbeddingBags(parts, 3000, OptimizerConfig(), None, torch.float32, CPU)
    assert group.num_ids < RADIX_SORT_IDS
    ids = torch.cat([torch.randint(rows, (3000 * hotness,)) for rows, hotness in TABLES]).int()
    ids[-1] = TABLES[-1][0] - 1
    bases = torch.tensor([0, 5, 305, 345, 352])
    bases = bases.repeat_interleave(torch.tensor([6000, 3000, 3000, 6000, 6000]))
    keys, order = torch.sort(ids + bases, stable=True)
    found = group.sort(ids)
    assert torch.equal(found.keys.long(), keys)
    assert torch.equal(found.order, order)
