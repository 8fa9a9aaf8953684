"""A model directory with deltas equals an export of the checkpoint that they lead to, and a running server swaps it in."""

from pathlib import Path

import numpy as np
import pytest

from configs.serving_schema import TableType
from serving.exporting.applied import apply_deltas
from serving.inference.versions import Versions
from serving.manifest import Manifest
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
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


@pytest.mark.parametrize("dtype", [TableType.bf16, TableType.int8])
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
