"""`train.accumulate`: a step whose dense component takes its batch in chunks trains as one that takes it at once."""

import pytest
import torch

from nn.checks import check_chunks
from nn.training.evaluator import predictions
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, worlds
from tests.nn.sharding.test_sharded_embeddings import case
from tests.nn.training.plain_training import local_state, resumes_bit_by_bit, train_and_compare

CHUNKS = "train.accumulate=3"
# Four steps per epoch; the last has 49 rows, and padding on two ranks. Chunks have 22 rows or fewer, on two ranks 11.
# With less of it, Adagrad makes steps of rounding errors where a gradient is nearly 0.
RULE = ["optimizer.name=adagrad", "optimizer.lr=0.1", "optimizer.eps=0.01"]
OPTIONS = [*TINY, "data.synthetic.train_rows=241", *RULE]
TABLES = {
    "whole": "sharding.tables={cat_0:table_wise,cat_1:data_parallel}",
    "rows": "sharding.tables={cat_1:data_parallel,cat_2:row_wise}",
}
CASES = {
    **TABLES,
    "dropout": "model.dropout=0.3",
    "average": "train.ema_decay=0.9",
    "clipped": "train.clip_norm=0.1",
    "dense": "train.freeze=[tables]",
    "tables": "train.freeze=[dense]",
}


def trained(overrides: list[str], num_steps: int = 8) -> tuple[list[float], dict]:
    built = build(compose_config(*overrides))
    return built.train(0, num_steps), {k: v.clone() for k, v in local_state(built).items()}


def on_ranks(cases: list[list[str]]) -> list[tuple[list[float], dict]]:
    with ranks_of_cpu():
        return [trained(each) for each in cases]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_chunks_train_as_the_whole_batch(name, num_ranks):
    cases = [[*OPTIONS, CASES[name], *further] for further in ([], [CHUNKS])]
    for whole, chunked in run_distributed(on_ranks, num_ranks, cases):
        torch.testing.assert_close(chunked[0], whole[0], rtol=0, atol=1e-6)
        for key, value in whole[1].items():
            torch.testing.assert_close(chunked[1][key], value, rtol=1e-5, atol=2e-6, msg=key)


def scores(cases: list[list[str]]) -> list[tuple[torch.Tensor, int]]:
    """Return the logits of two batches of the test split, and the most rows that the dense component took at once."""
    found = []
    with ranks_of_cpu():
        for each in cases:
            run, sizes = build(compose_config(*each)), []
            run.step.dense.register_forward_pre_hook(
                lambda _, inputs, sizes=sizes: sizes.append(len(inputs[0]))
            )
            passed = predictions(run.step, run.test_loader.batches(0, 2), run.ranks.device)
            found.append((torch.cat([logits.clone() for _, logits in passed]), max(sizes)))
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", TABLES)
def test_an_evaluation_takes_the_chunks_of_training(name, num_ranks):
    """All of its batch at once would need the memory that chunks save."""
    cases = [[*OPTIONS, TABLES[name], *further] for further in ([], [CHUNKS])]
    for (whole, _), (chunked, most) in run_distributed(scores, num_ranks, cases):
        torch.testing.assert_close(chunked, whole, rtol=0, atol=1e-6)
        assert most == -(-64 // num_ranks // 3)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_chunks_train_as_torch_does(num_ranks):
    def updates(tables, dense):
        return [torch.optim.SGD(tables, lr=0.2), torch.optim.SGD(dense, lr=0.2)]

    options = [*TINY, "optimizer.name=sgd", "optimizer.lr=0.2", TABLES["whole"], CHUNKS]
    train_and_compare(options, updates, num_ranks)


@pytest.mark.parametrize("model", ["model.dropout=0.3", "model.batch_norm=true"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restored_run_resumes_bit_by_bit(num_ranks, model, tmp_path):
    options = [*TINY, "optimizer.lr=0.2", model, CHUNKS]
    assert resumes_bit_by_bit(tmp_path, options, num_ranks)


def test_the_loss_scale_is_divided_out_once(monkeypatch):
    """A power of two changes no bit; on a CPU only a test can set one."""
    states = []
    with ranks_of_cpu():
        for scale in (1.0, 1024.0):
            for module in ("nn.training.train_step", "nn.build"):
                monkeypatch.setattr(f"{module}.loss_scale", lambda config, scale=scale: scale)
            states.append(trained([*OPTIONS, CASES["clipped"], CHUNKS])[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_batch_normalization_is_per_chunk():
    """Two chunks have two means, of which the running one takes the mean; that of a batch is the same with equal chunks."""
    options = [*TINY, "model.batch_norm=true", "train.max_steps=1"]
    states = []
    with ranks_of_cpu():
        for chunks in (1, 2):
            built = build(compose_config(*options, f"train.accumulate={chunks}"))
            built.train(0, 1)
            states.append({k: v.clone() for k, v in built.step.dense_weights().items()})
    whole, chunked = states
    means = [name for name in whole if name.endswith("running_mean")]
    # Of the first layer; the input of the others is normalized by chunks itself.
    torch.testing.assert_close(chunked[means[0]], whole[means[0]], rtol=1e-5, atol=1e-6)
    variance = means[0].replace("running_mean", "running_var")
    assert not torch.equal(chunked[variance], whole[variance])


def on_gpus(cases: list[list[str]]) -> list[list[float]]:
    from nn.distributed.process_group import process_group, ranks_from_environment

    losses = []
    with process_group(ranks_from_environment("cuda")):
        for each in cases:
            built = build(compose_config(*each))
            losses.append(built.train(0, 6))
            built.step.close()
    return losses


@pytest.mark.parametrize("world_size", worlds(1, 2))
@pytest.mark.parametrize("model", ["dlrm", "dcnv2"])
def test_captured_and_launched_chunks_train_as_the_whole_batch(model, world_size):
    each = [*case(model, "multi_hot", "adagrad", "table_wise"), *ON_GPU]
    further = [["train.accumulate=1"], [CHUNKS], [CHUNKS, "train.capture=false"]]
    whole, captured, launched = run_distributed(
        on_gpus, world_size, [[*each, *options] for options in further]
    )[0]
    assert captured == pytest.approx(launched, rel=2e-5)
    assert captured == pytest.approx(whole, rel=1e-4)


def test_what_needs_the_complete_batch_is_refused():
    with pytest.raises(ValueError, match=r"model\.name=fcn adds losses of complete batches"):
        check_chunks(compose_config("model.name=fcn", "train.accumulate=2"))
    ended = run_command(*TINY, "train.accumulate=2", "train.amp=bf16", "train.fp8=full")
    assert (ended.exit_code, ended.err.count("\n")) == (2, 1)
    assert "scales by the largest values of complete batches, and train.accumulate=2" in ended.err
