"""Comparison of a stopped run's files with its record: whatever differs is reported and written again."""

import json
import os
import shutil
import zlib
from pathlib import Path

import pytest

from preproc import work_directory
from preproc.criteo import parse, shuffle
from preproc.dataset_writer import checksum
from preproc.report.console import Phase
from preproc.table.output_files import TableFiles
from preproc.work_directory import Work, _read_state, compare
from tests.helpers.preproc_command import Refused, data_files, preproc, raw_line, write_lines
from tests.preproc.table.test_pipeline import _hydra

COLUMNS = [f"x{i}" for i in range(40)]


@pytest.fixture(scope="module")
def logs(tmp_path_factory) -> Path:
    lines = [
        raw_line(i % 2, i1=i, c1=f"{i % 50:08x}", c2=["x", "yy"][i % 3 % 2]) for i in range(300)
    ]
    return write_lines(tmp_path_factory.mktemp("logs") / "raw.tsv", lines)


def raw(logs: Path) -> list[str]:
    return [f"source={logs}", "shuffle=true", "on_bad=quarantine"]


def any_table(logs: Path) -> list[str]:
    source = {"files": str(logs), "format": "tsv", "header": False, "columns": COLUMNS}
    description = {"sources": {"t": source}, "label": {"name": "x0"}, "categorical": ["x14"]}
    return ["dataset=any", f"table={_hydra(description)}", "shuffle=true"]


@pytest.fixture(scope="module")
def wanted(logs, tmp_path_factory) -> dict:
    directory = tmp_path_factory.mktemp("wanted")
    for job in (raw, any_table):
        preproc(*job(logs), f"output={directory / job.__name__}")
    return {job: data_files(directory / job.__name__) for job in (raw, any_table)}


def stop(*_):
    raise OSError("stop")


# Where the run stops: all is parsed; columns are partitioned, one is permuted; all is shuffled; a part is encoded; all but
# the spec is written.
def after_parse(patch):
    patch.setattr("preproc.criteo.pipeline.split_rows", stop)


def within_shuffle(patch):
    permuted = iter(range(100))
    original = shuffle.order_within

    def order_within(*arguments):
        if next(permuted) == 1:
            raise OSError("stop")
        return original(*arguments)

    patch.setattr(shuffle, "order_within", order_within)


def before_encode(patch):
    patch.setattr("preproc.criteo.pipeline._view_non_hex", stop)


def at_the_end(patch):
    patch.setattr("preproc.criteo.pipeline.complete_dataset", stop)


def of_a_table(patch):
    patch.setattr(TableFiles, "write_row_columns", stop)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def of_type(make):
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGE = {
    "flipped": flip,
    "shorter": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
    "a directory": of_type(Path.mkdir),
    "a FIFO": of_type(os.mkfifo),
    "a link to itself": of_type(lambda path: path.symlink_to(path)),
}
CASES = [
    (raw, after_parse, "odd/0.parquet"),
    (raw, within_shuffle, "cat_0.u32.dealt"),
    (raw, before_encode, "numerical.bin"),
    (raw, at_the_end, "/vocabulary/cat_0.parquet"),
    (any_table, of_a_table, "vocabulary_0/0.parquet"),
    (any_table, of_a_table, "state.json"),
]


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("name", ["files", "checked", "growing"])
def test_a_file_that_is_not_as_recorded_is_named(tmp_path, kind, name):
    work = Work(tmp_path, tmp_path / "dataset", {})
    work.dataset.mkdir()
    path = work.dataset / "file" if name == "files" else tmp_path / "file"
    path.write_bytes(b"whatever was recorded")
    if name == "files":
        work.state["files"]["file"] = checksum(path)
    else:
        work.state["checked"] |= work.synced_records(path)
        work.state["growing"] = ["file"] * (name == "growing")
    compare(work, Phase("", print))
    DAMAGE[kind](path)
    if (kind, name) == ("longer", "growing"):
        compare(work, Phase("", print))
        return
    with pytest.raises(ValueError, match=f"^{path} "):
        compare(work, Phase("", print))


def test_a_part_that_is_being_rewritten_is_not_compared(tmp_path):
    work = Work(tmp_path, tmp_path, {})
    (tmp_path / "file").write_bytes(b"old and kept")
    work.state["checked"]["file"] = [[3, None], [9, zlib.crc32(b" and kept")]]
    (tmp_path / "file").write_bytes(b"new and kept")
    compare(work, Phase("", print))
    (tmp_path / "file").write_bytes(b"new and lost")
    with pytest.raises(ValueError, match="has changed since it was recorded"):
        compare(work, Phase("", print))


@pytest.mark.parametrize(("job", "phase", "name"), CASES)
def test_damage_to_the_work_of_a_stopped_run_changes_nothing(
    tmp_path, monkeypatch, capsys, logs, wanted, job, phase, name
):
    command = [*job(logs), f"output={tmp_path / 'out'}"]
    with monkeypatch.context() as patch:
        phase(patch)
        with pytest.raises(Refused, match="stop"):
            preproc(*command)
    work = tmp_path / ".out.preproc"
    [dataset] = tmp_path.glob(".out.partial-*")
    # The damage of each case is another one, so that all are tried at little cost.
    kind = list(DAMAGE)[CASES.index((job, phase, name)) % len(DAMAGE)]
    DAMAGE[kind](dataset / name[1:] if name[0] == "/" else work / name)
    capsys.readouterr()
    preproc(*command)
    out = capsys.readouterr().out
    [warning] = [line for line in out.splitlines() if line.startswith("warning: ")]
    assert name.removeprefix("/") in warning
    assert warning.endswith("; restarting from the beginning")
    assert data_files(tmp_path / "out") == wanted[job]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize(
    ("job", "phase"),
    [(raw, within_shuffle), (raw, at_the_end), (any_table, of_a_table)],
)
def test_intact_work_is_continued(tmp_path, monkeypatch, capsys, logs, wanted, job, phase):
    command = [*job(logs), f"output={tmp_path / 'out'}"]
    with monkeypatch.context() as patch:
        phase(patch)
        with pytest.raises(Refused, match="stop"):
            preproc(*command)
    # Whatever reads the source again would fail.
    monkeypatch.setattr(parse, "blocks", stop)
    monkeypatch.setattr("preproc.table.duckdb_engine.DuckDBEngine.read", stop)
    preproc(*command)
    assert "warning" not in capsys.readouterr().out
    assert data_files(tmp_path / "out") == wanted[job]


def changed(**changes):
    def change(path: Path) -> None:
        document = json.loads(path.read_text())
        document["state"] |= changes
        path.write_text(json.dumps(document))

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed(parse={"done": True, "rows": [9], "files": []}),
        changed(files=[]),
        changed(dataset="../elsewhere"),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text())["state"])),
        lambda path: path.write_text("[1, 2]"),
        lambda path: path.write_text("[" * 10_000),
        lambda path: path.write_text('{"state": 5}'),
        lambda path: path.write_bytes(b"\xff"),
    ],
)
def test_a_changed_state_is_not_used(tmp_path, change):
    state = {"identity": {"seed": 1}, "dataset": ".out.partial-1", "path": "\udcff", "rate": 1e22}
    work = Work(tmp_path, tmp_path, state)
    work.save()
    assert _read_state(tmp_path / "state.json") == state
    change(tmp_path / "state.json")
    with pytest.raises(ValueError, match=f"^{tmp_path / 'state.json'}") as refused:
        _read_state(tmp_path / "state.json")
    assert str(refused.value).isprintable()


def test_a_file_added_to_a_stored_relation_is_found(tmp_path, monkeypatch, capsys, logs, wanted):
    command = [*any_table(logs), f"output={tmp_path / 'out'}"]
    with monkeypatch.context() as patch:
        of_a_table(patch)
        with pytest.raises(Refused, match="stop"):
            preproc(*command)
    relation = tmp_path / ".out.preproc" / "rows_"
    shutil.copy(relation / "0.parquet", relation / "1.parquet")
    preproc(*command)
    assert "1.parquet is not in the record; restarting" in capsys.readouterr().out
    assert data_files(tmp_path / "out") == wanted[any_table]


def test_a_link_at_the_work_directory_is_refused_and_its_target_kept(tmp_path, logs):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    (tmp_path / ".out.preproc").symlink_to("mine")
    with pytest.raises(Refused, match="is a symbolic link; remove it"):
        preproc(*raw(logs), f"output={tmp_path / 'out'}")
    assert (tmp_path / "mine" / "file").exists()


def test_clear_leaves_one_name_and_raises_the_error_of_what_cannot_be_removed(
    tmp_path, monkeypatch
):
    for number in range(9):
        (tmp_path / f"{number}" / "deeper").mkdir(parents=True)
    (tmp_path / "kept").touch()
    delete = work_directory._delete

    def failing(path):
        if path.name == "3":
            raise OSError(5, "Input/output error")
        delete(path)

    monkeypatch.setattr(work_directory, "_delete", failing)
    with pytest.raises(OSError, match="Input/output error"):
        work_directory.clear(tmp_path, but="kept")
    assert {path.name for path in tmp_path.iterdir()} >= {"3", "kept"}
    monkeypatch.undo()
    work_directory.clear(tmp_path, but="kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
