"""Speed of HSTU's attention on one GPU: the project's kernels, and a softmax of the same shape by flex attention.

    python -m benchmarks.hstu_attention                  all shapes
    python -m benchmarks.hstu_attention --lengths 2672   samples of one length
    python -m benchmarks.hstu_attention --sweep          other blocks of the kernels, at 2,672 positions

4 heads of 128 columns in bf16, causal, about 128 thousand positions. Useful products are two forward and five backward, each of
2 * 128 operations a pair of positions that see each other. Flex attention has no SiLU instead of its softmax; it is compiled
for the same mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.launch import command_parser
from nn.layers.hstu import SampleParts
from nn.layers.sequence_events import SequenceEvents
from nn.ops.hstu_attention import JaggedPositions

HEADS, COLUMNS, POSITIONS = 4, 128, 48 * 2672
ZIPF_MEAN, ZIPF_MOST = 2672, 8192


def positions_of(lengths: Tensor) -> JaggedPositions:
    """Return the positions of samples of these lengths."""
    longest = int(lengths.max())
    samples = torch.zeros(int(lengths.sum()), dtype=torch.long, device=lengths.device)
    events = SequenceEvents({}, {}, lengths.cumsum(0) - lengths, lengths, samples, longest)
    return SampleParts.of(events, 0, 0).at


def zipf_lengths() -> Tensor:
    """Return lengths of the mean `ZIPF_MEAN` that fall as 1 / rank below `ZIPF_MOST`, in a random order."""
    ranks = torch.arange(1, POSITIONS // ZIPF_MEAN + 1)
    longest = float(ZIPF_MOST)
    while True:
        lengths = (longest / ranks).clamp(1, ZIPF_MOST).long()
        if lengths.float().mean() >= ZIPF_MEAN:
            return lengths[torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))]
        longest *= 1.001


def measured(step: Callable[[], Any]) -> float:
    """Return the median time of a step in ms."""
    import triton

    return triton.testing.do_bench(step, warmup=25, rep=100, return_mode="median")


def times_of(attend: Callable[..., Tensor], shape: tuple[int, ...]) -> tuple[float, float]:
    """Return the times of the forward and of the backward pass in ms."""
    draw = torch.Generator("cuda").manual_seed(0)
    made = [
        torch.randn(shape, generator=draw, device="cuda").bfloat16().requires_grad_()
        for _ in range(3)
    ]
    out = attend(*made)
    grad = torch.randn(out.shape, generator=draw, device="cuda").bfloat16()
    with torch.no_grad():
        forward = measured(lambda: attend(*made))
    return forward, measured(lambda: torch.autograd.grad(out, made, grad, retain_graph=True))


def flex_of(lengths: Tensor) -> tuple[Callable[..., Tensor], tuple[int, ...]]:
    """Return compiled flex attention over the same positions, and the shape of its inputs."""
    from torch._functorch import config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    # A backward pass that is measured repeatedly keeps what the forward pass left for it.
    config.donated_buffer = False
    count = int(lengths.sum())
    sample = torch.arange(len(lengths), device="cuda").repeat_interleave(lengths)

    def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (sample[query] == sample[key])

    mask = torch.compile(create_block_mask)(sees, None, None, count, count)
    compiled = torch.compile(flex_attention)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask), (1, HEADS, count, COLUMNS)


def print_shape(name: str, lengths: Tensor) -> None:
    """Print the times of both at one shape."""
    from nn.ops.triton.hstu_attention import attend

    lengths = lengths.cuda()
    at, norm = positions_of(lengths), torch.full_like(lengths, int(lengths.max()))
    pairs = float((lengths * (lengths + 1) // 2).sum())
    flops = 2 * COLUMNS * HEADS * pairs  # of one product

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, norm, at, at, 1)

    for title, (attention, shape) in {
        "SiLU": (ours, (len(at.samples), HEADS, COLUMNS)),
        "flex (softmax)": flex_of(lengths),
    }.items():
        forward, backward = times_of(attention, shape)
        speeds = 2 * flops / forward, 5 * flops / backward, 7 * flops / (forward + backward)
        print(
            f"| {name} | {len(lengths)} | {title} | {forward:.3f} | {backward:.3f} | "
            f"{' | '.join(f'{speed / 1e9:.0f}' for speed in speeds)} |",
            flush=True,
        )


# Blocks of queries and of keys, warps and stages of each kernel to try.
SWEEP = {
    "FORWARD": [(128, 64, 8, 3), (128, 128, 8, 2)],
    "OF_KEYS": [(64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2)],
    "OF_QUERIES": [(128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2)],
}


def sweep(lengths: Tensor) -> None:
    """Print the time of the pass of every kernel with other blocks; the pass backward has two kernels."""
    from nn.ops.triton import hstu_attention as kernels

    lengths = lengths.cuda()
    at, norm = positions_of(lengths), torch.full_like(lengths, int(lengths.max()))
    shape = (len(at.samples), HEADS, COLUMNS)
    for name, choices in SWEEP.items():
        blocks = getattr(kernels, name)
        before = dict(blocks)
        for sizes in choices:
            blocks.update(
                zip(("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages"), sizes, strict=True)
            )
            times = times_of(lambda q, k, v: kernels.attend(q, k, v, norm, at, at, 1), shape)
            print(f"{name} {sizes}: {times[name != 'FORWARD']:.3f} ms", flush=True)
        blocks.update(before)


def main() -> None:
    """Print a table of times and speeds."""
    parser = command_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2672, 4096])
    parser.add_argument("--sweep", action="store_true", help="try other blocks of the kernels")
    args = parser.parse_args()
    shapes = {f"{length:,}": torch.full((POSITIONS // length,), length) for length in args.lengths}
    if args.sweep:
        sweep(torch.full((POSITIONS // ZIPF_MEAN,), ZIPF_MEAN))
        return
    print(torch.cuda.get_device_name(), torch.__version__)
    print(
        "| positions of a sample | samples | attention | forward ms | backward ms | TFLOP/s forward | backward | both |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, lengths in (shapes | {"Zipf": zipf_lengths()}).items():
        print_shape(name, lengths)


if __name__ == "__main__":
    main()
