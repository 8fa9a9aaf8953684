"""Event logs in windows, user by user in each: one capacity for distinct rows holds for nearly all batches."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from nn.checkpoint.tensor_index import read_index
from nn.distributed.process_group import process_group, ranks_from_environment
from nn.training.step_runner import StepRunner
from tests.helpers.command import run_command
from tests.helpers.composed import build, compose_config
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, worlds
from tests.helpers.preproc_command import preproc
from tests.nn.training.test_accumulate import scores

STEPS = 120
STOP, END = 15, 20
SIZES = "table_rows=[4000,500,1500,121,300,200,200,200,100,90,82]"


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("log") / "data"
    users = ["yambda.users=120", "yambda.mean_events=400", "yambda.history=90"]
    preproc("dataset=yambda", *users, SIZES, f"output={root}")
    return root


def overrides(log: Path, *others: str) -> list[str]:
    tiny = ["width=8", "layers=1", "heads=2", "head_dim=4", "embedding_dim=4", "input_hidden=4"]
    return [
        *("experiment=hstu_mlperf", "device=cpu", "train.amp=off", f"data.path={log}"),
        *(f"model.{option}" for option in tiny),
        *("train.batch_size=32", "eval.batch_size=32", "log.loggers=[]", "eval.auc_threshold=null"),
        *others,
    ]


def batches_above(options: list[str]) -> list[bool]:
    """Train, and return of each batch whether a rank asked for more rows than there is room for."""
    found: list[bool] = []
    fitting = StepRunner._fitting

    def noted(self, batch, rows):
        fits = fitting(self, batch, rows)
        found.append(fits is not rows)
        return fits

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(StepRunner, "_fitting", noted)
        ended = run_command(*options)
    assert ended.exit_code == 0, ended.err
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hardly_a_batch_asks_for_more_rows_than_there_is_room_for(log, num_ranks, tmp_path):
    """The first batch has one user, and others seven."""
    options = overrides(log, f"train.max_steps={STEPS}", f"run_dir={tmp_path / 'run'}")
    for found in run_distributed(batches_above, num_ranks, options):
        assert len(found) > STEPS
        assert sum(found) <= len(found) / 100


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_chunks_of_an_evaluation_are_divided_by_the_longest_of_the_batch(log, num_ranks):
    cases = [overrides(log, f"train.accumulate={chunks}") for chunks in (1, 4)]
    for (whole, _), (chunked, most) in run_distributed(scores, num_ranks, cases):
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-6)
        assert most == 32 // num_ranks // 4


ON_DISK = "sharding.tables={user_x_artist: {tier: disk, cache: 0.7}, item_id: table_wise}"
# The benchmark's rates begin at 0 and stay below 1e-6.
FAST = ["optimizer.lr=0.01", "scheduler.warmup_steps=4"]


def losses_and_checkpoint(runs: list[list[str]], step: int) -> tuple[list[float], dict]:
    """Start each run, of one directory, and return all losses and the tensors of a checkpoint."""
    for options in runs:
        ended = run_command(*options)
        assert ended.exit_code == 0, ended.err
    run = Path(next(option for option in runs[0] if option.startswith("run_dir="))[8:])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    tensors = read_index(run / "checkpoints" / f"step_{step}").tensors
    found = {name: np.concatenate([*tensor.blocks()]) for name, tensor in tensors.items()}
    return [record["loss"] for record in records if "loss" in record], found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_that_stops_inside_a_window_resumes_to_its_bits(log, num_ranks, tmp_path):
    """With the benchmark's chunks, optimizers, and tables on disk."""
    source = open_dataset(FeatureSpec.load(log))
    uid = [feature.name for feature in source.spec.categorical].index("uid")
    users = source.read("train", np.array([[0, END * 32]])).ids[uid]
    # User by user inside a window: they descend where one begins.
    ends = np.flatnonzero(np.diff(users) < 0) + 1
    assert (ends < STOP * 32).any()
    assert STOP * 32 not in ends
    each = overrides(log, "train.accumulate=4", ON_DISK, *FAST, "log.every=1", "checkpoint.keep=2")
    each += [f"sharding.disk_path={tmp_path / 'disk'}", "eval.max_steps=1"]
    found = []
    for name, stops in (("whole", [END]), ("parts", [STOP, END])):
        run = [*each, f"run_dir={tmp_path / name}"]
        runs = [[*run, f"train.max_steps={stop}"] for stop in stops]
        found.append(run_distributed(losses_and_checkpoint, num_ranks, runs, END)[0])
    (wanted, whole), (losses, parts) = found
    assert losses == wanted
    assert len(set(wanted)) == END
    assert parts.keys() == whole.keys()
    for name, values in whole.items():
        np.testing.assert_array_equal(parts[name], values, err_msg=name)


def test_chunks_ranks_and_tables_on_disk_train_as_the_whole(log, tmp_path):
    """With the benchmark's optimizers: one update of the tables a step."""
    each = overrides(log, *FAST, "model.attention_norm=capacity")
    disk = [ON_DISK, f"sharding.disk_path={tmp_path}"]
    cases = [each, [*each, "train.accumulate=4"], [*each, *disk]]
    [(wanted, _), *others] = run_distributed(trained, 1, cases)[0]
    for num_ranks in (2, 4):
        more = ["train.accumulate=2", *(disk if num_ranks == 2 else [])]
        others += run_distributed(trained, num_ranks, [[*each, *more]])[0]
    assert len(set(wanted)) == 20
    for losses, _ in others:
        assert losses == pytest.approx(wanted, rel=1e-5)


def trained(cases: list[list[str]]) -> list[tuple[list[float], int]]:
    """Return the losses of each case, and how many of its steps were launched operation by operation."""
    found = []
    configs = [compose_config(*case) for case in cases]
    with process_group(ranks_from_environment(configs[0].device.value)):
        for config in configs:
            run = build(config)
            run.step.runner.measure(run.train_loader)
            found.append((run.train(0, 20), run.step.runner.num_launched))
            run.step.close()
    return found


@pytest.mark.parametrize("num_ranks", worlds(1, 2))
def test_the_captured_step_trains_as_the_launched_one_and_as_cpus(log, num_ranks, tmp_path):
    """With the benchmark's chunks, attention, and tables on disk."""
    each = overrides(log, "train.accumulate=4", f"sharding.disk_path={tmp_path}", ON_DISK)
    captured = [[*each, *ON_GPU, f"train.amp={amp}"] for amp in ("bf16", "off")]
    launched = [[*case, "train.capture=false"] for case in captured]
    found = run_distributed(trained, num_ranks, [*captured, *launched])[0]
    [cpu] = run_distributed(trained, num_ranks, [each])[0]
    for (losses, num_launched), (wanted, _) in zip(found[:2], found[2:], strict=True):
        assert losses == wanted
        assert num_launched == 0
    assert found[1][0] == pytest.approx(cpu[0], rel=1e-4)
