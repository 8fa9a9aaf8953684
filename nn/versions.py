"""Which versions of torch, TorchRec and FBGEMM belong together."""

from importlib.metadata import PackageNotFoundError, version

# FBGEMM's wheels are built for one torch, and TorchRec calls one FBGEMM; a wrong pair ends in an undefined symbol.
TESTED = [("2.13", "1.8", "1.8"), ("2.11", "1.6", "1.6")]


def require_stack() -> None:
    """Raise `ValueError` unless torch, TorchRec and FBGEMM are a tested trio; imports none of them."""
    found = (_minor("torch"), _minor("torchrec"), _minor("fbgemm-gpu", "fbgemm-gpu-cpu"))
    if found in TESTED:
        return
    names = ("torch", "torchrec", "fbgemm-gpu")
    trios = " or ".join(
        ", ".join(f"{name} {wanted}" for name, wanted in zip(names, trio, strict=True))
        for trio in TESTED
    )
    have = ", ".join(
        f"{name} {minor or 'missing'}" for name, minor in zip(names, found, strict=True)
    )
    raise ValueError(
        f"these versions do not work together: {have}; install {trios} "
        "(`uv sync --extra cpu`, or `--extra cuda` on a GPU machine, takes the first)"
    )


def _minor(*packages: str) -> str | None:
    for package in packages:
        try:
            return ".".join(version(package).split(".")[:2])
        except PackageNotFoundError:
            continue
    return None
