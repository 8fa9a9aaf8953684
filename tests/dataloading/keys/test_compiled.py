"""Kernels without a directory for their compiled code: slower, with one line, and the same results."""

import pickle

import numba
import numpy as np
import pytest
from numba.core import caching

from dataloading.keys import compiled
from dataloading.keys.compiled import kernel


def add(one, other):
    return one + other


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path):
    compiled._warn.cache_clear()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))


def no_directory(patch) -> None:
    """Leave Numba what a read-only package and home leave it."""
    patch.setattr(caching.CacheImpl, "_locator_classes", [])


def full_disk(patch) -> None:
    patch.setattr(caching.IndexDataCacheFile, "save", raises(OSError("No space left on device")))


def damaged_file(patch) -> None:
    patch.setattr(caching.IndexDataCacheFile, "load", raises(pickle.UnpicklingError("truncated")))


def raises(error):
    def function(*_):
        raise error

    return function


@pytest.mark.parametrize("fault", [no_directory, full_disk, damaged_file])
def test_a_cache_that_fails_costs_time_only(monkeypatch, capsys, fault):
    fault(monkeypatch)
    for _ in range(2):
        assert kernel(add)(np.int64(1), np.int64(2)) == 3
    err = capsys.readouterr().err
    assert err.startswith("warning: compiled kernels cannot be kept on disk")
    assert err.count("\n") == 1


def test_all_kernels_are_compiled_by_this_function():
    from pathlib import Path

    sources = [
        path
        for package in ("dataloading", "preproc", "nn", "serving")
        for path in (Path(compiled.__file__).parents[2] / package).rglob("*.py")
    ]
    assert [path.name for path in sources if "njit" in path.read_text()] == ["compiled.py"]
