"""Memory that HSTU, transformer and RankMixer blocks declare, against the bytes that torch keeps; without a GPU, of one too."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from nn.layers.distinct_rows import DistinctRows
from nn.layers.interactions.transformer import BlockKind, TransformerBlock
from nn.layers.pass_state import PassState, attach
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence_events import SequenceEvents
from nn.models.hstu import HSTU
from nn.models.options import RankMixerOptions
from nn.models.rankmixer import RankMixer, RankMixerBlock
from tests.helpers.specs import sized_spec
from tests.nn.models.test_hstu import HISTORIES, ITEMS, LONGEST, hstu_spec, options_of

SAMPLES, COLUMNS = 8, 128
SIZES = {
    "embedding_dim": COLUMNS,
    "input_hidden": 64,
    "width": COLUMNS,
    "layers": 3,
    "heads": 4,
    "head_dim": 32,
    "action": None,
}
VARIANTS: dict[str, dict[str, object]] = {
    "as_it_is": {"item_mlps": "item"},
    "mlps_by_row": {"item_mlps": "row"},
    "research": {"item_mlps": "item", "silu_all": True, "concat": False},
    "wide_heads": {"item_mlps": "item", "head_dim": 64},
}


class Kept(torch.autograd.Function):
    """Attention's memory: it keeps queries, keys and values, and has a gradient of each."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, gradients: Any = None) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.gradients = gradients
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            return *(torch.empty_like(of) for of in ctx.saved_tensors), None
        blocks, numbers = ctx.gradients
        return *(blocks.block(number).unflatten(1, grad.shape[1:]) for number in numbers), None


class NoKernel:
    """Nothing is computed of tensors without memory."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: None


def products_of_tokens(left: Any, right: Any, dtype: torch.dtype, *_: Any, **__: Any) -> Tensor:
    return left.rows.new_empty(*left.rows.shape[:2], right.rows.shape[1], dtype=dtype)


class Peak(TorchDispatchMode):
    """Counts the bytes of all memories that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self._alive, self.most = WeakIdKeyDictionary(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for found in tree_leaves(out):
            if isinstance(found, Tensor):
                memory = found.untyped_storage()
                self._alive[memory] = memory.nbytes()
        self.most = max(self.most, sum(self._alive.values()))
        return out


def inputs(events: int, rows: int, dtype: torch.dtype, device: str) -> PooledEmbeddings:
    """Return the embeddings of a batch with room for `events`; tables hand out `rows`."""
    ids = {"dtype": torch.int32, "device": device}
    starts, lengths = torch.empty(SAMPLES, **ids), torch.empty(SAMPLES, **ids)
    values = {
        item: torch.empty(rows + 1, COLUMNS, dtype=dtype, device=device, requires_grad=True)
        for item in ITEMS
    }

    def rows_of(table: str, name: str) -> DistinctRows:
        positions = torch.empty(events if name in HISTORIES else SAMPLES, **ids)
        return DistinctRows(values[table], positions, starts, lengths)

    found = SequenceEvents(
        {history: rows_of(item, history) for item, history in zip(ITEMS, HISTORIES, strict=True)},
        {"hist_time": torch.empty(events, device=device)},
        starts,
        lengths,
        torch.empty(events, **ids),
        LONGEST,
    )
    context = torch.empty(SAMPLES, 2 * COLUMNS, dtype=dtype, device=device, requires_grad=True)
    return PooledEmbeddings.with_rows(context, rows_of, lambda name: found)


@pytest.fixture
def without_kernels(monkeypatch):
    kernels = ModuleType("nn.ops.triton.hstu_attention")
    kernels.attend = lambda q, k, v, *rest: Kept.apply(q, k, v, rest[-1])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    attention = "nn.layers.stu.hstu_attention"
    monkeypatch.setattr(attention, lambda q, k, v, *_, **__: Kept.apply(q, k, v))
    norms = "nn.ops.triton.layer_norm"
    for name in ("_norm", "_norm_gradient", "_gate", "_gate_gradient"):
        monkeypatch.setattr(f"{norms}.{name}", NoKernel())
    sums = "nn.ops.triton.row_sums"
    # What programs add up does not grow with the events.
    monkeypatch.setattr(f"{sums}.SUM_PROGRAMS", 1)
    for kernel in ("_sum_of_rows", "_row_sums"):
        monkeypatch.setattr(f"{sums}.{kernel}", NoKernel())
    monkeypatch.setattr(f"{sums}.column_sums", lambda sums: sums.new_empty(sums.shape[1]))
    monkeypatch.setattr(f"{norms}.column_sums", lambda sums: sums.new_empty(sums.shape[1]))


def kept_bytes(model_options: dict, events: int, rows: int, amp: bool) -> tuple[int, int]:
    """Return the bytes that a GPU keeps for the backward pass and what is declared, parameters and samples apart."""
    dtype = torch.bfloat16 if amp else torch.float32
    with FakeTensorMode(), torch.device("cuda"):
        model = HSTU.build(options_of(**SIZES | model_options), hstu_spec())
        embeddings = inputs(events, rows, dtype, "cuda")
        kept = bytes_kept_by(model, amp, torch.empty(SAMPLES, 1), embeddings)
    return kept, declared(model, events, rows, dtype)


def bytes_kept_by(module: nn.Module, amp: bool, *arguments: Any) -> int:
    memories: dict[int, Any] = {}
    parameters = {of.untyped_storage()._cdata for of in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory._cdata not in parameters:
            memories[memory._cdata] = memory
        return tensor

    torch.set_autocast_enabled("cuda", amp)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            module(*arguments)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.clear_autocast_cache()
    return sum(of.nbytes() for of in memories.values())


def declared(model: HSTU, events: int, rows: int, dtype: torch.dtype) -> int:
    found = model.activations()
    columns = found.event_columns["history"] * events + found.row_columns["item"] * rows
    return columns * dtype.itemsize


@pytest.mark.parametrize("amp", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_an_event_and_a_row_keep_is_declared(without_kernels, variant, amp):
    options, dtype = VARIANTS[variant], torch.bfloat16 if amp else torch.float32
    small, of_small = kept_bytes(options, 4_000, 100, amp)
    large, of_large = kept_bytes(options, 9_000, 100, amp)
    # Beside what is kept: gradients of a layer's columns.
    inner = max(COLUMNS, 4 * int(options.get("head_dim", 32)))
    beside = 5_000 * inner * dtype.itemsize * 2
    assert large - small == pytest.approx(of_large - of_small - beside, rel=0.05)


@pytest.mark.parametrize("variant", ["as_it_is", "mlps_by_row"])
def test_what_a_row_keeps_is_declared(without_kernels, variant):
    (small, of_small), (large, of_large) = (
        kept_bytes(VARIANTS[variant], 4_000, rows, True) for rows in (100, 2_100)
    )
    # The item's rows lie in the memory of the lookup.
    looked_up = 2_000 * COLUMNS * 2 if variant != "mlps_by_position" else 0
    assert large - small - looked_up == pytest.approx(of_large - of_small, rel=0.05)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_pass_allocates_what_is_declared(without_kernels, variant, monkeypatch):
    # As on a GPU.
    for name in ("stu", "sequence"):
        monkeypatch.setattr(f"nn.layers.{name}.can_fuse", lambda *_: True)
    monkeypatch.setattr("nn.layers.stu._has_kernel", lambda *_: True)

    def peak(events: int) -> tuple[int, int]:
        with FakeTensorMode():
            model = HSTU.build(options_of(**SIZES | VARIANTS[variant]), hstu_spec())
            embeddings = inputs(events, 100, torch.float32, "cpu")
            with Peak() as counted:
                model(torch.empty(SAMPLES, 1), embeddings).sum().backward()
        return counted.most, declared(model, events, 100, torch.float32)

    small, of_small = peak(4_000)
    large, of_large = peak(9_000)
    assert large - small == pytest.approx(of_large - of_small, rel=0.05)


@pytest.mark.parametrize("amp", [True, False])
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("residual", ["pre_norm", "post_norm", "gated"])
def test_what_a_transformer_block_keeps_is_declared(
    without_kernels, residual, activation, amp, monkeypatch
):
    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return Kept.apply(q, k, v)

    monkeypatch.setattr("nn.layers.interactions.transformer.attend", attend)
    monkeypatch.setattr(
        "nn.ops.triton.mlp.cast_parameters", lambda to, of: [one.to(to) for one in of]
    )
    dtype = torch.bfloat16 if amp else torch.float32
    with FakeTensorMode(), torch.device("cuda"):
        block = TransformerBlock(64, BlockKind(2, 4, residual, activation=activation))
        x = torch.empty(100_000, 64, dtype=dtype, requires_grad=True)
        kept = bytes_kept_by(block, amp, x, None)
    # Copies of weights are small beside the positions.
    wanted = 100_000 * dtype.itemsize * block.kept_per_position
    assert kept == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("amp", [True, False, "partial", "full"])
def test_what_a_block_of_rankmixer_keeps_is_declared(amp, monkeypatch):
    kernels = "nn.ops.triton.rankmixer"
    monkeypatch.setattr("nn.ops.triton.fp8.quantise._quantise", NoKernel())
    monkeypatch.setattr("nn.ops.fp8._of_tokens", products_of_tokens)
    monkeypatch.setattr("nn.layers.fp8.stream_of_scales", lambda _: None)
    for name in ("_norm", "_activate"):
        monkeypatch.setattr(f"{kernels}.{name}", NoKernel())
    monkeypatch.setattr(f"{kernels}.cast_parameters", lambda to, of: [one.to(to) for one in of])
    # Drawing reads numbers.
    monkeypatch.setattr("nn.layers.per_token.truncated_normal_", lambda *_: None)
    dtype = torch.bfloat16 if amp else torch.float32
    sizes = {"embedding_dim": 8, "tokens": 4, "token_dim": 64, "expansion": 3}
    one, two = (RankMixerOptions(layers=layers, **sizes) for layers in (1, 2))
    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(4, 100_000, 64, dtype=dtype, requires_grad=True)
        block = RankMixerBlock(one)
        if isinstance(amp, str):
            block.network.use_fp8(weight_gradients=amp == "full")
            attach(block, PassState(0, x.device))
        kept = bytes_kept_by(block, bool(amp), x)
    wanted, less = (
        RankMixer(options, sized_spec(1, 2)).activations().backward_columns
        for options in (two, one)
    )
    declared = 100_000 * dtype.itemsize * (wanted - less)
    if amp == "full":
        # The inputs of both products in 8 bits: that of the first is kept in 16 bits too, for its norm.
        declared -= 100_000 * (one.expansion - 1) * 4 * 64
    # Copies of weights are small beside the samples.
    assert kept == pytest.approx(declared, rel=2e-3)
