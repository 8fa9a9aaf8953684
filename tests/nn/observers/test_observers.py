"""Observers of the training loop from outside the project: by an option, and in the library."""

import json
from time import sleep

import pytest

from nn.distributed.errors import DivergedError
from nn.library.options import options
from nn.library.own_training import Training
from nn.observers.observer import Observer
from nn.training.train_records import LATE_STEPS
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import needs_gpus

QUIET = ["log.loggers=[]", "train.max_steps=6", "eval.every=4", "eval.at_start=true", "log.every=3"]
QUIET += ["checkpoint.save_every=2", "eval.final_max_steps=1"]

MODULE = """
from nn.observers.observer import Observer

EVENTS = []


class Noting(Observer):
    def on_start(self, loop):
        EVENTS.append(("start", loop.num_steps, loop.last_step))

    def on_step_begin(self, loop):
        EVENTS.append(("step begins", loop.num_steps))

    def on_step(self, loop, trained):
        EVENTS.append(("step", loop.num_steps, trained.loss > 0))

    def on_record(self, loop, record):
        EVENTS.append(("record", record["step"], round(record["loss"], 5)))

    def on_evaluation_begin(self, loop):
        EVENTS.append(("evaluation begins", loop.num_steps))

    def on_evaluation(self, loop, record, *, is_final):
        EVENTS.append(("evaluation", record["step"], is_final))

    def on_checkpoint(self, loop, checkpoint):
        assert checkpoint.directory.parent == loop.run_dir / "checkpoints"
        EVENTS.append(("checkpoint", checkpoint.directory.name))

    def on_between_steps(self, loop):
        EVENTS.append(("between", loop.num_steps))

    def on_end(self, loop):
        EVENTS.append(("end", loop.num_steps))


class Failing(Observer):
    def on_record(self, loop, record):
        raise KeyError("a name of mine")


class Mistyped(Observer):
    def on_steps(self, loop, trained):
        pass


NO_OBSERVER = object()
"""
FAILING_MODEL = """
from dataclasses import dataclass

import torch

from configs.schema import ModelConfig
from nn.models.model import Model


@dataclass
class Options(ModelConfig):
    pass


class Failing(Model):
    Options = Options

    @classmethod
    def build(cls, options, spec):
        return cls()

    def __init__(self):
        super().__init__()
        self.top = torch.nn.Linear(4, 1)

    def forward(self, numerical, embeddings):
        return self.top(numerical).squeeze(1)
"""

AT_STEP = [("step begins", 0), ("step", 1, True), ("between", 1), ("step begins", 1)]


@pytest.fixture
def own(tmp_path, monkeypatch, request):
    """The name of a module outside the project."""
    name = f"own_observers_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_an_observer_from_outside_sees_every_event_in_order(own, tmp_path):
    __import__(own)
    ended = run_command(*TINY, *QUIET, f"log.observers=[{own}:Noting]", f"run_dir={tmp_path}/run")
    assert ended.exit_code == 0, ended.err
    events = __import__(own).EVENTS
    assert events[:3] == [("start", 0, 6), ("evaluation begins", 0), ("evaluation", 0, False)]
    assert events[3:7] == AT_STEP
    kinds = [event[0] for event in events]
    assert [kinds.count(kind) for kind in ("step", "between", "record")] == [6, 5, 2]
    assert [e for e in events if e[0] == "evaluation"] == [
        ("evaluation", 0, False),
        ("evaluation", 4, False),
        ("evaluation", 6, False),
        ("evaluation", 6, True),
    ]
    # Between the steps 4 and 5: the evaluation before the checkpoint that holds it.
    at = events.index(("step", 4, True))
    assert events[at + 1 : at + 5] == [
        ("evaluation begins", 4),
        ("evaluation", 4, False),
        ("checkpoint", "step_4"),
        ("between", 4),
    ]
    assert [e[1] for e in events if e[0] == "checkpoint"] == ["step_2", "step_4", "step_6"]
    assert events[-2:] == [("end", 6), ("evaluation", 6, True)]
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    losses = [round(line["loss"], 5) for line in lines if "loss" in line]
    assert [e[2] for e in events if e[0] == "record"] == pytest.approx(losses, abs=2e-5)


def test_an_observer_changes_no_digit_of_a_run(own, tmp_path):
    for name, more in (("with", [f"log.observers=[{own}:Noting]"]), ("without", [])):
        assert run_command(*TINY, *QUIET, *more, f"run_dir={tmp_path}/{name}").exit_code == 0
    tensors = [
        tmp_path / name / "checkpoints/step_6/rank_00000.bin" for name in ("with", "without")
    ]
    assert tensors[0].read_bytes() == tensors[1].read_bytes()


def test_an_observer_that_fails_ends_the_run_in_one_line(own, tmp_path):
    ended = run_command(*TINY, *QUIET, f"log.observers=[{own}:Failing]", f"run_dir={tmp_path}/run")
    assert ended.exit_code == 2
    assert ended.err.count("\n") == 1
    for text in (f"{own}:Failing", "on_record", "KeyError", f"{own}.py:"):
        assert text in ended.err


def test_a_model_outside_the_project_that_fails_ends_the_run_in_one_line(own, tmp_path):
    (tmp_path / f"{own}.py").write_text(FAILING_MODEL)
    tiny = [option for option in TINY if not option.startswith(("model.bottom", "model.top"))]
    named = ["--config-name=base", f"model.name={own}:Failing"]
    ended = run_command(*tiny, *named, *QUIET, f"run_dir={tmp_path}/run")
    assert ended.exit_code == 2, ended.err
    assert "no summary of the model and no model.json (RuntimeError" in ended.out
    (last,) = ended.err.splitlines()
    for text in (f"error: the model {own}:Failing has failed (RuntimeError", f"{own}.py:27"):
        assert text in last, ended.err


def test_what_is_no_observer_is_refused(own):
    for name, problem in (
        (f"{own}:NO_OBSERVER", "is no observer"),
        (f"{own}:NOTHING", "has no NOTHING"),
        (f"{own}:Mistyped", "has on_steps, which is no event; want on_between_steps"),
        ("plain", "no package.module:NAME"),
    ):
        ended = run_command(*TINY, *QUIET, f"log.observers=[{name}]", "checkpoint.save=false")
        assert ended.exit_code == 2
        assert problem in ended.err


def test_a_training_of_the_library_has_observers(tmp_path):
    class Counting(Observer):
        steps = 0
        ended = False

        def on_step(self, loop, trained):
            self.steps += 1

        def on_end(self, loop):
            self.ended = True

        @property
        def on_host(self):
            raise AssertionError("no event asks for this")

    counting = Counting()
    counting.on_gpu = False  # no method
    config = options("dlrm", *TINY, *QUIET, f"run_dir={tmp_path}/run")
    with Training(config, quiet=True, observers=[counting]) as training:
        while training.num_steps < training.last_step:
            training.step()
        training.finish()
    assert (counting.steps, counting.ended) == (6, True)
    counting.on_finish = counting.on_end
    with pytest.raises(ValueError, match=r"Counting \(0\) has on_finish, which is no event; want"):
        Training(config, observers=[counting])
    named = type("Named", (Observer,), {"on_steps": classmethod(lambda of, loop, trained: None)})
    with pytest.raises(ValueError, match=r"^type \(0\) is no observer; want an object of a class"):
        Training(config, observers=[Counting])
    with pytest.raises(ValueError, match=r"Named \(0\) has on_steps, which is no event; want"):
        Training(config, observers=[named()])


def test_a_training_of_the_library_starts_once_however_its_steps_are_trained(tmp_path):
    class Starts(Observer):
        def __init__(self, log):
            self.log = log

        def on_start(self, loop):
            self.log.append(loop.num_steps)

        def on_error(self, loop):
            raise OSError("the log is away")

    logs = [], []
    config = options("dlrm", *TINY, *QUIET, "eval.at_start=true", f"run_dir={tmp_path}/run")
    with Training(config, quiet=True, observers=[Starts(log) for log in logs]) as training:
        summary = training.train()
    assert logs == ([0], [0])
    assert summary["untrained_test_auc"] is not None
    other = options("dlrm", *TINY, *QUIET, f"run_dir={tmp_path}/other")

    def step_and_diverge() -> None:
        with Training(other, quiet=True, observers=[Starts([])]) as training:
            training.step()
            with pytest.raises(ValueError, match="were trained one by one; call step"):
                training.train()
            raise DivergedError("the loss is nan")

    # What the observer's own error in `on_error` does not replace.
    with pytest.raises(DivergedError, match="the loss is nan"):
        step_and_diverge()


def told_records(run_dir: str, device: str) -> list[tuple[int, int]]:
    """Return the step of each record, and the one at which this rank is told of it; an evaluation comes after step 24."""
    told = []

    class Told(Observer):
        def on_record(self, loop, record):
            told.append((record["step"], loop.num_steps))

    steps = ["train.max_steps=24", "log.every=10", "eval.per_epoch=1", "checkpoint.save=false"]
    config = options(
        "dlrm", *TINY, *steps, "log.loggers=[]", f"device={device}", f"run_dir={run_dir}"
    )
    with Training(config, quiet=True, observers=[Told()]) as training:
        training.train()
    return told


@pytest.mark.parametrize(
    ("device", "world_size", "late"),
    [("cpu", 1, 0), ("cpu", 2, 0), pytest.param("cuda", 2, LATE_STEPS, marks=needs_gpus(2))],
)
def test_all_ranks_are_told_of_a_record_at_the_same_step(tmp_path, device, world_size, late):
    """On one GPU the step depends on when the metrics are there."""
    told = run_distributed(told_records, world_size, f"{tmp_path}/run", device)
    assert told == [[(10, 10 + late), (20, min(20 + late, 24)), (24, 24)]] * world_size


def step_times(run_dir: str) -> list[float]:
    """Train on a rank of which the second ends each evaluation late; return the milliseconds of a step in each record."""
    times = []

    class Slow(Observer):
        def on_evaluation(self, loop, record, *, is_final):
            sleep(loop.rank)

        def on_record(self, loop, record):
            times.append(record["step_ms"])

    config = options("dlrm", *TINY, *QUIET, f"run_dir={run_dir}")
    with Training(config, quiet=True, observers=[Slow()]) as training:
        training.train()
    return times


def test_a_record_leaves_out_the_evaluation_of_the_slowest_rank(tmp_path):
    """On one of two GPUs the first evaluation ended up to 90 ms later than on the other, the time of 27 steps."""
    first, _ = run_distributed(step_times, 2, f"{tmp_path}/run")
    # Of steps 4 to 6, behind the evaluation.
    assert first[1] < 300
