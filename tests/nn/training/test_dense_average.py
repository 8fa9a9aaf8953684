"""The average of the dense component: its values, its use in evaluation, and checkpoints with and without it."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.schema import Component
from nn.checkpoint import state as checkpoint
from nn.distributed.process_group import process_group, ranks_from_environment
from nn.layers.parameter_average import ParameterAverage
from nn.training.prefetch import Prefetcher
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, Built, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import summary
from tests.nn.checkpoint.test_state import save
from tests.nn.training.plain_training import TOLERANCE, local_state, resumes_bit_by_bit

DECAY = 0.6
"""Reached at step 12 of 20."""
PLAIN = [*TINY, "optimizer.name=adam", "optimizer.lr=0.01"]
OPTIONS = [*PLAIN, f"train.ema_decay={DECAY}"]


def dense_of(built: Built, prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value.clone()
        for name, value in built.step.state_dict().items()
        if name.startswith(prefix)
    }


def logits_of(built: Built) -> Tensor:
    """Return the logits of a test batch, in evaluation mode."""
    built.step.set_training(False)
    prefetcher = Prefetcher(built.test_loader.batches(0, 1), built.step.runner, built.ranks.device)
    logits = built.step.predict(*next(prefetcher)).float().cpu()
    built.step.set_training(True)
    return logits


def worst_error_of_the_average(overrides: list[str]) -> float:
    """Return the largest difference to an average in double precision after 20 steps."""
    with ranks_of_cpu():
        built = build(compose_config(*overrides))
        wanted = {name: value.double() for name, value in dense_of(built, "dense.").items()}
        for step in range(20):
            built.train(step, 1)
            for name, value in dense_of(built, "dense.").items():
                decay = min(DECAY, (1 + step) / (10 + step))
                wanted[name] = decay * wanted[name] + (1 - decay) * value
        average = dense_of(built, "dense_ema.")
    assert average.keys() == wanted.keys()
    return max((average[name] - wanted[name]).abs().max().item() for name in wanted)


def test_it_is_the_average_of_the_weights():
    assert worst_error_of_the_average(OPTIONS) < TOLERANCE
    assert max(run_distributed(worst_error_of_the_average, 2, OPTIONS)) < TOLERANCE


def test_it_forgets_the_initial_weights_within_an_epoch_of_few_steps():
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32))
    average = ParameterAverage({"weight": weight}, 0.999)
    with torch.no_grad():
        weight.fill_(1.0)
    for step in range(268):
        average.update(step)
    # 1 - 0.999**268 = 0.235 without the warm-up.
    assert average.state()["weight"].item() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restored_run_resumes_bit_by_bit(num_ranks, tmp_path):
    assert resumes_bit_by_bit(tmp_path, OPTIONS, num_ranks)


def test_evaluation_uses_it_and_training_does_not():
    with ranks_of_cpu():
        built, plain = (build(compose_config(*options)) for options in (OPTIONS, PLAIN))
        for step in range(0, 6, 2):
            assert built.train(step, 2) == plain.train(step, 2)
            before = local_state(built)
            logits = logits_of(built)
            after = local_state(built)
            assert all(torch.equal(before[name], after[name]) for name in before)
        assert not torch.equal(logits, logits_of(plain))
        average = dense_of(built, "dense_ema.")
        with torch.no_grad():
            for name, parameter in plain.step.dense.named_parameters():
                parameter.copy_(average[name])
        assert torch.equal(logits, logits_of(plain))


def test_a_checkpoint_without_it_gives_its_weights_and_says_so(tmp_path):
    with ranks_of_cpu():
        plain = build(compose_config(*PLAIN))
        plain.train(0, 3)
        path = save(tmp_path, plain, 3)
        built = build(compose_config(*OPTIONS))
        note = checkpoint.restore(path, built.step, with_optimizer=True)
        weights, average = dense_of(built, "dense."), dense_of(built, "dense_ema.")
    assert note == (
        f"checkpoint.restore={path} has no average of the dense component: it starts at the restored weights"
    )
    assert all(torch.equal(weights[name], average[name]) for name in weights)


def test_a_run_without_it_leaves_it_out_and_says_so(tmp_path):
    with ranks_of_cpu():
        built = build(compose_config(*OPTIONS))
        built.train(0, 3)
        path = save(tmp_path, built, 3)
        plain = build(compose_config(*PLAIN))
        note = checkpoint.restore(path, plain.step, with_optimizer=True)
        assert plain.train(3, 2) == built.train(3, 2)
    assert note is not None
    assert "which train.ema_decay=null leaves out: the weights themselves are used" in note


def test_a_checkpoint_with_it_gives_no_note(tmp_path):
    with ranks_of_cpu():
        built = build(compose_config(*OPTIONS))
        built.train(0, 3)
        other = build(compose_config(*OPTIONS))
        path = save(tmp_path, built, 3)
        assert checkpoint.restore(path, other.step, with_optimizer=False) is None
        assert torch.equal(logits_of(other), logits_of(built))


def test_tables_alone_leave_the_average_at_the_seeds_weights(tmp_path):
    with ranks_of_cpu():
        built = build(compose_config(*OPTIONS))
        built.train(0, 3)
        other = build(compose_config(*OPTIONS))
        before = dense_of(other, "dense_ema.")
        note = checkpoint.restore(
            save(tmp_path, built, 3),
            other.step,
            with_optimizer=False,
            components=[Component.tables],
        )
        after = dense_of(other, "dense_ema.")
    assert note is None
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_evaluates_it_and_refuses_to_resume_without_it(tmp_path):
    run = [*OPTIONS, "train.max_steps=6", "log.loggers=[]", f"run_dir={tmp_path / 'run'}"]
    trained = run_command(*run)
    assert trained.exit_code == 0, trained.err
    restore = f"checkpoint.restore={tmp_path / 'run/checkpoints/step_6'}"
    evaluate = ["mode=eval", restore, "log.loggers=[]"]
    auc = {
        name: auc_of(tmp_path / name, [*options, *evaluate])
        for name, options in {"average": OPTIONS, "weights": PLAIN}.items()
    }
    assert auc["average"] == auc_in(tmp_path / "run")
    assert auc["weights"] != auc["average"]
    refused = run_command(*run, "train.ema_decay=null", "train.max_steps=8")
    assert refused.exit_code == 2
    assert f"train.ema_decay={DECAY} instead of None" in refused.err


def auc_of(run_dir: Path, overrides: list[str]) -> float:
    ended = run_command(*overrides, f"run_dir={run_dir}")
    assert ended.exit_code == 0, ended.err
    assert ("leaves out" in ended.out) == (run_dir.name == "weights")
    return auc_in(run_dir)


def auc_in(run_dir: Path) -> float:
    return summary(run_dir)["test_auc"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_passes_read_the_average_and_then_the_weights():
    on_gpu = [option for option in OPTIONS if option != "device=cpu"] + ["device=cuda"]
    without = [option for option in on_gpu if not option.startswith("train.ema_decay")]
    with process_group(ranks_from_environment("cuda")):
        built, plain = build(compose_config(*on_gpu)), build(compose_config(*without))
        for step in range(4):
            assert built.train(step, 1) == pytest.approx(plain.train(step, 1), rel=1e-5)
            logits = logits_of(built)
        average = dense_of(built, "dense_ema.")
        with torch.no_grad():
            for name, parameter in plain.step.dense.named_parameters():
                parameter.copy_(average[name])
        torch.testing.assert_close(logits, logits_of(plain), rtol=1e-4, atol=1e-5)
        built.step.close()
        plain.step.close()
