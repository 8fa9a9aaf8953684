"""The combinations of torch, TorchRec and FBGEMM that are tested."""

from importlib.metadata import PackageNotFoundError, version

# FBGEMM's wheels are built for one torch, and TorchRec calls one FBGEMM; an incompatible pair fails with an undefined symbol.
TESTED = [("2.13", "1.8", "1.8"), ("2.11", "1.6", "1.6")]


def require_stack() -> None:
    """Raise `ValueError` unless torch, TorchRec and FBGEMM are a tested combination; import none of them."""
    installed = (_minor("torch"), _minor("torchrec"), _minor("fbgemm-gpu", "fbgemm-gpu-cpu"))
    if installed in TESTED:
        return
    names = ("torch", "torchrec", "fbgemm-gpu")
    tested = " or ".join(
        ", ".join(f"{name} {wanted}" for name, wanted in zip(names, trio, strict=True))
        for trio in TESTED
    )
    present = ", ".join(
        f"{name} {minor or 'missing'}" for name, minor in zip(names, installed, strict=True)
    )
    raise ValueError(
        f"these versions do not work together: {present}; install {tested} "
        "(`uv sync --extra cpu`, or `--extra cuda` on a GPU machine, takes the first)"
    )


def _minor(*packages: str) -> str | None:
    for package in packages:
        try:
            return ".".join(version(package).split(".")[:2])
        except PackageNotFoundError:
            continue
    return None
