"""Commands whose data, output and mirror lie on an S3 server: they end as with directories."""

import logging
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from dataloading.storage.local_copy import local_path
from dataloading.storage.object_store import ObjectStore
from dataloading.storage.upload import upload_folder
from nn.checkpoint.directory import list_checkpoints
from nn.observability.run_lock import RunLock
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.datasets import write_clicks
from tests.helpers.preproc_command import Refused, preproc
from tests.helpers.runs import at_step, differences, killed_at, records, summary
from tests.nn.test_next_day import OPTIONS as DAY_OPTIONS
from tests.nn.test_next_day import days  # noqa: F401

pytestmark = pytest.mark.doors

OPTIONS = [
    *(option for option in TINY if not option.startswith("data.")),
    *("train.batch_size=32", "checkpoint.save_every=4", "log.every=4", "log.loggers=[]"),
]


def checkpoints_of(bucket: str, run: str = "a") -> set[str]:
    files = ObjectStore(f"{bucket}/runs/{run}").list_files()
    return {name.split("/")[1] for name in files if name.endswith("/run.json")}


def _refuse(self: ObjectStore, source: Path, name: str) -> None:
    raise ValueError("s3://bucket: no room")


def names_of(run_dir: Path) -> set[str]:
    return {path.name for path in list_checkpoints(run_dir / "checkpoints")}


def test_a_run_that_lost_its_disk_resumes_from_its_mirror_bit_by_bit(bucket, tmp_path, monkeypatch):
    root = write_clicks(tmp_path / "clicks")
    upload_folder(root, ObjectStore(f"{bucket}/clicks"), "feature_spec.yaml")
    data, mirror = f"data.path={bucket}/clicks", f"checkpoint.mirror={bucket}/runs/a"
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert run_command(*OPTIONS, f"data.path={root}", f"run_dir={whole}").exit_code == 0
    run = [*OPTIONS, data, mirror, f"run_dir={run_dir}"]
    with monkeypatch.context() as patched:
        at_step(patched, 6, lambda: os.kill(os.getpid(), signal.SIGTERM))
        stopped = run_command(*run)
    assert stopped.exit_code == 75, stopped.err
    (step,) = re.findall(r"after step (\d+); a checkpoint was saved", stopped.err)
    stored = ObjectStore(f"{bucket}/runs/a").list_files()
    assert {"config.yaml", "metrics.jsonl"} <= set(stored)
    assert checkpoints_of(bucket) == names_of(run_dir) >= {f"step_{step}"}
    shutil.rmtree(run_dir)
    again = run_command(*run)
    assert again.exit_code == 0, again.err
    assert f"checkpoints up to step {step} were copied from checkpoint.mirror" in again.out
    assert differences(whole, run_dir) == []
    assert checkpoints_of(bucket) == names_of(run_dir)
    last = f"{bucket}/runs/a/checkpoints/{max(names_of(run_dir), key=lambda name: int(name[5:]))}"
    evaluate = ["mode=eval", f"checkpoint.restore={last}", f"run_dir={tmp_path / 'eval'}"]
    evaluated = run_command(*OPTIONS, data, *evaluate)
    assert evaluated.exit_code == 0, evaluated.err
    assert summary(tmp_path / "eval")["test_auc"] == summary(whole)["test_auc"]
    scores = ["mode=predict", f"checkpoint.restore={whole / 'checkpoints/best'}", data]
    assert run_command(*OPTIONS, *scores, f"output={tmp_path / 'scores.csv'}").exit_code == 0
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "upload", _refuse)
        refused = run_command(*OPTIONS, *scores, f"output={bucket}/scores.csv")
    assert (refused.exit_code, refused.err) == (2, "error: s3://bucket: no room\n")
    assert not ObjectStore(f"{bucket}/scores.csv").has("")
    written = run_command(*OPTIONS, *scores, f"output={bucket}/scores.csv")
    assert "written to  s3://bucket/scores.csv, " in written.out, written.err
    copy = local_path(f"{bucket}/scores.csv")
    assert copy.read_bytes() == (tmp_path / "scores.csv").read_bytes()
    again = run_command(*OPTIONS, *scores, f"output={bucket}/scores.csv")
    assert (again.exit_code, again.err.count("exists; move or delete it")) == (2, 1)


def test_days_continue_from_their_mirror_on_a_new_machine(bucket, days, tmp_path):  # noqa: F811
    run_dir = tmp_path / "run"

    def command(number: int, mirror: str) -> list[str]:
        listed = ",".join(str(path) for path in days[:number])
        return [*DAY_OPTIONS, f"days=[{listed}]", f"run_dir={run_dir}", "day=next", mirror]

    mirror = f"checkpoint.mirror={bucket}/runs/days"
    assert run_command(*command(2, mirror)).exit_code == 0
    before = summary(run_dir)["steps"]
    shutil.rmtree(run_dir)
    again = run_command(*command(3, mirror))
    assert (again.exit_code, again.err) == (0, "")
    assert summary(run_dir)["steps"] == before * 3 // 2
    assert [record["day"] for record in records(run_dir) if "next_auc" in record] == [1, 2]
    with RunLock(logging.getLogger()) as lock:
        lock.take(run_dir)
        refused = run_command(*command(3, mirror))
    assert refused.exit_code == 2


def test_the_best_of_the_day_before_is_kept_on_a_new_machine(
    bucket,
    days,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    run_dir = tmp_path / "run"
    mirror = f"checkpoint.mirror={bucket}/runs/best"
    options = [*DAY_OPTIONS, "checkpoint.keep=2", "eval.per_epoch=1", f"run_dir={run_dir}", mirror]
    first = run_command(*options, f"data.path={days[0]}")
    assert (first.exit_code, first.err) == (0, "")
    best = run_dir / "checkpoints" / "best"
    linked = os.readlink(best)
    next_day = [*options, f"data.path={days[1]}", "day=next"]
    for step in (28, 34):
        # Twice before the evaluation of the second day; the second time on a machine without the files of the first.
        with monkeypatch.context() as patched:
            at_step(patched, step, lambda: os.kill(os.getpid(), signal.SIGTERM))
            assert run_command(*next_day).exit_code == 75
        assert (os.readlink(best), best.exists()) == (linked, True)
        assert linked in checkpoints_of(bucket, "best")
        shutil.rmtree(run_dir)


def test_a_checkpoint_that_is_saved_again_replaces_the_mirrors(bucket, days, tmp_path):  # noqa: F811
    run_dir = tmp_path / "run"
    mirror = f"checkpoint.mirror={bucket}/runs/short"
    options = [*DAY_OPTIONS, "eval.every=4", f"run_dir={run_dir}", mirror]
    with killed_at(14):
        run_command(*options, f"data.path={days[0]}")
    # Its last checkpoint is saved again, since it does not say that the day ends there.
    shorter = run_command(*options, f"data.path={days[0]}", "train.max_steps=12")
    assert (shorter.exit_code, shorter.err) == (0, "")
    shutil.rmtree(run_dir)
    next_day = run_command(*options, f"data.path={days[1]}", "day=next")
    assert (next_day.exit_code, next_day.err) == (0, "")


def test_days_finish_a_commit_before_they_look_into_the_mirror(bucket, days, tmp_path):  # noqa: F811
    run_dir = tmp_path / "run"
    options = [*DAY_OPTIONS, f"run_dir={run_dir}", f"checkpoint.mirror={bucket}/runs/commit"]
    named = [*options, f"days=[{days[0]}]", "day=next"]
    assert run_command(*named).exit_code == 0
    checkpoints = run_dir / "checkpoints"
    last = f"step_{summary(run_dir)['steps']}"
    # Killed between the removal of a checkpoint's first version and the rename of the second.
    os.rename(checkpoints / last, checkpoints / f".{last}.unfinished")
    number = (checkpoints / f".{last}.unfinished").stat().st_ino
    assert run_command(*named).exit_code == 0
    assert (checkpoints / last).stat().st_ino == number


def test_a_mirror_that_cannot_be_written_is_refused_at_the_start_and_later_a_warning(
    bucket, tmp_path, monkeypatch
):
    run = [*OPTIONS, f"data.path={write_clicks(tmp_path / 'clicks')}", "train.max_steps=6"]
    mirror = "checkpoint.mirror=s3://no-such-bucket/run"
    refused = run_command(*run, mirror, f"run_dir={tmp_path / 'refused'}")
    assert refused.exit_code == 2
    assert refused.err.startswith("error: s3://no-such-bucket/run: ")
    assert refused.err.count("\n") == 1
    upload = ObjectStore.upload

    def without_checkpoints(self: ObjectStore, source, name: str) -> None:
        if name.startswith("checkpoints/"):
            raise ValueError("s3://bucket/b: no room")
        upload(self, source, name)

    monkeypatch.setattr(ObjectStore, "upload", without_checkpoints)
    ended = run_command(*run, f"checkpoint.mirror={bucket}/b", f"run_dir={tmp_path / 'run'}")
    assert (ended.exit_code, ended.err) == (0, "")
    assert "the mirror of the checkpoints could not be written: s3://bucket/b: no room" in ended.out
    assert "write it as s3://BUCKET/FOLDER" in run_command(*run, "checkpoint.mirror=/x").err


def test_preprocessing_reads_from_a_bucket_and_writes_to_one(bucket, tmp_path):
    (tmp_path / "raw").mkdir()
    lines = (f"{row % 2},{row},{row % 7}" for row in range(40))
    (tmp_path / "raw" / "rows.csv").write_text("click,age,shop\n" + "\n".join(lines) + "\n")
    upload_folder(tmp_path / "raw", ObjectStore(f"{bucket}/raw"), "rows.csv")
    columns = "label: click, numerical: [age], categorical: [shop]"
    split = "split: {by: random, train: 0.8}"
    sources = "sources: {rows: {files: '${source}'}}"
    table = ["dataset=any", f"table={{{sources}, {columns}, {split}}}"]
    preproc(*table, f"source={tmp_path / 'raw' / 'rows.csv'}", f"output={tmp_path / 'local'}")
    command = [*table, f"source={bucket}/raw/*.csv", f"output={bucket}/dataset"]
    preproc(*command)
    copy = local_path(f"{bucket}/dataset")
    for name in ("feature_spec.yaml", "train/shop.bin", "test/numerical.bin"):
        assert (copy / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    with pytest.raises(Refused, match="s3://bucket/dataset exists already"):
        preproc(*command)
