"""Fixtures of the tests of kernels."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def set_tf32() -> Iterator[Callable[[bool], None]]:
    """Set whether products of float32 may be TF32, until the test ends; `monkeypatch` would delete what the module computes."""
    matmul = torch.backends.cuda.matmul
    kept = matmul.allow_tf32
    yield lambda allow: setattr(matmul, "allow_tf32", allow)
    matmul.allow_tf32 = kept
