"""A restored run continues as the uninterrupted one, with any sharding and number of ranks."""

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from torch import Tensor

from nn.build import open_source
from nn.checkpoint import state as checkpoint
from nn.checkpoint.directory import find_damage, list_checkpoints, prune, read_facts
from nn.checkpoint.tensor_index import read_index
from nn.distributed.sharded_tensor import local_tensors
from tests.helpers.checkpoints import save as save_checkpoint
from tests.helpers.composed import (
    DCNV2,
    TINY,
    Built,
    build,
    compose_config,
    ranks_of_cpu,
    table_map,
)
from tests.helpers.distributed import run_distributed

RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.005}
LAYOUTS = ["table_wise", "row_wise", "column_wise", "data_parallel"]
# Each kind of state and each sharding; tests/nn/checkpoint/test_reshard.py moves each optimizer between all shardings.
CASES = [
    ("sgd", "table_wise"),
    ("adagrad", "data_parallel"),
    ("rowwise_adagrad", "row_wise"),
    ("adam", "row_wise"),
    ("adam", "column_wise"),
]


def case(rule: str, layout: str = "table_wise") -> list[str]:
    tables = ",".join(f"cat_{index}:{layout}" for index in range(5))
    rates = [f"optimizer.name={rule}", f"optimizer.lr={RATES[rule]}", "optimizer.eps=0.01"]
    return [*TINY, *rates, f"sharding.tables={{{tables}}}"]


def save(directory: Path, built: Built, num_steps: int) -> Path:
    return save_checkpoint(directory, built.step, num_steps, built.source.spec, built.ranks)


def restored(path: Path, *overrides: str) -> Built:
    built = build(compose_config(*overrides))
    checkpoint.restore(path, built.step, with_optimizer=True)
    return built


def state_of(built: Built) -> dict[str, Tensor]:
    """Return copies of all weights and optimizer states of a run on one rank."""
    dense = built.step.dense.named_parameters()
    optimizer = built.step.dense_optimizer.state
    state = {name: parameter.detach().clone() for name, parameter in dense}
    for name, parameter in built.step.dense.named_parameters():
        state |= {f"{name} {key}": value.clone() for key, value in optimizer[parameter].items()}
    tables = built.step.tables
    for name, value in (tables.weights() | tables.optimizer_state()).items():
        (tensor,) = local_tensors(value)
        state[name] = tensor.clone().squeeze(-1)
    return state


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("rule", RATES)
def test_a_restored_run_resumes_bit_by_bit(rule, tmp_path):
    with ranks_of_cpu():
        uninterrupted = build(compose_config(*case(rule)))
        losses = uninterrupted.train(0, 6)
        first = build(compose_config(*case(rule)))
        assert first.train(0, 3) == losses[:3]
        second = restored(save(tmp_path, first, 3), *case(rule))
        assert same(state_of(second), state_of(first))
        assert second.train(3, 3) == losses[3:]
        assert same(state_of(second), state_of(uninterrupted))


def move_to_other_layouts(source: Path, directory: Path) -> dict[tuple[str, str], list[float]]:
    """Restore each optimizer's checkpoint with each sharding, save it again and train three more steps."""
    losses = {}
    with ranks_of_cpu():
        for rule, layout in CASES:
            built = restored(source / rule / "step_3", *case(rule, layout))
            save(directory / rule / layout, built, 3)
            losses[rule, layout] = built.train(3, 3)
    return losses


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> tuple[Path, dict, dict, dict]:
    """Return the checkpoints of two ranks, states and losses of the runs on one rank, and the losses on two."""
    directory = tmp_path_factory.mktemp("checkpoints")
    states, losses = {}, {}
    with ranks_of_cpu():
        for rule in RATES:
            built = build(compose_config(*case(rule)))
            built.train(0, 3)
            save(directory / "one" / rule, built, 3)
            states[rule] = state_of(built)
            losses[rule] = built.train(3, 3)
    two = run_distributed(move_to_other_layouts, 2, directory / "one", directory / "two")
    assert two[0] == two[1]
    return directory / "two", states, losses, two[0]


@pytest.mark.parametrize(("rule", "layout"), CASES)
def test_two_ranks_resume_a_run_of_one_rank_with_any_sharding(moved, rule, layout):
    _, _, losses, losses_on_two = moved
    assert losses_on_two[rule, layout] == pytest.approx(losses[rule], rel=1e-6)


@pytest.mark.parametrize(("rule", "layout"), CASES)
def test_one_rank_restores_all_state_that_two_ranks_saved_with_any_sharding(moved, rule, layout):
    directory, states, losses, _ = moved
    with ranks_of_cpu():
        built = restored(directory / rule / layout / "step_3", *case(rule))
        assert same(state_of(built), states[rule])
        assert built.train(3, 3) == losses[rule]


@pytest.mark.parametrize("layout", ["row_wise", "column_wise", "table_wise"])
def test_one_rank_restores_with_another_sharding(moved, layout):
    directory, _, losses, _ = moved
    with ranks_of_cpu():
        built = restored(
            directory / "adagrad" / "data_parallel" / "step_3", *case("adagrad", layout)
        )
        assert built.train(3, 3) == pytest.approx(losses["adagrad"], rel=1e-6)


def test_names_depend_neither_on_the_sharding_nor_on_compilation(tmp_path):
    names = {}
    with ranks_of_cpu():
        for layout, compiled in (("row_wise", "false"), ("data_parallel", "true")):
            config = compose_config(*case("adagrad", layout), f"train.compile={compiled}")
            path = save(tmp_path / layout, build(config), 0)
            names[layout] = set(read_index(path).tensors)
    assert names["row_wise"] == names["data_parallel"]
    assert {
        "tables.cat_0.weight",
        "tables.cat_0.momentum1",
        "dense.bottom.layers.0.weight",
        "dense_optimizer.bottom.layers.0.weight.sum",
    } < names["row_wise"]


def test_an_interrupted_save_leaves_no_step_directory(tmp_path, monkeypatch):
    with ranks_of_cpu():
        built = build(compose_config(*TINY))

        def write_half(path, parts):
            path.write_bytes(b"half")
            raise OSError("No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("nn.checkpoint.tensor_files.write_arrays", write_half)
            with pytest.raises(ValueError, match="No space left"):
                save(tmp_path, built, 5)
        assert not list(tmp_path.glob("step_*"))
        path = save(tmp_path, built, 5)
        assert [path.name for path in tmp_path.iterdir()] == ["step_5"]
        assert checkpoint.check(path, built.source.spec, table_map(built.config))["num_steps"] == 5
        assert not [file for file in path.iterdir() if file.read_bytes() == b"half"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a checkpoint of DCNv2 with three cross layers, trained one step with Adagrad."""
    with ranks_of_cpu():
        built = build(compose_config(*case("adagrad"), *DCNV2))
        built.train(0, 1)
        return save(tmp_path_factory.mktemp("saved"), built, 1)


def test_a_directory_that_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"is not a checkpoint \(.*\); name a step_N directory"):
        checkpoint.check(tmp_path, None, {})
    (tmp_path / "run.json").write_text('{"num_st')
    with pytest.raises(ValueError, match=r"is not a checkpoint \(.*\); name a step_N directory"):
        checkpoint.check(tmp_path, None, {})


def test_other_features_are_refused(saved):
    with ranks_of_cpu():
        built = build(compose_config(*TINY, "data.synthetic.hotness=[1,1,1,1,2]"))
    with pytest.raises(
        ValueError, match=r"was trained on other features than this dataset's .* set data\.path to"
    ):
        checkpoint.check(saved, built.source.spec, table_map(built.config))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (["model.name=dlrm"], r"dense\.\S+ \(\d+, \d+\) instead of \(\d+, \d+\)"),
        (["model.embedding_dim=12"], r"tables\.cat_0\.weight \(500, 8\) instead of \(500, 12\)"),
        (["model.cross.num_layers=4"], r"no dense\.cross\.layers\.3\."),
        (["model.cross.num_layers=2"], r"unexpected dense\.cross\.layers\.2\.\S+"),
        (["model.top_mlp=[8,1]"], r"dense\.top\.layers\.0\.weight \(16, 48\) instead of \(8, 48\)"),
    ],
)
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_another_model_is_refused(saved, changes, difference, with_optimizer):
    with ranks_of_cpu():
        built = build(compose_config(*case("adagrad"), *DCNV2, *changes))
        with pytest.raises(ValueError, match="holds another model or optimizer") as caught:
            checkpoint.restore(saved, built.step, with_optimizer=with_optimizer)
    assert re.search(difference, str(caught.value)), caught.value
    assert "use the model, embedding_dim and optimizer that it was trained with" in str(
        caught.value
    )


def test_another_model_is_refused_with_the_options_of_its_run(saved, tmp_path):
    path = copy_of(saved, tmp_path / "checkpoints")
    (tmp_path / "config.yaml").touch()
    with ranks_of_cpu():
        built = build(compose_config(*case("adagrad"), *DCNV2, "model.name=dlrm"))
        wanted = f"that it was trained with (config={tmp_path / 'config.yaml'}), or load"
        with pytest.raises(ValueError, match=re.escape(wanted)):
            checkpoint.restore(path, built.step, with_optimizer=False)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        (["optimizer.embedding_name=adam"], "no tables.cat_0.momentum2"),
        (["optimizer.embedding_name=sgd"], "unexpected tables.cat_0.momentum1"),
        (
            ["optimizer.embedding_name=rowwise_adagrad"],
            "tables.cat_0.momentum1 (500, 8) instead of (500,)",
        ),
        (["optimizer.name=adam", "optimizer.embedding_name=adagrad"], "exp_avg"),
        (["optimizer.name=sgd", "optimizer.embedding_name=adagrad"], "unexpected dense_optimizer."),
    ],
)
def test_another_optimizer_is_refused_for_training_only(saved, changes, difference):
    config = compose_config(*case("adagrad"), *DCNV2, *changes)
    with ranks_of_cpu():
        built = build(config)
        with pytest.raises(ValueError, match="holds another model or optimizer") as caught:
            checkpoint.restore(saved, built.step, with_optimizer=True)
        checkpoint.restore(saved, built.step, with_optimizer=False)
    assert difference in str(caught.value)


def copy_of(saved: Path, target: Path) -> Path:
    shutil.copytree(saved, target / "step_1")
    return target / "step_1"


@pytest.mark.parametrize("name", ["run.json", "tensors.json", "rank_00000.bin"])
@pytest.mark.parametrize("length", [0, -2])
def test_a_truncated_file_is_named(saved, tmp_path, name, length):
    path = copy_of(saved, tmp_path)
    (path / name).write_bytes((path / name).read_bytes()[:length])
    wanted = rf"is not a checkpoint \({re.escape(name)} is (truncated|damaged).*\); name a step_N directory"
    with pytest.raises(ValueError, match=wanted):
        checkpoint.check(path, None, {})


def test_changed_bytes_are_reported_with_one_remedy(saved, tmp_path):
    path = copy_of(saved, tmp_path)
    shard = path / "rank_00000.bin"
    data = bytearray(shard.read_bytes())
    for offset in used_bytes(path, shard.name):
        data[offset] ^= 4
    shard.write_bytes(data)
    with ranks_of_cpu():
        built = build(compose_config(*case("adagrad"), *DCNV2))
        with pytest.raises(ValueError, match="has changed since it was written") as caught:
            checkpoint.restore(path, built.step, with_optimizer=True)
    assert str(caught.value).startswith(f"checkpoint.restore={path} cannot be read: {shard} has")
    assert str(caught.value).endswith("); copy it again, or take another checkpoint")
    assert str(caught.value).count("copy it again") == 1


@pytest.mark.parametrize("name", ["tensors.json", "rank_00000.bin"])
def test_a_missing_file_is_named(saved, tmp_path, name):
    path = copy_of(saved, tmp_path)
    (path / name).unlink()
    with pytest.raises(ValueError, match=f"{re.escape(name)} is missing"):
        checkpoint.check(path, None, {})


def test_a_flipped_bit_is_found_in_every_file(saved, tmp_path):
    path = copy_of(saved, tmp_path)
    for name in ("run.json", "tensors.json", "rank_00000.bin"):
        intact = (path / name).read_bytes()
        for offset in sorted(offset for offset in used_bytes(path, name) if offset < len(intact)):
            data = bytearray(intact)
            data[offset] ^= 4
            (path / name).write_bytes(data)
            try:
                assert find_damage(path, read_facts(path), 0, 1), (name, offset)
            except ValueError:
                assert name == "run.json"
            (path / name).write_bytes(intact)
    assert find_damage(path, read_facts(path), 0, 1) is None


def used_bytes(path: Path, name: str) -> set[int]:
    """Return offsets of some bytes of a file that are not padding between two arrays."""
    if name != "rank_00000.bin":
        return set(range(1, (path / name).stat().st_size - 2, 97))
    return {
        chunk.start + offset
        for tensor in read_index(path).tensors.values()
        for chunk in tensor.chunks
        for offset in (0, tensor.num_bytes - 1)
    }


def test_a_newer_format_is_refused_with_a_remedy(saved, tmp_path):
    path = copy_of(saved, tmp_path)
    facts = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(facts | {"format_version": 2}))
    with pytest.raises(
        ValueError, match="it has format 2, and this version reads up to 1; use the"
    ):
        checkpoint.check(path, None, {})


def test_old_checkpoints_are_removed_except_the_latest_and_the_best(saved, tmp_path):
    for step in range(1, 6):
        shutil.copytree(saved, tmp_path / f"step_{step}")
    prune(tmp_path, 4, keep=2, best_step=2)
    # step_5 is not of this run, which resumed from an earlier step.
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step_5",
        "step_4",
        "step_3",
        "step_2",
    ]
    assert (tmp_path / "best").resolve() == tmp_path / "step_2"
    config = compose_config(*TINY)
    assert checkpoint.check(tmp_path / "best", open_source(config).spec, table_map(config))


def test_a_checkpoint_that_appears_late_is_waited_for(saved, tmp_path):
    def appear():
        time.sleep(1)
        copy_of(saved, tmp_path / "hidden")
        (tmp_path / "hidden").rename(tmp_path / "checkpoints")

    with ranks_of_cpu():
        built = build(compose_config(*case("adagrad"), *DCNV2))
        thread = Thread(target=appear)
        thread.start()
        checkpoint.restore(tmp_path / "checkpoints" / "step_1", built.step, with_optimizer=True)
        thread.join()


def test_a_rename_whose_answer_was_lost_is_accepted(saved, tmp_path, monkeypatch):
    def rename(source, target):
        Path(source).replace(target)
        raise FileNotFoundError(source)

    monkeypatch.setattr("nn.checkpoint.directory.os.rename", rename)
    with ranks_of_cpu():
        path = save(tmp_path, build(compose_config(*TINY)), 3)
    assert read_facts(path)["num_steps"] == 3


def test_the_dtype_of_stored_numericals_does_not_change_the_fingerprint():
    spec = open_source(compose_config(*TINY)).spec
    assert replace(spec, numerical_dtype=np.dtype("float16")).fingerprint() == spec.fingerprint()
