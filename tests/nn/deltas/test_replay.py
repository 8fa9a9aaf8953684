"""A base and its deltas make the export of the checkpoint that they lead to, byte for byte."""

from pathlib import Path

import pytest

from configs.export_schema import ExportFormat
from configs.schema import Component
from nn.checkpoint.directory import list_checkpoints
from nn.deltas.delta import Link, read_delta
from nn.export.tables import Selection, export_tables
from nn.replay import replay
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.runs import killed_at

ALL = Selection(parts=list(Component), optimizer=False)
# A last batch that is not full; Adam, whose moments would move a row that is updated by a gradient of zero.
MODEL = (
    *(option for option in TINY if not option.startswith("device")),
    *("data.synthetic.train_rows=1000", "optimizer.name=adam", "optimizer.lr=0.001"),
    *("train.ema_decay=0.9", "train.epochs=2", "eval.per_epoch=1", "seed=3"),
    *("checkpoint.delta_every=3", "checkpoint.save_every=8", "checkpoint.keep=99"),
)


def run(directory: Path, *options: str, device: str = "cpu") -> Path:
    ended = run_command(*MODEL, f"run_dir={directory}", f"device={device}", *options)
    assert ended.exit_code == 0, ended.err
    return directory


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Return a run of 32 steps."""
    return run(tmp_path_factory.mktemp("trained") / "run")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_replayed(run_dir: Path, room: Path, base: int = 0, **options) -> None:
    """Compare the replay from step `base` to the last one with the export of the last checkpoint."""
    format = options.get("format", ExportFormat.npy)
    last = list_checkpoints(run_dir / "checkpoints")[0]
    export_tables(last, room / "wanted", ALL, format=format)
    replay(run_dir / f"checkpoints/step_{base}", [str(run_dir / "deltas")], room / "got", format)
    assert contents(room / "got") == contents(room / "wanted")


@pytest.mark.parametrize(("base", "format"), [(0, "npy"), (16, "safetensors")])
def test_the_replay_is_the_export_byte_for_byte(trained, tmp_path, base, format):
    steps = [int(path.name[5:]) for path in list_checkpoints(trained / "deltas")]
    assert steps == [32, 30, 27, 24, 21, 18, 16, 15, 12, 9, 8, 6, 3]
    assert_replayed(trained, tmp_path, base, format=ExportFormat[format])
    # An export of the base serves as well.
    export_tables(trained / f"checkpoints/step_{base}", tmp_path / "base")
    replay(tmp_path / "base", [str(trained / "deltas")], tmp_path / "again", ExportFormat[format])
    assert contents(tmp_path / "again") == contents(tmp_path / "wanted")


def test_a_killed_run_continues_its_chain(trained, tmp_path):
    with killed_at(14):
        run(tmp_path / "run")
    before = states(tmp_path / "run")
    assert [state.step for state in before] == [12, 9, 8, 6, 3]
    run(tmp_path / "run")
    after = states(tmp_path / "run")
    # It has repeated the steps after 8 bit by bit: a reader that has applied those deltas needs only the later ones.
    assert after[-5:] == before
    assert [state.step for state in after] == [state.step for state in states(trained)]
    assert not {state.id for state in after} & {state.id for state in states(trained)}
    assert_replayed(tmp_path / "run", tmp_path)


def test_a_run_without_deltas_begins_a_chain_where_it_resumes(tmp_path):
    run(tmp_path / "run", "checkpoint.delta_every=null", "train.max_steps=8")
    with pytest.raises(ValueError, match="was saved by a run without deltas"):
        replay(tmp_path / "run/checkpoints/step_8", ["none"], tmp_path / "got")
    run(tmp_path / "run", "train.max_steps=20", "checkpoint.delta_keep=3")
    assert [state.step for state in states(tmp_path / "run")] == [20, 18, 16]
    with pytest.raises(ValueError, match=r"a gap: .*step_16 begins at step 15"):
        assert_replayed(tmp_path / "run", tmp_path, 8)


@pytest.mark.parametrize("option", ["delta_dtype=int8", "delta_keep=3"])
def test_options_of_deltas_that_are_not_written_are_refused(option):
    ended = run_command(*MODEL, "checkpoint.delta_every=null", f"checkpoint.{option}")
    assert ended.exit_code == 2
    assert f"checkpoint.{option} is of deltas, and checkpoint.delta_every=null writes" in ended.err


def states(run_dir: Path) -> list[Link]:
    """Return the states that the deltas of a run lead to, the latest first."""
    return [read_delta(path).end for path in list_checkpoints(run_dir / "deltas")]
