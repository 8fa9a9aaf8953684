"""Untrusted files are not executed, and names in them do not lead out of their directory: docs/security.md."""

import ast
import io
import json
import os
import pickle
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import yaml

from configs.command_line import end_command
from configs.schema import Component
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from main import _end
from nn.checkpoint import state as checkpoint
from nn.checkpoint.tensor_index import INDEX_FILE, read_index
from nn.export.tables import ExportFormat, export_tables
from tests.helpers.command import ROOT, run_command, start_command
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu, table_map
from tests.helpers.datasets import write_clicks
from tests.nn.checkpoint.test_state import save
from tests.project.test_layers import sources

TRAP = "trap was sprung"


class Trap:
    """Object whose pickle creates a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.path),)


def test_the_trap_works(tmp_path):
    pickle.loads(pickle.dumps(Trap(tmp_path / TRAP)))
    assert (tmp_path / TRAP).exists()


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    with ranks_of_cpu():
        built = build(compose_config(*TINY))
        built.train(0, 1)
        return save(tmp_path_factory.mktemp("original"), built, 1)


@pytest.fixture
def saved(original, tmp_path) -> Path:
    """Return a copy of the checkpoint that may be damaged."""
    return shutil.copytree(original, tmp_path / "step_1")


def shards(path: Path) -> list[Path]:
    """Return the files with the tensors of a checkpoint."""
    index = json.loads((path / INDEX_FILE).read_text())
    named = {chunk["file"] for tensor in index["tensors"].values() for chunk in tensor["chunks"]}
    return [path / entry for entry in sorted(named)]


def read_all_ways(path: Path, directory: Path) -> list[str]:
    """Check, restore and export a checkpoint; return the error messages."""
    messages = []
    with ranks_of_cpu():
        built = build(compose_config(*TINY))
        for read in (
            lambda: checkpoint.check(path, built.source.spec, table_map(built.config)),
            lambda: checkpoint.restore(path, built.step, with_optimizer=True),
            lambda: export_tables(path, directory / "out"),
        ):
            try:
                read()
            except ValueError as error:
                messages.append(str(error))
    return messages


def test_the_pickled_index_of_torch_is_never_opened(saved, tmp_path):
    (saved / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / TRAP)))
    assert read_all_ways(saved, tmp_path) == []
    assert not (tmp_path / TRAP).exists()


@pytest.mark.parametrize("name", [INDEX_FILE, "run.json"])
def test_a_pickle_instead_of_json_is_refused(saved, tmp_path, name):
    (saved / name).write_bytes(pickle.dumps(Trap(tmp_path / TRAP)))
    assert len(read_all_ways(saved, tmp_path)) >= 1
    assert not (tmp_path / TRAP).exists()


def archive_with(trap: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", trap)
    return stream.getvalue()


@pytest.mark.parametrize("form", [lambda trap: trap, archive_with], ids=["bare", "in an archive"])
def test_a_pickle_instead_of_numbers_is_not_loaded(saved, tmp_path, form):
    trap = form(pickle.dumps(Trap(tmp_path / TRAP)))
    for path in shards(saved):
        path.write_bytes((trap * (path.stat().st_size // len(trap) + 1))[: path.stat().st_size])
    read_all_ways(saved, tmp_path)
    assert not (tmp_path / TRAP).exists()


def test_a_pickle_in_a_table_of_the_tf2_recipe_is_refused(saved, tmp_path):
    export_tables(saved, tmp_path / "tf2", format=ExportFormat.tf2)
    trap = np.array([[Trap(tmp_path / TRAP)]], dtype=object)
    np.save(tmp_path / "tf2/sparse/feature_0.npy", trap, allow_pickle=True)
    with ranks_of_cpu():
        step = build(compose_config(*TINY)).step
        with pytest.raises(ValueError, match=r"feature_0\.npy: got object"):
            checkpoint.restore(
                tmp_path / "tf2", step, with_optimizer=False, components=[Component.tables]
            )
    assert not (tmp_path / TRAP).exists()


def edit(path: Path, change: Callable[[dict], None]) -> None:
    """Change one tensor of the index."""
    index = json.loads((path / INDEX_FILE).read_text())
    change(index["tensors"]["tables.cat_0.weight"])
    (path / INDEX_FILE).write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name", ["../secret", "{outside}/secret", "link", "..", "", "a/../b", "\0"]
)
def test_a_checkpoint_with_a_file_outside_its_directory_is_refused(saved, tmp_path, name):
    (tmp_path / "secret").write_bytes(bytes(2**16))
    (saved / "link").symlink_to(tmp_path / "secret")
    edit(saved, lambda tensor: tensor["chunks"][0].update(file=name.format(outside=tmp_path)))
    with pytest.raises(ValueError, match=r"want the plain name of a file|a link that leads out of"):
        read_index(saved)
    assert len(read_all_ways(saved, tmp_path)) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.update(dtype="object"),
        lambda tensor: tensor.update(dtype=["float32"]),
        lambda tensor: tensor.update(size=[-500, 8]),
        lambda tensor: tensor.update(size=[10**15, 8]),
        lambda tensor: tensor.update(size="500"),
        lambda tensor: tensor["chunks"][0].update(offsets=[-1, 0]),
        lambda tensor: tensor["chunks"][0].update(start=True),
        lambda tensor: tensor["chunks"].append(tensor["chunks"][0]),
        lambda tensor: tensor["chunks"].clear(),
        lambda tensor: tensor["chunks"][0].pop("file"),
        lambda tensor: tensor["chunks"][0].update(crc32=[]),
    ],
)
def test_an_invalid_index_is_refused(saved, change):
    edit(saved, change)
    with pytest.raises(ValueError, match=INDEX_FILE):
        read_index(saved)


def test_a_chunk_beyond_the_end_of_its_file_is_refused(saved):
    edit(saved, lambda tensor: tensor["chunks"][0].update(start=10**12))
    with pytest.raises(ValueError, match="truncated"):
        list(read_index(saved).tensors["tables.cat_0.weight"].blocks())


def test_a_nested_index_does_not_exhaust_the_stack(saved):
    (saved / INDEX_FILE).write_text("[" * 10**6)
    with pytest.raises(ValueError, match=INDEX_FILE):
        read_index(saved)


def yaml_trap(path: Path) -> str:
    return f"!!python/object/apply:os.mkdir ['{path}']"


def test_yaml_creates_plain_values_only(tmp_path):
    root = write_clicks(tmp_path / "clicks")
    with (root / "feature_spec.yaml").open("a") as stream:
        stream.write(f"\nfurther: {yaml_trap(tmp_path / TRAP)}\n")
    with pytest.raises(ValueError, match="not plain yaml"):
        FeatureSpec.load(root)
    (tmp_path / "experiment").mkdir()
    text = f"# @package _global_\nrun_dir: {yaml_trap(tmp_path / TRAP)}\n"
    (tmp_path / "experiment/evil.yaml").write_text(text)
    recipe = str(ROOT / "dlrm.py")
    options = [f"--config-dir={tmp_path}", "+experiment=evil", "mode=plan"]
    ended = start_command(recipe, *options, directory=tmp_path)
    assert ended.exit_code != 0
    assert "could not determine a constructor" in ended.err
    assert not (tmp_path / TRAP).exists()


@pytest.mark.parametrize(
    "name", ["../feature_spec.yaml", "{outside}/feature_spec.yaml", "link.yaml"]
)
def test_a_spec_outside_the_dataset_is_refused(tmp_path, name):
    root = write_clicks(tmp_path / "clicks")
    (root / "feature_spec.yaml").rename(tmp_path / "feature_spec.yaml")
    (root / "link.yaml").symlink_to(tmp_path / "feature_spec.yaml")
    ended = run_command(
        f"data.path={root}", f"data.feature_spec={name.format(outside=tmp_path)}", "mode=plan"
    )
    assert ended.exit_code == 2
    assert "lies outside the dataset directory" in ended.err


@pytest.mark.parametrize("recipe", ["../elsewhere", "/elsewhere", "..", ""])
def test_a_recipe_name_that_is_a_path_is_refused(recipe):
    ended = run_command(f"recipe='{recipe}'", "mode=plan")
    assert ended.exit_code == 2
    assert "names a folder below runs/" in ended.err


def files_below(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_feature_names_do_not_become_paths(tmp_path):
    root = write_clicks(tmp_path / "room/clicks")
    spec = yaml.safe_load((root / "feature_spec.yaml").read_text())
    hostile = "../../../outside/x"
    text = json.dumps(spec).replace('"user"', json.dumps(hostile))
    (root / "feature_spec.yaml").write_text(text)
    run_dir, output = tmp_path / "room/run", tmp_path / "room/out"
    ended = run_command(
        *(option for option in TINY if not option.startswith("data.")),
        f"data.path={root}",
        f"run_dir={run_dir}",
        "eval.batch_size=64",
    )
    assert ended.exit_code == 0, ended.err
    path = next((run_dir / "checkpoints").glob("step_*"))
    written = export_tables(path, output)
    assert any("/outside/" in name for name in written["tables"])
    assert {entry.name for entry in tmp_path.iterdir()} == {"room"}
    files = [*chain.from_iterable(written["tables"].values())]
    assert files_below(output) == {"export.json", "run.json", "tensors.json", *files}


FAKE = {
    "srun": '#!/bin/sh\nprintf "%s\\0" "$@" > srun.txt\n',
    "scontrol": "#!/bin/sh\necho node1\n",
}


@pytest.mark.parametrize(
    "argument",
    [
        "$(touch sprung)",
        "`touch sprung`",
        "; touch sprung",
        "& touch sprung",
        "a'b\"c d",
        "*",
        "-x\ny",
    ],
)
def test_slurm_arguments_are_not_interpreted_by_a_shell(tmp_path, argument):
    for name, text in FAKE.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dlrm.py").touch()
    (tmp_path / "nn/distributed").mkdir(parents=True)
    (tmp_path / "nn/distributed/node_launcher.py").touch()
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": argument, "CONTAINER_MOUNTS": argument}
    for image in ({}, {"CONTAINER_IMAGE": argument}):
        done = subprocess.run(
            ["bash", str(ROOT / "slurm_multinode.sh"), "dlrm.py", f"run_dir={argument}", argument],
            cwd=tmp_path,
            env=os.environ | job | image | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        received = (tmp_path / "srun.txt").read_text().split("\0")
        assert received[-4:-1] == ["dlrm.py", f"run_dir={argument}", argument]
        assert bool(image) == (f"--container-image={argument}" in received)
    assert not (tmp_path / "sprung").exists()


# Functions that execute their input, or pass text to a shell.
DANGEROUS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "joblib.load"),
    *("yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "os.popen"),
    "torch.distributed.checkpoint",
}


def test_no_module_executes_its_input():
    for module, source in sources().items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                assert not names & DANGEROUS, module
                assert node.module != "pickle", module
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            assert called not in DANGEROUS | {"eval", "exec"}, module
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert keywords.get("shell", "False") == "False", module
            if called == "np.load":
                assert keywords.get("allow_pickle") == "False", module


FORGED = "x\x1b[31m\nerror: all is well\r"


def test_an_error_is_one_line_whatever_a_name_holds(tmp_path):
    root = write_clicks(tmp_path / "clicks")
    spec = (root / "feature_spec.yaml").read_text()
    (root / "feature_spec.yaml").write_text(spec.replace("user", json.dumps(FORGED), 1))
    ended = run_command(f"data.path={root}", "mode=plan")
    assert ended.exit_code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith("error: ")
    assert r"x\x1b[31m\nerror: all is well\r" in line


@pytest.mark.parametrize("end", [end_command, partial(_end, exit_code=2)])
def test_the_last_line_of_every_command_is_one_line(end, capsys):
    with pytest.raises(SystemExit):
        end(f"error: {FORGED}{'x' * 10**6}")
    err = capsys.readouterr().err
    assert len(err) < 10_000
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "\x1b" not in err


HUGE = {
    "memory of a byte": ("sharding.host_gib=1e-9",),
    "memory of a byte for four": ("sharding.host_gib=1e-9", "sharding.world_size=4"),
    "GPUs of a byte": ("sharding.hbm_gib=1e-9", "device=cuda"),
    "no memory for tables": ("sharding.host_gib=1", "sharding.reserve=0.999999999999"),
    "a billion ranks": ("sharding.world_size=1000000000",),
    "tables of petabytes": ("data.synthetic.cardinalities=[9000000000000000]",),
    "tables of exabytes": ("data.synthetic.cardinalities=[9000000000000000000]",),
    "a trillion columns": ("model.embedding_dim=1000000000000",),
    "a trillion outputs": ("model.top_mlp=[1000000000000,1]",),
    "a trillion ids per row": ("data.synthetic.hotness=[1000000000000,1,1,1,1]",),
    "a trillion expanded ids": ("data.multi_hot.hotness=[1000000000000,1,1,1,1]",),
    "a trillion numericals": ("data.synthetic.num_numerical=1000000000000",),
    "a trillion batches ahead": ("data.prefetch=1000000000000",),
    "a trillion workers": ("data.workers=1000000000000",),
    "a trillion profiled steps": ("profile.steps=1000000000000",),
    "a trillion timed passes": ("inference.steps=1000000000000",),
    "a quintillion rows": ("data.synthetic.test_rows=1000000000000000000",),
}


@pytest.mark.parametrize("options", HUGE.values(), ids=HUGE)
def test_an_absurd_size_is_refused_with_one_line(options):
    ended = run_command(*TINY, "mode=plan", *options)
    assert ended.exit_code == 2
    (line,) = ended.err.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize("rows", [9 * 10**18, 2**63, 2**55])
def test_a_dataset_that_declares_a_table_beyond_any_memory_is_refused(tmp_path, rows):
    root = write_clicks(tmp_path / "clicks", num_items=2**62)
    spec = root / "feature_spec.yaml"
    spec.write_text(spec.read_text().replace(str(2**62), str(rows)))
    ended = run_command("mode=plan", f"data.path={root}", "train.batch_size=64")
    assert ended.exit_code == 2
    (line,) = ended.err.splitlines()
    assert f"table 'item' of {rows:,} rows" in line


@pytest.mark.parametrize("world_size", [1, 4])
def test_a_feature_without_any_id_is_planned(tmp_path, world_size):
    with write_dataset(
        tmp_path / "data", categorical=[CategoricalFeature.of("tags", 9, None)], numerical=("n",)
    ) as dataset:
        for split in ("train", "test"):
            dataset[split].append(
                numerical=np.ones((64, 1)),
                labels=np.arange(64) % 2,
                ids={"tags": np.empty(0, int)},
                lengths={"tags": np.zeros(64, int)},
            )
    options = [f"sharding.world_size={world_size}", "train.batch_size=64"]
    ended = run_command("mode=plan", f"data.path={tmp_path / 'data'}", *options)
    assert ended.exit_code == 0, ended.err
