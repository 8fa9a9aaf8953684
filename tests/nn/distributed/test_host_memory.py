"""Limits of control groups, as containers and SLURM jobs have them."""

import os

import pytest

from nn.distributed.host_memory import host_memory

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("own", "files", "wanted"),
    [
        ("0::/job/step\n", {"job/memory.max": "4096\n", "job/step/memory.max": "max\n"}, 4096),
        ("9:cpu,memory:/docker/1\n3:cpu:/x\n", {"memory/memory.limit_in_bytes": "8192\n"}, 8192),
        ("0::/\n", {"memory.max": "max\n"}, PHYSICAL),
        ("", {}, PHYSICAL),
    ],
)
def test_the_least_limit_counts(own, files, wanted, tmp_path):
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory(tmp_path, tmp_path / "own") == wanted
