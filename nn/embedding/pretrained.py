"""Vectors of a file as the rows of a table that is not trained (`model.pretrained`)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from configs.messages import shown
from configs.schema import OptimizerConfig
from nn.embedding.declared_tables import Tables

ROWS_AT_ONCE = 2**16


@dataclass(frozen=True, slots=True)
class FileRows:
    """A .npy file [rows, columns] of floats, memory-mapped; the `init_fn` of its table."""

    feature: str
    path: str

    def opened(self) -> np.ndarray:
        """Return the file's rows. Raises ValueError: it cannot be read, or is no matrix of floats."""
        key = f"model.pretrained.{self.feature}={self.path}"
        try:
            rows = np.lib.format.open_memmap(self.path, mode="r")  # reads no archive and no pickle
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{key} cannot be read ({error}); want a .npy file of floats"
            ) from None
        if rows.ndim != 2 or rows.dtype not in ("float16", "float32", "float64"):
            raise ValueError(
                f"{key} holds {list(rows.shape)} {rows.dtype}; want a .npy file [rows, columns] of floats"
            )
        return rows

    def __call__(self, weight: Tensor, first_row: int = 0, first_column: int = 0) -> None:
        """Fill a shard of the table [rows, columns]. Raises ValueError: a number is not finite in the table's type."""
        of_file = self.opened()
        columns = slice(first_column, first_column + weight.shape[1])
        for first, part in zip(
            range(0, len(weight), ROWS_AT_ONCE), weight.split(ROWS_AT_ONCE), strict=True
        ):
            begin = first_row + first
            block = np.array(of_file[begin : begin + len(part), columns])
            rows = torch.from_numpy(block).to(part.dtype)
            if not rows.isfinite().all():
                row = begin + int((~rows.isfinite()).any(1).int().argmax())
                raise ValueError(
                    f"model.pretrained.{self.feature}={self.path}: row {row} is not finite in the table's {part.dtype}; "
                    "correct the file"
                )
            part.copy_(rows)


def check_pretrained(tables: Tables, optimizer: OptimizerConfig) -> None:
    """Refuse files of other sizes than their tables, and optimizers that move rows whose gradient is zero; ValueError."""
    for table in tables:
        if not isinstance(table.init_fn, FileRows):
            continue
        key, shape = f"model.pretrained.{table.init_fn.feature}", table.init_fn.opened().shape
        if shape != (table.num_embeddings, table.embedding_dim):
            raise ValueError(
                f"{key}={table.init_fn.path} holds {shape[0]} vectors of {shape[1]} columns, and table {shown(table.name)} has "
                f"{table.num_embeddings} of {table.embedding_dim}; make a file of these, or set model.embedding_dims"
            )
        if optimizer.embedding_l2 or optimizer.table_name == "ftrl":
            raise ValueError(
                f"{key}: optimizer.embedding_l2 and the tables' optimizer ftrl would move weights without a gradient, and these "
                "are not trained; set optimizer.embedding_l2=0 and another optimizer.embedding_name"
            )
