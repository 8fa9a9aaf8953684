"""Kernels without a directory for their compiled code: slower, with one line, and the same results. Their threads."""

import importlib
import os
import pickle
import shutil
import sys
import time
from contextlib import suppress

import numba
import numpy as np
import pytest
from numba.core import caching

from dataloading.keys.kernels import compiled
from dataloading.keys.kernels.compiled import kernel, num_threads, numba_threads


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


def test_code_on_disk_is_of_the_files_that_it_uses(monkeypatch, tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    header = "from dataloading.keys.kernels.compiled import kernel\n"
    (package / "outer.py").write_text(
        f"{header}from kernels.inner import inner\n@kernel\ndef outer(x):\n    return inner(x)\n"
    )
    for factor in (2, 3):
        (package / "inner.py").write_text(
            f"{header}@kernel\ndef inner(x):\n    return {factor} * x\n"
        )
        # As a new process.
        compiled._digest.cache_clear()
        for name in [name for name in sys.modules if name.startswith("kernels")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        shutil.rmtree(package / "__pycache__", ignore_errors=True)
        assert importlib.import_module("kernels.outer").outer(7) == 7 * factor


def test_all_kernels_are_compiled_by_this_function():
    from pathlib import Path

    sources = [
        path
        for package in ("dataloading", "preproc", "nn", "serving")
        for path in (Path(compiled.__file__).parents[3] / package).rglob("*.py")
    ]
    assert [path.name for path in sources if "njit" in path.read_text()] == ["compiled.py"]


def test_a_thread_keeps_its_own_number():
    before = numba.get_num_threads()
    with suppress(ValueError), numba_threads(1):
        assert numba.get_num_threads() == 1
        raise ValueError
    assert numba.get_num_threads() == before
    assert num_threads(10**6) == numba.config.NUMBA_NUM_THREADS


def test_a_fork_does_not_wait_for_a_call_of_its_parent():
    with numba_threads(1):
        child = os.fork()
        if not child:
            with numba_threads(1):
                os._exit(7)
        for _ in range(200):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
        else:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("it waits for the lock")
    assert os.waitstatus_to_exitcode(status) == 7
