"""A killed run resumes, and writes what an uninterrupted one writes; memory stays in bounds."""

import os
import random
import re
import shutil
import socket
import tracemalloc
import weakref
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from preproc import dataset_writer as output_module
from preproc.column_store import StoredColumn
from preproc.criteo import parse, shuffle
from preproc.criteo import pipeline as criteo
from preproc.criteo.hash_table import Lookup
from preproc.criteo.shuffle import buckets_of, order_within
from preproc.report.console import Phase
from preproc.work_directory import Work
from tests.helpers.preproc_command import Refused, data_files, preproc, raw_line, write_lines
from tests.preproc.table.test_pipeline import _hydra


def noise(num_rows: int, seed: int = 0) -> list[str]:
    """Return lines with many values in two columns, and some non-hexadecimal texts."""
    draw = random.Random(seed)
    return [
        raw_line(
            draw.randint(0, 1),
            i1=draw.choice(["", draw.randint(-5, 10**12)]),
            c1=f"{draw.randint(0, 3000):08x}",
            c2=draw.choice(["", "x", "ffffffff", f"{draw.randint(0, 30):08x}"]),
        )
        for _ in range(num_rows)
    ]


def all_files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def raw_logs(source: str) -> list[str]:
    return [f"source={source}", "frequency_limit=3"]


def any_table(source: str) -> list[str]:
    columns = [f"x{i}" for i in range(40)]
    table = {
        "sources": {"t": {"files": source, "format": "tsv", "header": False, "columns": columns}},
        "label": {"name": "x0"},
        "numerical": [{"name": "x1", "transforms": [{"fill": 0}, "standardise"]}],
        "categorical": ["x14", "x15", {"name": "both", "cross": ["x14", "x15"]}],
    }
    return ["dataset=any", f"table={_hydra(table)}", "numerical_dtype=float32"]


def test_a_run_stopped_within_a_file_resumes_after_its_last_checkpoint(tmp_path, monkeypatch):
    source, output = write_lines(tmp_path / "raw.tsv", noise(2000)), tmp_path / "out"
    preproc(f"source={source}", f"output={tmp_path / 'wanted'}")
    monkeypatch.setattr(parse, "BLOCK_BYTES", 10_000)
    calls = count(1)

    def every_third(writer):
        # The files then hold rows beyond the checkpoint when the run is stopped.
        if next(calls) % 3 == 0:
            writer.checkpoint()

    monkeypatch.setattr(parse._Writer, "checkpoint_if_due", every_third)
    blocks, offsets = parse.blocks, []

    def stops(file, offset, size):
        offsets.append(offset)
        for number, block in enumerate(blocks(file, offset, size)):
            if number == 4:
                raise KeyboardInterrupt
            yield block

    monkeypatch.setattr(parse, "blocks", stops)
    for _ in range(20):
        if output.exists():
            break
        with suppress(Refused):
            preproc(f"source={source}", f"output={output}", "threads=1")
    assert len(offsets) > 2
    assert offsets == sorted(set(offsets))
    assert all_files(output) == all_files(tmp_path / "wanted")


@pytest.fixture(scope="module")
def wanted(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """Return raw rows, and the files that an uninterrupted run writes."""
    directory = tmp_path_factory.mktemp("wanted")
    source = write_lines(directory / "raw.tsv", noise(500))
    preproc(f"source={source}", f"output={directory / 'out'}")
    return source, all_files(directory / "out")


@pytest.fixture(scope="module")
def shuffled(wanted, tmp_path_factory) -> dict[str, bytes]:
    """Return the files of `wanted`, shuffled by one thread."""
    output = tmp_path_factory.mktemp("shuffled") / "out"
    preproc(f"source={wanted[0]}", f"output={output}", "shuffle=true", "threads=1")
    return all_files(output)


@pytest.fixture(scope="module")
def seen_twice(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    """Return more raw rows, and the files of an uninterrupted run that drops values seen once."""
    directory = tmp_path_factory.mktemp("seen_twice")
    source = write_lines(directory / "raw.tsv", noise(4000))
    preproc(f"source={source}", f"output={directory / 'out'}", "frequency_limit=2")
    return source, all_files(directory / "out")


def test_a_run_killed_while_it_writes_the_spec_leaves_nothing_of_it(wanted, tmp_path, monkeypatch):
    source, output = wanted[0], tmp_path / "out"

    def killed(_spec, directory):
        for name in (".feature_spec.yaml.tmp", "feature_spec.yaml"):
            (directory / name).write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("preproc.dataset_writer.write_spec", killed)
        with pytest.raises(Refused):
            preproc(f"source={source}", f"output={output}")
    preproc(f"source={source}", f"output={output}")
    assert all_files(output) == wanted[1]


@pytest.mark.parametrize("job", [raw_logs, any_table])
def test_a_run_killed_after_its_output_was_complete_removes_its_work_directory(
    tmp_path, monkeypatch, job
):
    source, output = write_lines(tmp_path / "raw.tsv", noise(300)), tmp_path / "out"
    options = [*job(str(source)), f"output={output}"]
    with monkeypatch.context() as patch:
        patch.setattr("preproc.work_directory._remove", lambda *_: (_ for _ in ()).throw(OSError()))
        with pytest.raises(Refused):
            preproc(*options)
    written = all_files(output)
    assert (tmp_path / ".out.preproc" / "state.json").exists()
    with pytest.raises(Refused, match="holds a dataset already"):
        preproc(*options, "seed=2")
    preproc(*options)
    assert not list(tmp_path.glob(".out.*"))
    assert all_files(output) == written
    with pytest.raises(Refused, match="holds a dataset already"):
        preproc(*options)


@pytest.mark.parametrize("job", [raw_logs, any_table])
def test_recorded_and_complete_files_are_synced(tmp_path, monkeypatch, job):
    synced, missed = set(), []
    fsync, save = os.fsync, Work.save
    put_in_place = output_module.put_in_place

    def note(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def need(*paths):
        missed.extend(path for path in paths if path.stat().st_ino not in synced)

    def record(run):
        for name in run.state["files"]:
            need(run.dataset / name, (run.dataset / name).parent)
        for name in run.state.get("relations", []):
            need(run.directory / name, *(run.directory / name).iterdir())
        if run.state.get("parse", {}).get(parse.NON_HEX_FILES):
            need(
                run.directory / parse.NON_HEX_FILES,
                *(run.directory / parse.NON_HEX_FILES).iterdir(),
            )
        if "shuffle" in run.state:
            need(run.directory / "origin.i64")
        save(run)

    def put(dataset, root):
        need(dataset, *dataset.rglob("*"))
        put_in_place(dataset, root)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Work, "save", record)
    monkeypatch.setattr(output_module, "put_in_place", put)
    source = write_lines(tmp_path / "raw.tsv", [*noise(300), "bad"])
    options = ["shuffle=true", "on_bad=quarantine", f"output={tmp_path / 'out'}"]
    # Both jobs draw with the same function; a picture takes longer than the rest.
    options += [f"plot={str(job is raw_logs).lower()}"]
    preproc(*job(str(source)), *options)
    assert missed == []
    wanted = {"report.png", "bad_rows.tsv"} if job is raw_logs else {"bad_rows.tsv"}
    assert wanted < {path.name for path in (tmp_path / "out").iterdir()}


def test_other_options_restart(tmp_path, monkeypatch):
    source, output = write_lines(tmp_path / "raw.tsv", noise(500)), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(
            "preproc.criteo.pipeline._write", lambda *_: (_ for _ in ()).throw(OSError("stop"))
        )
        with pytest.raises(Refused):
            preproc(f"source={source}", f"output={output}")
    preproc(f"source={source}", f"output={output}", "frequency_limit=5")
    preproc(f"source={source}", f"output={tmp_path / 'wanted'}", "frequency_limit=5")
    assert all_files(output) == all_files(tmp_path / "wanted")


def stopped_at(phase: str, monkeypatch, *options: str) -> None:
    """Run the command up to function `phase` of the job, which fails as on a full disk."""
    with monkeypatch.context() as patch:
        patch.setattr(
            f"preproc.criteo.pipeline.{phase}", lambda *_: (_ for _ in ()).throw(OSError("stop"))
        )
        with pytest.raises(Refused):
            preproc(*options)


def test_a_run_to_another_output_does_not_resume_from_the_files_of_the_first(
    wanted, tmp_path, monkeypatch
):
    options = [f"source={wanted[0]}", f"temp_directory={tmp_path}"]
    stopped_at("draw_report", monkeypatch, *options, f"output={tmp_path / 'one' / 'out'}")
    for directory in ("two", "one"):
        preproc(*options, f"output={tmp_path / directory / 'out'}")
    assert len(data_files(tmp_path / "one" / "out")) == 2 * 28
    assert all_files(tmp_path / "one" / "out") == all_files(tmp_path / "two" / "out")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["out"]


def test_a_run_whose_files_were_removed_writes_them_again(wanted, tmp_path, monkeypatch):
    options = [f"source={wanted[0]}", f"output={tmp_path / 'out'}"]
    stopped_at("complete_dataset", monkeypatch, *options)
    [dataset] = tmp_path.glob(".out.partial-*")
    work = tmp_path / ".out.preproc"
    for path in (dataset, work):
        shutil.copytree(path, tmp_path / "stopped" / path.name)
    for lost in ("train/cat_3.bin", "vocabulary/cat_0.parquet", "test/label.bin", ""):
        if lost:
            (dataset / lost).unlink()
        else:
            shutil.rmtree(dataset)
        preproc(*options)
        assert all_files(tmp_path / "out") == wanted[1], lost
        shutil.rmtree(tmp_path / "out")
        for path in (dataset, work):
            assert not path.exists()
            shutil.copytree(tmp_path / "stopped" / path.name, path)


def test_runs_that_work_in_two_places_never_share_a_dataset(
    wanted, shuffled, tmp_path, monkeypatch
):
    # The files have equal sizes and other bytes, so only their owner distinguishes them.
    options = [f"source={wanted[0]}", f"output={tmp_path / 'out'}"]
    one, two = (
        [*options, "shuffle=true", f"seed={n}", f"temp_directory={tmp_path / n}"] for n in "12"
    )
    stopped_at("complete_dataset", monkeypatch, *one)
    stopped_at("complete_dataset", monkeypatch, *two)
    preproc(*one)
    assert all_files(tmp_path / "out") == shuffled
    assert not list(tmp_path.glob(".out.*"))


def test_another_writer_of_the_output_leaves_a_run_its_files(tmp_path, monkeypatch):
    source, output = write_lines(tmp_path / "raw.tsv", noise(500)), tmp_path / "out"
    later = []

    def before_the_report(*arguments):
        for command in (
            [f"source={source}", f"temp_directory={tmp_path / 'two'}"],
            ["dataset=synthetic", "data.synthetic.cardinalities=[5]"],
        ):
            with pytest.raises(Refused) as refused:
                preproc(*command, f"output={output}")
            later.append(refused.value.message)
        return draw_report(*arguments)

    draw_report = criteo.draw_report
    monkeypatch.setattr(criteo, "draw_report", before_the_report)
    preproc(f"source={source}", f"output={output}")
    assert (
        later
        == [
            f"error: process {os.getpid()} on {socket.gethostname()} is writing {output}; wait for it, or choose another output"
        ]
        * 2
    )
    assert len(data_files(output)) == 2 * 28


def test_a_directory_that_appears_at_the_output_meanwhile_is_kept(wanted, tmp_path, monkeypatch):
    source, output = wanted[0], tmp_path / "out"

    def before_the_report(*arguments):
        output.mkdir()
        (output / "mine").touch()
        return draw_report(*arguments)

    draw_report = criteo.draw_report
    monkeypatch.setattr(criteo, "draw_report", before_the_report)
    with pytest.raises(Refused, match="is not empty and holds no feature_spec"):
        preproc(f"source={source}", f"output={output}")
    assert [path.name for path in output.iterdir()] == ["mine"]


def test_other_test_rows_leave_nothing_of_the_splits_before(tmp_path, monkeypatch):
    files = [write_lines(tmp_path / f"day_{day}", noise(300 + day, day)) for day in range(4)]
    options = ["dataset=criteo_1tb", "frequency_limit=1", f"source=[{files[0]},{files[1]}]"]
    tests = {"first": [f"test_source={files[2]}"], "last": [f"test_source={files[3]}"], None: []}
    for name, test in tests.items():
        preproc(*options, *test, f"output={tmp_path / 'wanted' / str(name)}")
    # Two days of tests each become shorter and longer, and tests that are no file become one and the other way round.
    pairs = [("first", "last"), ("last", "first"), ("first", None), (None, "first")]
    for before, wanted in pairs:
        out = tmp_path / "out" / f"{before}_{wanted}"
        stopped_at("complete_dataset", monkeypatch, *options, *tests[before], f"output={out}")
        preproc(*options, *tests[wanted], f"output={out}")
        assert all_files(out) == all_files(tmp_path / "wanted" / str(wanted)), (before, wanted)


def test_shuffling_moves_complete_training_rows_and_nothing_else(wanted, shuffled, tmp_path):
    for name, *options in (
        ["two", "shuffle=true", "threads=2", "memory_limit=1GB"],
        ["other", "shuffle=true", "seed=2"],
    ):
        preproc(f"source={wanted[0]}", f"output={tmp_path / name}", *options)
    two, other = (data_files(tmp_path / name) for name in ("two", "other"))
    plain, one = (
        {name: data for name, data in files.items() if name.endswith(".bin")}
        for files in (wanted[1], shuffled)
    )
    assert one == two
    assert {name for name in plain if plain[name] != one[name]} == {
        "train/label.bin",
        "train/numerical.bin",
        "train/cat_0.bin",
        "train/cat_1.bin",
    }
    order = order_within(1, 0, 450)
    for name, dtype in (("label", "u1"), ("cat_0", "<i2"), ("cat_1", "i1")):
        rows = np.frombuffer(plain[f"train/{name}.bin"], dtype)
        assert one[f"train/{name}.bin"] == rows[order].tobytes()
    numerical = np.frombuffer(plain["train/numerical.bin"], "<f2").reshape(-1, 13)
    assert one["train/numerical.bin"] == numerical[order].tobytes()
    assert one["train/label.bin"] != other["train/label.bin"]


@pytest.mark.parametrize("job", [raw_logs, any_table])
def test_brackets_in_a_path_are_letters_like_others(tmp_path, job):
    source = write_lines(tmp_path / "raw.tsv", noise(300))
    for name in ("plain", "odd[1]*b"):
        output = tmp_path / name / "out"
        preproc(*job(str(source)), f"output='{output}'", "shuffle=true")
    assert all_files(tmp_path / "odd[1]*b") == all_files(tmp_path / "plain") != {}


def test_the_random_order_over_buckets_is_a_permutation_that_looks_uniform(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "BUCKET_ROWS", 1000)
    monkeypatch.setattr(shuffle, "CHUNK_ROWS", 777)
    column = StoredColumn(tmp_path / "rows", "<i4")
    np.arange(10_500, dtype="<i4").tofile(column.path)
    work = Work(tmp_path, tmp_path / "dataset", {})
    shuffle.shuffle_rows([column], 10_000, 5, 2, work, Phase("", print))
    rows = column.read(0, 10_500)
    assert (rows[10_000:] == np.arange(10_000, 10_500)).all()
    assert (np.sort(rows[:10_000]) == np.arange(10_000)).all()
    # Correlation of position and row, and fixed points: about 0 (sd 0.01) and about 1.
    assert abs(np.corrcoef(np.arange(10_000), rows[:10_000])[0, 1]) < 0.05
    assert (rows[:10_000] == np.arange(10_000)).sum() < 8


def test_a_thread_that_shuffles_stays_within_its_memory_estimate(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "BUCKET_ROWS", 20_000)
    monkeypatch.setattr(shuffle, "CHUNK_ROWS", 10_000)
    labels = StoredColumn(tmp_path / "labels", "u1")
    numericals = StoredColumn(tmp_path / "numericals", "<f4", 13)
    np.zeros(50_000, "u1").tofile(labels.path)
    np.zeros((50_000, 13), "<f4").tofile(numericals.path)
    columns = [labels, numericals]
    work = Work(tmp_path, tmp_path / "dataset", {})
    tracemalloc.start()
    shuffle.shuffle_rows(columns, 50_000, 5, 1, work, Phase("", print))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0.7 < peak / shuffle.worker_bytes(columns, 50_000) < 1.05


def test_buckets_depend_on_the_rows_alone():
    whole = buckets_of(3, 0, 5000, 7)
    assert (np.concatenate([buckets_of(3, 0, 100, 7), buckets_of(3, 100, 5000, 7)]) == whole).all()
    assert np.bincount(whole, minlength=7).min() > 600


def test_a_vocabulary_in_parts_gives_the_same_ids(seen_twice, tmp_path, monkeypatch):
    monkeypatch.setattr("preproc.criteo.encode.ENTRY_BYTES", 1 << 21)
    alive = []

    class Watched(Lookup):
        made = most_alive = 0

        def __init__(self, most_entries):
            super().__init__(most_entries)
            alive.append(weakref.ref(self))
            Watched.made += 1
            Watched.most_alive = max(
                Watched.most_alive, sum(reference() is not None for reference in alive)
            )

    monkeypatch.setattr("preproc.criteo.encode.Lookup", Watched)
    options = ["frequency_limit=2", "memory_limit=2GB", "threads=1"]
    preproc(f"source={seen_twice[0]}", f"output={tmp_path / 'pieces'}", *options)
    assert all_files(tmp_path / "pieces") == seen_twice[1]
    assert Watched.made > 26
    assert Watched.most_alive == 1


def test_merging_partial_counts_does_not_change_the_counts(seen_twice, tmp_path, monkeypatch):
    monkeypatch.setattr("preproc.criteo.encode.GROWING_ENTRY_BYTES", 1 << 20)
    monkeypatch.setattr("preproc.criteo.encode.MERGE_ROWS", 150)
    options = ["frequency_limit=2", "memory_limit=500MB"]
    preproc(f"source={seen_twice[0]}", f"output={tmp_path / 'merged'}", *options)
    assert all_files(tmp_path / "merged") == seen_twice[1]


def test_a_phase_shows_its_rate_and_the_time_left():
    phase = Phase("parse", print)
    phase.total, phase.detail = 400.0, "day_3"
    phase.update(100.0)
    text = phase.describe(200.0, 60.0, rows=6_000_000)
    assert text == "parse: day_3, 6,000,000 rows (100,000 rows/s), 50.0 %, 0:02:00 left"
    assert re.search(r"0:01:00 left", phase.describe(250.0, 60.0))
