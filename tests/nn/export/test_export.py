"""Export of complete tables from checkpoints with any sharding, in bounded memory."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import Component
from nn.checkpoint import state as checkpoint
from nn.checkpoint.tensor_index import BLOCK_BYTES
from nn.export.tables import ExportFormat, Selection, export_tables
from tests.helpers.command import ROOT, run_command, start_command
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu, table_map
from tests.helpers.distributed import run_distributed
from tests.nn.checkpoint.test_state import case, restored, same, save, state_of

LAYOUTS = ["table_wise", "row_wise", "column_wise", "data_parallel"]
MIXED = "sharding.tables={cat_0:row_wise,cat_1:column_wise,cat_2:data_parallel,cat_3:table_wise}"


def train_and_save(directory: Path, overrides: list[str]) -> Path:
    with ranks_of_cpu():
        built = build(compose_config(*overrides))
        built.train(0, 3)
        return save(directory, built, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Return a checkpoint of two ranks per optimizer, with tables of all shardings."""
    directory = tmp_path_factory.mktemp("saved")
    return {
        rule: run_distributed(train_and_save, 2, directory / rule, [*case(rule), MIXED])[0]
        for rule in ("adagrad", "adam", "sgd")
    }


@pytest.fixture(scope="module")
def complete(saved) -> dict[str, dict[str, np.ndarray]]:
    """Return the state of the same checkpoints on one rank, with one tensor per table."""
    states = {}
    with ranks_of_cpu():
        for rule, path in saved.items():
            built = restored(path, *case(rule))
            states[rule] = {name: value.numpy() for name, value in state_of(built).items()}
    return states


@pytest.mark.parametrize("rule", ["adagrad", "adam", "sgd"])
def test_npy_files_hold_ids_rows_and_optimizer_state(saved, complete, rule, tmp_path):
    record = export_tables(saved[rule], tmp_path / "out")
    written = record["tables"]
    states = {"adagrad": ["momentum1"], "adam": ["momentum1", "momentum2"], "sgd": []}[rule]
    assert list(written) == [f"cat_{index}" for index in range(5)]
    for table, files in written.items():
        assert sorted(files) == sorted(f"{table}.{kind}.npy" for kind in ["id", "weight", *states])
        arrays = {name: np.load(tmp_path / "out" / name, allow_pickle=False) for name in files}
        rows = len(complete[rule][f"{table}.weight"])
        assert np.array_equal(arrays[f"{table}.id.npy"], np.arange(rows))
        for kind in ["weight", *states]:
            exported, wanted = arrays[f"{table}.{kind}.npy"], complete[rule][f"{table}.{kind}"]
            assert exported.dtype == wanted.dtype
            assert np.array_equal(exported, wanted)
    listed = json.loads((tmp_path / "out/export.json").read_text())
    assert listed == record == {"checkpoint": "step_3", "format": "npy", "tables": written}


def test_safetensors_files_are_read_by_their_own_library(saved, complete, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    selection = Selection(["cat_1"])
    export_tables(saved["adam"], tmp_path / "out", selection, format=ExportFormat.safetensors)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"cat_1.safetensors", "export.json", "run.json", "tensors.json"}
    arrays = load_file(tmp_path / "out/cat_1.safetensors")
    assert torch.equal(arrays.pop("id"), torch.arange(40))
    assert set(arrays) == {"weight", "momentum1", "momentum2"}
    for kind, values in arrays.items():
        assert np.array_equal(values.numpy(), complete["adam"][f"cat_1.{kind}"])


def test_optimizer_state_can_be_left_out(saved, tmp_path):
    selection = Selection(["cat_2"], optimizer=False)
    record = export_tables(saved["adam"], tmp_path / "out", selection)
    assert record["tables"] == {"cat_2": ["cat_2.id.npy", "cat_2.weight.npy"]}


def restore_tf2(path: Path, overrides: list[str]) -> Path:
    with ranks_of_cpu():
        built = build(compose_config(*overrides))
        checkpoint.check(
            path, built.source.spec, table_map(built.config), components=[Component.tables]
        )
        checkpoint.restore(path, built.step, with_optimizer=False, components=[Component.tables])
        return save(path.parent / "again", built, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tf2_recipes_tables_are_exported_and_restored_bit_by_bit(
    saved, complete, layout, tmp_path
):
    export_tables(saved["adagrad"], tmp_path / "tf2", format=ExportFormat.tf2)
    sparse = tmp_path / "tf2/sparse"
    names = {path.name for path in sparse.iterdir()}
    assert names == {"config.json", *(f"feature_{index}.npy" for index in range(5))}
    first = np.load(sparse / "feature_0.npy", mmap_mode="r", allow_pickle=False)
    assert np.array_equal(first, complete["adagrad"]["cat_0.weight"])
    sizes = json.loads((sparse / "config.json").read_text())
    assert sizes["categorical_cardinalities"] == [500, 40, 7, 300, 1000]
    assert sizes["embedding_dim"] == [8] * 5
    overrides = [*case("adagrad", layout), "seed=7"]
    again = run_distributed(restore_tf2, 2, tmp_path / "tf2", overrides)[0]
    with ranks_of_cpu():
        fresh = build(compose_config(*case("adagrad"), "seed=7"))
        seeds = state_of(fresh)
        back = restored(again, *case("adagrad"), "seed=7")
        state = state_of(back)
    tables = {name for name in state if name.startswith("cat_") and name.endswith(".weight")}
    assert len(tables) == 5
    assert all(np.array_equal(state[name].numpy(), complete["adagrad"][name]) for name in tables)
    rest = {name: value for name, value in state.items() if name not in tables}
    assert same(rest, {name: seeds[name] for name in rest})


def test_a_run_begins_with_tables_of_the_tf2_recipe(saved, tmp_path):
    export_tables(saved["adagrad"], tmp_path / "tf2", format=ExportFormat.tf2)
    command = [*case("adagrad"), f"checkpoint.restore={tmp_path / 'tf2'}", "train.max_steps=3"]
    command.append(f"run_dir={tmp_path / 'run'}")
    ended = run_command(*command)
    assert ended.exit_code == 2
    assert "set checkpoint.parts=[tables]" in ended.err
    ended = run_command(*command, "checkpoint.parts=[tables]", "train.freeze=[tables]")
    assert ended.exit_code == 0, ended.err


def damage(folder: Path, kind: str) -> None:
    path = folder / "feature_1.npy"
    array = np.load(path)
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(path.read_bytes()[:-4])
    elif kind == "one too many":
        np.save(folder / "feature_5.npy", array)
    elif kind == "objects":
        np.save(path, np.array([[print]], dtype=object), allow_pickle=True)
    elif kind == "columns first":
        np.save(path, np.asfortranarray(array))
    else:
        np.save(path, array.astype(kind))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("missing", "feature_1.npy is not a table"),
        ("truncated", r"feature_1.npy has \d+ bytes, want \d+"),
        ("one too many", "more tables than the 5"),
        ("objects", "feature_1.npy: got object"),
        ("columns first", "in column order"),
        ("float64", "feature_1.npy: got float64"),
    ],
)
def test_invalid_tables_of_the_tf2_recipe_are_named(saved, tmp_path, kind, text):
    export_tables(saved["sgd"], tmp_path / "tf2", format=ExportFormat.tf2)
    damage(tmp_path / "tf2/sparse", kind)
    with ranks_of_cpu():
        built = build(compose_config(*case("sgd")))
        with pytest.raises(ValueError, match=text):
            checkpoint.restore(
                tmp_path / "tf2", built.step, with_optimizer=False, components=[Component.tables]
            )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no checkpoint: set checkpoint=DIR"),
        (
            ["checkpoint=nowhere", "output=out"],
            "checkpoint=nowhere is not a checkpoint (there is no run.json in it); name a step_N "
            "directory in a run's checkpoints/",
        ),
        (["checkpoint={saved}", "output=out", "tables=[cat_9]"], "has no table cat_9, only cat_0,"),
        (
            ["checkpoint={saved}", "output=.", "tables=[cat_0]"],
            "output=. exists; name a new directory",
        ),
        (["checkpoint={saved}", "output=out", "formt=npy"], "there is no option formt"),
        (["checkpoint={saved}", "output=out", "format=tf2", "tables=[cat_0]"], "leave tables out"),
    ],
)
def test_the_command_reports_errors(saved, tmp_path, arguments, text):
    arguments = [option.replace("{saved}", str(saved["sgd"])) for option in arguments]
    ended = start_command("-m", "nn.export", *arguments, directory=tmp_path)
    assert ended.exit_code == 2
    assert ended.err.startswith("error: ")
    assert text in ended.err
    assert list(tmp_path.iterdir()) == []


def test_the_command_exports_without_torch(saved, tmp_path):
    program = "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_module('nn.export', run_name='__main__'); "
    program += "assert 'torch' not in sys.modules"
    arguments = [
        "export",
        f"checkpoint={saved['adam']}",
        f"output={tmp_path / 'out'}",
        "tables=[cat_3,cat_3]",
    ]
    # An install has no top-level `nn`, so it starts where a checkout's commands start.
    ended = start_command("-c", program, *arguments, directory=ROOT, program=sys.executable)
    assert ended.exit_code == 0, ended.err
    assert "1 tables, 4 files" in ended.out
    assert len(np.load(tmp_path / "out/cat_3.weight.npy")) == 300


def test_a_failed_export_leaves_nothing(saved, tmp_path):
    path = tmp_path / "step_3"
    path.mkdir()
    for entry in saved["adam"].iterdir():
        (path / entry.name).write_bytes(entry.read_bytes())
    shard = path / "rank_00001.bin"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(ValueError, match="truncated"):
        export_tables(path, tmp_path / "out")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_3"]


EXPORT = """
import sys
from pathlib import Path
from nn.export import array_files, tables
# The slower one is in the way of the other while that one starts and ends.
blocks = array_files.write_blocks
def slow(stream, arrays):
    print(flush=True)
    sys.stdin.readline()
    return blocks(stream, arrays)
array_files.write_blocks = slow
tables.export_tables(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_two_exports_to_one_output_do_not_mix(saved, tmp_path):
    arguments = [str(saved["adam"]), str(tmp_path / "out")]
    first = subprocess.Popen(
        [sys.executable, "-c", EXPORT, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    first.stdout.readline()
    command = ["-m", "nn.export", f"checkpoint={arguments[0]}", f"output={arguments[1]}"]
    ended = start_command(*command, directory=ROOT)
    assert ended.exit_code == 2
    assert ended.err == (
        f"error: process {first.pid} on {socket.gethostname()} is writing {arguments[1]}; wait for it, or choose another "
        "output\n"
    )
    first.communicate("\n" * 100)
    assert first.returncode == 0
    assert os.listdir(tmp_path) == ["out"]
    export_tables(saved["adam"], tmp_path / "alone")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "alone") != {}
    ended = start_command(*command, directory=ROOT)
    assert ended.exit_code == 2
    assert "exists; name a new directory" in ended.err


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_export_that_was_killed_leaves_nothing_for_the_next(saved, tmp_path):
    (tmp_path / ".out.partial-0").mkdir()
    (tmp_path / ".out.partial-0" / "half").touch()
    (tmp_path / ".out.lock").write_text("process 1 on a host that is off")
    export_tables(saved["sgd"], tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_a_link_to_nothing_is_no_output(saved, tmp_path):
    (tmp_path / "out").symlink_to("nowhere")
    with pytest.raises(ValueError, match="exists; name a new directory"):
        export_tables(saved["sgd"], tmp_path / "out")


MEASURE = """
import resource, sys
from pathlib import Path
from nn.export.tables import ExportFormat, export_tables
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_tables(Path(sys.argv[1]), Path(sys.argv[2]), format=ExportFormat[sys.argv[3]])
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """Return a checkpoint with one column-wise table of 128 MiB."""
    overrides = [
        *TINY,
        "data.synthetic.cardinalities=[500000,9]",
        "model.embedding_dim=64",
        "model.bottom_mlp=[64]",
        "sharding.tables={cat_0:column_wise}",
    ]
    return run_distributed(save_untrained, 2, tmp_path_factory.mktemp("large"), overrides)[0]


def save_untrained(directory: Path, overrides: list[str]) -> Path:
    with ranks_of_cpu():
        return save(directory, build(compose_config(*overrides)), 0)


@pytest.mark.parametrize("format", ExportFormat)
def test_memory_does_not_grow_with_the_tables(large, tmp_path, format):
    command = [sys.executable, "-c", MEASURE, str(large), str(tmp_path / "out"), format.name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    size = 4 * 64 * 500_000
    assert (
        sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file()) > size
    )
    assert int(done.stdout) < 4 * BLOCK_BYTES < size
