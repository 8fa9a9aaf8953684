"""Counts of the ids of a feature, as preprocessing has written them: `vocabulary/FEATURE.parquet` of a dataset."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from pyarrow.lib import ArrowException

from dataloading.dataset.feature_spec import CategoricalFeature


def counts_of_ids(root: Path, feature: CategoricalFeature) -> np.ndarray | None:
    """Return the counts of a feature's ids, int64 [cardinality]; None if the dataset has no readable ones.

    The id 0 stands for all values without an own id, which are not counted there; it counts as the most frequent other one.
    """
    path = root / "vocabulary" / f"{feature.name}.parquet"
    if not path.is_file():
        return None
    try:
        table = pq.read_table(path, columns=["id", "count"])
        ids, found = (table.column(name).to_numpy() for name in ("id", "count"))
        counts = np.zeros(feature.cardinality, dtype=np.int64)
        counts[ids] = found
    except (OSError, ArrowException, IndexError, KeyError, ValueError, TypeError):
        # An estimate does without; `python -m preproc mode=verify` names what is wrong with the file.
        return None
    counts[0] = max(counts[0], counts.max(initial=0))
    return counts
