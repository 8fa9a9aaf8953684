import hashlib

import pytest
import torch

from nn.layers.initialization import BLOCK_ELEMENTS, fill_uniform_, initialise_dense
from nn.models.dlrm import DLRM
from nn.models.options import DLRMOptions
from tests.helpers.specs import sized_spec


def filled(rows, columns, *, bound=1.0, device="cpu", seed=7, table="cat_0", row=0, column=0):
    out = torch.full((rows, columns), float("nan"), device=device)
    fill_uniform_(out, seed=seed, table=table, row_offset=row, col_offset=column, bound=bound)
    return out


def element_by_hand(seed, table, row, column):
    """The documented hash in Python's own integers; bound 1."""

    def split_mix(key, index):
        bits = (key + index * 0x9E3779B97F4A7C15) % 2**64
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    digest = hashlib.blake2b(f"{seed}/{table}".encode(), digest_size=16).digest()
    row_bits = split_mix(int.from_bytes(digest[:8], "little"), row)
    column_bits = split_mix(int.from_bytes(digest[8:], "little"), column)
    bits = (row_bits + column_bits) % 2**32
    bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
    bits = ((bits ^ bits >> 15) ^ row_bits >> 32) * 0x846CA68B % 2**32
    return ((bits - 2**32 if bits >= 2**31 else bits) >> 8) / 2**23


def correlation(a, b):
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1].item()


@pytest.mark.parametrize("row", [0, 2**31 - 3, 2**32 - 2, 2**40])
def test_elements_are_the_documented_hash_of_their_global_position(row):
    # 7 columns leave a tail behind any vector width
    out = filled(5, 7, seed=-3, row=row, column=2**16)
    wanted = [
        [element_by_hand(-3, "cat_0", row + r, 2**16 + c) for c in range(7)] for r in range(5)
    ]
    assert out.tolist() == wanted


def test_row_blocks_and_column_blocks_fill_the_same_bits_as_the_whole_table():
    whole = filled(103, 12)
    parts = torch.empty_like(whole)
    for row, rows in ((0, 40), (40, 63)):
        for column, columns in ((0, 4), (4, 8)):
            part = parts[row : row + rows, column : column + columns]  # a strided view
            fill_uniform_(part, seed=7, table="cat_0", row_offset=row, col_offset=column, bound=1.0)
    assert torch.equal(parts, whole)


def test_chunks_leave_no_trace(monkeypatch):
    whole = filled(103, 12)
    monkeypatch.setitem(BLOCK_ELEMENTS, "cpu", 40)
    assert torch.equal(filled(103, 12), whole)
    monkeypatch.setitem(BLOCK_ELEMENTS, "cpu", 1)
    assert torch.equal(filled(103, 12), whole)


def test_an_empty_shard_is_left_empty():
    assert filled(0, 8).shape == (0, 8)
    assert filled(8, 0).shape == (8, 0)


def test_values_are_uniform_within_the_bound():
    bound = 0.02
    values = filled(4096, 128, bound=bound)
    count = values.numel()
    assert -bound <= values.min().item() < -0.9999 * bound
    assert 0.9999 * bound < values.max().item() < bound
    assert abs(values.mean().item()) < 4 * bound / (3 * count) ** 0.5
    assert abs(values.var().item() / (bound**2 / 3) - 1) < 4 * (0.8 / count) ** 0.5
    bins = torch.histc(values, bins=256, min=-bound, max=bound)
    chi_square = ((bins - count / 256) ** 2 / (count / 256)).sum().item()
    assert 165 < chi_square < 345  # 255 +- 4 deviations


@pytest.mark.parametrize("other", [{"row": 1}, {"column": 1}, {"table": "cat_1"}, {"seed": 8}])
def test_neighbouring_rows_columns_tables_and_seeds_are_not_correlated(other):
    size = (2048, 64)
    first, second = filled(*size), filled(*size, **other)
    limit = 4 / first.numel() ** 0.5
    assert abs(correlation(first, second)) < limit
    assert abs(correlation(first.abs(), second.abs())) < limit


def test_no_pair_of_columns_or_rows_is_correlated():
    values = filled(4096, 128)
    for matrix in (values[:128], values.T):
        apart = torch.corrcoef(matrix.double())
        apart.fill_diagonal_(0)
        assert apart.abs().max().item() < 5.5 / matrix.shape[1] ** 0.5


def test_rows_do_not_repeat_where_32_bits_would():
    # 2^18 keys of 32 bits would collide some 8 times
    rows = filled(2**18, 2)
    assert len(torch.unique(rows, dim=0)) == len(rows)


def test_row_offsets_that_agree_in_their_lower_32_bits_differ():
    assert not torch.equal(filled(4, 4, row=5), filled(4, 4, row=5 + 2**32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_fills_the_same_bits_as_the_cpu():
    for rows, columns, bound in ((70_001, 128, 1 / 293**0.5), (1000, 20, 0.3)):
        on_gpu = filled(rows, columns, bound=bound, device="cuda", row=2**33)
        assert torch.equal(on_gpu.cpu(), filled(rows, columns, bound=bound, row=2**33))


def dense_half():
    options = DLRMOptions(embedding_dim=4, bottom_mlp=[8, 4], top_mlp=[8, 1])
    return DLRM(options, sized_spec(3, 2))


def test_dense_weights_depend_on_the_seed_alone():
    first, second, third = dense_half(), dense_half(), dense_half()
    initialise_dense(first, 1)
    torch.rand(3)
    initialise_dense(second, 1)
    initialise_dense(third, 2)
    weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in (first, second, third)]
    assert torch.equal(weights[0], weights[1])
    assert not (weights[0] == weights[2]).any()


def test_dense_initialisation_leaves_the_global_random_state_alone():
    module = dense_half()
    state = torch.get_rng_state()
    initialise_dense(module, 1)
    assert torch.equal(torch.get_rng_state(), state)


def test_dense_weights_built_on_meta_get_the_same_values():
    with torch.device("meta"):
        late = dense_half()
    late.bottom.to_empty(device="cpu")
    late.top.to_empty(device="cpu")
    early = dense_half()
    for module in (late, early):
        initialise_dense(module, 1)
    assert torch.equal(late.top.layers[0].weight, early.top.layers[0].weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_16_bits_begin_as_what_float32_is_rounded_to(dtype):
    full, narrow = torch.empty(300, 12), torch.empty(300, 12, dtype=dtype)
    for out in (full, narrow):
        fill_uniform_(out, seed=7, table="cat_0", bound=0.1)
    assert torch.equal(narrow, full.to(dtype))
    part = torch.empty(40, 4, dtype=dtype)
    fill_uniform_(part, seed=7, table="cat_0", row_offset=100, col_offset=8, bound=0.1)
    assert torch.equal(part, narrow[100:140, 8:])
