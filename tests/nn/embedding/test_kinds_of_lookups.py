"""Lookups of every kind against autograd: shared tables, several tables per feature, mean, no pooling, widths from 1.

Ragged features, and tables of which only some rows are here, too.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from configs.schema import OptimizerConfig, OptimizerName
from dataloading.dataset.batch_layout import NO_ID, IdCount
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.id_blocks import id_blocks, with_positions
from nn.embedding.local_tables import LocalTable, UpdateScalars
from nn.embedding.lookups import Lookup, Pooling
from nn.embedding.optimizer import table_rule
from nn.embedding.torch_optimizer import update_rows
from nn.embedding.touched_rows import TouchedRows
from tests.helpers.gpus import needs_no_gpu

# 0: ragged, with up to three ids per sample.
HOTNESS = {"item": 1, "history": 5, "genres": 3, "user": 1, "tags": 0, "words": 0}
ROWS = {"item": 40, "history": 40, "genres": 7, "user": 3, "tags": 11, "words": 40}
# Ranks of the samples, which matter to the order of ragged ids.
NUM_SOURCES = 2
SUM, MEAN, NONE = Pooling.sum, Pooling.mean, Pooling.none
# Columns, and features with their pooling. Tables of a width class differ in kind within a case, or have all one kind.
CASES: dict[str, list[tuple[int, list[tuple[str, Pooling]]]]] = {
    "one_lookup_each": [(16, [("item", SUM)]), (1, [("user", SUM)]), (16, [("genres", SUM)])],
    "mean_and_no_pooling": [
        (16, [("genres", MEAN)]),
        (16, [("history", NONE)]),
        (12, [("item", SUM)]),
        (3, [("user", NONE)]),
    ],
    "shared_table": [(8, [("item", SUM), ("history", NONE)]), (8, [("genres", MEAN)])],
    "several_tables_per_feature": [
        (16, [("item", SUM)]),
        (1, [("item", SUM)]),
        (1, [("history", MEAN), ("item", SUM)]),
        (5, [("genres", SUM)]),
        (16, [("genres", SUM)]),
    ],
    "ragged": [
        (16, [("tags", SUM)]),
        (16, [("item", SUM)]),
        (1, [("tags", MEAN)]),
        (8, [("words", MEAN), ("item", SUM), ("history", NONE)]),
    ],
}
# Table -> its first row and number of rows here, in some cases.
ROWS_HERE = {"ragged": {3: (10, 20)}, "shared_table": {0: (5, 30)}, "one_lookup_each": {2: (3, 2)}}
RULES = [OptimizerName.sgd, OptimizerName.rowwise_adagrad, OptimizerName.adam]


# Columns before the vectors, which is what a prefix leaves.
PREFIX = 3


def make_group(
    case: str, rule: OptimizerName, num_samples: int, device: str, *, backwards: bool = False
) -> tuple[LocalEmbeddingBags, UpdateScalars]:
    """Return tables whose vectors lie behind a prefix; `backwards`: in a matrix, those of the last lookup first."""
    config = OptimizerConfig(name=rule, lr=0.1, eps=1e-3)
    generator = torch.Generator().manual_seed(1)
    tables = []
    for columns, features in CASES[case]:
        rows = max(ROWS[feature] for feature, _ in features)
        first_row, rows = ROWS_HERE.get(case, {}).get(len(tables), (None, rows))
        weight = torch.randn(rows, columns, generator=generator)
        state = table_rule(rule).new_state(weight)
        state = {name: value.to(device) for name, value in state.items() if name != "iter"}
        lookups = tuple(Lookup(name, HOTNESS[name], pooling) for name, pooling in features)
        tables.append(LocalTable(lookups, weight.to(device), state, first_row=first_row))
    used = {lookup.feature for table in tables for lookup in table.lookups}
    rows = num_samples // NUM_SOURCES
    counts = {
        name: IdCount(count, rows * (count or 3)) for name, count in HOTNESS.items() if name in used
    }
    scalars = UpdateScalars(config, 0.5, torch.device(device))
    scalars.set(3, 0.1)
    group = LocalEmbeddingBags(
        placed_backwards(tables) if backwards else tables,
        id_blocks(counts, NUM_SOURCES, rows),
        num_samples,
        config,
        scalars,
        torch.float32,
        torch.device(device),
    )
    return group, scalars


def placed_backwards(tables: list[LocalTable]) -> list[LocalTable]:
    end, placed = 0, []
    for table in reversed(tables):
        lookups = []
        for lookup in reversed(table.lookups):
            lookups.append(replace(lookup, column=end))
            end += lookup.num_vectors * table.weight.shape[1]
        placed.append(replace(table, lookups=tuple(reversed(lookups))))
    return placed[::-1]


def draw_ids(group: LocalEmbeddingBags) -> dict[str, Tensor]:
    """Draw ids [G, H] of each feature, some rows often; of a ragged one [G, 3], of which some are `NO_ID`."""
    generator = torch.Generator().manual_seed(5)
    used = {lookup.feature for table in group.tables for lookup in table.lookups}
    drawn = {}
    for name, count in HOTNESS.items():
        if name in used:
            numbers = torch.rand(group.num_samples, count or 3, generator=generator)
            drawn[name] = ((ROWS[name] ** numbers).long() - 1).clamp(0, ROWS[name] - 1)
            if not count:
                lengths = torch.randint(0, 4, (group.num_samples, 1), generator=generator)
                drawn[name][torch.arange(3) >= lengths] = NO_ID
    return drawn


def expected(group: LocalEmbeddingBags, ids: dict[str, Tensor]) -> list[Tensor]:
    """Return embeddings, then weights after an update and which rows it changed, in plain torch with autograd."""
    weights = [table.weight.clone().requires_grad_() for table in group.tables]
    columns = []
    for table, weight in zip(group.tables, weights, strict=True):
        for lookup in table.lookups:
            here = ids[lookup.feature] - (table.first_row or 0)
            is_here = ((here >= 0) & (here < len(weight))).unsqueeze(2)
            rows = weight[here.clamp(0, len(weight) - 1)] * is_here  # [G, H, D]
            count = (ids[lookup.feature] != NO_ID).sum(1, keepdim=True).clamp(min=1)
            pooled = {"sum": rows.sum(1), "mean": rows.sum(1) / count, "none": rows.flatten(1)}
            columns.append(pooled[lookup.pooling])
    out = torch.cat(columns, dim=1)
    (out * gradients_of(group) * 0.5).sum().backward()
    results = [out.detach()]
    for table, weight in zip(group.tables, weights, strict=True):
        rows = torch.cat([ids[lookup.feature].flatten() for lookup in table.lookups]).unique()
        rows = rows[rows != NO_ID] - (table.first_row or 0)
        rows = rows[(rows >= 0) & (rows < len(weight))]
        state = {name: value.clone() for name, value in table.state.items()}
        copied = LocalTable(table.lookups, weight.detach().clone(), state)
        update_rows(copied, rows, weight.grad[rows], group._config, lr=0.1, step=torch.tensor([3]))
        mask = torch.zeros(len(weight), dtype=torch.uint8)
        mask[rows] = 1
        results += [copied.weight, *copied.state.values(), mask]
    return results


def gradients_of(group: LocalEmbeddingBags) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(group.num_samples, group.num_columns, generator=generator)


def arrived(name: str, ids: Tensor) -> Tensor:
    """Return the ids of a feature as `LocalEmbeddingBags` takes them."""
    if HOTNESS[name]:
        return ids.flatten()
    rows, pieces = len(ids) // NUM_SOURCES, []
    for of_source in ids.split(rows):
        used = of_source[of_source != NO_ID]
        pieces.append(torch.cat([used, used.new_full((3 * rows - len(used),), NO_ID)]))
    lengths = (ids != NO_ID).sum(1)
    return with_positions(torch.cat([*pieces, lengths]), [3 * rows], NUM_SOURCES, rows)


def measured(group: LocalEmbeddingBags, ids: dict[str, Tensor], device: str) -> list[Tensor]:
    flat = torch.cat([arrived(name, values) for name, values in ids.items()]).int().to(device)
    wide = torch.full((group.num_samples, PREFIX + group.num_columns), 7.0, device=device)
    group.look_up(flat, wide[:, PREFIX:])
    assert (wide[:, :PREFIX] == 7).all()
    columns = [
        torch.arange(placed.lookup.num_vectors * placed.width) + PREFIX + placed.first_column
        for placed in group._lookups
    ]
    of_lookups = torch.cat(columns).to(device)
    gradients = torch.full_like(wide, 7.0)
    gradients[:, of_lookups] = gradients_of(group).to(device)
    is_good = torch.ones(1, dtype=torch.int32, device=device)
    group.touched = TouchedRows(group.tables, torch.device(device))
    group.update(group.sort(flat), gradients[:, PREFIX:], is_good)
    state = [
        tensor
        for position, table in enumerate(group.tables)
        for tensor in (table.weight, *table.state.values(), group.touched.of_table(position))
    ]
    return [tensor.cpu().clone() for tensor in (wide[:, of_lookups], *state)]


def compare(
    case: str,
    rule: OptimizerName,
    num_samples: int,
    device: str,
    *,
    fused: bool,
    backwards: bool = False,
) -> None:
    reference, _ = make_group(case, rule, num_samples, "cpu")
    ids = draw_ids(reference)
    group, _ = make_group(case, rule, num_samples, device, backwards=backwards)
    if fused and group._kernels is None:
        from nn.embedding.triton_launcher import TritonLauncher

        group._kernels = TritonLauncher(
            group.tables,
            group._lookups,
            group._key_bases,
            group._sources,
            num_samples,
            group._config,
        )
    results = measured(group, ids, device)
    for actual, wanted in zip(results, expected(reference, ids), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("case", "rule"), list(product(CASES, RULES)))
def test_plain_lookups_and_updates_equal_autograd(case, rule, backwards):
    compare(case, rule, 34, "cpu", fused=False, backwards=backwards)


@needs_no_gpu
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernels_equal_autograd(case, backwards):
    pytest.importorskip("triton")
    # Unpooled and ragged features have several blocks of 32 ids.
    compare(case, OptimizerName.rowwise_adagrad, 10, "cpu", fused=True, backwards=backwards)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("case", "rule"), list(product(CASES, RULES)))
def test_kernels_equal_autograd_on_a_gpu(case, rule):
    compare(case, rule, 5_000, "cuda", fused=True)
