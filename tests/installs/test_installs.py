"""Fresh installs, in each of the ways that README.md shows: uv's and pip's, every Python, lowest versions; each trains.

They take packages from uv's cache or an index: gigabytes, so a virtual environment is removed with its test.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.installs.constraints import FILE, PYPROJECT, resolved

pytestmark = pytest.mark.doors
ROOT = Path(__file__).resolve().parents[2]
QUICK = ["train.max_steps=8", "data.synthetic.train_rows=16384", "data.synthetic.test_rows=2048"]
MINUTE_S = 60


@pytest.fixture
def checkout(tmp_path) -> Path:
    """The files that git has, as a clone has them: an install writes `build/` into its checkout."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folder = tmp_path / "a checkout"
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def venv(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "venv"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A directory of a user with modules of their own."""
    folder = tmp_path / "work"
    (folder / "configs").mkdir(parents=True)
    for name in ("main.py", "configs/__init__.py"):
        (folder / name).write_text("raise SystemExit('the module of the user')")
    return folder


def run(
    *command: str | Path, cwd: Path, minutes: float = 5, **more: str
) -> subprocess.CompletedProcess:
    """Run a command as in a new shell, outside of this environment."""
    own = ("PYTHONPATH", "VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")
    env = {name: value for name, value in os.environ.items() if name not in own} | more
    try:
        return subprocess.run(
            [*map(str, command)],
            **{"cwd": cwd, "env": env, "capture_output": True, "text": True},
            timeout=minutes * MINUTE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        printed = [(part or b"").decode()[-5000:] for part in (late.stdout, late.stderr)]
        raise AssertionError("\n".join((str(late), *printed))) from None


def succeeds(*command: str | Path, cwd: Path, **more: str) -> str:
    done = run(*command, cwd=cwd, **more)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


def interpreter(minor: str) -> str:
    """Return a Python of this machine; one that pyenv has installed counts, chosen or not."""
    chosen = {}
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True)
        chosen = {"PYENV_VERSION": ":".join(listed.stdout.split())}
    return succeeds("uv", "python", "find", "--system", minor, cwd=Path("/"), **chosen).strip()


@pytest.mark.parametrize("minor", ["3.11", "3.12", "3.13"])
def test_the_quick_start_trains_on_every_python(checkout, venv, minor):
    """`uv run --extra cpu dlrm.py`, with the packages of constraints.txt and no tools of the developers."""
    out = succeeds(
        *("uv", "run", "--python", interpreter(minor), "--extra", "cpu", "dlrm.py", *QUICK),
        *(f"run_dir={venv.parent / 'run'}",),
        cwd=checkout,
        UV_PROJECT_ENVIRONMENT=str(venv),
    )
    assert f"python {minor}." in out
    assert re.search(r"^test AUC +0\.\d+", out, re.MULTILINE)
    listed = succeeds("uv", "pip", "freeze", "--python", venv, cwd=venv.parent).splitlines()
    assert not [line for line in listed if line.startswith(("pytest==", "ruff==", "pyspark=="))]
    # All but the project itself.
    versions = {line for line in listed if "==" in line}
    assert versions <= {line.split()[0] for line in FILE.read_text().splitlines()}


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_uv_pip_from_another_directory_trains_or_says_what_mends(checkout, venv, elsewhere, extra):
    """TorchRec brings FBGEMM's CUDA build; beside `cpu`, which of both lies there is uv's choice."""
    succeeds("uv", "venv", "--quiet", "--python", sys.executable, venv, cwd=elsewhere)
    python = venv / "bin/python"
    succeeds(
        *("uv", "pip", "install", "--quiet", "--python", python, "-c", checkout / FILE.name),
        *("-e", f"{checkout}[{extra}]"),
        cwd=elsewhere,
    )
    train = [python, "-m", "hybrid_parallel_recsys.dlrm", *QUICK, f"run_dir={elsewhere / 'run'}"]
    done = run(*train, cwd=elsewhere)
    if done.returncode != 0 or extra == "cuda":
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1
        _, _, command = done.stderr.partition("NVIDIA driver here; run: ")
        succeeds(*shlex.split(command), cwd=elsewhere)
        succeeds(*train, cwd=elsewhere)


def test_pip_trains_after_the_two_commands_of_the_page(checkout, venv, elsewhere):
    """Minutes, as pip copies each file: with the wheel of the CUDA build, which the second command replaces."""
    succeeds(sys.executable, "-m", "venv", venv, cwd=elsewhere)
    pip = [venv / "bin/python", "-m", "pip", "install", "--quiet"]
    text = (ROOT / "docs/operations.md").read_text()
    [first, second] = re.search(
        r"`pip install (\S+ \S+ '\.\[cpu\]') && pip install ([^`]+)`", text
    ).groups()
    succeeds(*pip, *shlex.split(first), cwd=checkout, minutes=8)
    succeeds(*pip, *shlex.split(second), cwd=checkout)
    succeeds(
        venv / "bin/python",
        "-m",
        "hybrid_parallel_recsys.dlrm",
        *QUICK,
        f"run_dir={elsewhere / 'run'}",
        cwd=elsewhere,
    )


def fast_tests(checkout: Path, venv: Path, requirements: list[str], *options: str) -> None:
    """Install requirements of the project without its constraints, and run `pytest -m fast`."""
    succeeds("uv", "venv", "--quiet", "--python", sys.executable, venv, cwd=venv.parent)
    (venv.parent / "requirements.txt").write_text("\n".join(requirements))
    succeeds(
        *("uv", "pip", "install", "--quiet", "--python", venv, *options),
        *("-r", venv.parent / "requirements.txt"),
        cwd=venv.parent,  # where [tool.uv] is not read
    )
    # The one package of two builds, last.
    succeeds(
        *("uv", "pip", "install", "--quiet", "--python", venv, "--reinstall", "--no-deps"),
        "fbgemm-gpu-cpu==1.8.*",
        cwd=venv.parent,
    )
    # Of a test that hangs it prints the stacks.
    options = ["-m", "pytest", "-q", "-m", "fast", "-o", "faulthandler_timeout=150"]
    succeeds(venv / "bin/python", *options, cwd=checkout, minutes=12, PYTHONPATH=str(checkout))


def asked() -> tuple[list[str], list[str]]:
    """Requirements of the project and the extras that CI installs, and of the developers' tools that are no dependencies."""
    project = tomllib.loads(PYPROJECT.read_text())
    extras = project["project"]["optional-dependencies"]
    needed = [*project["project"]["dependencies"]]
    for extra in ("cpu", "onnx", "mlperf", "loggers", "sweep"):
        needed += extras[extra]
    names = {Requirement(text).name for text in needed}
    tools = [t for t in project["dependency-groups"]["dev"] if Requirement(t).name not in names]
    return needed, tools


def test_the_fast_tests_pass_with_the_lowest_allowed_versions(checkout, venv):
    needed, tools = asked()
    pins = {
        line.partition("==")[0]: line.partition("==")[2] for line in FILE.read_text().splitlines()
    }
    # The newest pandas asks for more than the lowest NumPy.
    kept = [
        text
        if text.startswith("pandas")
        else f"{text.partition('>=')[0]}=={pins[Requirement(text).name]}"
        for text in tools
    ]
    fast_tests(checkout, venv, [*needed, *kept], "--resolution=lowest-direct")


def test_the_fast_tests_pass_with_the_newest_allowed_versions(checkout, venv):
    """Nothing to do where this environment has them: then all other tests have shown it."""
    pins = [Requirement(line) for line in resolved()]
    here = [pin for pin in pins if pin.marker is None or pin.marker.evaluate()]
    if not all(
        pin.specifier.contains(_version(pin.name) or str(pin.specifier)[2:]) for pin in here
    ):
        needed, tools = asked()
        fast_tests(checkout, venv, [*needed, *tools])


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
