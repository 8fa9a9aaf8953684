"""Scores of a trained model on the rows of other days, as an observer of the loop."""

from dataclasses import dataclass

from nn.build import TRAIN_SPLIT
from nn.distributed.preemption import Heartbeat
from nn.next_day import as_known, open_previous_day
from nn.observability.progress import Progress
from nn.observability.records import DAY, FINAL
from nn.observers.observer import Loop, Observer
from nn.session import Session
from nn.training.evaluator import Evaluator
from nn.training.limits import NEXT, PREVIOUS
from nn.training.loop_state import LoopState, plain_numbers


@dataclass(eq=False)
class DayScores(Observer):
    """Evaluations on the rows of other days than the trained one; they decide nothing.

    The model of the days before is scored on the rows of a new day before these are trained, and the model that the day has
    trained is scored on the day before.
    """

    session: Session
    state: LoopState
    progress: Progress
    heartbeat: Heartbeat | None

    def on_start(self, loop: Loop) -> None:
        """Score the rows of a new day, whose new values the model does not know."""
        session, day = self.session, self.state.day
        if day.is_new:
            known = as_known(session.config, session.source, session.start.checkpoint)
            stored = session.source
            evaluator = session.evaluator_of(known, TRAIN_SPLIT, self.heartbeat, stored)
            self._evaluate(loop, evaluator, NEXT, f"day {day.number}, before it is trained")

    def on_end(self, loop: Loop) -> None:
        """Score the day before, after the last checkpoint: a run of more steps resumes from the state trained last."""
        session, day = self.session, self.state.day
        before = open_previous_day(
            session.config, day, session.source.spec, session.ranks, session.logger
        )
        if before is not None:
            split = session.config.eval.split
            evaluator = session.evaluator_of(before, split, self.heartbeat)
            self._evaluate(loop, evaluator, PREVIOUS, f"day {day.number - 1}")

    def _evaluate(self, loop: Loop, evaluator: Evaluator, which: str, model: str) -> None:
        measured = evaluator.run(self.progress)
        header = {"step": loop.num_steps, "epoch": loop.epoch(), **self.state.day.label}
        numbers = {f"{which}_{key.removeprefix('test_')}": v for key, v in measured.items()}
        del numbers[f"{which}_eval_s"]
        self.state.other_days |= plain_numbers(numbers)
        record = header | numbers | {"eval_s": measured["eval_s"]}
        if which == PREVIOUS:
            record[FINAL] = True
        self.session.recorder.write(DAY, record)
        self.progress.show_test(header | measured, model=model, problem=evaluator.problem)
