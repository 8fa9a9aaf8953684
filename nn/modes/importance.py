"""`mode=importance`: how much worse a checkpoint gets when a feature is permuted."""

from functools import partial
from typing import Any

from configs.schema import Config
from dataloading.dataset.source import Source
from dataloading.permuted_source import BLOCK_ROWS
from nn.distributed.errors import DivergedError
from nn.importance import as_csv, measure_importance
from nn.observability.console import print_importance
from nn.plots.importance import draw_importance
from nn.session import Session, open_session


def importance(config: Config, config_yaml: str) -> None:
    with open_session(config, config_yaml) as session:
        if session is not None:
            _importance(session)


def _importance(session: Session) -> None:
    config = session.config
    split = config.eval.split
    rows = session.source.num_rows(split)
    if rows > BLOCK_ROWS:
        session.logger.info(
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
        session.metrics,
        seed=config.seed,
        repeats=config.eval.importance_repeats,
        report=lambda name, done, total: session.logger.info(f"feature {done + 1}/{total}: {name}"),
    )
    print_importance(session.console, measured)
    facts = {"model": config.model.name, "data": config.data.path}
    draw = partial(draw_importance, measured, session.metrics[0], facts)
    session.recorder.write_importance(
        measured, as_csv(measured), draw if config.log.pictures else None
    )
    unpermuted = {metric.test_key: measured["unpermuted"][metric.key] for metric in session.metrics}
    session.finish(unpermuted)
