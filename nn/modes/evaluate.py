"""`mode=eval`: the metrics of a checkpoint on a split."""

from typing import Any

from configs.schema import Config
from nn.observability.progress import Progress
from nn.observability.records import PROBLEM, TEST
from nn.session import open_session
from nn.training.evaluator import described_predictions


def evaluate(config: Config, config_yaml: str) -> None:
    with open_session(config, config_yaml) as session:
        if session is None:
            return
        num_steps, evaluator = session.start.num_steps, session.evaluator()
        with Progress(session.console, session.metrics, num_steps, has_training=False) as progress:
            record: dict[str, Any] = {"step": num_steps, **evaluator.run(progress)}
            progress.show_test(record, problem=evaluator.problem)
        if evaluator.problem is not None:
            record[PROBLEM] = evaluator.problem
        session.recorder.write(TEST, record)
        session.recorder.write_predictions(described_predictions(config, evaluator, num_steps))
        session.finish(record)
