"""`mode=inference`: the measured passes and their printed numbers."""

import json

import pytest
import torch

from configs.schema import InferenceConfig
from nn.modes.inference import measure
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu


def test_single_forward_passes_are_timed_after_the_warm_up(monkeypatch):
    with ranks_of_cpu() as ranks:
        built = build(compose_config(*TINY))
        batch = built.test_loader.batch(0)
        passes = []
        predict = built.step.predict
        monkeypatch.setattr(built.step, "predict", lambda *inputs: passes.append(predict(*inputs)))
        config = InferenceConfig(batch_sizes=[1], steps=7, warmup_steps=3)
        result = measure(built.step, batch, config, ranks)
    assert len(passes) == 3 + 7
    assert all(torch.equal(each, passes[0]) for each in passes)
    assert result["batch_size"] == 128
    assert 0 < result["p50_ms"] <= result["p90_ms"] <= result["p99_ms"]
    assert 128e3 / result["p99_ms"] < result["samples_per_s"] < 128e3 / result["p50_ms"] * 7


@pytest.mark.parametrize(("mode", "recorded"), [("inference", set()), ("train", {64, 128})])
def test_the_id_exchange_is_recorded_for_training_only(monkeypatch, mode, recorded):
    monkeypatch.setattr("nn.training.train_step.capture_blocker", lambda *_: None)
    with ranks_of_cpu():
        step = build(compose_config(*TINY, f"mode={mode}")).step
    assert step.runner.builder.captured_sizes == recorded


def test_quantiles_are_those_of_the_passes(monkeypatch):
    latencies_ms = iter(range(1, 102))
    monkeypatch.setattr("nn.modes.inference._timed_ms", lambda *_: float(next(latencies_ms)))
    monkeypatch.setattr("nn.modes.inference._forward", lambda *_: None)
    config = InferenceConfig(batch_sizes=[1], steps=101, warmup_steps=0)
    with ranks_of_cpu() as ranks:
        batch = build(compose_config(*TINY)).test_loader.batch(0)
        result = measure(None, batch, config, ranks)
    quantiles = {"p50_ms": 51.0, "p90_ms": 91.0, "p99_ms": 100.0}
    assert result == {"batch_size": 128, "samples_per_s": pytest.approx(128e3 / 51)} | quantiles


def test_a_table_with_a_line_a_batch_size_is_printed_and_recorded(tmp_path):
    sizes = ["inference.batch_sizes=[1,64,512]", "inference.steps=3", "inference.warmup_steps=1"]
    ended = run_command(*TINY, "mode=inference", f"run_dir={tmp_path / 'run'}", *sizes)
    assert ended.exit_code == 0
    lines = ended.out.splitlines()
    head = next(line for line in lines if line.split()[:2] == ["batch", "size"])
    assert head.split() == ["batch", "size", "samples/s", "p50", "ms", "p90", "ms", "p99", "ms"]
    left_out = "left out: batch sizes 512, which split 'test' of 256 rows or 1 rank cannot fill"
    assert left_out in ended.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [each["batch_size"] for each in summary["inference"]] == [1, 64]
    row = next(line.split() for line in lines if line.split()[:1] == ["64"])
    assert float(row[1].replace(",", "")) == pytest.approx(
        summary["inference"][1]["samples_per_s"], abs=0.51
    )


def test_batch_sizes_that_cannot_be_timed_at_all_end_the_run(tmp_path):
    ended = run_command(
        *TINY, "mode=inference", f"run_dir={tmp_path / 'run'}", "inference.batch_sizes=[512,1024]"
    )
    assert ended.exit_code == 2
    assert ended.err == (
        "error: inference.batch_sizes=[512, 1024]: none can be timed with the 256 rows of split "
        "'test' on 1 rank; name a size that is no larger and divides over the ranks\n"
    )
    assert not (tmp_path / "run").exists()
