"""Runs on GPUs from the command line: resumed training, inference, a profile."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.command import ROOT, run_command, start_command
from tests.helpers.composed import DCNV2, TINY
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, needs_one_gpu, worlds
from tests.helpers.runs import records
from tests.nn.checkpoint.test_reshard import RATES, contents

RESUMED = [
    ("dlrm", "adam", "off"),
    ("dcnv2", "adagrad", "off"),
    ("dlrm", "rowwise_adagrad", "bf16"),
]
# Tolerance of every number in the records. The same ranks do the same sums, so only the order of atomic additions in libraries
# differs.
RESUME_TOLERANCE = {"off": 2e-5, "bf16": 2e-3}


def started_on_gpus(recipe: str, rule: str, amp: str, run_dir: Path, last_step: int) -> str:
    """Start a run with checkpoints in the background; return what it prints."""
    ended = run_command(
        *(option for option in TINY if not option.startswith("device")),
        *(DCNV2 if recipe == "dcnv2" else []),
        *ON_GPU,
        *(f"optimizer.name={rule}", f"optimizer.lr={RATES[rule]}", "optimizer.eps=0.01"),
        *(f"train.amp={amp}", f"train.max_steps={last_step}", f"run_dir={run_dir}"),
        *("log.every=1", "log.loggers=[]", "checkpoint.save_every=4", "checkpoint.keep=9"),
        recipe=recipe,
    )
    assert ended.exit_code == 0, ended.err
    return ended.out


@pytest.mark.parametrize(("recipe", "rule", "amp"), RESUMED)
@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, world_size, recipe, rule, amp):
    """The step is captured, and later steps ran while the checkpoint was copied and written."""

    def start(name: str, last_step: int) -> str:
        case = (recipe, rule, amp, tmp_path / name, last_step)
        return run_distributed(started_on_gpus, world_size, *case)[0]

    assert "step: a CUDA graph" in start("uninterrupted", 24)
    start("resumed", 11)
    # Without the last checkpoint the run looks as if killed after step 11.
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_11")
    assert "step_8, 8 steps" in start("resumed", 24)
    uninterrupted, resumed = (
        [record for record in records(tmp_path / name) if "loss" in record]
        for name in ("uninterrupted", "resumed")
    )
    assert [record["step"] for record in resumed] == list(range(1, 25))
    losses = [[record["loss"] for record in run] for run in (uninterrupted, resumed)]
    assert losses[1] == pytest.approx(losses[0], rel=RESUME_TOLERANCE[amp])
    stored = [
        contents(tmp_path / name / "checkpoints", 24) for name in ("uninterrupted", "resumed")
    ]
    assert stored[0].keys() == stored[1].keys()
    equal = [name for name, value in stored[0].items() if np.array_equal(value, stored[1][name])]
    print(
        f"{recipe} {rule} {amp} on {world_size}: losses equal to the bit: {losses[0] == losses[1]}, tensors equal "
        f"to the bit: {len(equal)} of {len(stored[0])}"
    )
    for name, value in stored[0].items():
        if name.startswith("tables") and name.endswith("weight"):
            distance = np.abs(value - stored[1][name]).max()
            assert distance <= 10 * RESUME_TOLERANCE[amp] * np.abs(value).max(), name


def started_with_patience(run_dir: Path, amp: str) -> str:
    """Start a run that over-fits at once; return what it prints."""
    ended = run_command(
        *(option for option in TINY if not option.startswith("device")),
        *ON_GPU,
        *(
            "data.synthetic.train_rows=256",
            "train.epochs=40",
            "optimizer.lr=0.3",
            f"train.amp={amp}",
        ),
        *("eval.every=2", "eval.patience=3", "eval.at_start=false", "eval.max_steps=1"),
        *("log.loggers=[]", f"run_dir={run_dir}"),
    )
    assert ended.exit_code == 0, ended.err
    return ended.out


@pytest.mark.parametrize("amp", ["off", "bf16"])
@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_the_best_model_is_loaded_into_a_captured_step(tmp_path, world_size, amp):
    """The forward graph that was captured while training reads the loaded weights."""
    run_dir = tmp_path / "run"
    output = run_distributed(started_with_patience, world_size, run_dir, amp)[0]
    assert "step: a CUDA graph" in output
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["stopped"] == "eval.patience exhausted"
    assert summary["result_step"] == summary["best_step"] < summary["steps"]
    assert summary["test_auc"] == pytest.approx(summary["best_test_auc"], abs=1e-6)
    assert summary["last_test_auc"] < summary["best_test_auc"]


@needs_one_gpu
def test_inference_accepts_the_batch_sizes_of_training_and_evaluation(tmp_path):
    sizes = ["inference.batch_sizes=[1,64,128]", "inference.steps=3", "inference.warmup_steps=1"]
    run_dir = tmp_path / "run"
    ended = run_command(*TINY, *ON_GPU, "mode=inference", f"run_dir={run_dir}", *sizes)
    assert ended.exit_code == 0, ended.err
    results = json.loads((run_dir / "summary.json").read_text())["inference"]
    assert [result["batch_size"] for result in results] == [1, 64, 128]


def profiled_on_gpus(run_dir: str) -> int:
    options = [*TINY, "device=cuda", "train.amp=bf16", "train.max_steps=20", "eval.per_epoch=1"]
    profile = ["profile.steps=5", "profile.start_step=10", "log.loggers=[]"]
    return run_command(*options, *profile, "checkpoint.save=false", f"run_dir={run_dir}").exit_code


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_a_profile_assigns_the_kernels_of_a_step(tmp_path, world_size):
    run_dir = tmp_path / "run"
    codes = run_distributed(profiled_on_gpus, world_size, str(run_dir))
    assert codes == [0] * world_size
    ranks = json.loads((run_dir / "profile/summary.json").read_text())
    assert len(ranks) == world_size
    for rank in ranks:
        assert (rank["on_gpu"], rank["num_steps"]) == (True, 5)
        ms = {phase["phase"]: phase["ms"] for phase in rank["phases"]}
        wanted = {"sort", "table update", "interaction", "MLPs and cross"}
        # On one GPU the interaction looks up its rows itself.
        wanted |= {"lookup", "all-to-all", "all-reduce"} if world_size > 1 else set()
        assert wanted <= set(ms), rank["kernels"]
        assert ms.get("other", 0) < 0.1 * sum(ms.values()), rank["kernels"]
    (memory, *_) = json.loads((run_dir / "memory.json").read_text())
    assert memory["total"] > memory["tables"] > 0


@pytest.mark.parametrize("world_size", worlds(2))
def test_nccl_sends_embeddings_without_buffers_of_its_own(tmp_path, world_size, monkeypatch):
    log = {"DEBUG": "INFO", "DEBUG_SUBSYS": "REG", "DEBUG_FILE": f"{tmp_path}/nccl_%p"}
    for name, value in log.items():
        monkeypatch.setenv(f"NCCL_{name}", value)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    ended = start_command(
        *(*torchrun, str(ROOT / "dlrm.py"), *TINY),
        # NCCL registers no messages below 16 KiB.
        *("train.batch_size=1024", "model.embedding_dim=64", "model.bottom_mlp=[16,64]"),
        *("device=cuda", "train.epochs=8", "log.loggers=[]", "checkpoint.save=false"),
        directory=tmp_path,
    )
    assert ended.exit_code == 0, ended.err
    logs = [path.read_text() for path in tmp_path.glob("nccl_*")]
    assert len(logs) == world_size
    for text in logs:
        assert "IPC register buffer" in text
        assert "failed to IPC register" not in text
