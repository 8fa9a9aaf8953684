"""Host memory that cannot be had is a message with what to do."""

import re

import pytest
import torch

from nn.tiers import row_store
from nn.tiers.row_store import RowStore, kinds_of

KINDS = kinds_of(128, torch.float32, ())


def test_too_little_memory_is_named():
    message = "^536,870,912.0 GiB of host memory for tables with tier: host cannot be allocated .*container, or keep"
    with pytest.raises(ValueError, match=message):
        RowStore(2**50, 1, KINDS, torch.device("cpu"))


@pytest.mark.parametrize(
    "error",
    [
        OSError(12, "Cannot allocate memory"),
        RuntimeError("CUDA error: OS call failed or operation not supported on this OS\nmore"),
    ],
)
def test_a_limit_of_locked_memory_is_named(error, monkeypatch):
    def refuse(*_):
        raise error

    monkeypatch.setattr(row_store, "pinned_memory", refuse)
    reason = re.escape(str(error).splitlines()[0])
    message = rf"^4.0 GiB of host memory .* cannot be pinned \({reason}\); raise the limit of locked memory \(`ulimit -l`\)"
    with pytest.raises(ValueError, match=message) as caught:
        RowStore(2**23, 1, KINDS, torch.device("cuda"))
    assert "\n" not in str(caught.value)
