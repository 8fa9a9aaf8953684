"""Proof of an export: rows of the test split through the training path and through the written model directory.

The training path is `nn.models.ranking_model` with the checkpoint's own weights, which the sharded step equals. It gets those
rows of the tables that the test rows look up, so the proof takes no memory for the others.
"""

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dataloading.batch import Batch
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.source import Source
from dataloading.loader import Loader, LoaderSettings
from nn.embedding.declared_tables import hands_out_rows
from nn.models.model import Model
from nn.models.ranking_model import RankingModel
from nn.models.tasks import Task, check_logits, column_of
from serving.inference.model import ServedModel
from serving.inference.model_rows import RaggedIds, Rows

if TYPE_CHECKING:
    # Numba is imported only where there are keys.
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.sparse.jagged_tensor import JaggedTensor

    from dataloading.keys.key_maps import KeyMaps

BATCH_ROWS = 1024
LIMITS = {"fp32": 1e-6, "bf16": 2e-3, "int8": 2e-3, "int4": 5e-2}
"""Largest difference of a probability, by the dtype of the tables."""
OTHER_LIMIT = 2e-5
"""Likewise of machine code of a GPU and of ONNX Runtime, where products are added in another order."""

WIDER = {
    "int4": ("dtype=int8", "dtype=bf16"),
    "int8": ("dtype=bf16", "dtype=fp32"),
    "bf16": ("dtype=fp32",),
}
BUG = "report this as a bug"
DIVERGED = (
    "the training has diverged; export an earlier checkpoint, or train with a smaller optimizer.lr"
)


@dataclass(frozen=True, slots=True)
class Proof:
    """Comparison of two paths.

    `largest_difference`: of all scores; of a task that is not binary, relative to numbers above 1.
    """

    split: str
    rows: int
    largest_difference: float
    limit: float


def proof_batches(
    source: Source, split: str, num_rows: int, key_maps: "KeyMaps | None" = None
) -> list[Batch]:
    """Return the first rows of a split; `key_maps` have the rows of raw keys.

    Raises ValueError: there is no such split, or it is empty.
    """
    available = min(num_rows, source.num_rows(split))
    if not available:
        raise ValueError(f"split={split} has no rows to prove the export with; name another")
    settings = LoaderSettings(batch_size=min(BATCH_ROWS, available), workers=1, prefetch=1)
    with closing(Loader(source, split, settings, key_maps=key_maps)) as loader:
        return list(loader.batches(0, -(-available // settings.batch_size)))


def looked_up_rows(
    tables: "Sequence[EmbeddingBagConfig]", batches: Sequence[Batch]
) -> dict[str, np.ndarray]:
    """Return the numbers of the rows that batches look up by table, ascending, int64; at least one."""
    found = {}
    for table in tables:
        features = [batch.feature(name) for batch in batches for name in table.feature_names]
        ids = [feature.values().numpy().astype(np.int64) for feature in features]
        found[table.name] = np.unique(np.concatenate([np.zeros(1, np.int64), *ids]))
    return found


class TrainingPath(RankingModel):
    """Plain PyTorch model on the rows of the tables that were looked up: ids are replaced by their index among these rows."""

    def __init__(
        self,
        tables: "Sequence[EmbeddingBagConfig]",
        numbers: dict[str, np.ndarray],
        rows: dict[str, Tensor],
        dense: Model,
        tasks: Sequence[Task],
        spec: FeatureSpec,
    ) -> None:
        small = [replace(table, num_embeddings=len(numbers[table.name])) for table in tables]
        handed_out = [table.name for table in tables if hands_out_rows(table, spec)]
        super().__init__(small, dense, None, handed_out, spec.sequences)
        self.load_state_dict(
            {f"tables.{name}": values for name, values in rows.items()}, strict=False
        )
        self._numbers = {name: torch.from_numpy(rows) for name, rows in numbers.items()}
        self._tasks = tasks

    def _ids_of(self, table: str, feature: str, batch: Batch) -> "JaggedTensor":
        from torchrec.sparse.jagged_tensor import JaggedTensor

        ids = batch.feature(feature)
        positions = torch.searchsorted(self._numbers[table], ids.values().long())
        return JaggedTensor(positions, lengths=ids.lengths())

    def scores(self, batch: Batch) -> Tensor:
        """Return the predictions of a batch, [B, tasks]."""
        with torch.no_grad():
            logits = self(batch)
        check_logits(self._tasks, logits, batch.labels)
        columns = []
        for index, task in enumerate(self._tasks):
            shifted = task.shifted(column_of(logits, index), batch.keep_rates)
            columns.append(shifted.sigmoid() if task.is_binary else shifted)
        return torch.stack(columns, dim=1)


def prove(
    batches: Sequence[Batch],
    path: TrainingPath,
    served: ServedModel,
    split: str,
    *,
    elsewhere: bool = False,
) -> Proof:
    """Compare the scores of both paths.

    `elsewhere`: whether the dense component of `served` runs on a GPU, or in ONNX Runtime. Raises ValueError: they differ by
    more than the dtype of the tables allows, or are not finite.
    """
    limit = LIMITS[served.manifest.dtype]
    if elsewhere:
        limit = max(limit, OTHER_LIMIT)
    pairs = ((path.scores(batch), served.scores(rows_of(batch, served))) for batch in batches)
    return compared(pairs, split, served.manifest.dtype, limit)


def compared(pairs: Iterable[tuple[Tensor, Tensor]], split: str, dtype: str, limit: float) -> Proof:
    """Compare the scores of the training path and those of what was written, [rows, tasks] each.

    Raises ValueError: they differ by more than that, or are not finite.
    """
    largest, num_rows = 0.0, 0
    for wanted, got in pairs:
        # First: a comparison with nan is never true, so the largest of several differences would hide it.
        sides = (wanted, "the training path", DIVERGED), (got, "the export", BUG)
        for scores, by, remedy in sides:
            is_bad = ~scores.isfinite()
            if is_bad.any():
                row, task = (int(index) for index in is_bad.nonzero()[0])
                raise ValueError(
                    f"row {num_rows + row:,} of split {split} has the score {float(scores[row, task])} by {by}, want a finite "
                    f"number; nothing was written: {remedy}"
                )
        # Relative to numbers above 1.
        largest = max(largest, float(((wanted - got).abs() / wanted.abs().clamp(min=1)).max()))
        num_rows += len(wanted)
    if not largest <= limit:
        wider = f"export with {' or '.join(WIDER[dtype])}" if dtype in WIDER else BUG
        raise ValueError(
            f"the export differs from the training path by {largest:.2e} on {num_rows:,} rows of split {split}, want at most "
            f"{limit:g} with dtype={dtype}; nothing was written: {wider}"
        )
    return Proof(split, num_rows, largest, limit)


def rows_of(batch: Batch, served: ServedModel) -> Rows:
    size = len(batch.numerical)
    fixed = [batch.feature(f.name).values().view(size, -1).long() for f in served.manifest.fixed]
    ids = torch.cat(fixed, dim=1) if fixed else torch.zeros(size, 0, dtype=torch.int64)
    ragged = {
        feature.name: RaggedIds(ids.values().long(), ids.lengths().long())
        for feature in served.manifest.ragged
        for ids in (batch.feature(feature.name),)
    }
    # A batch has those of all groups of the dataset, and so has the manifest if it has any.
    columns = [
        (name, ragged[of.features[0]].lengths)
        for of in served.manifest.sequences
        for name in of.numbers
    ]
    events = batch.events if columns else ()
    numbers = {
        name: RaggedIds(values, lengths)
        for (name, lengths), values in zip(columns, events, strict=True)
    }
    return Rows(batch.numerical, ids, ragged, batch.keep_rates, numbers)
