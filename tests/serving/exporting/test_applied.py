"""A model directory with deltas equals an export of the checkpoint that they lead to, and a running server swaps it in."""

import json
from pathlib import Path

import numpy as np
import pytest

from configs.serving_schema import ApplyConfig, TableType
from nn.checkpoint.directory import list_checkpoints
from nn.deltas.delta import read_delta
from serving.apply import run as apply
from serving.exporting.applied import apply_deltas
from serving.exporting.proof import LIMITS
from serving.exporting.proof_rows import read_proof_rows, write_proof_rows
from serving.inference.model import ServedModel
from serving.inference.versions import Versions
from serving.manifest import MANIFEST, PROOF_ROWS, Manifest, ModelError
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.serving.handmade_model import some_rows, write_manifest, write_model
from tests.serving.served_models import export, served_scores


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """Return a run of 16 steps with deltas; its dense component is averaged."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    options = ("train.max_steps=16", "checkpoint.delta_every=4", "checkpoint.keep=9")
    ended = run_command(
        *TINY,
        *options,
        "train.ema_decay=0.9",
        "data.synthetic.train_rows=1024",
        f"run_dir={run_dir}",
    )
    assert ended.exit_code == 0, ended.err
    return run_dir


@pytest.mark.parametrize("dtype", [TableType.bf16, TableType.int8, TableType.int4])
def test_an_applied_version_equals_an_export_and_is_swapped_in(run_dir, tmp_path, dtype):
    first, last = (run_dir / f"checkpoints/step_{step}" for step in (0, 16))
    export(first, tmp_path / "models/1", dtype=dtype)
    wanted = export(last, tmp_path / "wanted", dtype=dtype)
    versions = Versions(tmp_path / "models", log=print)
    manifest, chain = apply_deltas(
        tmp_path / "models/1", [str(run_dir / "deltas")], tmp_path / "models/2"
    )
    assert len(chain) == 4
    for name, state in wanted.files.items():
        if name.startswith("tables/"):
            assert manifest.files[name] == state, name
    assert manifest.source["step"] == 16
    assert versions.update()
    assert versions.current.name == "2"
    got = served_scores(tmp_path / "models/2", last)
    assert np.array_equal(got, served_scores(tmp_path / "wanted", last))
    assert not np.array_equal(got, served_scores(tmp_path / "models/1", last))
    # Its own proof: of the rows of the base's, all of which the deltas have changed or left as the base has them.
    found, exported = manifest.proof, wanted.proof
    assert (found["split"], found["rows"], found["version"]) == ("test", exported["rows"], "1")
    assert found["largest_difference"] == pytest.approx(exported["largest_difference"], rel=0.3)
    assert (
        found["largest_difference"]
        != Manifest.read(tmp_path / "models/1").proof["largest_difference"]
    )


@pytest.mark.parametrize(("dtype", "columns", "share"), [("int8", 16, 0.4), ("int4", 9, 0.4)])
def test_deltas_of_integers_make_the_bytes_of_an_export(
    run_dir, tmp_path, capsys, dtype, columns, share
):
    """On a table of integers of the same dtype only; an odd row of int4 ends in half a byte."""
    sizes = (f"model.embedding_dim={columns}", f"model.bottom_mlp=[16,{columns}]")
    num_bytes = {}
    for name in ("table", dtype):
        ended = run_command(
            *(*TINY, *sizes, "train.max_steps=16", "checkpoint.delta_every=4", "checkpoint.keep=9"),
            *(f"checkpoint.delta_dtype={name}", f"run_dir={tmp_path / name}"),
        )
        assert ended.exit_code == 0, ended.err
        paths = list_checkpoints(tmp_path / name / "deltas")
        num_bytes[name] = sum(read_delta(path).rows_of("cat_4").num_bytes for path in paths)
        assert {read_delta(path).facts["delta"]["format"] for path in paths} == {
            1 if name == "table" else 3
        }
    assert 0 < num_bytes[dtype] < share * num_bytes["table"]
    first, last = (tmp_path / dtype / f"checkpoints/step_{step}" for step in (0, 16))
    deltas = str(tmp_path / dtype / "deltas")
    export(first, tmp_path / "models/1", dtype=TableType[dtype])
    wanted = export(last, tmp_path / "wanted", dtype=TableType[dtype])
    apply(ApplyConfig(model=str(tmp_path / "models"), deltas=[deltas]))
    printed = capsys.readouterr().out
    assert f"4 deltas of {rows_in(deltas):,} rows, 0." in printed
    # Their integers are all that is known: what they lost by rounding is in no proof.
    assert "rows of split test: largest difference from the rows of the deltas 0.0e+00" in printed
    manifest = Manifest.read(tmp_path / "models/2")
    tables = {name: state for name, state in wanted.files.items() if name.startswith("tables/")}
    assert tables.items() <= manifest.files.items()
    got = served_scores(tmp_path / "models/2", last)
    assert np.array_equal(got, served_scores(tmp_path / "wanted", last))
    assert not np.array_equal(got, served_scores(tmp_path / "models/1", last))
    assert manifest.proof["largest_difference"] <= manifest.proof["limit"]
    other = "int4" if dtype == "int8" else "fp32"
    export(first, tmp_path / "other", dtype=TableType[other])
    with pytest.raises(ValueError, match=f"rows of table cat_. are {dtype}, and .* model {other};"):
        apply_deltas(tmp_path / "other", [deltas], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def rows_in(deltas: str) -> int:
    paths = list_checkpoints(Path(deltas))
    return sum(of.touched for path in paths for of in read_delta(path).tables.values())


def test_an_applied_version_beyond_the_limit_is_refused_as_an_export_is(
    run_dir, tmp_path, monkeypatch
):
    export(run_dir / "checkpoints/step_0", tmp_path / "1", dtype=TableType.int8)
    # A directory of an earlier version has no rows of its proof.
    document = json.loads((tmp_path / "1" / MANIFEST).read_text())
    del document["files"][PROOF_ROWS]
    (tmp_path / "1" / MANIFEST).write_text(json.dumps(document))
    deltas = [str(run_dir / "deltas")]
    manifest, _ = apply_deltas(tmp_path / "1", deltas, tmp_path / "2")
    assert (manifest.proof["split"], manifest.proof["rows"]) == ("drawn", 1024)
    difference = manifest.proof["largest_difference"]
    assert 0 < difference < manifest.proof["limit"] == LIMITS["int8"]
    monkeypatch.setitem(LIMITS, "int8", difference / 2)
    with pytest.raises(ValueError, match=r"differs from the training path by .* on 1,024 rows of"):
        apply_deltas(tmp_path / "1", deltas, tmp_path / "3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]


def test_rows_of_a_proof_that_are_not_of_the_model_are_refused(tmp_path):
    path, rows = write_model(tmp_path / "1", "fp32"), some_rows(9, 3, 1)
    write_proof_rows(path, rows)
    write_manifest(path, json.loads((path / MANIFEST).read_text()))
    manifest = Manifest.read(path)
    found = read_proof_rows(path, manifest)[1]
    model = ServedModel.load(path)
    assert model.scores(found).equal(model.scores(rows))
    numbers = np.fromfile(path / PROOF_ROWS, "<i8")
    for index, value in ((0, 10), (0, 2**40), (1, 0), (2, -1), (4, 40), (5, -1), (5 + 9 * 7, 2)):
        changed = numbers.copy()
        changed[index] = value
        changed.tofile(path / PROOF_ROWS)
        with pytest.raises(ModelError, match=r"proof_rows.bin has"):
            read_proof_rows(path, manifest)


def test_the_next_version_begins_where_the_newest_ends(run_dir, tmp_path):
    export(run_dir / "checkpoints/step_0", tmp_path / "1")
    deltas = run_dir / "deltas"
    apply_deltas(tmp_path / "1", [str(deltas / "step_4")], tmp_path / "2")
    with pytest.raises(
        ValueError, match=r"a gap: .*step_12 begins at step 8, and .*2 ends at step 4"
    ):
        apply_deltas(tmp_path / "2", [str(deltas / "step_12")], tmp_path / "3")
    manifest, chain = apply_deltas(tmp_path / "2", [str(deltas)], tmp_path / "3")
    assert [delta.end.step for delta in chain] == [8, 12, 16]
    Manifest.read(tmp_path / "3").verify(tmp_path / "3")
    wanted = export(run_dir / "checkpoints/step_16", tmp_path / "wanted")
    tables = {name: state for name, state in wanted.files.items() if name.startswith("tables/")}
    assert tables.items() <= manifest.files.items()
    with pytest.raises(ValueError, match="there are none after step 16"):
        apply_deltas(tmp_path / "3", [str(deltas)], tmp_path / "4")
    # A version that is not what it was is no base.
    table = tmp_path / "2" / manifest.tables[0].file
    table.write_bytes(bytes(table.stat().st_size))
    with pytest.raises(ValueError, match="its SHA-256 differs"):
        apply_deltas(tmp_path / "2", [str(deltas)], tmp_path / "4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "wanted"]
