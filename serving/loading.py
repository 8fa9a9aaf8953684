"""Choice of the device on which a model directory is loaded."""

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serving.inference.versions import LoadModel

COPYING_THREADS = 4
"""Most threads beside a GPU, where they only copy rows: 32 of them wait 15 ms for each other, 4 copy in 0.1 ms."""


def model_loader(
    device: str, max_batch: int, dense_dtype: str, table_gib: float | None
) -> "LoadModel":
    """Return the function that loads a model directory.

    `max_batch`: rows of the largest batch on a GPU. `table_gib`: GiB of tables in the GPU's memory; None for most of what is
    free. Raises ValueError: there is no GPU.
    """
    if device == "cpu":
        from serving.inference.model import ServedModel

        return ServedModel.load
    import torch

    if not torch.cuda.is_available():
        raise ValueError("device=cuda: torch finds no GPU; set device=cpu, or install CUDA's build")
    from serving.gpu.model import GpuModel

    return partial(
        GpuModel.load,
        max_batch=max_batch,
        dense_dtype=torch.bfloat16 if dense_dtype == "bf16" else torch.float32,
        table_bytes=None if table_gib is None else int(table_gib * 2**30),
    )
