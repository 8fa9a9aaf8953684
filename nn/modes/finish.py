"""The end of a training: its last checkpoint, the final evaluation and the summary."""

import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nn.baseline import baseline, most_rows
from nn.build import TRAIN_SPLIT
from nn.checkpoint.directory import CHECKPOINTS, list_checkpoints, step_of
from nn.distributed.errors import DivergedError, SharedError, StoppedError
from nn.distributed.process_group import Ranks
from nn.observability.records import FINAL, PROBLEM, UNSAVED
from nn.observability.run_directory import LAST_AUC, LAUNCHED, RESULT_STEP
from nn.session import Session
from nn.training.evaluator import described_predictions
from nn.training.train_records import peak_hbm_bytes
from nn.training.trainer import Trainer


@contextmanager
def finishes_writing(trainer: Trainer, ranks: Ranks) -> Iterator[None]:
    """After an error, wait for the files that are being written."""
    try:
        yield
    except BaseException as error:
        # If all ranks have this error, the checkpoint will be complete; if not, waiting for the others may never end.
        is_shared = isinstance(error, DivergedError | SharedError | StoppedError)
        if is_shared or ranks.world_size == 1:
            trainer.finish_files()
        raise


def finish_training(session: Session, trainer: Trainer) -> tuple[dict[str, Any], str | None]:
    """Save the last checkpoint, and record the result.

    Returns the summary, and why that checkpoint could not be written, or None.
    """
    ranks, problem = session.ranks, None
    if trainer.saving is not None:
        if not trainer.is_saved:
            trainer.save(is_last=True)
        problem = trainer.saving.manager.wait()
    summary = _result(session, trainer)
    summary["teacher_auc"] = session.teacher_auc
    summary[UNSAVED] = problem
    if session.step.tables.has_disk_tables:
        stored, full = session.step.tables.disk_bytes()
        # Linux counts kilobytes.
        host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        summary |= {
            "tier_disk_peak_bytes": stored,
            "tier_disk_full_bytes": full,
            "peak_host_bytes": host,
        }
        if ranks.is_rank0:
            session.logger.info(
                f"tables on disk: {stored / 2**30:,.3f} GiB at their peak, {full / 2**30:,.3f} GiB with all rows; "
                f"{host / 2**30:,.3f} GiB of host memory at the peak of rank 0"
            )

    def finish() -> None:
        summary.update(_baseline(session, summary))
        best = summary["best_step"]
        steps = [step_of(path) for path in list_checkpoints(session.recorder.run_dir / CHECKPOINTS)]
        summary["checkpoint"] = f"{CHECKPOINTS}/step_{steps[0]}" if steps else None
        summary["best_checkpoint"] = f"{CHECKPOINTS}/step_{best}" if best in steps else None
        session.recorder.finish(summary, pictures=session.config.log.pictures)

    # The summary comes last: a run that is killed before it has not finished.
    ranks.run_on_rank0(finish)
    if problem is None:
        return summary, None
    latest = ranks.broadcast_object(summary.get("checkpoint"))
    return summary, (
        f"the checkpoint could not be written below {session.recorder.run_dir / CHECKPOINTS}: {problem}; the run's other "
        "results are there. Free some space and rerun the same command, which trains "
        f"{'from the start' if latest is None else f'from {latest}'} again, or set checkpoint.save=false"
    )


def _result(session: Session, trainer: Trainer) -> dict[str, Any]:
    """Make the final evaluation, of the best model under `eval.patience`, and return the summary.

    The last checkpoint must have been written: the state that was trained last may be gone afterwards.

    Raises SharedError: the best checkpoint cannot be read.
    """
    trainer.observers.tell("on_end", trainer)
    config, recorder, evaluator = session.config, session.recorder, trainer.evaluator
    state, model_step = trainer.state, trainer.num_steps
    if config.eval.patience is not None and state.best_step not in (None, model_step):
        assert trainer.saving is not None
        assert state.best_step is not None
        if trainer.saving.manager.load_best(state.best_step):
            model_step = state.best_step
    if model_step == trainer.num_steps and not evaluator.has_final:
        summary = _summary(session, trainer, state.test)
        # A loop of the caller's own may end without an evaluation.
        if state.test.get("step", model_step) != model_step:
            summary[RESULT_STEP] = state.test["step"]
        return summary
    measured = evaluator.run(trainer.progress, is_final=True)
    record = trainer.head_of_record(model_step) | measured
    trainer.observers.tell("on_evaluation", trainer, record, is_final=True)
    problem = evaluator.problem
    of_problem = {} if problem is None else {PROBLEM: problem}
    recorder.write(FINAL, record | of_problem | {FINAL: True})
    recorder.write_predictions(described_predictions(config, evaluator, model_step))
    name = "final" if model_step == trainer.num_steps else "final, best model"
    trainer.progress.show_test(record, model=name, problem=problem)
    last_auc = state.test.get(trainer.auc_key(state.test))
    return _summary(session, trainer, record) | {RESULT_STEP: model_step, LAST_AUC: last_auc}


def _summary(session: Session, trainer: Trainer, test: Mapping[str, Any]) -> dict[str, Any]:
    state, step, problem = trainer.state, session.step, trainer.evaluator.problem
    return {
        "recipe": session.config.recipe,
        "steps": trainer.num_steps,
        "epochs": trainer.epoch(),
        "stopped": trainer.stopped,
        **{metric.test_key: test.get(metric.test_key) for metric in session.metrics},
        "test_rows": test.get("test_rows"),
        "split": session.config.eval.split,
        trainer.best_metric.best_key: state.best_value,
        "best_step": state.best_step,
        "first_step": state.first_step,
        **state.first_auc,
        **state.day.label,
        **state.other_days,
        **({} if problem is None else {PROBLEM: problem}),
        **trainer.records.speed.run(),
        "peak_hbm_bytes": peak_hbm_bytes(session.ranks),
        # Where others are captured.
        **({} if step.capture_blocker else {LAUNCHED: step.runner.num_launched}),
    }


def _baseline(session: Session, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of the baseline that `eval.baseline` asks for, or that a small dataset has without; else nothing."""
    config, source = session.config, session.source
    rows = source.num_rows(TRAIN_SPLIT) + source.num_rows(config.eval.split)
    most = most_rows(source.spec)
    is_small = config.data.path is not None and rows <= most and not session.start.day.number
    if not (is_small if config.eval.baseline is None else config.eval.baseline):
        return {}
    num_test, num_trained = summary["test_rows"] or 0, summary["steps"] * config.train.batch_size
    if num_test > most:
        session.logger.info(
            f"note: no baseline: {num_test:,} rows were evaluated, and it is for at most {most:,}"
        )
        return {}
    try:
        return baseline(source, session.step.tasks, config.eval.split, num_test, num_trained)
    except Exception as error:  # the result of a complete training is not lost with it
        session.logger.warning(f"no baseline: {error!r}")
        return {}
