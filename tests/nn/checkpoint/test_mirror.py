"""A mirror that is killed at any of its operations: the next machine continues without a gap, and nothing is left."""

import logging
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path
from unittest.mock import patch

from dataloading.storage.object_store import ObjectStore
from nn.checkpoint.directory import list_checkpoints, step_of
from nn.checkpoint.mirror import CheckpointMirror, complete_steps, fetch_run
from tests.helpers.runs import Killed

STEPS = (3, 6, 9)
OPERATIONS = ("upload", "remove", "remove_folder", "download")


class Operations:
    """The operations of a store, of which the n-th and all later ones kill the process; None: none do."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at, self.done = kill_at, 0

    def __enter__(self) -> "Operations":
        self._patches = [
            patch.object(ObjectStore, name, self._counted(getattr(ObjectStore, name)))
            for name in OPERATIONS
        ]
        for patched in self._patches:
            patched.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patched in self._patches:
            patched.stop()

    def _counted(self, original):
        def call(*arguments):
            self.done += 1
            if self.kill_at is not None and self.done >= self.kill_at:
                raise Killed
            return original(*arguments)

        return call


def keep(checkpoints: Path, best: int) -> None:
    """Keep the newest two checkpoints, and link the best one, as after a save and at a start."""
    (checkpoints / "best").unlink(missing_ok=True)
    (checkpoints / "best").symlink_to(f"step_{best}")
    for old in list_checkpoints(checkpoints)[2:]:
        shutil.rmtree(old)


def train(run_dir: Path, address: str) -> None:
    """Resume from the newest checkpoint, and mirror every save."""
    checkpoints = run_dir / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    saved = [step_of(path) for path in list_checkpoints(checkpoints)]
    mirror = CheckpointMirror(run_dir, address, logging.getLogger())
    metrics = run_dir / "metrics.jsonl"
    # Records after the checkpoint are cut at a start.
    if saved:
        keep(checkpoints, max(saved))
    lines = metrics.read_text().splitlines()[: max(saved, default=0)] if saved else []
    for step in range(max(saved, default=0) + 1, max(STEPS) + 1):
        lines.append(f"record {step}")
        metrics.write_text("\n".join(lines) + "\n")
        delta = run_dir / f"deltas/step_{step}"
        if (
            not delta.exists()
        ):  # the start removes those after its checkpoint, and the same are written again
            delta.mkdir(parents=True)
            (delta / "run.json").write_text(f"delta {step}")
        if step not in STEPS:
            continue
        path = checkpoints / f"step_{step}"
        path.mkdir()
        for name in ("run.json", "rank_0.bin"):
            (path / name).write_text(f"{name} of {step}")
        keep(checkpoints, step)
        mirror._upload()
    (run_dir / "summary.json").write_text("{}")
    mirror._upload()


def tree(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for path in root.rglob("*")
        if path.is_file()
    }


def test_a_mirror_killed_at_any_operation_loses_no_record_and_leaves_nothing(tmp_path):
    train(tmp_path / "run", f"file://{tmp_path / 'wanted'}")
    wanted = tree(tmp_path / "wanted")
    assert "checkpoints/step_9/run.json" in wanted
    for number in count(1):
        address = f"file://{tmp_path / f'mirror_{number}'}"
        with Operations(number) as operations, suppress(Killed):
            train(tmp_path / f"first_{number}", address)
        if operations.done < number:
            break
        # The disk is lost, and the copying is killed too.
        run_dir = tmp_path / f"second_{number}"
        for kill_at in (1 + number % 5, None):
            with Operations(kill_at), suppress(Killed):
                fetch_run(run_dir, address)
        local = list_checkpoints(run_dir / "checkpoints")
        stored = complete_steps(ObjectStore(address), "checkpoints")
        assert [f"checkpoints/{path.name}" for path in reversed(local)] == stored
        # Those that lead to the checkpoints, without a gap.
        deltas = [step_of(path) for path in list_checkpoints(run_dir / "deltas")[::-1]]
        assert deltas == list(range(1, len(deltas) + 1))
        assert not local or len(deltas) >= step_of(local[0])
        for path in local:
            step = step_of(path)
            assert tree(path) == {name: f"{name} of {step}" for name in ("run.json", "rank_0.bin")}
            records = (run_dir / "metrics.jsonl").read_text().splitlines()
            assert records[:step] == [f"record {at}" for at in range(1, step + 1)]
        train(run_dir, address)
        assert tree(tmp_path / f"mirror_{number}") == wanted
    assert number > 20


def test_a_delta_between_checkpoints_is_mirrored_and_a_removed_one_is_removed(tmp_path):
    run_dir, address = tmp_path / "run", f"file://{tmp_path / 'mirror'}"
    mirror = CheckpointMirror(run_dir, address, logging.getLogger())
    for step in (2, 4, 6):
        path = run_dir / f"deltas/step_{step}"
        path.mkdir(parents=True)
        (path / "run.json").write_text(f"delta {step}")
    mirror.start()
    mirror.wait()
    assert complete_steps(ObjectStore(address), "deltas") == [f"deltas/step_{n}" for n in (2, 4, 6)]
    # A run that resumes at step 4 writes other rows.
    (run_dir / "deltas/step_6/run.json").write_text("delta 6 of the next start")
    shutil.rmtree(run_dir / "deltas/step_2")
    mirror.start()
    mirror.wait()
    assert tree(tmp_path / "mirror") == {
        "deltas/step_4/run.json": "delta 4",
        "deltas/step_6/run.json": "delta 6 of the next start",
    }


def test_deltas_of_another_way_from_the_same_step_are_replaced(tmp_path):
    run_dir, address = tmp_path / "run", f"file://{tmp_path / 'mirror'}"
    for folder, step, text in (
        ("deltas", 2, "delta 2"),
        ("deltas", 4, "delta 4 of the mirror"),
        ("checkpoints", 4, "checkpoint 4"),
    ):
        path = tmp_path / f"mirror/{folder}/step_{step}"
        path.mkdir(parents=True)
        (path / "run.json").write_text(text)
    for step, text in ((2, "delta 2"), (4, "delta 4 of this machine")):
        path = run_dir / f"deltas/step_{step}"
        path.mkdir(parents=True)
        (path / "run.json").write_text(text)
    assert fetch_run(run_dir, address) == 4
    assert tree(run_dir) == {
        "deltas/step_2/run.json": "delta 2",
        "deltas/step_4/run.json": "delta 4 of the mirror",
        "checkpoints/step_4/run.json": "checkpoint 4",
    }


def test_a_record_that_vanishes_keeps_no_checkpoint_from_its_mirror(tmp_path):
    upload = ObjectStore.upload

    def after_removal(store, source, name):
        if name == "metrics.jsonl":
            source.unlink(missing_ok=True)
        upload(store, source, name)

    with patch.object(ObjectStore, "upload", after_removal):
        train(tmp_path / "run", f"file://{tmp_path / 'mirror'}")
    assert "checkpoints/step_9/run.json" in tree(tmp_path / "mirror")


def test_an_empty_folder_that_a_store_keeps_is_removed_once(tmp_path):
    remove_folder, removed = ObjectStore.remove_folder, []

    def leave_empty(store, name):
        removed.append(name)
        remove_folder(store, name)
        (tmp_path / "mirror" / name).mkdir()

    run_dir, address = tmp_path / "run", f"file://{tmp_path / 'mirror'}"
    with patch.object(ObjectStore, "remove_folder", leave_empty):
        train(run_dir, address)
        assert removed == ["checkpoints/step_3"]
        mirror = CheckpointMirror(run_dir, address, logging.getLogger())
        for _ in range(2):
            mirror._upload()
        # A step that is trained again.
        shutil.copytree(run_dir / "checkpoints/step_6", run_dir / "checkpoints/step_3")
        mirror._upload()
        assert len(complete_steps(ObjectStore(address), "checkpoints")) == 3
        shutil.rmtree(run_dir / "checkpoints/step_3")
        mirror._upload()
    assert removed == ["checkpoints/step_3"] * 3
    assert complete_steps(ObjectStore(address), "checkpoints") == [
        "checkpoints/step_6",
        "checkpoints/step_9",
    ]
