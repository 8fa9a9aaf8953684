"""A baseline on the rows of a run: logistic regression on the ids, by FTRL-proximal (McMahan et al. 2013), on one core.

Numbers are ids too, of bins between their quantiles. Three learning rates are trained at once, for several passes; the
rate and the number of passes with the least log loss on the last tenth of the training rows then train all of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.source import Columns, Source, read_with_keys
from nn.metrics.grouped_auc import weighted_auc
from nn.models.tasks import Task
from nn.observability.records import BASELINE

# C: models, a learning rate and a label each; S: weights of a model; T: binary labels

MOST_ROWS = 1_000_000
"""A dataset of more rows gets a baseline only if it is asked for, however few ids its rows have."""
RATES, L2, BETA = (0.05, 0.15, 0.5), (3.0, 3.0, 1.0), 1.0
BATCH_ROWS, PARTS = 1024, 64
"""A batch has rows of so many parts of the data, since neighbours may be alike."""
MOST_PASSES, MOST_IDS = 6, 75_000_000
"""The passes of the choice read at most so many ids, in about 10 s; of more rows, evenly spread ones are trained."""
MOST_HELD_IDS = 4 * MOST_IDS
"""Of the rows that it is measured on, which lie in memory with 8 bytes an id."""
MOST_WEIGHTS, KEYS, BINS = 1 << 23, 1_048_573, 64


@dataclass(frozen=True, slots=True)
class _Batch:
    """The ids of some rows: the index of its weight [N] and the row of each; labels [B, T], weights [B, 1], keep rates."""

    indices: Tensor
    row: Tensor
    labels: Tensor
    weights: Tensor
    keep_rates: Tensor | None

    def logits(self, weights: Tensor, indices: Tensor) -> Tensor:
        """Return the sums [B, C] of weights [S, C], which are at `indices` [N]."""
        logits = torch.zeros(len(self.labels), weights.shape[1])
        return logits.index_add_(0, self.row.long(), weights[indices])


def most_rows(spec: FeatureSpec) -> int:
    """Return how many rows a dataset may have that gets a baseline without being asked, and a split that it is measured on."""
    return min(MOST_ROWS, int(MOST_HELD_IDS / _ids_per_row(spec)))


def _ids_per_row(spec: FeatureSpec) -> float:
    return 1 + len(spec.numerical) + sum(f.mean_hotness for f in spec.categorical)


def baseline(
    source: Source, tasks: Sequence[Task], split: str, num_test: int, num_trained: int
) -> dict[str, Any]:
    """Return AUC and log loss of a logistic regression, by `BASELINE` and the key of the metric; empty without a binary label.

    `num_test`: rows of the split that the run was measured on, its first ones. `num_trained`: rows that it has trained. The
    same rows give the same numbers.
    """
    binary = [index for index, task in enumerate(tasks) if task.is_binary]
    most = int(MOST_IDS / _ids_per_row(source.spec))
    most_fitted = most // max(len(binary), 1)
    num_rows = min(source.num_rows("train"), num_trained, most_fitted)
    if not binary or num_rows < 2 * PARTS or not num_test:
        return {}
    threads = torch.get_num_threads()
    # The order of a sum depends on the number of threads.
    torch.set_num_threads(1)
    try:
        rows = _Rows(source, binary, most)
        fitted = rows.batches("train", source.num_rows("train"), num_rows)
        passes = min(max(most_fitted // num_rows, 1), MOST_PASSES)
        trained = _trained(fitted, rows.num_weights, passes)
        tested = rows.batches(split, num_test, num_test)
    finally:
        torch.set_num_threads(threads)
    logits = torch.cat([batch.logits(trained, batch.indices) for batch in tested])
    labels, weights = (
        torch.cat([getattr(b, name) for b in tested]) for name in ("labels", "weights")
    )
    rates = [batch.keep_rates for batch in tested if batch.keep_rates is not None]
    result: dict[str, Any] = {f"{BASELINE}rows": sum(len(batch.labels) for batch in fitted)}
    for column, index in enumerate(binary):
        task = tasks[index]
        # This loss has no weight of positive rows to correct.
        plain = replace(task, options=replace(task.options, positive_weight=1.0))
        shifted = plain.shifted(logits[:, column], torch.cat(rates) if rates else None)
        loss = _losses(shifted[:, None], labels[:, [column]], weights).item()
        auc = weighted_auc(shifted, labels[:, column] > 0.5, weights[:, 0])
        for metric in task.metrics:
            if metric.name in ("auc", "log_loss"):
                result[f"{BASELINE}{metric.test_key}"] = auc if metric.name == "auc" else loss
    return result


class _Rows:
    """Rows of a source as batches, whose numbers, ids and keys have indices among `num_weights` weights."""

    def __init__(self, source: Source, binary: Sequence[int], most: int) -> None:
        self._source, self._binary, spec = source, binary, source.spec
        first = np.array([[0, min(source.num_rows("train"), BATCH_ROWS * BINS, most)]])
        numerical = source.read("train", first).numerical
        quantiles = np.linspace(0, 1, BINS + 1)[1:-1]
        self._edges = [np.unique(np.quantile(column, quantiles)) for column in numerical.T]
        sizes = [1, *(len(edges) + 1 for edges in self._edges)]
        sizes += [KEYS if f.is_dynamic else f.cardinality for f in spec.categorical]
        self._offsets = [0, *np.cumsum(sizes).tolist()]
        self.num_weights = min(self._offsets[-1], MOST_WEIGHTS)

    def batches(self, split: str, available: int, wanted: int) -> list[_Batch]:
        """Return the first `available` rows of a split, or about `wanted` evenly spread ones; those held out come last."""
        number, most = max(-(-wanted // BATCH_ROWS), 2), BATCH_ROWS // PARTS
        edges = np.linspace(0, available, PARTS * number + 1).astype(np.int64)
        runs = np.stack([edges[:-1], np.minimum(edges[:-1] + most, edges[1:])], axis=1)
        border = PARTS * _border(number)
        parts = (
            part.reshape(PARTS, -1, 2).swapaxes(0, 1) for part in (runs[:border], runs[border:])
        )
        return [
            self._batch(read_with_keys(self._source, split, of_batch))
            for of_batch in np.concatenate([*parts])
            if (of_batch[:, 1] > of_batch[:, 0]).any()
        ]

    def _batch(self, columns: Columns) -> _Batch:
        count = len(columns.labels)
        ids = [np.zeros(count, np.int64)]
        for edges, numbers in zip(self._edges, columns.numerical.T, strict=True):
            ids.append(np.searchsorted(edges, numbers, side="right"))
        lengths = [np.ones(count, np.int64)] * len(ids)
        features = zip(self._source.spec.categorical, columns.ids, columns.lengths, strict=True)
        for feature, values, of_rows in features:
            ids.append(values % KEYS if feature.is_dynamic else values.astype(np.int64))
            lengths.append(np.full(count, len(values) // count) if of_rows is None else of_rows)
        placed = [values + offset for values, offset in zip(ids, self._offsets, strict=False)]
        rows = [np.repeat(np.arange(count), number) for number in lengths]
        weights = np.ones(count, np.float32) if columns.weights is None else columns.weights
        rates = columns.keep_rates
        return _Batch(
            torch.from_numpy((np.concatenate(placed) % self.num_weights).astype(np.int32)),
            torch.from_numpy(np.concatenate(rows).astype(np.int32)),
            torch.from_numpy(columns.labels.reshape(count, -1)[:, list(self._binary)]),
            torch.from_numpy(weights[:, None]),
            None if rates is None else torch.from_numpy(rates),
        )


def _border(number: int) -> int:
    """Return the first of some batches that is held out."""
    return max(number * 9 // 10, 1)


class _Ftrl:
    """Weights [S, C] of models with a learning rate and an L2 each."""

    def __init__(self, size: int, rates: Sequence[float], l2: Sequence[float]) -> None:
        self._sums, self._squares = torch.zeros(2, size, len(rates))
        self._rates, self._l2 = torch.tensor(rates), torch.tensor(l2)

    def weights(self, indices: Tensor | slice) -> Tensor:
        """Return weights, [n, C]."""
        return -self._sums[indices] / (
            (BETA + self._squares[indices].sqrt()) / self._rates + self._l2
        )

    def train(self, batches: Sequence[_Batch], columns: Tensor, seed: int) -> None:
        """Train on each batch once; `columns` [C] are the labels of the models."""
        for index in torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed)):
            batch = batches[index]
            indices, inverse = batch.indices.unique(return_inverse=True)
            weights, squares = self.weights(indices), self._squares[indices]
            errors = batch.logits(weights, inverse).sigmoid() - batch.labels[:, columns]
            errors *= batch.weights
            gradient = torch.zeros_like(weights).index_add_(0, inverse, errors[batch.row])
            later = squares + gradient.square()
            self._sums[indices] += (
                gradient - (later.sqrt() - squares.sqrt()) / self._rates * weights
            )
            self._squares[indices] = later


def _trained(batches: Sequence[_Batch], size: int, passes: int) -> Tensor:
    """Return the weights [S, T] of the best rate and number of passes of each label."""
    num_labels, border = batches[0].labels.shape[1], _border(len(batches))
    fitted, held_out = batches[:border], batches[border:]
    columns = torch.arange(num_labels).repeat_interleave(len(RATES))
    ftrl = _Ftrl(size, RATES * num_labels, L2 * num_labels)
    labels, row_weights = (
        torch.cat([getattr(b, name) for b in held_out]) for name in ("labels", "weights")
    )
    best = [(math.inf, 0, 0)] * num_labels
    for number in range(passes):
        ftrl.train(fitted, columns, number)
        logits = [b.logits(ftrl.weights(b.indices), torch.arange(len(b.indices))) for b in held_out]
        losses = _losses(torch.cat(logits), labels[:, columns], row_weights)
        parts = losses.split(len(RATES))
        found = [(float(part.min()), int(part.argmin()), number + 1) for part in parts]
        if all(now >= before for now, before in zip(found, best, strict=True)):
            break
        best = [min(pair) for pair in zip(best, found, strict=True)]
    trained = []
    for label, (_, rate, count) in enumerate(best):
        one = _Ftrl(size, [RATES[rate]], [L2[rate]])
        for number in range(count):
            one.train(batches, torch.tensor([label]), number)
        trained.append(one.weights(slice(None)))
    return torch.cat(trained, dim=1)


def _losses(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return the mean log loss of each column [C], float64."""
    losses = softplus(torch.where(labels > 0.5, -logits, logits)).double()
    return (losses * weights).sum(0) / weights.double().sum()
