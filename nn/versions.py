"""The versions of torch, TorchRec and FBGEMM that are tested together, and the build of FBGEMM that this machine can load."""

import ctypes
import sys
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path

# FBGEMM's wheels are built for one torch, and TorchRec calls one FBGEMM; an incompatible pair fails with an undefined symbol.
TESTED = ("2.13", "1.8", "1.8")
CPU_BUILD, CUDA_BUILD = "fbgemm-gpu-cpu", "fbgemm-gpu"


def require_stack() -> None:
    """Raise `ValueError` unless torch, TorchRec and FBGEMM have the tested versions and load here; import none of them."""
    installed = (_minor("torch"), _minor("torchrec"), _minor(CUDA_BUILD, CPU_BUILD))
    if installed != TESTED:
        names = ("torch", "torchrec", CUDA_BUILD)
        wanted, present = (
            ", ".join(
                f"{name} {minor or 'missing'}" for name, minor in zip(names, trio, strict=True)
            )
            for trio in (TESTED, installed)
        )
        raise ValueError(
            f"these versions do not work together: {present}; install {wanted}: `uv sync --extra cpu`, or `--extra cuda` on a "
            "GPU machine"
        )
    _require_build(f"{installed[2]}.*")


def _require_build(wanted: str) -> None:
    """Raise ValueError if FBGEMM's libraries are those of the CUDA build on a machine without a driver, or of both builds.

    TorchRec asks for `fbgemm-gpu`, the CUDA build, on every machine. Beside the extra `cpu` pip and `uv pip` install both, one
    over the other: their files have the same names, and the order is the installer's.
    """
    build = _build()
    if build == CPU_BUILD:
        return
    has_driver = _has_driver()
    if build == CUDA_BUILD and has_driver:
        return
    found = "the CUDA build" if build == CUDA_BUILD else build
    command = (
        f"{sys.executable} -m pip install --force-reinstall --no-deps"
        if find_spec("pip")
        else f"uv pip install --python {sys.executable} --reinstall --no-deps"
    )
    raise ValueError(
        f"FBGEMM's libraries are {found}, and there is {'an' if has_driver else 'no'} NVIDIA driver here; run: {command} "
        f"'{CUDA_BUILD if has_driver else CPU_BUILD}=={wanted}'"
    )


def _build() -> str:
    """Return the distribution whose libraries lie in the environment, or what they are if not those of one."""
    installed, are_there = [], True
    for package in (CPU_BUILD, CUDA_BUILD):
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            continue
        libraries = [(file.size, Path(file.locate())) for file in files if file.suffix == ".so"]
        are_there = all(path.exists() for _, path in libraries)
        # A record may have no sizes.
        if are_there and all(size in (None, path.stat().st_size) for size, path in libraries):
            return package
        installed.append(package)
    if len(installed) > 1:
        return "a mixture of the CPU and the CUDA build"
    # A build that was stripped or made here has other sizes than its record.
    return installed[0] if are_there else "incomplete"


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # FBGEMM's CUDA build is linked with it
    except OSError:
        return False
    return True


def _minor(*packages: str) -> str | None:
    for package in packages:
        try:
            return ".".join(version(package).split(".")[:2])
        except PackageNotFoundError:
            continue
    return None
