"""No step, evaluation or checkpoint calls an operator of FBGEMM, whose wheels lack some GPUs; TorchRec imports the package."""

from pathlib import Path

import pytest
import torch

from nn.checkpoint import state as checkpoint
from nn.distributed.process_group import process_group, ranks_from_environment
from tests.helpers.checkpoints import save as save_checkpoint
from tests.helpers.composed import build, compose_config
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, worlds
from tests.nn.sharding.test_sharded_embeddings import case

CASES = [
    case("dlrm", "one_hot", "sgd", "table_wise"),
    case("dlrm", "multi_hot", "adam", "row_wise"),
    case("dcnv2", "multi_hot", "adagrad", "column_wise"),
    case("dlrm", "multi_hot", "rowwise_adagrad", "data_parallel"),
]


class _Operators:
    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"torch.ops.fbgemm.{name} was called")


def train_without(device: str, options: list[str], directory: Path) -> list[int]:
    """Train, evaluate, save and restore each case; return the steps of the checkpoints."""
    steps = []
    with process_group(ranks_from_environment(device)), pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.ops, "fbgemm", _Operators())
        for number, each in enumerate(CASES):
            built = build(compose_config(*each, *options))
            built.train(0, 5)  # with the last batch of an epoch
            built.score(1)
            root = directory / str(number)
            path = save_checkpoint(root, built.step, 5, built.source.spec, built.ranks)
            checkpoint.restore(path, built.step, with_optimizer=True)
            steps.append(int(path.name.removeprefix("step_")))
            built.step.close()
    return steps


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_train_without_its_operators(world_size, tmp_path):
    epochs = ["data.synthetic.train_rows=197", "train.epochs=9"]
    results = run_distributed(train_without, world_size, "cpu", epochs, tmp_path)
    assert results == [[5] * len(CASES)] * world_size


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_gpus_train_without_its_operators(world_size, tmp_path):
    results = run_distributed(train_without, world_size, "cuda", [*ON_GPU], tmp_path)
    assert results == [[5] * len(CASES)] * world_size
