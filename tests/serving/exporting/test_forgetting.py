"""Values that are removed from a run with its deltas, from models and vocabularies, and are found nowhere afterwards."""

import bz2
import errno
import gzip
import os
import shutil
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from configs.serving_schema import ForgetConfig, TableType
from dataloading.dataset.durable_files import edited_copy, exclusive, lock_directory
from nn.checkpoint import forgetting as forgetting_of_rows
from nn.checkpoint.directory import find_damage, list_checkpoints, read_facts
from nn.checkpoint.tensor_index import Chunk, StoredTensor, read_index
from nn.export.tables import Selection, export_tables
from preproc.forgetting import ids_of
from preproc.vocabulary_file import check_vocabulary
from serving.exporting.applied import apply_deltas
from serving.forget import run as forget
from serving.inference.key_rows import load_key_rows
from serving.inference.model import ServedModel
from serving.inference.tables import MappedTable
from serving.inference.versions import Versions
from serving.manifest import Manifest
from serving.value_search import Values, holders
from serving.versions import servable
from serving.vocabulary import Vocabulary
from tests.helpers.command import run_command
from tests.helpers.distributed import run_distributed
from tests.helpers.preproc_command import preproc
from tests.nn.deltas.test_raw_keys import DELTAS, ROW_WISE, keys_of
from tests.nn.test_raw_keys import SMALL, data, trained
from tests.serving.served_models import export

__all__ = ["data"]


@pytest.fixture
def served(data, tmp_path) -> Path:
    """A run that was stopped after five steps, a model of its last checkpoint, and an export of its tables."""
    trained(data, tmp_path / "run", 5, *DELTAS)
    checkpoint = tmp_path / "run/checkpoints/step_5"
    export(checkpoint, tmp_path / "models/1", dtype=TableType.int8, rows=8)
    export_tables(checkpoint, tmp_path / "tables", Selection())
    return tmp_path


def array(directory: Path, name: str) -> np.ndarray:
    return np.concatenate([*read_index(directory).tensors[name].blocks()])


def forgetting(root: Path, values: list, *directories: Path, feature: str = "user") -> int:
    """Run the command; return its exit code."""
    (root / "keys.txt").write_text("\n".join(map(str, values)))
    config = ForgetConfig(
        feature=feature,
        keys=str(root / "keys.txt"),
        directories=[*map(str, directories)],
    )
    try:
        forget(config)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize("sharding", [(), (ROW_WISE,)])
def test_keys_leave_checkpoints_models_and_the_deltas_that_follow(data, served, capsys, sharding):
    last = served / "run/checkpoints/step_5"
    before = keys_of(served / "run", 5)
    gone = before[before != 0][3:]
    rows = np.flatnonzero(np.isin(before, gone))
    others = np.setdiff1d(np.arange(len(before)), rows)
    weights = array(last, "tables.user.weight")
    assert weights[rows].any(axis=1).all()
    shutil.copytree(served / "models/1", served / "follower")
    versions = Versions(served / "models", log=print)
    where = [served / "run", served / "models", served / "tables"]
    assert forgetting(served, gone.tolist(), *where) == 1
    printed = capsys.readouterr().out
    assert f"run/checkpoints/step_5: values removed: {len(gone)} (keys.user." in printed
    assert "run/deltas: has the rows as they were" in printed
    assert "(keys.user.keys); remove it" in printed

    for path in [*list_checkpoints(served / "run/checkpoints"), served / "tables"]:
        assert find_damage(path, read_facts(path), 0, 1) is None
        assert not np.isin(array(path, "keys.user.keys"), gone).any()
    for name in read_index(last).tensors:
        if name.startswith("tables.user."):
            after = array(last, name)
            assert not after[rows].any(), name
    np.testing.assert_array_equal(array(last, "tables.user.weight")[others], weights[others])
    assert versions.update()
    keys = load_key_rows(served / "models/1", Manifest.read(served / "models/1"))["user"]
    assert not keys.rows(gone).any()
    assert keys.rows(before[others][before[others] != 0]).all()

    shutil.rmtree(served / "run/deltas")
    # Left by a killed run, and damaged: said, and no reason to leave the others as they are.
    shutil.copytree(last, served / "run/checkpoints/.step_9.unfinished")
    (served / "run/checkpoints/.step_9.unfinished/run.json").unlink()
    assert forgetting(served, gone.tolist(), *where) == 1
    assert ".step_9.unfinished: not changed: " in capsys.readouterr().out
    shutil.rmtree(served / "run/checkpoints/.step_9.unfinished")
    assert forgetting(served, gone.tolist(), *where) == 0
    assert f"none of {len(gone)} values" in capsys.readouterr().out

    # The next delta leads a model that has the keys to an export without them.
    if sharding:
        run_distributed(trained, 2, data, served / "run", 6, *DELTAS, *sharding)
    else:
        trained(data, served / "run", 6, *DELTAS)
    assert not keys_of(served / "run", 6)[rows].all(), "the batch has not filled all rows again"
    deltas, step = [str(served / "run/deltas")], served / "run/checkpoints/step_6"
    step_7 = step.with_name("step_7")
    manifest, _ = apply_deltas(served / "follower", deltas, served / "followed")
    wanted = export(step, served / "wanted", dtype=TableType.int8, rows=8)
    assert files_of(manifest) == files_of(wanted)
    # The note stays, and the delta after that one does not take the keys again from rows that others have got.
    refilled = keys_of(served / "run", 6)[rows].any()
    assert refilled or sharding
    trained(data, served / "run", 7, *DELTAS)
    for step in (6, 7):
        facts = read_facts(served / f"run/checkpoints/step_{step}")
        assert "forgotten" not in facts
        assert set(rows.tolist()) <= set(facts["forgotten_before"]["keys.user"])
    manifest, _ = apply_deltas(served / "follower", deltas, served / "further")
    wanted = export(step_7, served / "wanted_7", dtype=TableType.int8, rows=8)
    assert files_of(manifest) == files_of(wanted)


def files_of(manifest: Manifest) -> dict:
    """Return what the manifest records of each file of tables and keys."""
    return {n: s for n, s in manifest.files.items() if n.startswith(("tables/", "keys/"))}


TABLE = (
    "table={sources: {t: {files: {file}}}, label: {name: y}, numerical: [{name: x}], "
    "categorical: [user_id, city], split: {train: 0.75}}"
)


def write_day(path: Path, day: int) -> None:
    lines = [
        f"{row % 2},{row},customer-{day * 2 + row % 9},{('bonn', 'rome', 'oslo')[row % 3]}"
        for row in range(72)
    ]
    path.write_text("\n".join(["y,x,user_id,city", *lines]) + "\n")


def fit(root: Path, day: int, *options: str) -> Path:
    """Make the dataset of a day from rows that the helper writes beside the datasets."""
    write_day(root / f"{day}.csv", day)
    table = TABLE.replace("{file}", str(root / f"{day}.csv"))
    preproc("dataset=any", f"output={root}/data/{day}", table, *options)
    return root / f"data/{day}"


def train(root: Path, data: Path, *options: str) -> None:
    ended = run_command(*SMALL, f"data.path={data}", f"run_dir={root}/run", *options)
    assert ended.exit_code == 0, ended.err


def test_values_leave_vocabularies_and_the_next_day_follows(tmp_path, capsys):
    first = fit(tmp_path, 0, "rare_counts=true")
    train(tmp_path, first, "train.max_steps=2")
    last = tmp_path / "run/checkpoints/step_2"
    export(last, tmp_path / "models/1", fitted=str(first), rows=8)
    export(last, tmp_path / "ids", rows=8)
    gone, kept = ["customer-3", "customer-5", "nobody-7"], ["customer-1", "customer-2"]
    ids = ids_of(first, "user_id", gone)
    rows = np.array(sorted(ids.values()))
    weights = array(last, "tables.user_id.weight")
    before = ids_of(first, "user_id", kept)
    where = [tmp_path / name for name in ("run", "models", "ids", "data")]
    # Without the dataset nobody knows the rows.
    assert forgetting(tmp_path, gone, *where[2:3], feature="user_id") == 1
    assert "ids: not changed: it has no raw values of a feature" in capsys.readouterr().out
    code = forgetting(tmp_path, gone, *where, feature="user_id")
    printed = capsys.readouterr().out
    assert (code, len(ids)) == (0, 2), printed
    assert "data/0: the raw files that it was made from were not looked at" in printed

    after = array(last, "tables.user_id.weight")
    assert not after[rows].any()
    assert (np.delete(after, rows, 0) == np.delete(weights, rows, 0)).all()
    assert check_vocabulary(first / "vocabulary/user_id.parquet", "") == len(weights) - 1
    assert ids_of(first, "user_id", [*gone, *kept]) == before
    preproc("mode=verify", f"path={first}")
    served = ServedModel.load(tmp_path / "models/1")
    name, size = served.manifest.raw["categorical"][0]["vocabulary"]
    found = Vocabulary(tmp_path / "models/1" / name, size).ids([*kept, *gone])
    assert found.tolist() == [*before.values(), 0, 0, 0]
    for model in ("ids", "models/1"):
        declared = Manifest.read(tmp_path / model).tables[0]
        table = MappedTable(tmp_path / model, declared, "fp32")
        assert not table.rows(torch.from_numpy(rows)).any()

    # The next day gives a value that comes again a new id, and the run goes on.
    second = fit(tmp_path, 1, "mode=extend", f"fitted={first}")
    assert ids_of(second, "user_id", ["customer-3"])["customer-3"] > len(weights) - 1
    assert ids_of(second, "user_id", kept) == before
    train(tmp_path, second, "day=next", "train.max_steps=1")
    export(tmp_path / "run/checkpoints/step_3", tmp_path / "models/2", fitted=str(second), rows=8)
    assert servable(tmp_path / "models") == ["2", "1"]


def test_ids_of_a_later_day_and_fits_of_another_one(tmp_path, capsys):
    first = fit(tmp_path, 0)
    train(tmp_path, first, "train.max_steps=2", "checkpoint.delta_every=1")
    base = tmp_path / "run/checkpoints/step_2"
    export(base, tmp_path / "models/1", fitted=str(first), rows=8)
    export(base, tmp_path / "ids", dtype=TableType.int8, rows=8)
    extend = ("mode=extend", f"fitted={first}")
    second = fit(tmp_path, 1, *extend)
    train(tmp_path, second, "day=next", "train.max_steps=1", "checkpoint.delta_every=1")
    last, deltas = tmp_path / "run/checkpoints/step_3", [str(tmp_path / "run/deltas/step_3")]
    # A day of as many new values, which are others.
    text = (tmp_path / "1.csv").read_text().replace("customer-9", "customer-19")
    (tmp_path / "other.csv").write_text(text.replace("customer-10", "customer-20"))
    table = TABLE.replace("{file}", str(tmp_path / "other.csv"))
    preproc("dataset=any", f"output={tmp_path}/other", table, *extend)
    assert len(ids_of(tmp_path / "other", "user_id", ["customer-19", "customer-20"])) == 2
    other = "trained on another day, or on one of other rows"
    with pytest.raises(ValueError, match=other):
        apply_deltas(tmp_path / "models/1", deltas, tmp_path / "applied", f"{tmp_path}/other")
    with pytest.raises(ValueError, match=other):
        export(last, tmp_path / "exported", fitted=f"{tmp_path}/other", rows=8)

    copy = shutil.copytree(tmp_path / "data", tmp_path / "backup") / "1"
    where = [tmp_path / name for name in ("run/checkpoints", "ids", "models", "data")]
    forgetting(tmp_path, ["customer-3", "customer-9"], *where, feature="user_id")
    printed = capsys.readouterr().out
    # The table of day 0 has no row of customer-9.
    assert f"{base}: values removed: 1 (tables.user_id.)" in printed
    assert f"{last}: values removed: 2 (tables.user_id.)" in printed
    assert f"{tmp_path}/ids: values removed: 1\n" in printed
    with pytest.raises(ValueError, match="forget removed; remove them there too"):
        export(last, tmp_path / "exported", fitted=str(copy), rows=8)
    with pytest.raises(ValueError, match="forget removed; remove them there too"):
        apply_deltas(tmp_path / "models/1", deltas, tmp_path / "applied", str(copy))
    exported = export(last, tmp_path / "exported", fitted=str(second), rows=8)
    row = ids_of(copy, "user_id", ["customer-3"])["customer-3"]
    assert row in exported.source["forgotten"]["tables.user_id"]
    # Checkpoints that follow keep the note.
    for steps in (2, 3):
        more = ("train.epochs=9", f"train.max_steps={steps}", "checkpoint.delta_every=1")
        train(tmp_path, second, *more)
        later = tmp_path / f"run/checkpoints/step_{steps + 2}"
        with pytest.raises(ValueError, match="forget removed; remove them there too"):
            export(later, tmp_path / "later", fitted=str(copy), rows=8)
    exported = export(later, tmp_path / "later", fitted=str(second), rows=8)
    assert row in exported.source["forgotten"]["tables.user_id"]
    applied, _ = apply_deltas(tmp_path / "models/1", deltas, tmp_path / "applied", str(second))
    assert applied.source["forgotten"] == {"tables.user_id": [row]}


@pytest.mark.parametrize("name", ["customer-3", "u3"])
def test_values_are_found_within_those_of_crosses(tmp_path, capsys, name):
    cross = "user_id, city, {name: pair, cross: [city, user_id]}"
    table = TABLE.replace("{file}", str(tmp_path / "0.csv")).replace("user_id, city", cross)
    write_day(tmp_path / "0.csv", 0)
    text = (tmp_path / "0.csv").read_text().replace("customer-3", name)
    (tmp_path / "0.csv").write_text(text)
    preproc("dataset=any", f"output={tmp_path}/data", table)
    train(tmp_path, tmp_path / "data", "train.max_steps=1")
    last = tmp_path / "run/checkpoints/step_1"
    export(last, tmp_path / "model", fitted=f"{tmp_path}/data", rows=8)
    where = [last, tmp_path / "model", tmp_path / "data"]
    assert forgetting(tmp_path, [name], *where, feature="user_id") == 1
    printed = capsys.readouterr().out
    assert (
        "vocabulary/pair.bin: still has a value (a part of values of the cross 'pair')" in printed
    )
    is_long = len(name) >= 6
    assert ("data/vocabulary/pair.parquet: still has a value" in printed) is is_long
    gone = [f"{city}\x1f{name}" for city in ("bonn", "rome", "oslo")]
    assert forgetting(tmp_path, gone, *where, feature="pair") == 0
    assert forgetting(tmp_path, [name], *where, feature="user_id") == 0


@pytest.mark.parametrize(
    "user", ["user_id", "{name: user_id, vocabulary: dynamic, capacity: 40}"], ids=["ids", "keys"]
)
def test_events_that_the_next_day_begins_with_leave(tmp_path, capsys, user):
    lines = [f"{row % 2},u{row % 7},i{row % 5},{row}" for row in range(70)]
    log = "{name: seen, of: [item], by: user_id, order_by: 'CAST(time AS INT)', length: 3}"
    table = (
        f"table={{sources: {{t: {{files: {tmp_path}/0.csv}}}}, order_by: ['CAST(time AS INT)'], "
        f"label: {{name: y}}, categorical: [{user}, item], sequence: [{log}]}}"
    )
    (tmp_path / "0.csv").write_text("\n".join(["y,user_id,item,time", *lines]) + "\n")
    preproc("dataset=any", f"output={tmp_path}/data/0", table)
    first = tmp_path / "data/0"
    forgetting(tmp_path, ["u3", "u5"], first, feature="user_id")
    assert "data/0: " in (printed := capsys.readouterr().out)
    assert "events of the next day removed: 6" in printed
    left = pq.read_table(first / "latest/seen.parquet")
    assert sorted({*left["who_"].to_pylist()}) == ["u0", "u1", "u2", "u4", "u6"]
    forgetting(tmp_path, ["i2"], first, feature="seen_item")
    left = pq.read_table(first / "latest/seen.parquet")
    assert len(left) < 15
    assert "i2" not in left["c0"].to_pylist()
    preproc("mode=verify", f"path={first}")
    # The next day follows, and its rows see none of these events.
    later = [line.rpartition(",")[0] + f",{100 + row}" for row, line in enumerate(lines)]
    (tmp_path / "1.csv").write_text("\n".join(["y,user_id,item,time", *later]) + "\n")
    second = table.replace("0.csv", "1.csv")
    preproc("dataset=any", f"output={tmp_path}/data/1", second, "mode=extend", f"fitted={first}")
    slices = np.fromfile(tmp_path / "data/1/train/seen.slices.bin", "<i8").reshape(-1, 2)
    assert slices[3].tolist()[0] == slices[3].tolist()[1]
    assert slices[4, 0] < slices[4, 1]


def test_what_cannot_be_forgotten_is_said(tmp_path, capsys):
    first = fit(tmp_path, 0)
    with pytest.raises(ValueError, match="directories: nothing there has a feature 'usr'"):
        forgetting(tmp_path, ["customer-3"], first, feature="usr")
    (tmp_path / "run/checkpoints/step_1").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step_1/tensors.json").touch()
    running = lock_directory(tmp_path / "run")
    with pytest.raises(ValueError, match=r"run is in use: .* wait until it ends, stop it"):
        forgetting(tmp_path, ["customer-3"], tmp_path / "run", feature="user_id")
    shutil.rmtree(tmp_path / "run/checkpoints")
    (tmp_path / "run/config.yaml").touch()
    with pytest.raises(ValueError, match=r"run is in use: .* wait until it ends, stop it"):
        forgetting(tmp_path, ["customer-3"], tmp_path / "run", first, feature="user_id")
    os.close(running)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ValueError, match="has no values; want one a line"):
        forgetting(tmp_path, [""], first, feature="user_id")
    with pytest.raises(ValueError, match=r"directories: .*none is no directory"):
        forgetting(tmp_path, ["customer-3"], tmp_path / "none", feature="user_id")
    assert forgetting(tmp_path, ["customer-3"], tmp_path, feature="user_id") == 1
    printed = capsys.readouterr().out
    assert "0.csv: still has a value (text); remove it, or make it again" in printed
    assert "keys.txt: still has a value (text)" in printed
    hashed = TABLE.replace("[user_id,", "[{name: user_id, buckets: 5},")
    preproc(
        "dataset=any",
        f"output={tmp_path}/hashed",
        hashed.replace("{file}", str(tmp_path / "0.csv")),
    )
    with pytest.raises(ValueError, match="has no vocabulary of it, as where values are hashed"):
        forgetting(tmp_path, ["customer-3"], tmp_path / "hashed", feature="user_id")


def test_rows_of_a_table_on_disk_get_the_seed_s_weights(data, tmp_path):
    disk = ("sharding.tables={user: {tier: disk, cache: 1}}", f"sharding.disk_path={tmp_path}")
    trained(data, tmp_path / "run", 5, *DELTAS, *disk)
    first, last = (tmp_path / f"run/checkpoints/step_{step}" for step in (0, 5))
    assert read_index(last).tensors["tables.user.weight"].chunks[0].initial is not None
    before, initial = keys_of(tmp_path / "run", 5), array(first, "tables.user.weight")
    gone = before[before != 0][2:6]
    rows = np.flatnonzero(np.isin(before, gone))
    assert (array(last, "tables.user.weight")[rows] != initial[rows]).any(axis=1).all()
    forgetting(tmp_path, gone.tolist(), tmp_path / "run")
    np.testing.assert_array_equal(array(last, "tables.user.weight")[rows], initial[rows])
    assert find_damage(last, read_facts(last), 0, 1) is None


def test_rows_across_checksums_are_overwritten_as_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(forgetting_of_rows, "CHECKSUM_BYTES", 64)
    rng = np.random.default_rng(0)
    for columns in (1, 5, 12, 16):
        values = rng.integers(1, 99, (50, columns)).astype(np.float32)
        path = tmp_path / f"{columns}.bin"
        path.write_bytes(b"before" + values.tobytes() + b"after")
        blocks_of = [values.tobytes()[at : at + 64] for at in range(0, values.nbytes, 64)]
        chunk = Chunk((100, 0), values.shape, path, 6, tuple(map(zlib.crc32, blocks_of)))
        rows = np.array([3, 100, 101, 117, 149, 150])
        tensor = StoredTensor("float32", (200, columns), (chunk,))
        checksums = forgetting_of_rows._overwrite(path, chunk, tensor, rows)
        values[[0, 1, 17, 49]] = 0
        wanted = values.tobytes()
        assert path.read_bytes() == b"before" + wanted + b"after"
        assert checksums == [zlib.crc32(wanted[at : at + 64]) for at in range(0, len(wanted), 64)]
        with pytest.raises(ValueError, match="has changed since it was written"):
            forgetting_of_rows._overwrite(path, chunk, tensor, rows)


def test_a_fit_s_ids_are_those_of_its_own_checkpoints_only(tmp_path):
    """Runs on two fits lie beside each other, and a value has an id in one of them."""
    fit(tmp_path, 0)
    table = TABLE.replace("{file}", str(tmp_path / "other.csv"))
    lines = [f"{row % 2},{row},person-{row % 9},rome" for row in range(72)]
    (tmp_path / "other.csv").write_text("\n".join(["y,x,user_id,city", *lines]) + "\n")
    preproc("dataset=any", f"output={tmp_path}/data/other", table)
    weights = {}
    for name in ("0", "other"):
        (tmp_path / name).mkdir()
        train(tmp_path / name, tmp_path / "data" / name, "train.max_steps=2")
        weights[name] = array(tmp_path / name / "run/checkpoints/step_2", "tables.user_id.weight")
        (tmp_path / f"{name}.csv").unlink()
    rows = np.array([*ids_of(tmp_path / "data/0", "user_id", ["customer-3"]).values()])
    assert weights["0"][rows].any()
    where = [tmp_path / name for name in ("0", "other", "data")]
    assert forgetting(tmp_path, ["customer-3"], *where, feature="user_id") == 0
    after = array(tmp_path / "0/run/checkpoints/step_2", "tables.user_id.weight")
    assert not after[rows].any()
    other = array(tmp_path / "other/run/checkpoints/step_2", "tables.user_id.weight")
    np.testing.assert_array_equal(other, weights["other"])


def test_a_vocabulary_keeps_ids_that_another_call_needs(tmp_path, capsys):
    first = fit(tmp_path, 0)
    train(tmp_path, first, "train.max_steps=2")
    (tmp_path / "0.csv").unlink()
    last, where = tmp_path / "run/checkpoints/step_2", (tmp_path / "run", first)
    ids = ids_of(first, "user_id", ["customer-3"])
    facts = (last / "run.json").read_text()
    (last / "run.json").write_text("")
    assert forgetting(tmp_path, ["customer-3"], *where, feature="user_id") == 1
    assert "needs its ids; call again then" in capsys.readouterr().out
    assert ids_of(first, "user_id", ["customer-3"]) == ids
    (last / "run.json").write_text(facts)
    assert forgetting(tmp_path, ["customer-3"], *where, feature="user_id") == 0
    assert not array(last, "tables.user_id.weight")[[*ids.values()]].any()
    assert not ids_of(first, "user_id", ["customer-3"])


def test_links_and_what_killed_calls_left_are_followed(served):
    last, gone = served / "run/checkpoints/step_5", keys_of(served / "run", 5)
    gone = gone[gone != 0][3:]
    (served / "link").symlink_to(last)
    # Killed between two renames, and in a copy.
    (served / "models/1").rename(served / "models/.1.replaced-0123abcd")
    shutil.copytree(last, last.with_name(".step_5.partial-0123abcd"))
    (last.with_name(".step_5.partial-0123abcd") / "run.json").unlink()
    shutil.rmtree(served / "run/deltas")
    where = (served / "link", served / "run", served / "models")
    assert forgetting(served, gone.tolist(), *where) == 0
    assert (served / "link").is_symlink()
    assert not np.isin(array(last, "keys.user.keys"), gone).any()
    keys = load_key_rows(served / "models/1", Manifest.read(served / "models/1"))["user"]
    assert not keys.rows(gone).any()
    assert not [*served.rglob("*.partial-*"), *served.rglob("*.replaced-*")]


def test_a_second_call_waits_for_the_first(served):
    gone = keys_of(served / "run", 5)[-1:].tolist()
    with (
        exclusive(served / "models/1.forget", "removes values"),
        pytest.raises(ValueError, match="removes values; wait for it"),
    ):
        forgetting(served, gone, served / "models")


def test_a_full_disk_leaves_the_directory_and_is_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "1").mkdir()
    (tmp_path / "1/file").write_text("before")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "file")

    monkeypatch.setattr(shutil, "copy2", full)
    with (
        pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device: 'file'$"),
        edited_copy(tmp_path / "1", ["file"]),
    ):
        pass
    assert (tmp_path / "1/file").read_text() == "before"
    assert os.listdir(tmp_path) == ["1"]


def test_lines_of_values_are_read_as_editors_write_them(tmp_path):
    keys = tmp_path / "keys"
    keys.write_bytes(b"\xef\xbb\xbfa\r\nb \r\n\r\nc\xe2\x80\xa8d")
    assert Values.read("user", keys).texts == ["a", "b ", "c\u2028d", "b"]
    keys.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is no UTF-8; want one value a line"):
        Values.read("user", keys)


@pytest.mark.parametrize(
    "column",
    [
        pa.array(["customer-3"], pa.large_string()),
        pa.array(["customer-3"]).dictionary_encode(),
        pa.array([b"\xff", b"customer-3"]),
        pa.array([[{"user": "customer-3"}]]),
        pa.array([1.5, None, 12345678901.0]),
    ],
    ids=lambda column: str(column.type),
)
def test_parquet_of_any_writer_is_searched(tmp_path, column):
    pq.write_table(pa.table({"column": column}), tmp_path / "file.parquet")
    (tmp_path / "keys").write_text("customer-3\n12345678901\n")
    found = [*holders(tmp_path, Values.read("user", tmp_path / "keys"))]
    assert (tmp_path / "file.parquet", "column column") in found


def test_files_are_searched_by_their_first_bytes(tmp_path):
    text = b"id\nother\ncustomer-3\n"
    packed = {
        "log.csv.gz": gzip.compress(text),
        "log.zst": pa.compress(text, codec="zstd", asbytes=True),
        "of_others.gz": gzip.compress(b"customer-30\n"),
        "empty": b"",
    }
    unread = {
        "log.bz2": bz2.compress(text),
        "cut.gz": packed["log.csv.gz"][:-9],
        "bad.parquet": text,
    }
    for name, written in (packed | unread).items():
        (tmp_path / name).write_bytes(written)
    pq.write_table(pa.table({"column": ["customer-3"]}), tmp_path / "part.pq", compression="zstd")
    values = Values("user", ["customer-3"], np.zeros(0, np.int64))
    found = {path.name: kind for path, kind in holders(tmp_path, values)}
    wanted = {"log.csv.gz": "text", "log.zst": "text", "part.pq": "column column"}
    assert {name: kind for name, kind in found.items() if name not in unread} == wanted
    assert all(found[name].startswith("or nobody knows: ") for name in unread)
