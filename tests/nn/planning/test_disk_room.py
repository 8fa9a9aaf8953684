"""Room on disk for tables with `tier: disk`: what a plan needs, and directories that do not have it."""

import shutil
from collections import namedtuple
from dataclasses import replace

import numpy as np
import pytest

from nn.build import build_plan, open_source, planned_hardware
from nn.planning.disk_room import DiskNeed, check_disk, disk_need
from nn.planning.plan import TablePlan
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, compose_config

Usage = namedtuple("Usage", "free")
GIB = 2**30
ROWS = 20_000
# 64 bytes per row: 8 float32 columns, and Adagrad's state. Host memory has room for a quarter of the rows.
ON_DISK = [
    *TINY,
    *("data.synthetic.cardinalities=[20000,40,7,300,1000]", "data.synthetic.exponent=0"),
    *("eval.batch_size=64", "optimizer.embedding_name=adagrad"),
    "sharding.tables={cat_0: {tier: disk, cache: 0.1}}",
    f"sharding.read_ahead_gib={5000 * 64 / GIB}",
]
NEED = DiskNeed(3 * GIB, GIB)


def with_free(monkeypatch: pytest.MonkeyPatch, gib: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(int(gib * GIB)))


def need_of(*overrides: str) -> DiskNeed:
    config = compose_config(*ON_DISK, "sharding.disk_path=/tables", "mode=plan", *overrides)
    _, tables = build_plan(config, open_source(config), planned_hardware(config))
    need = disk_need(tables, 1)
    assert need is not None
    return need


def test_the_journal_has_the_rows_that_change_between_two_saves():
    """32 steps of 64 rows, of which the device keeps 1,500 for good; all ids alike."""
    assert need_of().table_bytes == ROWS * 64

    def changed(steps: int) -> float:
        return (ROWS - 1500) * (1 - (1 - 1 / ROWS) ** (64 * steps)) * 64

    assert need_of().journal_bytes == pytest.approx(changed(32), rel=1e-3)
    for saves in ("checkpoint.save_every=8", "checkpoint.delta_every=8", "train.max_steps=8"):
        assert need_of(saves).journal_bytes == pytest.approx(changed(8), rel=1e-3)
    never = ("checkpoint.save_every=8", "checkpoint.save=false")
    assert need_of(*never) == need_of()
    # Host memory has room for all rows.
    assert need_of("sharding.read_ahead_gib=1").journal_bytes == 0


def test_the_fullest_node_counts():
    halves = TablePlan("a", 1000, 8, 1, "row_wise", "fused", (0, 2), (5, 5), tier="disk")
    whole = TablePlan("b", 10, 8, 1, "table_wise", "fused", (3,), (5,), tier="disk")
    tables = [
        *(replace_sizes(halves, (500, 700), 60), replace_sizes(whole, (100,), 5)),
        TablePlan("c", 10, 8, 1, "table_wise", "fused", (0,), (9999,)),
    ]
    need = disk_need(tables, 2)
    # Rows of 1.2 and of 10 bytes.
    assert need == DiskNeed(800, pytest.approx(60 * 1.2 * 7 / 12 + 5 * 10))
    assert disk_need(tables, 2, filled={"a": 300}).filled_bytes == 300 * 7 / 12
    assert disk_need(tables[2:], 2) is None


def replace_sizes(table: TablePlan, sizes: tuple[int, ...], journal_rows: float) -> TablePlan:
    return replace(table, disk_bytes_per_rank=sizes, journal_rows=journal_rows)


def test_a_directory_that_does_not_exist_is_noted_in_a_plan_and_checked_at_a_start(
    tmp_path, monkeypatch
):
    missing = tmp_path / "disk" / "tables"
    with_free(monkeypatch, 0.5)
    noted = check_disk(missing, NEED, may_be_elsewhere=True)
    assert noted.startswith(
        f"{missing} does not exist here, so its room is not checked; the tables"
    )
    wanted = (
        rf"^sharding.disk_path={missing} has 0.50 GiB free, and the tables with tier: disk take at most 3.00 GiB, and rows that "
        r"change between two saves 1.00 GiB more; free some space there, choose another directory, save more often "
        r"\(checkpoint.save_every\), or keep fewer tables on disk$"
    )
    with pytest.raises(ValueError, match=wanted):
        check_disk(missing, NEED, may_be_elsewhere=False)
    missing.mkdir(parents=True)
    with pytest.raises(ValueError, match=wanted):
        check_disk(missing, NEED, may_be_elsewhere=True)
    with_free(monkeypatch, 1)
    assert check_disk(missing, NEED, may_be_elsewhere=True).startswith(
        f"{missing} has 1.00 GiB free; the tables"
    )


def test_what_killed_runs_have_left_counts_as_free(tmp_path, monkeypatch):
    with_free(monkeypatch, 1)
    need = DiskNeed(0, GIB + 2**20)
    with pytest.raises(ValueError, match=r"1\.00 GiB free"):
        check_disk(tmp_path, need, may_be_elsewhere=False)
    left = tmp_path / ".tables.partial-0123abcd"
    left.mkdir()
    (left / "t_weight").write_bytes(b"x" * 2**20)
    assert check_disk(tmp_path, need, may_be_elsewhere=False)
    assert left.exists()


def test_a_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(ValueError, match=rf"disk_path={path}: {file} is not a directory; name"):
            check_disk(path, NEED, may_be_elsewhere=False)
    # Root, as whom tests may run, writes everywhere.
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be written by this user; name a"):
        check_disk(tmp_path / "new", NEED, may_be_elsewhere=False)


def test_a_plan_and_a_start_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [*ON_DISK, f"sharding.disk_path={disk}", f"run_dir={tmp_path / 'run'}"]
    fits = run_command(*command, "mode=plan")
    assert f"disk room   {disk} has " in fits.out
    assert fits.exit_code == 0
    shutil.rmtree(tmp_path / "run")
    with_free(monkeypatch, 1e-5)
    for mode in ("plan", "train"):
        ended = run_command(*command, f"mode={mode}")
        assert ended.exit_code == 2
        assert ended.err.startswith(f"error: sharding.disk_path={disk} has 0.00 GiB free, and")
        assert list(tmp_path.rglob("*")) == [disk]


def test_vectors_of_a_file_are_written_in_full(tmp_path, monkeypatch):
    """20,000 vectors of 8 numbers of 4 bytes, and as many bytes of Adagrad's state, which are not written."""
    vectors = tmp_path / "vectors.npy"
    np.save(vectors, np.zeros((ROWS, 8), np.float32))
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [*ON_DISK, f"sharding.disk_path={disk}", "mode=plan"]
    filled = ["model.embedding_dims={cat_0:8}", f"model.pretrained={{cat_0:{vectors}}}"]
    need = need_of()
    free = need.journal_bytes + ROWS * 8 * 4
    for some, ends in ((free + 1, 0), (free - 1, 2)):
        with_free(monkeypatch, some / GIB)
        assert run_command(*command, *filled).exit_code == ends
        assert run_command(*command).exit_code == 0
    assert str(DiskNeed(3 * GIB, GIB, 2 * GIB)).startswith(
        "the tables with tier: disk take at most 3.00 GiB (2.00 GiB at the start), and rows"
    )
