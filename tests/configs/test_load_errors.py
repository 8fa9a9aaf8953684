"""A missing library ends every command with one line and exit code 2; an error of the program keeps its traceback."""

import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from configs import messages
from configs.command_line import errors_end_command
from configs.messages import DEPENDENCIES, EXTRAS, load_error_text, require_package
from tests.helpers.command import run_command, run_module

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    *("main", "dlrm", "dcnv2", "preproc", "compare", "status", "sweep", "nn.export", "nn.replay"),
    *("serving.export", "serving.apply", "serving.run"),
    *(
        "serving.rollback",
        "serving.triton",
        "serving.evaluate_latency",
        "serving.evaluate_accuracy",
    ),
]
TO_INSTALL = "`uv sync --extra cpu` or `pip install '.[cpu]'` in the checkout (`cuda` instead of `cpu` on a GPU machine)"


def test_every_command_says_so_in_a_python_without_packages():
    started = {
        name: subprocess.Popen(
            [sys.executable, "-S", "-m", name], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        for name in COMMANDS
    }
    for name, process in started.items():
        _, err = process.communicate(timeout=120)
        assert (name, process.returncode) == (name, 2), err
        assert err.startswith("error: the package ")
        assert err.endswith(f"is not installed for {sys.executable}: {TO_INSTALL}\n")
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"),
            f"the package torch is not installed for {sys.executable}: {TO_INSTALL}",
        ),
        (
            ModuleNotFoundError("No module named 'pyspark'", name="pyspark"),
            f"the package pyspark is not installed for {sys.executable}: `uv sync --extra cpu --extra spark` or "
            "`pip install '.[cpu,spark]'` in the checkout (`cuda` instead of `cpu` on a GPU machine)",
        ),
        (
            ImportError("libtorch_cpu.so: failed to map\nsegment", name="torch._C"),
            f"a library of {sys.executable} cannot be loaded: libtorch_cpu.so: failed to map segment; raise the limit of "
            f"memory if there is one (ulimit -v), or install again: {TO_INSTALL}",
        ),
        (
            OSError("Could not load this library: /x/fbgemm_gpu_py.so"),
            f"a library of {sys.executable} cannot be loaded: Could not load this library: /x/fbgemm_gpu_py.so; raise the "
            f"limit of memory if there is one (ulimit -v), or install again: {TO_INSTALL}",
        ),
        (
            ImportError("cannot import name 'sort' from 'torch.sort'", name="torch.sort"),
            f"a library of {sys.executable} cannot be loaded: cannot import name 'sort' from 'torch.sort'; install again: "
            f"{TO_INSTALL}",
        ),
        (
            ModuleNotFoundError("No module named 'my_models'", name="my_models"),
            f"the package my_models is not installed for {sys.executable}: install it there, or correct the import",
        ),
        (
            ImportError("cannot import name 'x' from 'my_models'", name="my_models"),
            f"a library of {sys.executable} cannot be loaded: cannot import name 'x' from 'my_models'; correct or reinstall "
            "my_models",
        ),
        (
            ImportError("my_ops.so: undefined symbol: f", name="my_ops"),
            f"a library of {sys.executable} cannot be loaded: my_ops.so: undefined symbol: f; raise the limit of memory if "
            "there is one (ulimit -v), or correct or reinstall my_ops",
        ),
    ],
)
def test_the_line_names_the_library_and_the_command(error, text, capsys):
    assert load_error_text(error) == text
    with pytest.raises(SystemExit) as end, errors_end_command():
        raise error
    assert end.value.code == 2
    assert capsys.readouterr().err == f"error: {text}\n"


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'nn.bild'", name="nn.bild"),
        ImportError("cannot import name 'x' from 'configs.schema'", name="configs.schema"),
        FileNotFoundError(2, "No such file", "libx.so"),
        OSError("a message without a library"),
    ],
)
def test_other_errors_are_left_to_their_handlers(error):
    assert load_error_text(error) is None


def test_an_error_of_the_program_keeps_its_traceback():
    error = ModuleNotFoundError("No module named 'nn.bild'", name="nn.bild")
    with pytest.raises(ModuleNotFoundError), errors_end_command():
        raise error


def test_a_recipe_says_so_when_a_later_import_fails(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics", None)

    def fails(config):
        import torchmetrics  # noqa: F401

    monkeypatch.setattr("nn.early_checks.check_inputs", fails)
    ended = run_command("mode=plan")
    assert ended.exit_code == 2
    assert (
        ended.err
        == f"error: the package torchmetrics is not installed for {sys.executable}: {TO_INSTALL}\n"
    )


@pytest.fixture
def without(monkeypatch):
    """Return the function that hides packages."""

    def hide(*names: str) -> None:
        monkeypatch.setattr(messages, "find_spec", lambda name: None if name in names else object())

    return hide


@pytest.mark.parametrize(
    ("module", "arguments", "package", "purpose", "extra"),
    [
        ("sweep", ["space=s.yaml"], "optuna", "python -m sweep", "sweep"),
        ("preproc", ["dataset=criteo_kaggle", "engine=spark"], "pyspark", "engine=spark", "spark"),
        ("serving.export", ["onnx=true"], "onnxscript", "onnx=true", "onnx"),
    ],
)
def test_an_extra_is_asked_for_before_heavy_imports(
    module, arguments, package, purpose, extra, without, tmp_path, monkeypatch
):
    without(package)
    # They would come next.
    for heavy in ("sweep.run", "preproc.table.pipeline.build", "serving.exporting.run"):
        monkeypatch.setitem(sys.modules, heavy, None)
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "s.yaml").write_text("{}")
    paths = {
        "sweep": [],
        "preproc": [f"source={tmp_path}/run.json", f"output={tmp_path}/out"],
        "serving.export": [f"checkpoint={tmp_path}", f"output={tmp_path}/out"],
    }
    ended = run_module(module, *arguments, *paths[module])
    assert ended.exit_code == 2
    assert ended.err.startswith(
        f"error: {purpose} needs the package {package}, which is not installed: `uv sync --extra cpu --extra {extra}`"
    )
    assert ended.err.count("\n") == 1


def test_spark_needs_java(monkeypatch, without, tmp_path):
    without()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    (tmp_path / "x").touch()
    ended = run_module(
        *("preproc", "dataset=criteo_kaggle", "engine=spark"),
        *(f"source={tmp_path}/x", f"output={tmp_path}/out"),
    )
    assert ended.exit_code == 2
    assert ended.err.startswith("error: engine=spark needs Java 17 or later, and there is no")


def test_the_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = packages_distributions()
    of_module = {
        canonicalize_name(name)
        for module in DEPENDENCIES.split()
        for name in installed.get(module, [])
    }
    needed = {
        canonicalize_name(Requirement(text).name)
        for text in (*project["dependencies"], *extras["cpu"])
    }
    assert needed - of_module <= {"fbgemm-gpu"}, "uv installs it for the extra cuda alone"
    for extra, modules in EXTRAS.items():
        brought = {canonicalize_name(Requirement(text).name) for text in extras[extra]}
        for module in modules:
            packages = {canonicalize_name(name) for name in installed.get(module, [])}
            assert not packages or packages & brought, (extra, module)


def test_a_package_that_is_installed_is_accepted():
    require_package("torch", "training")
