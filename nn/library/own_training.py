"""A training whose loop the caller writes: next batch, step, evaluate, save."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any, Self

import torch
import yaml
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from configs.messages import shown
from configs.option_values import plain_values
from configs.schema import Config, Mode
from dataloading.batch import Batch
from dataloading.dataset.feature_spec import FeatureSpec
from nn.checkpoint.directory import CHECKPOINTS
from nn.distributed.process_group import process_rank
from nn.early_checks import check_inputs
from nn.library.torch_state import check_torch_state
from nn.library_warnings import quiet_libraries
from nn.modes.finish import finish_training, finishes_writing
from nn.modes.train import open_training
from nn.observability.console import make_console
from nn.observability.mlperf_log import now_ms
from nn.observability.run_directory import RESULT_STEP
from nn.observers.choice import check_events
from nn.observers.observer import Observer
from nn.session import Session, open_session
from nn.training.prefetch import Prefetcher
from nn.training.trainer import Trainer
from nn.versions import require_stack


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """Loss, logits and batch of a training step, as `StepResult` has them; the logits stay as they are."""

    loss: float
    logits: Tensor
    _batch: Batch
    _spec: FeatureSpec
    _training: "Training"
    _num_steps: int

    @property
    def batch(self) -> dict[str, Tensor | JaggedTensor]:
        """The batch as `Training.batch` names its tensors, on the device.

        Raises ValueError: it is on a GPU, and the next step has overwritten it.
        """
        if self.logits.is_cuda and self._training.num_steps != self._num_steps:
            raise ValueError(
                "a later step has overwritten this batch; take it, and clone what you keep, before the next step()"
            )
        return named_tensors(self._batch, self._spec)


class Training:
    """The objects of a training run, without its loop; a context manager.

    Everything else is as with the command: run directory, records every `log.every` steps, checkpoints by
    `checkpoint.save_every` and by the clock, a checkpoint on SIGTERM, and a run that resumes from the latest checkpoint of its
    `run_dir`. Under torchrun every rank runs the same loop.
    """

    def __init__(
        self, config: Config, *, quiet: bool = False, observers: Sequence[Observer] = ()
    ) -> None:
        if config.mode is not Mode.train:
            raise ValueError(f"mode={config.mode.value} is no training; set mode=train")
        self._config = config
        self._quiet = quiet
        self._observers = {
            f"{type(observer).__qualname__} ({number})": observer
            for number, observer in enumerate(observers)
        }
        for name, observer in self._observers.items():
            check_events(name, observer)
        self._stack = ExitStack()
        self._opened: tuple[Session, Trainer] | None = None
        self._prefetcher: Prefetcher | None = None
        self._is_finished = False

    def __enter__(self) -> Self:
        """Open the run; ValueError: an invalid option or input, or a run directory that holds the complete run already."""
        config = self._config
        check_inputs(config)
        # Weights that are made in inference mode can never be trained; of no_grad each step asks again.
        check_torch_state(trains=torch.is_inference_mode_enabled())
        if current_thread() is not main_thread():
            warnings.warn(
                "a training outside of the main thread saves nothing at SIGTERM", stacklevel=2
            )
        require_stack()
        quiet_libraries()
        with ExitStack() as stack:
            started_ms = now_ms()
            console = make_console(process_rank())
            console.quiet |= self._quiet
            text = yaml.safe_dump(plain_values(config), sort_keys=False)
            session = stack.enter_context(open_session(config, text, console))
            if session is None:
                raise ValueError(
                    f"run_dir={config.run_dir} holds the complete run already; set another run_dir, or raise train.epochs or "
                    "train.max_steps"
                )
            trainer = stack.enter_context(open_training(session, started_ms, self._observers))
            stack.enter_context(finishes_writing(trainer, session.ranks))
            self._directory = Path.cwd()
            self._opened = session, trainer
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened = None
        self._stack.__exit__(*exception)

    @property
    def run_dir(self) -> Path:
        return self._session.recorder.run_dir

    @property
    def spec(self) -> FeatureSpec:
        return self._session.source.spec

    @property
    def num_steps(self) -> int:
        """Updates made so far; those of earlier starts count too."""
        return self._trainer.num_steps

    @property
    def last_step(self) -> int:
        """Updates of the complete run, by `train.epochs` and `train.max_steps`."""
        return self._trainer.last_step

    @property
    def steps_per_epoch(self) -> int:
        loader = self._session.loaders.train
        assert loader is not None
        return loader.steps_per_epoch

    @property
    def learning_rate(self) -> float:
        """The learning rate of the dense component in the latest step."""
        return self._session.step.learning_rate

    def set_schedule(self, factor: Callable[[int], float]) -> None:
        """Replace `scheduler`: the learning rate of a step is `factor(step)` times `optimizer.lr`; steps count from 0."""
        self._session.step.schedule = factor

    def batch(self, step: int | None = None) -> dict[str, Tensor | JaggedTensor]:
        """Read this rank's batch of a step, by default the next one, as named tensors on the host; it is not trained.

        The batch is a function of seed and step, so any can be read at any time. Raises ValueError: run or day has no such step.
        """
        loader, day = self._session.loaders.train, self._trainer.state.day
        assert loader is not None
        step = self.num_steps if step is None else step
        if type(step) is not int or not day.first_step <= step < self.last_step:
            raise ValueError(
                f"there is no batch of step {shown(step)}; want {day.first_step:,} to {self.last_step - 1:,}"
            )
        return named_tensors(loader.batch(day.position(step)), self.spec)

    def step(self) -> TrainedStep:
        """Train on the next batch; return it with its loss and logits.

        Raises ValueError: all steps are done, or `finish` was called. Raises DivergedError: the loss is not finite; nothing
        was updated. Raises StoppedError: a signal stopped the run, after a checkpoint.
        """
        session, trainer = self._at_work(trains=True)
        if trainer.num_steps >= trainer.last_step:
            raise ValueError(
                f"all {trainer.last_step:,} steps are done; raise train.epochs or train.max_steps"
            )
        if self._config.data.watch_dir is not None:
            raise ValueError("data.watch_dir waits for rows in train(); call it, not step()")
        prefetcher = self._started()
        if trainer.num_steps > session.start.num_steps:
            # Before a step, so that the checkpoint of the one before has its evaluation.
            trainer.between_steps()
        with trainer.writing_late_record():
            trainer.begin_step()
            trained = session.step.train(trainer.num_steps, prefetcher)
        # The memory of a CUDA graph is written again.
        logits = trained.logits.clone() if trained.logits.is_cuda else trained.logits
        trainer.finish_step(trained, prefetcher)
        return TrainedStep(trained.loss, logits, trained.batch, self.spec, self, trainer.num_steps)

    def evaluate(self) -> dict[str, Any]:
        """Evaluate on `eval.split`, write the record, and return it, such as `test_auc` and `test_log_loss`."""
        _, trainer = self._at_work()
        return trainer.evaluate() if self._prefetcher is None else trainer.evaluate_between_steps()

    def save(self) -> Path:
        """Write a checkpoint, from which the command and this class resume, and return its directory.

        Raises ValueError: the run saves none. Raises OSError: it could not be written.
        """
        session, trainer = self._at_work()
        self._started()
        trainer.save()
        assert trainer.saving is not None, "checked by the trainer"
        problem = trainer.saving.manager.wait()
        if problem is not None:
            raise OSError(problem)
        return session.recorder.run_dir / CHECKPOINTS / f"step_{trainer.num_steps}"

    def train(self) -> dict[str, Any]:
        """Train all steps, with the evaluations and checkpoints of the command, and finish; the last call.

        Raises ValueError: `step` or `save` was called before.
        """
        session, trainer = self._at_work(trains=True)
        if self._prefetcher is not None:
            raise ValueError(
                "steps were trained one by one; call step() for the others, or train() alone"
            )
        self._is_finished = True
        trainer.train()
        return self._finished(session, trainer)

    def finish(self) -> dict[str, Any]:
        """Save the last checkpoint, draw the curves, write summary.json, and return its content; the last call."""
        session, trainer = self._at_work()
        prefetcher = self._started()
        self._is_finished = True
        trainer.end(prefetcher)
        summary = self._finished(session, trainer)
        if not trainer.state.test and RESULT_STEP not in summary:
            warnings.warn(
                "the loop made no evaluation, so its result has no metric; call evaluate() before finish()",
                stacklevel=2,
            )
        return summary

    def _started(self) -> Prefetcher:
        """Return the batches of the remaining steps, which begin to be read at the first call."""
        if self._prefetcher is None:
            self._prefetcher = self._trainer.start()
        return self._prefetcher

    @staticmethod
    def _finished(session: Session, trainer: Trainer) -> dict[str, Any]:
        summary, problem = finish_training(session, trainer)
        if problem is not None:
            raise OSError(problem)
        return summary

    def _at_work(self, *, trains: bool = False) -> tuple[Session, Trainer]:
        check_torch_state(trains=trains)
        if self._is_finished:
            raise ValueError("the run is finished; open another one to train on")
        session, trainer = self._open()
        paths = str(self.run_dir), self._config.data.path or "/"
        is_fixed = all(path.startswith("/") or "://" in path for path in paths)
        if not is_fixed and Path.cwd() != self._directory:
            raise ValueError(
                f"the working directory is {Path.cwd()}, and the run's relative paths begin in {self._directory}, in which it "
                "was opened; change back, or make run_dir and data.path absolute"
            )
        return session, trainer

    def _open(self) -> tuple[Session, Trainer]:
        if self._opened is None:
            raise ValueError("the training is not open; write `with Training(config) as training:`")
        return self._opened

    @property
    def _session(self) -> Session:
        return self._open()[0]

    @property
    def _trainer(self) -> Trainer:
        return self._open()[1]


def named_tensors(batch: Batch, spec: FeatureSpec) -> dict[str, Tensor | JaggedTensor]:
    """Return the columns of a batch by name, without padding rows; they share memory with the batch.

    Returns labels, weight, keep rate and numerical features as float32 [B]; ids as integers [B], or [B, hotness] of a feature
    with several; those of a ragged feature, and numbers of events, as a `JaggedTensor`.
    """
    rows = batch.num_valid
    labels = [batch.labels] if batch.labels.dim() == 1 else [*batch.labels.unbind(1)]
    single = [values for values in (batch.weights, batch.keep_rates) if values is not None]
    named: dict[str, Tensor | JaggedTensor] = {
        column.name: values[:rows]
        for column, values in zip(
            spec.row_columns, [*labels, *single, *batch.teachers.values()], strict=True
        )
    }
    for column, name in enumerate(spec.numerical):
        named[name] = batch.numerical[:rows, column]
    for feature in spec.categorical:
        ids = batch.feature(feature.name)
        if feature.hotness is None:
            named[feature.name] = JaggedTensor(ids.values(), lengths=ids.lengths()[:rows])
        elif len(ids.values()) == rows:
            named[feature.name] = ids.values()
        else:
            named[feature.name] = ids.values().view(rows, -1)
    events = iter(batch.events)
    for group in spec.sequences:
        lengths = batch.feature(group.features[0]).lengths()[:rows]
        for number in group.numbers:
            named[number.name] = JaggedTensor(next(events), lengths=lengths)
    return named
