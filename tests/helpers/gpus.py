"""Tests that need GPUs: marks by how many, and the cases that several files train there."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tests.nn.sharding.test_sharded_embeddings import case

ON_GPU = ["device=cuda", "train.tf32=false"]
NUM_STEPS = 12
CASES = [
    ("dlrm", "one_hot", "sgd", "table_wise"),
    ("dlrm", "multi_hot", "adagrad", "column_wise"),
    ("dlrm", "multi_hot", "rowwise_adagrad", "table_wise"),
    ("dlrm", "one_hot", "adam", "data_parallel"),
    ("dlrm", "multi_hot", "sgd", "row_wise"),
    ("dcnv2", "one_hot", "sgd", "data_parallel"),
    ("dcnv2", "multi_hot", "adam", "table_wise"),
    ("dcnv2", "one_hot", "adagrad", "column_wise"),
]
# With this one rounding to 16 bits moves the length of a table's change by 3 % at most; with the default one, by 10 %.
SEED = "seed=0"
# 197 rows in batches of 64: three full ones and a tail of 5, padded on 2 and on 4 ranks.
TWO_EPOCHS, TWO_EPOCHS_STEPS = ["data.synthetic.train_rows=197", "train.epochs=2"], 8


needs_no_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled where a GPU is"
)


def needs_gpus(count: int) -> list[pytest.MarkDecorator]:
    """Marks of a test on `count` GPUs: `gpu`, `gpu2` or `gpu4`, and the skip where a machine has fewer."""
    has_fewer = torch.cuda.device_count() < count
    mark = getattr(pytest.mark, "gpu" if count == 1 else f"gpu{count}")
    return [mark, pytest.mark.skipif(has_fewer, reason=f"needs {count} GPU{'s' * (count > 1)}")]


def needs_one_gpu(test: Callable) -> Callable:
    """A test on one GPU."""
    for mark in needs_gpus(1):
        test = mark(test)
    return test


def worlds(*counts: int) -> list:
    """Numbers of GPUs as parameters of a test, marked."""
    return [pytest.param(count, marks=needs_gpus(count)) for count in counts]


def gpu_cases(amp: str, layout: str | None = None) -> list[list[str]]:
    """Overrides of all cases, in their own layout or in the one given."""
    return [
        [*case(*parts[:3], layout or parts[3]), *ON_GPU, SEED, f"train.amp={amp}"]
        for parts in CASES
    ]


def check_same_bits(run: Callable[[], Sequence[Tensor]]) -> None:
    """Compare the results of two runs, and those of a captured one, with the first run's bit by bit."""
    first, again = run(), run()
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    assert all(torch.equal(one, two) for one, two in zip(first, captured, strict=True))
