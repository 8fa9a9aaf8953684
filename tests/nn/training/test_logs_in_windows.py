"""Event logs in windows, user by user in each: the capacity for distinct rows holds for nearly all batches, not the first one alone."""

from pathlib import Path

import pytest
import torch

from nn.training.step_runner import StepRunner
from tests.helpers.command import run_command

from tests.helpers.distributed import run_distributed
from tests.helpers.preproc_command import preproc
from tests.nn.training.test_accumulate import scores

STEPS = 120
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
