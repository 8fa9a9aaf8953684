"""Adjacent tables are looked up and updated together, with the results of separate tables."""

from dataclasses import replace

import pytest
import torch

from configs.schema import OptimizerConfig, OptimizerName
from nn.embedding.adjacent_tables import AdjacentTables, adjacent_tables
from nn.embedding.embedding_bags import RADIX_SORT_IDS, LocalEmbeddingBags
from nn.embedding.id_blocks import IdBlock
from nn.embedding.local_tables import LocalTable, UpdateScalars, place_lookups
from nn.embedding.lookups import Lookup
from tests.nn.embedding.fixed_blocks import fixed_blocks

CPU = torch.device("cpu")
# Rows and hotness: the second and third are alike and adjacent, and so are the last two.
TABLES = [(5, 2), (300, 1), (40, 1), (7, 2), (30, 2)]
DIM = 4


def adjacent(dtype: torch.dtype = torch.float32) -> list[LocalTable]:
    torch.manual_seed(1)
    rows = [num_rows for num_rows, _ in TABLES]
    weights = torch.randn(sum(rows), DIM).to(dtype).split(rows)
    sums = torch.rand(sum(rows)).split(rows)
    return [
        LocalTable((Lookup(f"c{index}", hotness),), weight, {"momentum1": total})
        for index, ((_, hotness), weight, total) in enumerate(
            zip(TABLES, weights, sums, strict=True)
        )
    ]


def separate(tables: list[LocalTable]) -> list[LocalTable]:
    return [
        replace(
            table,
            weight=table.weight.clone(),
            state={name: state.clone() for name, state in table.state.items()},
        )
        for table in tables
    ]


def group_of(
    tables: list[LocalTable],
    num_samples: int,
    config: OptimizerConfig,
    scalars: UpdateScalars | None,
) -> LocalEmbeddingBags:
    hotness = {f"c{index}": hotness for index, (_, hotness) in enumerate(TABLES)}
    blocks = fixed_blocks(hotness, num_samples)
    return LocalEmbeddingBags(tables, blocks, num_samples, config, scalars, torch.float32, CPU)


def joined_of(tables: list[LocalTable]) -> list[AdjacentTables]:
    """Join tables whose ids lie one after the other, of one sample."""
    hotness = {table.lookups[0].feature: table.lookups[0].hotness for table in tables}
    return adjacent_tables(tables, place_lookups(tables, fixed_blocks(hotness, 1)))


def trained(tables: list[LocalTable], num_samples: int) -> list[torch.Tensor]:
    """Return the pooled embeddings of two steps, and weights and states after them."""
    config = OptimizerConfig(name=OptimizerName.rowwise_adagrad, lr=0.1)
    scalars = UpdateScalars(config, 0.5, CPU)
    scalars.set(0, 0.1)
    group = group_of(tables, num_samples, config, scalars)
    generator = torch.Generator().manual_seed(2)
    results = []
    for _ in range(2):
        ids = [
            torch.randint(rows, (num_samples * hotness,), generator=generator)
            for rows, hotness in TABLES
        ]
        ids = torch.cat(ids).int()
        results.append(torch.empty(num_samples, group.num_columns))
        group.look_up(ids, results[-1])
        gradients = torch.randn(num_samples, group.num_columns, generator=generator)
        group.update(group.sort(ids), gradients, torch.ones(1, dtype=torch.int32))
    for table in tables:
        results += [table.weight, *table.state.values()]
    return results


def test_adjacent_tables_of_one_hotness_are_joined():
    tables = adjacent()
    joined = joined_of(tables)
    assert [(group.first, group.end) for group in joined] == [(0, 1), (1, 3), (3, 5)]
    assert torch.equal(joined[1].joined.weight[300:], tables[2].weight)
    assert len(joined_of(separate(tables))) == len(tables)
    assert len(joined_of([tables[1], tables[0], tables[2]])) == 3
    own_state = replace(tables[2], state=separate(tables)[2].state)
    assert len(joined_of([tables[1], own_state])) == 2
    assert len(joined_of(adjacent(torch.bfloat16))) == len(tables)
    assert joined_of([]) == []
    blocks = {"c1": IdBlock(0, 1, 1), "c2": IdBlock(2, 1, 1)}
    apart = adjacent_tables(tables[1:3], place_lookups(tables[1:3], blocks))
    assert len(apart) == 2, "ids of another feature lie between theirs"
    for column, count in ((DIM, 1), (DIM + 1, 2)):
        second = replace(tables[2], lookups=(Lookup("c2", 1, column=column),))
        assert len(joined_of([tables[1], second])) == count, column


@pytest.mark.parametrize("num_samples", [50, 2000], ids=["few ids", "many ids"])
def test_adjacent_tables_train_as_separate_ones(num_samples):
    together = trained(adjacent(), num_samples)
    for one, other in zip(together, trained(separate(adjacent()), num_samples), strict=True):
        assert torch.equal(one, other)


def test_padded_ids_are_sorted_as_others():
    tables = separate(adjacent())
    group = group_of(tables, 3000, OptimizerConfig(), None)
    assert group.num_ids < RADIX_SORT_IDS
    ids = torch.cat([torch.randint(rows, (3000 * hotness,)) for rows, hotness in TABLES]).int()
    ids[-1] = TABLES[-1][0] - 1
    bases = torch.tensor([0, 5, 305, 345, 352])
    bases = bases.repeat_interleave(torch.tensor([6000, 3000, 3000, 6000, 6000]))
    keys, order = torch.sort(ids + bases, stable=True)
    result = group.sort(ids)
    assert torch.equal(result.keys.long(), keys)
    assert torch.equal(result.order, order)
