"""Tables of 16 bits: training on one and two ranks, checkpoints, export, plan and refusals."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.export_schema import ExportFormat
from configs.schema import Component, OptimizerConfig, OptimizerName
from nn.build import build_plan, hardware_of, open_source
from nn.checkpoint import state as checkpoint
from nn.distributed.sharded_tensor import local_tensors
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.embedding.local_tables import LocalTable, UpdateScalars
from nn.embedding.lookups import Lookup
from nn.export.tables import Selection, export_tables
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, Built, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.nn.checkpoint.test_state import restored, same, save, state_of
from tests.nn.embedding.fixed_blocks import fixed_blocks
from tests.nn.training.test_train_step import EPOCHS, parts, two_epochs, whole

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GOOD = torch.ones(1, dtype=torch.int32)
# Optimizers and tails; bf16 with all optimizers, fp16 with one.
CASES = [
    *product(["bf16"], ["sgd", "adagrad", "rowwise_adagrad", "adam"], ["uneven_tail"]),
    ("bf16", "adam", "tail_of_one"),
    ("fp16", "adagrad", "uneven_tail"),
]


def case(dtype: str, rule: str, tail: str = "uneven_tail") -> list[str]:
    return [*two_epochs(rule, EPOCHS[tail], "whole"), f"model.embedding_dtype={dtype}"]


def one_table(dtype: torch.dtype, rows: int, lr: float) -> tuple[LocalEmbeddingBags, UpdateScalars]:
    """Return a group of one table of ones with SGD."""
    config = OptimizerConfig(name=OptimizerName.sgd)
    scalars = UpdateScalars(config, 1.0, torch.device("cpu"))
    scalars.set(0, lr)
    table = LocalTable((Lookup("a", 1),), torch.ones(rows, 4, dtype=dtype), {}, 0, 5)
    group = LocalEmbeddingBags(
        [table],
        fixed_blocks({"a": 1}, rows),
        rows,
        config,
        scalars,
        torch.float32,
        torch.device("cpu"),
    )
    return group, scalars


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_updates_smaller_than_half_a_step_of_the_dtype_add_up_on_average(dtype):
    rows, num_steps = 2000, 64
    step_down = torch.finfo(dtype).eps / 2  # from 1 to the next smaller number
    lr = step_down / 16
    group, scalars = one_table(dtype, rows, lr)
    ids = group.sort(torch.arange(rows, dtype=torch.int32))
    for step in range(num_steps):
        scalars.set(step, lr)
        group.update(ids, torch.ones(rows, 4), GOOD)
    learnt = (1 - group.tables[0].weight.double()) / step_down
    # 64 / 16 steps, with a chance of 1 / 16 each: a deviation of sqrt(64 * 15) / 16 steps, over 8000 weights.
    assert learnt.mean().item() == pytest.approx(4, abs=5 * (64 * 15) ** 0.5 / 16 / 8000**0.5)
    assert learnt.std().item() == pytest.approx((64 * 15) ** 0.5 / 16, rel=0.05)
    # Rounding to the nearest number would leave the weight unchanged.
    assert (torch.ones(1, dtype=dtype) - lr).item() == 1


def trained(cases: list[list[str]]) -> list[tuple[list[float], dict, dict[str, torch.dtype]]]:
    """Return per case the losses, this rank's shards of the weights in float32, and the dtypes of its tables."""
    results = []
    with ranks_of_cpu():
        for overrides in cases:
            built = build(compose_config(*overrides))
            losses = built.train(0, 2 * built.train_loader.steps_per_epoch)
            dtypes = {shard.table: shard.weight.dtype for shard in built.step.tables.shards()}
            shards = {
                name: [(row, column, values.float()) for row, column, values in of_table]
                for name, of_table in parts(built).items()
            }
            results.append((losses, shards, dtypes))
    return results


@pytest.fixture(scope="module")
def on_one_and_two() -> tuple[list, list]:
    cases = [case(*settings) for settings in CASES]
    return trained(cases), run_distributed(trained, 2, cases)


@pytest.mark.parametrize("settings", CASES, ids="-".join)
def test_two_ranks_round_as_one_does_tails_included(on_one_and_two, settings):
    """Sums in another order change the last bits of float32, and therefore rarely the rounding of a weight."""
    one, two = on_one_and_two
    index = CASES.index(settings)
    assert two[0][index][0] == two[1][index][0]
    assert two[0][index][0] == pytest.approx(one[index][0], rel=1e-4)
    expected, actual = whole([one[index][1]]), whole([rank[index][1] for rank in two])
    for name in (f"cat_{number}" for number in (0, 2, 3, 4)):
        differ = expected[name] != actual[name]
        assert differ.float().mean() < 0.01, name
        # Different weights are neighbouring numbers.
        eps = torch.finfo(DTYPES[settings[0]]).eps
        torch.testing.assert_close(expected[name], actual[name], rtol=2 * eps, atol=1e-6)


def test_a_replicated_table_stays_float32(on_one_and_two):
    one, two = on_one_and_two
    for _, _, dtypes in (one[0], two[0][0], two[1][0]):
        assert dtypes["cat_1"] is torch.float32
        assert {dtypes[name] for name in dtypes if name != "cat_1"} == {torch.bfloat16}


def test_training_twice_gives_the_same_bits_and_another_seed_others(on_one_and_two):
    again = trained([case(*CASES[0]), [*case(*CASES[0]), "seed=2"]])
    first = on_one_and_two[0][0]
    assert again[0][0] == first[0]
    for name, values in whole([first[1]]).items():
        assert torch.equal(values, whole([again[0][1]])[name])
    assert again[1][0] != first[0]


@pytest.mark.parametrize(("dtype", "rule"), [("bf16", "adam"), ("fp16", "adagrad")])
def test_a_restored_run_resumes_bit_by_bit(dtype, rule, tmp_path):
    options = case(dtype, rule)
    with ranks_of_cpu():
        uninterrupted = build(compose_config(*options))
        losses = uninterrupted.train(0, 6)
        first = build(compose_config(*options))
        first.train(0, 3)
        second = restored(save(tmp_path, first, 3), *options)
        assert same(state_of(second), state_of(first))
        assert second.train(3, 3) == losses[3:]
        assert same(state_of(second), state_of(uninterrupted))


def weights_of(built: Built) -> dict[str, torch.Tensor]:
    weights = {}
    for name, value in built.step.tables.weights().items():
        (tensor,) = local_tensors(value)
        weights[name] = tensor.clone()
    return weights


def test_restored_weights_are_rounded_to_the_dtype_of_the_tables(tmp_path):
    plain = [*TINY, "optimizer.name=adagrad"]
    with ranks_of_cpu():
        full = build(compose_config(*plain))
        full.train(0, 3)
        path = save(tmp_path / "full", full, 3)
        for name, dtype in DTYPES.items():
            narrow = restored(path, *plain, f"model.embedding_dtype={name}")
            for table, weight in weights_of(full).items():
                assert torch.equal(weights_of(narrow)[table], weight.to(dtype))
            states = {key: state for key, state in state_of(full).items() if "momentum" in key}
            assert same(states, {key: state_of(narrow)[key] for key in states})
            back = restored(save(tmp_path / name, narrow, 3), *plain)
            for table, weight in weights_of(narrow).items():
                assert torch.equal(weights_of(back)[table], weight.float())
            other = "fp16" if name == "bf16" else "bf16"
            swapped = restored(tmp_path / name / "step_3", *plain, f"model.embedding_dtype={other}")
            for table, weight in weights_of(narrow).items():
                assert torch.equal(weights_of(swapped)[table], weight.to(DTYPES[other]))


def train_and_save(directory: Path, options: list[str]) -> Path:
    with ranks_of_cpu():
        built = build(compose_config(*options))
        built.train(0, 3)
        return save(directory, built, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_of_two_ranks_are_exported_in_every_format(dtype, tmp_path):
    path = run_distributed(train_and_save, 2, tmp_path / "saved", case(dtype, "adagrad"))[0]
    with ranks_of_cpu():
        built = restored(path, *case(dtype, "adagrad"))
        wanted = weights_of(built)["cat_3.weight"]
    export_tables(path, tmp_path / "npy")
    npy = np.load(tmp_path / "npy/cat_3.weight.npy", allow_pickle=False)
    # numpy has no bfloat16.
    assert npy.dtype == (np.float16 if dtype == "fp16" else np.float32)
    assert np.array_equal(npy.astype(np.float32), wanted.float().numpy())
    assert np.load(tmp_path / "npy/cat_3.momentum1.npy").dtype == np.float32
    assert np.load(tmp_path / "npy/cat_1.weight.npy").dtype == np.float32
    export_tables(path, tmp_path / "tf2", format=ExportFormat.tf2)
    tf2 = np.load(tmp_path / "tf2/sparse/feature_3.npy", allow_pickle=False)
    assert tf2.dtype == np.float32
    assert np.array_equal(tf2, wanted.float().numpy())
    export_tables(path, tmp_path / "st", Selection(["cat_3"]), format=ExportFormat.safetensors)
    load_file = pytest.importorskip("safetensors.torch").load_file
    stored = load_file(tmp_path / "st/cat_3.safetensors")
    assert torch.equal(stored["weight"], wanted)


def test_tables_of_the_tf2_recipe_are_read_into_16_bits(tmp_path):
    with ranks_of_cpu():
        full = build(compose_config(*TINY))
        export_tables(save(tmp_path, full, 0), tmp_path / "tf2", format=ExportFormat.tf2)
        narrow = build(compose_config(*TINY, "model.embedding_dtype=bf16", "seed=9"))
        checkpoint.restore(
            tmp_path / "tf2", narrow.step, with_optimizer=False, components=[Component.tables]
        )
        for table, weight in weights_of(full).items():
            assert torch.equal(weights_of(narrow)[table], weight.bfloat16())


def test_a_plan_counts_16_bit_weights_and_float32_copies():
    config = compose_config(
        *TINY,
        "optimizer.name=adam",
        "model.embedding_dtype=fp16",
        "sharding.tables={cat_1:data_parallel}",
    )
    _, rows = build_plan(config, open_source(config), hardware_of(config, "cpu", 2, 2))
    by_name = {row.table: row for row in rows}
    assert by_name["cat_0"].bytes_per_rank == (500 * 8 * (2 + 8),)
    assert by_name["cat_1"].bytes_per_rank == (40 * 8 * (4 + 8),) * 2


def test_evaluation_and_inference_read_16_bit_tables(tmp_path):
    path = train_and_save(tmp_path, case("bf16", "adagrad"))
    options = [*case("bf16", "adagrad"), f"checkpoint.restore={path}", "log.loggers=[]"]
    for mode in ("eval", "inference"):
        run_dir = f"run_dir={tmp_path / mode}"
        assert run_command(*options, f"mode={mode}", run_dir).exit_code == 0
