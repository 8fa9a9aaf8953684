"""Tables whose ids are slots of an arena: kernels and plain torch update the same bits as with all rows in order."""

from dataclasses import replace

import pytest
import torch

from configs.schema import OptimizerConfig
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.local_tables import LocalTable, SlotRows, UpdateScalars
from nn.embedding.lookups import Lookup
from nn.embedding.touched_rows import TouchedRows
from tests.nn.embedding.fixed_blocks import fixed_blocks

pytest.importorskip("triton")

# Two ids per sample: a block of 32 of the kernel, and two more.
ROWS, SLOTS, WIDTH, SAMPLES = 400, 90, 8, 17
FIRST_ROW = 1000
"""Of the table that is shared with other ranks."""


def tables_in_order(dtype: torch.dtype) -> list[LocalTable]:
    """Return a table, a row-wise shard of a second one, and a small third one."""
    generator = torch.Generator().manual_seed(1)

    def table(name: str, rows: int, key: int, first_row: int | None = None) -> LocalTable:
        weight = torch.randn(rows, WIDTH, generator=generator).to(dtype)
        state = {"momentum1": torch.rand(rows, WIDTH, generator=generator)}
        return LocalTable((Lookup(name, 2),), weight, state, 0, key, first_row)

    return [table("a", ROWS, 7), table("b", ROWS, 8, FIRST_ROW), table("c", 9, 9)]


def in_arena(
    tables: list[LocalTable], used: list[torch.Tensor]
) -> tuple[list[LocalTable], torch.Tensor]:
    """Move the first two tables into one arena; return the tables and the slot of every row, -1 for none."""
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))
    rows = torch.cat([used[0], used[1] + ROWS])
    slots = order[: len(rows)]
    row_of_slot = torch.full((SLOTS + 1,), 2 * ROWS, dtype=torch.int32)
    row_of_slot[slots] = rows.int()
    slot_of_row = torch.full((2 * ROWS,), -1)
    slot_of_row[rows] = slots
    arena = torch.zeros(SLOTS, WIDTH, dtype=tables[0].weight.dtype)
    arena[slots] = torch.cat([table.weight for table in tables[:2]])[rows]
    state = torch.zeros(SLOTS, WIDTH)
    state[slots] = torch.cat([table.state["momentum1"] for table in tables[:2]])[rows]
    moved = [
        replace(
            table,
            weight=arena,
            state={"momentum1": state},
            first_row=None if table.first_row is None else 0,
            slots=SlotRows(row_of_slot, 0, first, ROWS, base - first),
        )
        for table, first, base in zip(tables[:2], (0, FIRST_ROW), (0, ROWS), strict=True)
    ]
    return [*moved, tables[2]], slot_of_row


def trained(
    tables: list[LocalTable], ids: torch.Tensor, *, by_kernel: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Look up and update once; return the embeddings, and which rows of each table have changed."""
    config = OptimizerConfig(embedding_name="adagrad", embedding_lr=0.1)
    scalars = UpdateScalars(config, 1.0, torch.device("cpu"))
    scalars.set(5, 0.1)
    blocks = fixed_blocks(dict.fromkeys("abc", 2), SAMPLES)
    bags = LocalEmbeddingBags(
        tables, blocks, SAMPLES, config, scalars, torch.float32, torch.device("cpu")
    )
    if by_kernel:
        from nn.embedding.triton_launcher import TritonLauncher

        bags._kernels = TritonLauncher(
            tables, bags._lookups, bags._key_bases, bags._sources, SAMPLES, config
        )
    bags.touched = TouchedRows(tables, torch.device("cpu"))
    out = torch.empty(SAMPLES, bags.num_columns)
    bags.look_up(ids, out)
    gradients = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    bags.update(bags.sort(ids), gradients, torch.ones(1, dtype=torch.int32))
    return out, [bags.touched.of_table(position) for position in range(len(tables))]


@pytest.mark.parametrize("by_kernel", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_give_the_bits_of_rows_in_order(dtype, by_kernel):
    generator = torch.Generator().manual_seed(4)
    used = [torch.randperm(ROWS, generator=generator)[:40] for _ in "ab"]
    picked = [rows[torch.randint(40, (2 * SAMPLES,), generator=generator)] for rows in used]
    # Every fifth id of the second table is another rank's.
    is_other = torch.arange(2 * SAMPLES) % 5 == 0
    small = torch.randint(9, (2 * SAMPLES,), generator=generator)
    shared = torch.where(is_other, 3, picked[1] + FIRST_ROW)
    plain, moving = tables_in_order(dtype), tables_in_order(dtype)
    arena, slot_of_row = in_arena(moving, used)
    slots = torch.where(is_other, -1, slot_of_row[picked[1] + ROWS])

    looked_up, masks = trained(
        plain, torch.cat([picked[0], shared, small]).int(), by_kernel=by_kernel
    )
    by_slots, masks_by_slots = trained(
        arena, torch.cat([slot_of_row[picked[0]], slots, small]).int(), by_kernel=by_kernel
    )

    assert torch.equal(looked_up, by_slots)
    changed = (picked[0], picked[1][~is_other], small)
    for mask, also, rows in zip(masks, masks_by_slots, changed, strict=True):
        assert mask.nonzero().flatten().tolist() == rows.unique().tolist()
        assert torch.equal(mask, also)
    for number, rows in enumerate(used):
        where = slot_of_row[rows + number * ROWS]
        for before, after in (
            (plain[number].weight, arena[number].weight),
            (plain[number].state["momentum1"], arena[number].state["momentum1"]),
        ):
            assert torch.equal(before[rows], after[where])
    assert torch.equal(plain[2].weight, arena[2].weight)
    assert not torch.equal(plain[0].weight, tables_in_order(dtype)[0].weight)
