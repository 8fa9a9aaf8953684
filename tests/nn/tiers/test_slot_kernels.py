"""The kernels map ids to the slots of the plain map, batch by batch, and move the same rows."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from nn.distributed.errors import RankError
from nn.embedding.optimizer import StateField
from nn.tiers import host_tier, slot_kernels
from nn.tiers.host_tier import DiskSettings, HostTier, TieredShard
from nn.tiers.initial_rows import InitialRows
from nn.tiers.row_store import WEIGHT, RowStore, kinds_of
from nn.tiers.slot_kernels import SlotKernels
from nn.tiers.slot_map import DeviceMoves, SlotMap, TierIds
from tests.helpers.gpus import needs_gpus

# Two tables of a group, the second from its row 200 on; their first row, rows, slots, and number of row 0 in the group.
TABLES = [(0, 5000, 120, 0), (200, 900, 180, 5000 - 200)]
IDS = 70
CPU = torch.device("cpu")
IS_COMPILED = torch.cuda.is_available()
ON_EACH = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            CPU, marks=pytest.mark.skipif(IS_COMPILED, reason="kernels are compiled on a GPU")
        ),
        pytest.param(torch.device("cuda"), marks=needs_gpus(1)),
    ],
)


def slot_map(device: torch.device = CPU) -> SlotMap:
    return SlotMap([rows for _, rows, _, _ in TABLES], [120, 180], 260, device)


def tier_ids(device: torch.device = CPU) -> TierIds:
    """Return positions of the ids of both tables, behind ten that are not theirs."""
    columns = [
        torch.tensor([first, first + rows, offset], dtype=torch.int32)
        for first, rows, _, offset in TABLES
    ]
    first, end, offset = torch.stack(columns).repeat_interleave(IDS, 0).t().contiguous()
    positions = torch.arange(10, 10 + 2 * IDS)
    return TierIds(0, *(tensor.to(device) for tensor in (positions, first, end, offset)))


def drawn(number: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Return ids that repeat, some of them without a row here."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(-1, 1200, (10 + 2 * IDS,), generator=generator)
    ids[10 : 10 + IDS : 2] = torch.randint(5000, (IDS // 2,), generator=generator)
    ids[::5] //= 20
    return ids.to(dtype)


@ON_EACH
def test_slots_and_moves_are_those_of_the_plain_map(device):
    compare_maps(device, torch.int64, 200 if IS_COMPILED else 9)


@ON_EACH
def test_several_programs_of_several_steps_map_alike(device, monkeypatch):
    monkeypatch.setattr(slot_kernels, "BLOCK", 128)
    monkeypatch.setattr(slot_kernels, "BLOCK_WORDS", 32)
    monkeypatch.setattr(slot_kernels, "MOST_WORD_PROGRAMS", 3)
    monkeypatch.setattr(slot_kernels, "MOST_RING_PROGRAMS", 2)
    compare_maps(device, torch.int32, 200 if IS_COMPILED else 7)


def compare_maps(device: torch.device, dtype: torch.dtype, batches: int) -> None:
    plain, other = slot_map(), slot_map(device)
    counts = torch.full((2, slot_kernels.NUM_COUNTS), -7, dtype=torch.int32, device=device)
    kernels = SlotKernels(other, counts)
    groups = tier_ids(), tier_ids(device)
    some_return = False
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number in range(batches):
        # Two batches are live; every third was not trained.
        released = 1 << (number - 2) % 8 if number >= 2 else 0
        trained = released if number % 3 else 0
        plain.release(released, trained)
        turn = number % 2
        kernels.release(released, trained, turn)
        ids = drawn(number, dtype)
        slots, mapped = ids.clone(), ids.to(device, copy=True)
        moves, missing, num_ids = plain.map(slots, groups[0], 1 << number % 8)
        device_moves = kernels.map(mapped, groups[1], 1 << number % 8, turn)
        assert torch.equal(slots, mapped.cpu())
        # The rows of the batch before may still move.
        assert all(torch.equal(lists.cpu(), values) for lists, values in before)
        fetched = 0 if moves is None else len(moves.fetched_rows)
        before = [
            (lists, lists.cpu().clone())
            for lists in (*(part[:fetched] for part in vars_of(device_moves)), device_moves.counts)
        ]
        found = [column[:fetched].cpu().long() for column in vars_of(device_moves)]
        returns = found[2] >= 0
        assert counts[turn].tolist() == [fetched, int(returns.sum()), missing, 0, num_ids, 0, 0, 0]
        assert num_ids == int((slots[groups[0].positions] >= 0).sum())
        if moves is not None:
            assert torch.equal(found[0], moves.fetched_rows)
            assert torch.equal(found[1], moves.fetched_slots)
            pairs = sorted(zip(found[2][returns].tolist(), found[1][returns].tolist(), strict=True))
            expected = (moves.returned_rows.tolist(), moves.returned_slots.tolist())
            assert pairs == list(zip(*expected, strict=True))
            some_return |= bool(pairs)
        for name in ("slot_of_row", "row_of_slot"):
            assert torch.equal(getattr(plain, name), getattr(other, name).cpu()), name
        # The last entry of the plain map stands for all other slots.
        for name in ("pins", "is_changed"):
            assert torch.equal(getattr(plain, name)[:-1], getattr(other, name)[:-1].cpu()), name
        assert plain.are_fixed_changed == other.are_fixed_changed
    assert some_return


def vars_of(moves: DeviceMoves) -> tuple[torch.Tensor, ...]:
    return moves.rows, moves.slots, moves.returned


@ON_EACH
def test_rows_are_exchanged_in_place(device):
    generator = torch.Generator().manual_seed(3)
    states = [StateField("m", per_row=False), StateField("n", per_row=True)]
    kinds = kinds_of(6, torch.bfloat16, states)
    stores = [RowStore(300, 40, kinds, on) for on in (CPU, device)]
    for name, plain in stores[0].host.items():
        for memory, same in (
            (plain, stores[1].host[name]),
            (stores[0].arena[name], stores[1].arena[name]),
        ):
            memory.copy_(torch.randn(memory.shape, generator=generator))
            same.copy_(memory)
    order = torch.randperm(300, generator=generator)[:44].int()
    rows, leaving = order[:22].sort().values, order[22:]
    slots = torch.randperm(40, generator=generator)[:22].int()
    returned = torch.where(torch.arange(22) % 3 > 0, leaving, -1).int()
    # Behind the rows that move, nothing is read.
    padded = [
        torch.cat([column, torch.full((9,), 2**30, dtype=torch.int32)])
        for column in (rows, slots, returned)
    ]
    columns = [*padded, torch.tensor([22, 0, 0, 0], dtype=torch.int32)]
    stores[1].exchange(DeviceMoves(*(column.to(device) for column in columns)))
    stays = returned >= 0
    stores[0].write_back(returned[stays].long(), slots[stays].long())
    stores[0].fetch(rows.long(), slots.long())
    if IS_COMPILED:
        torch.cuda.synchronize()
    for name in (WEIGHT, "m", "n"):
        assert torch.equal(stores[0].host[name], stores[1].host[name])
        assert torch.equal(stores[0].arena[name], stores[1].arena[name].cpu())


@pytest.mark.parametrize("on_disk", [False, True])
@ON_EACH
def test_a_tier_with_kernels_keeps_the_rows_of_one_without(device, on_disk, monkeypatch, tmp_path):
    shards = [
        TieredShard(5000, 4, torch.float32, 240, 210),
        TieredShard(900, 4, torch.float32, 300, 210, 200),
    ]
    tiers = [HostTier(shards, [], CPU)]
    monkeypatch.setattr(host_tier, "maps_by_kernels", lambda device: True)
    initial = InitialRows(1, "t", 0.1) if on_disk else None
    others = [replace(shard, initial=initial) for shard in shards]
    tiers.append(HostTier(others, [], device, DiskSettings(tmp_path, 900 * 16)))
    for tier, on in zip(tiers, (CPU, device), strict=True):
        for index in range(2):
            values = (torch.arange(shards[index].rows).view(-1, 1) % 89).float().repeat(1, 4)
            if tier is tiers[1] and on_disk:
                tier.fill(index, torch.arange(len(values)), values)
            else:
                tier.host_rows(index)[WEIGHT].copy_(values)
        tier.reload()
        holds = []
        for number in range(9):
            ids = drawn(number).to(on)
            hold = tier.map(ids, [tier_ids(on)])
            holds.append((hold, ids[10:]))
            if len(holds) == 2:
                # The pass of the batch before: it adds the number of the batch to its rows.
                done, slots = holds.pop(0)
                done.check()
                done.arrive()
                arena = tier._groups[0].store.arena[WEIGHT]
                arena[slots[slots >= 0].unique().long()] += number
                done.release(is_trained=True)
        tier.write_back()
    counts = [tier.take_counts() for tier in tiers]
    for count in counts:
        count["ms"] = 0
    assert (counts[1]["disk_rows_out"] > 0) == on_disk
    # The batch that has no pass is not counted where kernels map.
    assert counts[0]["rows_in"] > counts[1]["rows_in"] > 400
    for index, shard in enumerate(others):
        plain, other = (tier.host_rows(index)[WEIGHT].clone() for tier in tiers)
        if shard.initial is not None:
            rows = torch.arange(shard.first_row, shard.first_row + shard.rows)
            shard.initial.toggle(other, rows)
        assert torch.equal(plain, other)


@ON_EACH
def test_rows_without_a_slot_are_an_error_before_the_pass(device, monkeypatch):
    monkeypatch.setattr(host_tier, "maps_by_kernels", lambda device: True)
    tier = HostTier([TieredShard(1000, 4, torch.float32, 40, 20)], [], device)
    columns = torch.tensor([[0], [1000], [0]], dtype=torch.int32).repeat(1, 45)
    group = TierIds(0, torch.arange(45, device=device), *columns.to(device))
    ids = torch.arange(500, 545, dtype=torch.int32, device=device)
    hold = tier.map(ids, [group])
    assert (ids < 0).sum() == 25
    with pytest.raises(RankError, match="need 25 rows more than the device has room for"):
        hold.check()
