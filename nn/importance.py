"""Importance of features by permutation: how much worse a trained model gets when a feature is that of other rows.

Breiman 2001 (Random Forests), section 10, on a split that was not trained on. The values of one feature are permuted over
the rows of the split, so that they keep their distribution and lose their relation to the label and to all other
features. Features that carry the same information hide each other's importance.
"""

import csv
import io
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

from dataloading.dataset.source import Source
from dataloading.permuted_source import BLOCK_ROWS, PermutedSource
from nn.models.metric import Metric

Evaluate = Callable[[Source], dict[str, Any]]
"""Evaluates the model on a source's rows; all ranks must call it."""


def measure_importance(
    source: Source,
    split: str,
    evaluate: Evaluate,
    metrics: Sequence[Metric],
    *,
    seed: int,
    repeats: int,
    report: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> dict[str, Any]:
    """Evaluate the model with each feature permuted in turn.

    `report`: called before each feature with its name, the features done and their number.

    Returns:
        `unpermuted` metrics by key, and `features`: by name, per metric key, the mean and deviation over the repeats of the
        permuted value minus the unpermuted one. The most important features come first, by the first metric.
    """
    spec = source.spec
    unpermuted = evaluate(source)
    names = [*spec.numerical, *(feature.name for feature in spec.categorical)]
    features: dict[str, dict[str, dict[str, float]]] = {}
    for index, name in enumerate(names):
        report(name, index, len(names))
        measured = [
            evaluate(PermutedSource(source, name, (seed, index, repeat)))
            for repeat in range(repeats)
        ]
        features[name] = {}
        for metric in metrics:
            changes = [record[metric.test_key] - unpermuted[metric.test_key] for record in measured]
            features[name][metric.key] = {"mean": fmean(changes), "deviation": pstdev(changes)}
    first = metrics[0]
    sign = 1 if first.larger_is_better else -1
    order = sorted(features, key=lambda name: sign * features[name][first.key]["mean"])
    return {
        "split": split,
        "seed": seed,
        "repeats": repeats,
        "permuted_within_rows": min(BLOCK_ROWS, source.num_rows(split)),
        "unpermuted": {metric.key: unpermuted[metric.test_key] for metric in metrics},
        "features": {name: features[name] for name in order},
    }


def as_csv(importance: dict[str, Any]) -> str:
    """Return the result as a table: one line per feature, two columns per metric."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    keys = list(importance["unpermuted"])
    writer.writerow(
        ["feature", *(f"{key} {number}" for key in keys for number in ("mean", "deviation"))]
    )
    for name, changes in importance["features"].items():
        numbers = [changes[key][number] for key in keys for number in ("mean", "deviation")]
        writer.writerow([name, *(f"{number:.7g}" for number in numbers)])
    return text.getvalue()
