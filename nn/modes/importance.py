"""`mode=importance`: how much worse a checkpoint gets when a feature is that of other rows.

Breiman 2001 (Random Forests), section 10, on a split that was not trained on. The values of one feature are permuted over
the rows of the split, so that they keep their distribution and lose their relation to the label and to all other
features. Features that carry the same information hide each other's importance.
"""

import csv
import io
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, pstdev
from typing import Any

from configs.schema import Config
from dataloading.dataset.source import Source
from dataloading.permuted_source import BLOCK_ROWS, PermutedSource
from nn.distributed.errors import DivergedError
from nn.models.metric import Metric
from nn.observability.console import print_importance
from nn.plots.importance import draw_importance
from nn.session import open_session


def importance(config: Config, config_yaml: str) -> None:
    with open_session(config, config_yaml) as session:
        if session is None:
            return
        split, metrics, logger = config.eval.split, session.metrics, session.logger
        rows = session.source.num_rows(split)
        if rows > BLOCK_ROWS:
            logger.info(
                f"note: split '{split}' has {rows:,} rows; features are permuted within blocks of {BLOCK_ROWS:,} rows"
            )

        def evaluate(source: Source) -> dict[str, Any]:
            evaluator = session.evaluator_of(source, split, stored=session.source)
            record = evaluator.run()
            if evaluator.problem is not None:
                raise DivergedError(evaluator.problem)
            return record

        measured = measure_importance(
            session.source,
            split,
            evaluate,
            metrics,
            seed=config.seed,
            repeats=config.eval.importance_repeats,
            report=lambda name, done, total: logger.info(f"feature {done + 1}/{total}: {name}"),
        )
        print_importance(session.console, measured)
        facts = {"model": config.model.name, "data": config.data.path}
        draw = partial(draw_importance, measured, metrics[0], facts)
        session.recorder.write_importance(
            measured, as_csv(measured), draw if config.log.pictures else None
        )
        session.finish({m.test_key: measured["unpermuted"][m.key] for m in metrics})


def measure_importance(
    source: Source,
    split: str,
    evaluate: Callable[[Source], dict[str, Any]],
    metrics: Sequence[Metric],
    *,
    seed: int,
    repeats: int,
    report: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> dict[str, Any]:
    """Evaluate the model with each feature permuted in turn.

    `evaluate`: evaluates the model on a source's rows; all ranks must call it. `report`: called before each feature with its
    name, the features done and their number.

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
