"""A wrong pair of torch, TorchRec and FBGEMM is named at the start; what the libraries say of themselves is not."""

import logging
import sys
import tomllib
import warnings
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from nn.library_warnings import quiet_libraries
from nn.versions import TESTED, require_stack
from tests.helpers.command import run_command

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.fixture
def installed(monkeypatch):
    """Packages and versions that seem to be installed; a test fills in its own."""
    packages = {}

    def version(package: str) -> str:
        if package not in packages:
            raise PackageNotFoundError(package)
        return packages[package]

    monkeypatch.setattr("nn.versions.version", version)
    return packages


def test_the_installed_versions_are_the_tested_ones():
    require_stack()


@pytest.mark.parametrize(
    "versions",
    [
        {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"},
        {"torch": "2.13.1", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.2"},
    ],
)
def test_the_tested_versions_pass(installed, versions):
    installed |= versions
    require_stack()


@pytest.mark.parametrize(
    ("versions", "have"),
    [
        (
            {"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.9.0"},
            "torch 2.13, torchrec 1.8, fbgemm-gpu 1.9",
        ),
        (
            {"torch": "2.11.0", "torchrec": "1.6.1", "fbgemm-gpu": "1.6.0"},
            "torch 2.11, torchrec 1.6, fbgemm-gpu 1.6",
        ),
        (
            {"torch": "2.13.0", "torchrec": "1.8.0"},
            "torch 2.13, torchrec 1.8, fbgemm-gpu missing",
        ),
    ],
)
def test_other_versions_are_named_with_the_right_ones(installed, versions, have):
    installed |= versions
    with pytest.raises(ValueError, match="do not work together") as caught:
        require_stack()
    assert str(caught.value) == (
        f"these versions do not work together: {have}; install torch 2.13, torchrec 1.8, "
        "fbgemm-gpu 1.8: `uv sync --extra cpu`, or `--extra cuda` on a GPU machine"
    )


def test_a_command_says_so_before_it_imports_any_of_them(installed):
    installed |= {"torch": "2.9.1", "torchrec": "1.8.0"}
    ended = run_command("mode=plan")
    assert ended.exit_code == 2
    assert ended.err.startswith("error: these versions do not work together: torch 2.9, torchrec")


def test_the_project_installs_the_tested_versions():
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    pins = dict(
        requirement.split("==") for requirement in project["dependencies"] if "==" in requirement
    )
    extras = project["optional-dependencies"]
    assert pins["fbgemm-gpu"] == f"{TESTED[2]}.*"  # TorchRec asks for any
    for extra, package in (("cpu", "fbgemm-gpu-cpu"), ("cuda", "fbgemm-gpu")):
        fbgemm = dict(requirement.split("==") for requirement in extras[extra])[package]
        assert (pins["torch"], pins["torchrec"], fbgemm) == tuple(f"{v}.*" for v in TESTED)


@pytest.fixture
def quiet():
    """Quiet libraries for one test."""
    root = logging.getLogger()
    filters = list(root.filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.resetwarnings()
        quiet_libraries()
        yield heard
    root.filters = filters


def test_what_no_user_can_act_on_is_not_said(quiet):
    # As FBGEMM writes it: in colour, and on a line of its own.
    coloured = "\033[93m\n      Failed to import: fbgemm_gpu.sll.lookup_adam_ssd\n      \033[0m"
    warnings.warn(coloured, DeprecationWarning, stacklevel=1)
    warnings.warn("`torch.jit.script` is deprecated", DeprecationWarning, stacklevel=1)
    renamed = "`torch.distributed.reduce_scatter_tensor` is deprecated. Please use another"
    warnings.warn(renamed, FutureWarning, stacklevel=1)
    assert quiet == []
    root = logging.getLogger()
    known = root.makeRecord("", 30, "", 0, "no entry in _fbgemm_torch_compat_table", (), None)
    assert not root.filter(known)


def test_everything_else_is_still_said(quiet):
    warnings.warn("this run loses rows", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in quiet] == ["this run loses rows"]
    root = logging.getLogger()
    assert root.filter(root.makeRecord("", 30, "", 0, "a rank is slow", (), None))
    assert logging.getLogger("torchrec.distributed.utils").isEnabledFor(logging.ERROR)


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """Return the function that installs builds of FBGEMM, one over the other, in a place that Python searches first."""
    sizes = {"fbgemm-gpu": 30, "fbgemm-gpu-cpu": 10}
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fbgemm_gpu").mkdir()

    def install(*packages: str, libraries: tuple[str, ...] = ("a.so", "b.so")) -> None:
        for package in packages:
            info = tmp_path / f"{package.replace('-', '_')}-1.8.0.dist-info"
            info.mkdir(exist_ok=True)
            (info / "METADATA").write_text(f"Name: {package}\nVersion: 1.8.0\n")
            lines = [f"fbgemm_gpu/{name},sha256=x,{sizes[package]}\n" for name in ("a.so", "b.so")]
            (info / "RECORD").write_text("".join(lines))
            for name in libraries:
                (tmp_path / "fbgemm_gpu" / name).write_bytes(bytes(sizes[package]))

    return install


@pytest.mark.parametrize(
    ("has_driver", "steps"),
    [
        (False, [["fbgemm-gpu-cpu"]]),
        (True, [["fbgemm-gpu"]]),
        (False, [["fbgemm-gpu", "fbgemm-gpu-cpu"]]),
        (True, [["fbgemm-gpu-cpu", "fbgemm-gpu"]]),
    ],
)
def test_a_build_that_loads_here_passes(builds, monkeypatch, has_driver, steps):
    monkeypatch.setattr("nn.versions._has_driver", lambda: has_driver)
    for packages in steps:
        builds(*packages)
    require_stack()


def test_the_cuda_build_without_a_driver_is_refused_with_the_command_that_mends(
    builds, monkeypatch
):
    monkeypatch.setattr("nn.versions._has_driver", lambda: False)
    monkeypatch.setattr("nn.versions.find_spec", lambda name: None)
    builds("fbgemm-gpu-cpu", "fbgemm-gpu")
    with pytest.raises(ValueError, match="libraries are the CUDA build") as caught:
        require_stack()
    assert str(caught.value) == (
        "FBGEMM's libraries are the CUDA build, and there is no NVIDIA driver here; run: uv pip install --python "
        f"{sys.executable} --reinstall --no-deps 'fbgemm-gpu-cpu==1.8.*'"
    )


def test_a_build_alone_may_differ_from_the_sizes_of_its_record(builds, monkeypatch, tmp_path):
    def distribution_without_cuda(package):
        if package == "fbgemm-gpu":
            raise PackageNotFoundError(package)
        return distribution(package)

    monkeypatch.setattr("nn.versions.distribution", distribution_without_cuda)
    monkeypatch.setattr("nn.versions._has_driver", lambda: False)
    builds("fbgemm-gpu-cpu")
    library = tmp_path / "fbgemm_gpu/a.so"
    library.write_bytes(b"stripped")
    require_stack()
    library.unlink()
    with pytest.raises(ValueError, match="FBGEMM's libraries are incomplete, and there is no"):
        require_stack()


def test_a_record_may_have_no_sizes(builds, monkeypatch, tmp_path):
    monkeypatch.setattr("nn.versions._has_driver", lambda: True)
    builds("fbgemm-gpu-cpu", "fbgemm-gpu")
    record = tmp_path / "fbgemm_gpu-1.8.0.dist-info/RECORD"
    record.write_text("fbgemm_gpu/a.so,,\nfbgemm_gpu/b.so,,\n")
    require_stack()


def test_a_mixture_of_both_builds_is_refused(builds, monkeypatch):
    monkeypatch.setattr("nn.versions._has_driver", lambda: True)
    monkeypatch.setattr("nn.versions.find_spec", lambda name: object())
    builds("fbgemm-gpu-cpu")
    builds("fbgemm-gpu", libraries=("b.so",))
    with pytest.raises(ValueError, match="a mixture of the CPU and the CUDA build") as caught:
        require_stack()
    assert str(caught.value).endswith(
        f"run: {sys.executable} -m pip install --force-reinstall --no-deps 'fbgemm-gpu==1.8.*'"
    )
