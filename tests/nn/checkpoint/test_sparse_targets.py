"""Rows of checkpoints are read into files with holes only where the disk has room."""

import errno
import os

import pytest
import torch

from nn.checkpoint import tensor_files


def test_every_page_of_a_changed_row_has_room_before_it_is_written(tmp_path, monkeypatch):
    """Rows of 3 KiB, some on two pages, and their first KiB only; a page without room would end the process."""
    path = tmp_path / "table"
    table = torch.from_file(str(path), shared=True, size=100 * 768, dtype=torch.float32)
    target = table.view(100, 768)[10:, :256]
    values = torch.zeros(90, 256)
    changed = [0, 1, 2, 30, 89]
    values[changed] = 1
    reserved: set[int] = set()
    fallocate = os.posix_fallocate

    def noted(descriptor: int, begin: int, num_bytes: int) -> None:
        reserved.update(range(begin // 4096, -(-(begin + num_bytes) // 4096)))
        fallocate(descriptor, begin, num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", noted)
    tensor_files._copy_changes(values, target)
    assert torch.equal(target, values)
    starts = [(10 + row) * 3072 for row in changed]
    assert reserved == {at // 4096 for start in starts for at in (start, start + 1023)}
    assert path.stat().st_size == 100 * 3072
    reserved.clear()
    tensor_files._copy_changes(values, target)
    assert not reserved

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device: .*table"):
        tensor_files._copy_changes(values + 1, target)
    assert torch.equal(target, values)
