"""The wheel with every yaml, the dependencies, and the files that the Dockerfile names."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from email import message_from_string
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hybrid_parallel_recsys.commands import MODULES

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ["configs", "dataloading", "preproc", "nn", "compare", "serving", "status", "sweep"]
NAME = "hybrid_parallel_recsys"
SCRIPTS = ["main.py", "dlrm.py", "dcnv2.py"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The project, built as pip would, outside the checkout: setuptools leaves files where it builds."""
    folder = tmp_path_factory.mktemp("project")
    for name in [*PACKAGES, NAME]:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in [*SCRIPTS, "setup.py", "pyproject.toml", "README.md"]:
        shutil.copy(ROOT / name, folder)
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "__init__.py").touch()
    build = "import setuptools.build_meta as backend; backend.build_wheel('out')"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    [built] = (folder / "out").glob("*.whl")
    return built


def test_the_wheel_holds_all_files_of_ours_and_nothing_else(wheel):
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {
        str(path.relative_to(ROOT))
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.suffix in (".py", ".yaml", ".sh", ".json")
    }
    own = {f"{NAME}/__init__.py", f"{NAME}/commands.py", f"{NAME}/py.typed"}
    assert held == own | {f"{NAME}/{name}" for name in ours | set(SCRIPTS)}
    assert f"{NAME}/configs/experiment/dlrm_criteo_t15.yaml" in held


def test_the_wheel_says_what_it_is(wheel):
    [path] = [name for name in ZipFile(wheel).namelist() if name.endswith("/METADATA")]
    metadata = message_from_string(ZipFile(wheel).read(path).decode())
    project = PROJECT["project"]
    assert (metadata["Name"], metadata["Version"]) == (project["name"], project["version"])
    assert metadata["Summary"] == project["description"]
    assert metadata["Author"] == "The developers"
    assert metadata["Keywords"].split(",") == project["keywords"]
    assert set(metadata.get_all("Provides-Extra")) == set(project["optional-dependencies"])
    assert SpecifierSet(metadata["Requires-Python"]) == SpecifierSet(project["requires-python"])
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    minors = [
        int(name.rpartition(".")[2]) for name in metadata.get_all("Classifier") if ":: 3." in name
    ]
    supported = SpecifierSet(project["requires-python"])
    assert minors == [minor for minor in range(30) if f"3.{minor}" in supported]


@pytest.fixture(scope="module")
def site(wheel) -> Path:
    """An empty folder into which the wheel was installed, with its console scripts in `bin/`."""
    folder = wheel.parent / "site"
    install = ["uv", "pip", "install", "--quiet", "--offline", "--no-deps", "--target", folder]
    subprocess.run([*install, "--python", sys.executable, wheel], check=True, timeout=120)
    return folder


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A directory of a user with modules of their own, whose names are ours too."""
    (tmp_path / "configs").mkdir()
    for name in ("main.py", "status.py", "configs/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('the module of the user')")
    return tmp_path


def runs(*command: str | Path, site: Path, cwd: Path) -> str:
    done = subprocess.run(
        [*map(str, command)],
        **{"cwd": cwd, "env": os.environ | {"PYTHONPATH": str(site)}},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.doors
def test_an_environment_gets_one_name_and_the_commands(site):
    held = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert held - {".lock"} == {NAME, "bin"}
    assert {path.name for path in (site / "bin").iterdir()} == set(MODULES)


@pytest.mark.doors
@pytest.mark.parametrize("module", ["dlrm", "dcnv2", "preproc", "nn.export"])
def test_an_installed_command_finds_its_own_modules_from_anywhere(site, elsewhere, module):
    """Also where the user has a `main.py` and a package `configs`."""
    [script] = [name for name, target in MODULES.items() if target == module]
    starts = [site / "bin" / script], [sys.executable, "-m", f"{NAME}.{module}"]
    for start in starts:
        out = runs(*start, "--help", site=site, cwd=elsewhere)
        assert "Options, with the values of this command" in out


PROGRAM = """
import main_of_user, sys
from hybrid_parallel_recsys import Run
run = Run.load("run")
print(run.summary()["steps"], "dlrm" in sys.modules, "main" in sys.modules)
"""


@pytest.mark.doors
def test_an_installed_wheel_trains_and_a_program_loads_its_run(site, elsewhere):
    small = ["train.max_steps=4", "data.synthetic.train_rows=2048", "data.synthetic.test_rows=512"]
    small += ["train.batch_size=256", "log.pictures=false"]
    bin_ = site / "bin"
    out = runs(bin_ / "recsys-dlrm", *small, "run_dir=run", site=site, cwd=elsewhere)
    assert "test AUC" in out
    state = json.loads(runs(bin_ / "recsys-status", "run", "--json", site=site, cwd=elsewhere))
    assert (state[0]["state"], state[0]["step"]) == ("finished", 4)
    (elsewhere / "main_of_user.py").touch()
    (elsewhere / "program.py").write_text(PROGRAM)
    assert runs(sys.executable, "program.py", site=site, cwd=elsewhere) == "4 False False\n"


@pytest.mark.doors
def test_a_type_checker_reads_the_public_names_of_an_installed_wheel(site, tmp_path):
    program = f"from {NAME} import Run, option\nreveal_type(Run.load)\nreveal_type(option)\n"
    (tmp_path / "typed.py").write_text(program)
    flags = [f"--cache-dir={tmp_path}/cache", "--follow-imports=silent"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *flags, "typed.py"],
        **{"cwd": tmp_path, "env": os.environ | {"MYPYPATH": str(site)}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "-> " in done.stdout, done.stdout
    assert done.stdout.count('note: Revealed type is "def (') == 2, done.stdout


def test_each_command_of_the_project_has_a_console_script():
    assert PROJECT["project"]["scripts"] == dict.fromkeys(MODULES, f"{NAME}.commands:run")
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    commands = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for path in files
        if '__name__ == "__main__":' in (text := path.read_text()) and "command(" in text
    }
    commands |= {path.removesuffix(".py") for path in SCRIPTS}
    # The first is the launcher of a node, which slurm_multinode.sh starts.
    assert commands - {"nn.distributed.node_launcher"} == set(MODULES.values())


def requirements() -> list[Requirement]:
    """Everything that the project, its extras and groups, and its build ask for."""
    lists = [
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
        *PROJECT["dependency-groups"].values(),
        PROJECT["build-system"]["requires"],
        PROJECT["tool"]["uv"]["override-dependencies"],
    ]
    return [Requirement(requirement) for requirements in lists for requirement in requirements]


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_every_dependency_has_an_upper_bound(requirement):
    """Without constraints the next major version would be installed on the day it appears."""
    operators = {clause.operator for clause in requirement.specifier}
    assert operators & {"<", "=="}


def dockerfile() -> list[list[str]]:
    """Instructions of the Dockerfile, each as its words."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


def copied() -> list[str]:
    """Every source of a COPY."""
    return [
        word
        for instruction, *words in dockerfile()
        if instruction == "COPY"
        for word in words[:-1]
        if not word.startswith("--")
    ]


def test_the_image_copies_what_exists_and_all_that_runs():
    assert [path for path in copied() if not (ROOT / path).exists()] == []
    assert {*PACKAGES, NAME, *SCRIPTS, "pyproject.toml"} <= set(copied())


def test_the_images_are_sent_what_they_copy_and_nothing_else():
    """A checkout may hold data, runs and secrets beside it."""
    serving = re.findall(
        r"^COPY (?:--\S+ )?(\S+) ", (ROOT / "Dockerfile.serving").read_text(), re.MULTILINE
    )
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line[0] == "!"} == {*copied(), *serving}


def test_the_image_is_plain_python_of_a_supported_version():
    first, image = dockerfile()[0]
    assert first == "FROM"
    # A tag alone moves.
    version = re.fullmatch(r"python:3\.(\d+)\.\d+-slim-\w+@sha256:[0-9a-f]{64}", image)
    assert f"\nFROM {image}\n" in (ROOT / "Dockerfile.serving").read_text()
    lowest, highest = re.findall(r"3\.(\d+)", PROJECT["project"]["requires-python"])
    assert int(lowest) <= int(version[1]) < int(highest)


def test_the_image_installs_the_cuda_extra_and_runs_as_nobody_special():
    instructions = dockerfile()
    installs = [" ".join(instruction) for instruction in instructions if "sync" in instruction]
    assert len(installs) == 1
    assert "uv sync --extra cuda --no-dev" in installs[0]
    assert "cuda" in PROJECT["project"]["optional-dependencies"]
    users = [words for instruction, *words in instructions if instruction == "USER"]
    assert users == [["trainer"]]
    names = [instruction for instruction, *_ in instructions]
    assert names.index("USER") < names.index("WORKDIR") < names.index("COPY") < names.index("CMD")


def test_the_image_starts_with_a_command_that_exists():
    command = (ROOT / "Dockerfile").read_text().split("CMD", 1)[1]
    assert command.strip() == '["python", "dlrm.py", "--help"]'
    assert "dlrm.py" in copied()
