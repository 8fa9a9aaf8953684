"""Tables of NVIDIA's TensorFlow 2 recipe: `sparse/feature_<i>.npy`, one float32 [rows, columns] per feature.

Layout: DeepLearningExamples, DLRM_and_DCNv2, `nn/sparse_model.py` (`save_checkpoint`, `save_config`).
"""

from collections.abc import Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from configs.messages import shortened, shown
from dataloading.dataset.documents import open_regular
from nn.checkpoint.tensor_index import Chunk, StoredTensor, TensorIndex, file_inside

FOLDER = "sparse"
CONFIG_FILE = "config.json"
# What Python's parser of literals and numpy's of dtypes raise for a header that is none.
_HEADER_ERRORS = (SyntaxError, TokenError, TypeError, LookupError, RecursionError, MemoryError)


def tf2_file_name(index: int) -> str:
    return f"feature_{index}.npy"


def find_tf2_tables(path: Path) -> Path | None:
    """Return the folder with the tables if `path` is a TF2 checkpoint or its folder `sparse`; otherwise None."""
    for folder in (path, path / FOLDER):
        if (folder / tf2_file_name(0)).is_file():
            return folder
    return None


def tf2_index(folder: Path, tables: Sequence[str]) -> TensorIndex:
    """Build the index of the tables, in the order of the features, from the headers of their files; ValueError if one is odd."""
    if (folder / tf2_file_name(len(tables))).exists():
        raise ValueError(
            f"{folder} has more tables than the {len(tables)} of this dataset "
            f"({tf2_file_name(len(tables))}); set data.path to the dataset it was trained on"
        )
    tensors = {
        f"tables.{table}.weight": _stored_table(file_inside(folder, tf2_file_name(index)))
        for index, table in enumerate(tables)
    }
    return TensorIndex(tuple(tables), tensors)


def _stored_table(path: Path) -> StoredTensor:
    try:
        with open_regular(path) as stream:
            # numpy's parser of headers evaluates literals only. The array is not read here, since it may be pickled.
            np.lib.format.read_magic(stream)
            shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(stream)
            start = stream.tell()
    except (OSError, ValueError, *_HEADER_ERRORS) as error:
        reason = shortened(" ".join(str(error).split())) or type(error).__name__
        raise ValueError(
            f"{path} is not a table of the TF2 recipe ({reason}); copy it again, or remove it from the checkpoint"
        ) from None
    if dtype != np.dtype("<f4") or len(shape) != 2 or fortran_order or min(shape) < 1:
        raise ValueError(
            f"{path}: got {shortened(str(dtype))} {shown(shape)}{' in column order' * fortran_order}, want row-major float32 "
            "[rows, columns]"
        )
    stored = StoredTensor("float32", shape, (Chunk((0, 0), shape, path, start),))
    if path.stat().st_size != start + stored.num_bytes:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes, want {start + stored.num_bytes}; copy it again"
        )
    return stored


def tf2_config(sizes: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Return the content of `sparse/config.json`: sizes [rows, columns] of the tables and the TF2 recipe's defaults."""
    return {
        "use_mde_embeddings": True,
        "embedding_dim": [columns for _, columns in sizes],
        "column_slice_threshold": 5_000_000_000,
        "embedding_zeros_initializer": False,
        "embedding_trainable": True,
        "categorical_cardinalities": [rows for rows, _ in sizes],
        "concat_embedding": False,
        "cpu_offloading_threshold_gb": 75,
    }
