"""Lookup and update kernels against plain torch: under Triton's interpreter on a CPU, compiled on a GPU."""

from itertools import product

import pytest
import torch

from configs.schema import OptimizerConfig, OptimizerName, table_optimizers
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.local_tables import LocalTable, UpdateScalars
from nn.embedding.lookups import Lookup
from nn.embedding.optimizer import table_rule
from nn.embedding.touched_rows import TouchedRows
from tests.helpers.gpus import needs_no_gpu
from tests.nn.embedding.fixed_blocks import fixed_blocks

# Rows, columns and hotness of each table: runs of equal ids over many blocks, within one block, and none.
TABLES = [(3, 16, 1), (500, 8, 1), (1, 16, 4), (40, 16, 3), (10_000, 12, 1)]
SAMPLES = 20
"""For the interpreter, which takes long: two tables have several blocks of 32 ids, and one of them a single run over three."""
RULES = table_optimizers()
# float32: sums in another order. bf16: gradients are exact in both, so the same.
TOLERANCE = 2e-5


def make_group(
    rule: str,
    num_samples: int,
    device: str,
    dtype: torch.dtype,
    stored: torch.dtype = torch.float32,
):
    own = {"ftrl_l1": 0.05, "ftrl_l2": 0.1} if rule == "ftrl" else {}
    config = OptimizerConfig(embedding_name=rule, embedding_lr=0.1, eps=1e-3, **own)
    generator = torch.Generator().manual_seed(1)
    shape = {
        OptimizerName.sgd: lambda weight: {},
        OptimizerName.rowwise_adagrad: lambda weight: {"momentum1": torch.rand(len(weight))},
        OptimizerName.adagrad: lambda weight: {"momentum1": torch.rand(weight.shape)},
        OptimizerName.adam: lambda weight: {
            "momentum1": torch.randn(weight.shape) * 0.01,
            "momentum2": torch.rand(weight.shape) * 0.01,
        },
    }.get(rule, lambda weight: table_rule(rule).new_state(weight))
    torch.manual_seed(2)
    tables = []
    for index, (rows, columns, hotness) in enumerate(TABLES):
        weight = torch.randn(rows, columns, generator=generator)
        state = {name: values.to(device) for name, values in shape(weight).items()}
        weight = weight.to(device, stored)
        tables.append(
            LocalTable((Lookup(f"c{index}", hotness),), weight, state, 4 * index, 77 + index)
        )
    scalars = UpdateScalars(config, 0.5, torch.device(device))
    scalars.set(3, 0.1)
    hotness = {lookup.feature: lookup.hotness for table in tables for lookup in table.lookups}
    group = LocalEmbeddingBags(
        tables,
        fixed_blocks(hotness, num_samples),
        num_samples,
        config,
        scalars,
        dtype,
        torch.device(device),
    )
    return group, scalars


def draw_ids(num_samples: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for rows, _, hotness in TABLES:
        # A power law: some rows come often, most never.
        chance = torch.rand(num_samples * hotness, generator=generator)
        drawn.append((rows**chance).long().clamp(max=rows) - 1)
    return torch.cat(drawn).int()


def results(
    rule: str,
    num_samples: int,
    device: str,
    dtype: torch.dtype,
    *,
    fused: bool,
    stored: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """Return the pooled embeddings of two steps, of which the last updates nothing, and weights and states after them.

    For weights of 16 bits, gradients are small multiples of one number, whose sums are exact in any order. Updates of float32
    weights also note the rows that they change; that mask is returned last.
    """
    group, scalars = make_group(rule, num_samples, device, dtype, stored)
    if stored is torch.float32:
        group.touched = TouchedRows(group.tables, torch.device(device))
    if fused and group._kernels is None:
        group._kernels = launcher_of(group, num_samples)
    if not fused:
        group._kernels = None
    looked_up = []
    for step, is_good in enumerate((1, 0)):
        ids = draw_ids(num_samples, step).to(device)
        out = torch.empty(num_samples, group.num_columns, dtype=dtype, device=device)
        group.look_up(ids, out)
        looked_up.append(out)
        torch.manual_seed(step)
        gradients = torch.randn(num_samples, group.num_columns).to(device, dtype)
        if stored is not torch.float32:
            gradients = (gradients * 8).round() / 1024
        scalars.set(step, 0.125 if stored is not torch.float32 else 0.1 + step)
        flag = torch.tensor([is_good], dtype=torch.int32, device=device)
        group.update(group.sort(ids), gradients, flag)
    state = [tensor for table in group.tables for tensor in (table.weight, *table.state.values())]
    masks = [] if group.touched is None else [group.touched.mask]
    return [tensor.double().cpu() for tensor in (*looked_up, *state, *masks)]


def launcher_of(group: LocalEmbeddingBags, num_samples: int):
    from nn.embedding.triton_launcher import TritonLauncher

    return TritonLauncher(
        group.tables, group._lookups, group._key_bases, group._sources, num_samples, group._config
    )


def compare(rule: str, num_samples: int, device: str, dtype: torch.dtype) -> None:
    plain = results(rule, num_samples, device, dtype, fused=False)
    fused = results(rule, num_samples, device, dtype, fused=True)
    for index, (expected, actual) in enumerate(zip(plain, fused, strict=True)):
        # Both round the pooled embeddings to bf16 once.
        rounding = 2**-7 if index < 2 and dtype == torch.bfloat16 else TOLERANCE
        worst = ((expected - actual).abs().max() / expected.abs().max()).item()
        assert worst < rounding, (rule, num_samples, dtype, index, worst)


def compare_stored(rule: str, num_samples: int, device: str, stored: torch.dtype) -> None:
    """Compare weights of 16 bits: bit for bit with SGD, in which only the rounding is inexact.

    Other optimizers divide, and the last float32 bit of a quotient may differ; few weights are then rounded the other way.
    """
    plain, fused = (
        results(rule, num_samples, device, torch.float32, fused=is_fused, stored=stored)
        for is_fused in (False, True)
    )
    for expected, actual in zip(plain, fused, strict=True):
        if rule == "sgd":
            assert torch.equal(expected, actual), (stored, (expected - actual).abs().max())
        else:
            differ = ~torch.isclose(expected, actual, rtol=TOLERANCE, atol=TOLERANCE)
            assert differ.double().mean() < 2e-3, (rule, stored, differ.double().mean())
            torch.testing.assert_close(expected, actual, rtol=2**-6, atol=2**-6)


@needs_no_gpu
@pytest.mark.parametrize("rule", RULES)
def test_interpreted_lookup_and_update_equal_plain_torch(rule):
    compare(rule, SAMPLES, "cpu", torch.float32)


@needs_no_gpu
@pytest.mark.parametrize("rule", RULES)
def test_weights_whose_gradients_were_zero_keep_their_bits(rule):
    """In plain torch and in the kernel."""
    kept = []
    for fused in (False, True):
        group, scalars = make_group(rule, SAMPLES, "cpu", torch.float32)
        before = [table.weight.clone() for table in group.tables]
        for state in (values for table in group.tables for values in table.state.values()):
            state.zero_()
        group._kernels = launcher_of(group, SAMPLES) if fused else None
        ids = draw_ids(SAMPLES, 0)
        group.look_up(ids, torch.empty(SAMPLES, group.num_columns))
        scalars.set(0, 0.1)
        gradients = torch.zeros(SAMPLES, group.num_columns)
        group.update(group.sort(ids), gradients, torch.ones(1, dtype=torch.int32))
        kept.append(
            all(
                torch.equal(old, table.weight)
                for old, table in zip(before, group.tables, strict=True)
            )
        )
    assert table_rule(rule).leaves_untouched_rows
    assert kept == [True, True]


@needs_no_gpu
@pytest.mark.parametrize(
    ("rule", "stored"),
    [
        (OptimizerName.sgd, torch.bfloat16),
        (OptimizerName.adam, torch.bfloat16),
        (OptimizerName.sgd, torch.float16),
    ],
)
def test_interpreted_updates_of_16_bit_weights_equal_plain_torch(rule, stored):
    compare_stored(rule, SAMPLES, "cpu", stored)


@needs_no_gpu
@pytest.mark.parametrize("rule", RULES)
def test_replicated_tables_which_have_no_state_here_are_looked_up(rule):
    group, _ = make_group(rule, 4, "cpu", torch.float32, torch.float32)
    for table in group.tables:
        table.state.clear()
    group._kernels = None
    ids, plain, fused = draw_ids(4, 0), *(torch.empty(4, group.num_columns) for _ in range(2))
    group.look_up(ids, plain)
    launcher_of(group, 4).look_up(ids, fused)
    assert torch.equal(plain, fused)


def test_equal_ids_of_many_blocks_are_summed_level_by_level():
    from nn.embedding.triton_launcher import _levels

    levels = _levels([0, 5 * 16**2], [5 * 16**2, 3], 16, 4, torch.device("cpu"))
    assert [level.blocks.shape[1] for level in levels] == [5 * 16 + 1, 10, 2, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("rule", "dtype"), list(product(RULES, [torch.float32, torch.bfloat16])))
def test_lookup_and_update_equal_plain_torch_on_a_gpu(rule, dtype):
    compare(rule, 20_000, "cuda", dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("rule", "stored"), list(product(RULES, [torch.bfloat16, torch.float16])))
def test_weights_of_16_bits_equal_plain_torch_on_a_gpu(rule, stored):
    compare_stored(rule, 20_000, "cuda", stored)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_update_is_deterministic():
    first, second = (
        results(OptimizerName.adagrad, 20_000, "cuda", torch.bfloat16, fused=True) for _ in "ab"
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
