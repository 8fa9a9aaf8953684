"""Rows of host memory as items of numpy, which copies rows of any dtype and width in one piece."""

import numpy as np
import torch
from torch import Tensor


def row_items(rows: Tensor) -> np.ndarray:
    """View contiguous rows [N, ...] in host memory as N items of raw bytes."""
    assert rows.is_contiguous()
    num_bytes = rows[:1].nbytes
    flat = rows.view(-1).view(torch.uint8).numpy()
    return flat.view(np.dtype((np.void, num_bytes)))
