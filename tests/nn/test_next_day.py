"""Days of a run whose tables grow; kills and other numbers of ranks in between change nothing."""

import io
import logging
import os
import random
import re
import shutil
import signal
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from configs.schema import DayToTrain
from dataloading.dataset.feature_spec import FeatureSpec
from nn.checkpoint.directory import read_facts, step_of
from nn.checkpoint.tensor_index import read_index
from nn.deltas.delta import read_delta
from nn.library.loaded_run import Run
from nn.modes.evaluate import evaluate
from nn.modes.train import train as train_run
from nn.observability.records import read_restarts, read_run
from nn.observability.run_lock import RunLock
from status.run_status import read_status
from tests.helpers.command import run_command
from tests.helpers.composed import compose_config
from tests.helpers.distributed import run_distributed
from tests.helpers.preproc_command import preproc
from tests.helpers.runs import differences, jsonl, killed_at, records, summary
from tests.nn.deltas.test_replay import assert_replayed
from tests.preproc.table.test_pipeline import _hydra

DAYS, ROWS = 3, 320
STEPS_PER_DAY = 18  # 288 training rows in batches of 16
OPTIONS = [
    *("model.embedding_dim=4", "model.bottom_mlp=[8,4]", "model.top_mlp=[8,1]", "device=cpu"),
    *("train.batch_size=16", "eval.batch_size=16", "log.pictures=false", "log.loggers=[]"),
    *(
        "log.every=5",
        "checkpoint.save_every=4",
        "checkpoint.keep=20",
        "train.tf32=false",
        "scheduler.warmup_steps=4",
    ),
    *("optimizer.name=adam", "optimizer.lr=0.01", "optimizer.eps=0.01"),
]


def table_of(path: Path, **user_feature: object) -> dict:
    return {
        "sources": {"t": {"files": str(path)}},
        "label": {"name": "y"},
        "numerical": ["x"],
        "categorical": [{"name": "user_id", "expression": '"user"'} | user_feature, "item"],
    }


@pytest.fixture(scope="module")
def days(tmp_path_factory) -> list[Path]:
    return write_days(tmp_path_factory.mktemp("days"), DAYS)


def write_days(root: Path, num_days: int, **user_feature: object) -> list[Path]:
    """Preprocess days on which users and items come and go."""
    made: list[Path] = []
    for day in range(num_days):
        draw = random.Random(day)
        lines = ["y,x,user,item"]
        for _ in range(ROWS):
            user, item = draw.randint(5 * day, 5 * day + 20), draw.randint(3 * day, 3 * day + 30)
            lines.append(f"{int(draw.random() < user % 4 / 4)},{draw.random()},u{user},i{item}")
        (root / f"{day}.csv").write_text("\n".join(lines) + "\n")
        table = table_of(root / f"{day}.csv", **user_feature)
        extend = ["mode=extend", f"fitted={made[-1]}"] if made else ["rare_counts=true"]
        limit = ["frequency_limit=2"] if not made else []
        made.append(root / f"day_{day}")
        preproc("dataset=any", f"table={_hydra(table)}", f"output={made[-1]}", *extend, *limit)
    return made


def train(data: Path, run_dir: Path, kill_at: int | None, *options: str) -> None:
    """Train a day, the first or the next of a run; `kill_at` is a step of the run."""
    config = compose_config(*OPTIONS, *options)
    day = None if data.name == "day_0" else DayToTrain.next
    placed = replace(config.data, path=str(data))
    with (
        nullcontext() if kill_at is None else killed_at(kill_at),
        redirect_stdout(io.StringIO()),
    ):
        train_run(replace(config, run_dir=str(run_dir), data=placed, day=day), "")


@pytest.fixture(scope="module")
def uninterrupted(days, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "uninterrupted"
    for data in days:
        train(data, run_dir, None)
    return run_dir


def test_the_start_of_a_day_is_no_restart(uninterrupted):
    assert [start["day"] for start in read_restarts(uninterrupted)] == [1, 2]
    found = read_status(uninterrupted)
    assert (found.state, found.restarts) == ("finished", 0)


@pytest.mark.doors
def test_killed_days_equal_uninterrupted_ones_bit_by_bit(days, uninterrupted, tmp_path):
    # At step 18 the new day was evaluated, and nothing of it saved; at step 41 some of it was.
    for data, step in zip(days, (6, 18, 41), strict=True):
        train(data, tmp_path / "run", step)
        train(data, tmp_path / "run", None)
    assert differences(uninterrupted, tmp_path / "run") == []


@pytest.mark.doors
def test_days_on_other_numbers_of_ranks(days, uninterrupted, tmp_path):
    sharded = "sharding.tables={user_id:row_wise,item:table_wise}"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(days[0], whole, None)
    shutil.copytree(whole, killed, symlinks=True)
    run_distributed(train, 2, days[1], whole, None, sharded)
    for kill_at in (27, None):
        run_distributed(train, 2, days[1], killed, kill_at, sharded)
    train(days[2], whole, None)
    train(days[2], killed, None)
    # A kill changes no bit, another number of ranks the order of sums only.
    assert differences(whole, killed) == []
    for got, wanted in zip(records(whole), records(uninterrupted), strict=True):
        assert numbers(got) == pytest.approx(numbers(wanted), rel=1e-3, abs=1e-3, nan_ok=True)


@pytest.mark.parametrize(
    "sharding",
    ["sharding.types=[row_wise]", pytest.param("sharding.group_size=1", marks=pytest.mark.doors)],
    ids=["row-wise", "groups"],
)
def test_raw_keys_go_on_over_days_on_two_ranks_as_in_one_process(tmp_path, sharding):
    """Rows have the keys of one process, and its weights but for the order of sums; a kill changes nothing."""
    days = write_days(tmp_path, 2, vocabulary="dynamic", capacity=20)
    one, two, killed = (tmp_path / name for name in ("one", "two", "killed"))
    for data in days:
        train(data, one, None)
        run_distributed(train, 2, data, two, None, sharding)
    run_distributed(train, 2, days[0], killed, None, sharding)
    for kill_at in (27, None):
        run_distributed(train, 2, days[1], killed, kill_at, sharding)
    assert differences(two, killed) == []
    last = f"checkpoints/step_{2 * STEPS_PER_DAY}"
    wanted, found = (read_index(run_dir / last).tensors for run_dir in (one, two))
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        tolerance = 0 if name.startswith("keys.") else 1e-4
        np.testing.assert_allclose(
            found[name].array(), tensor.array(), rtol=tolerance, atol=tolerance, err_msg=name
        )
    day = [record for record in records(two) if record.get("day") and "keys_new" in record]
    assert sum(record["keys_new"] for record in day) > 0
    assert sum(record["keys_evicted"] for record in day) > 0


def numbers(record: dict) -> dict[str, float]:
    return {key: value for key, value in record.items() if isinstance(value, int | float)}


def test_a_day_has_its_place_in_the_records_and_the_steps_of_the_run_continue(days, uninterrupted):
    lines = records(uninterrupted)
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert [line.get("day", 0) for line in lines] == sorted(line.get("day", 0) for line in lines)
    before = [line for line in lines if "next_auc" in line]
    assert [(line["step"], line["epoch"], line["day"]) for line in before] == [
        (STEPS_PER_DAY * day, 0, day) for day in (1, 2)
    ]
    assert all(line["next_rows"] == 288 for line in before)
    assert [line["day"] for line in lines if "previous_auc" in line] == [1, 2]
    # Epochs of days have different lengths.
    assert (read_run(uninterrupted).num_days, read_run(uninterrupted).steps_per_epoch) == (3, None)
    # The warm-up was on the first day.
    assert {line["lr"] for line in lines if line.get("day") and "lr" in line} == {0.01}
    result = summary(uninterrupted)
    assert result["steps"] == STEPS_PER_DAY * DAYS
    assert result["day"] == 2
    # The best evaluation is one of the last day.
    assert result["best_step"] > STEPS_PER_DAY * 2


def test_a_day_is_scored_as_the_model_before_it_would(days, uninterrupted, tmp_path):
    """New values have no row yet, so they have id 0: as in the day's rows transformed by the fit of the day before."""
    table = table_of(days[2].parent / "2.csv")
    transform = ["mode=transform", f"fitted={days[1]}", "split_name=null"]
    preproc("dataset=any", f"table={_hydra(table)}", f"output={tmp_path / 'data'}", *transform)
    checkpoint = uninterrupted / f"checkpoints/step_{2 * STEPS_PER_DAY}"
    shutil.copytree(checkpoint, tmp_path / checkpoint.name)
    config = compose_config(*OPTIONS, "mode=eval", "eval.split=train")
    config = replace(
        config,
        run_dir=str(tmp_path / "run"),
        data=replace(config.data, path=str(tmp_path / "data")),
        checkpoint=replace(config.checkpoint, restore=str(tmp_path / checkpoint.name)),
    )
    with redirect_stdout(io.StringIO()):
        evaluate(config, "")
    [scored] = [
        line for line in records(uninterrupted) if line.get("next_auc") and line["day"] == 2
    ]
    got = summary(tmp_path / "run")
    assert (scored["next_auc"], scored["next_log_loss"]) == (got["test_auc"], got["test_log_loss"])


def test_a_restored_checkpoint_of_a_later_day_resumes_at_its_place_in_that_day(
    days, uninterrupted, tmp_path
):
    # Two of 18 steps of the second day are behind it.
    restore = f"checkpoint.restore={uninterrupted / 'checkpoints/step_20'}"
    config = compose_config(*OPTIONS, restore)
    placed = replace(config.data, path=str(days[1]))
    for kill_at in (30, None):
        with (
            nullcontext() if kill_at is None else killed_at(kill_at),
            redirect_stdout(io.StringIO()),
        ):
            train_run(replace(config, run_dir=str(tmp_path / "run"), data=placed), "")
    last = f"checkpoints/step_{2 * STEPS_PER_DAY}"
    for file in (uninterrupted / last).iterdir():
        if file.name != "run.json":
            assert (tmp_path / "run" / last / file.name).read_bytes() == file.read_bytes(), (
                file.name
            )
    assert summary(tmp_path / "run")["epochs"] == 1


def test_a_checkpoint_that_is_restored_on_other_data_trains_all_of_them(
    days, uninterrupted, tmp_path
):
    # The second day's last checkpoint, and a third day that is longer.
    table = table_of(tmp_path / "long.csv")
    lines = [path.read_text() for path in sorted(days[0].parent.glob("*.csv"))[1:]]
    (tmp_path / "long.csv").write_text(lines[0] + lines[1].partition("\n")[2])
    longer = tmp_path / "longer"
    extend = ["mode=extend", f"fitted={days[1]}"]
    preproc("dataset=any", f"table={_hydra(table)}", f"output={longer}", *extend)
    named = uninterrupted / "checkpoints" / f"step_{2 * STEPS_PER_DAY}"
    restore = [f"checkpoint.restore={named}", "checkpoint.grow=true", f"data.path={longer}"]
    assert run_command(*OPTIONS, *restore, f"run_dir={tmp_path / 'run'}").err == ""
    found = summary(tmp_path / "run")
    assert found["first_step"] == 2 * STEPS_PER_DAY
    assert (found["steps"] - found["first_step"], found["epochs"]) == (2 * STEPS_PER_DAY, 1)
    ended = ["scheduler.decay_start_step=5", "scheduler.decay_steps=10"]
    refused = run_command(*OPTIONS, *restore, *ended, f"run_dir={tmp_path / 'ended'}")
    assert refused.exit_code == 2
    assert "the schedule has ended before step 36 of checkpoint.restore" in refused.err


def test_a_shortened_day_is_followed_by_the_next_one(days, tmp_path):
    options = [*OPTIONS, "eval.every=4", f"run_dir={tmp_path / 'run'}"]
    with killed_at(14):
        run_command(*options, f"data.path={days[0]}")
    # The checkpoint of step 12 does not say yet that the day ends there.
    shorter = [*options, f"data.path={days[0]}", "train.max_steps=12"]
    assert run_command(*shorter).err == ""
    assert "nothing to do" in run_command(*shorter).out
    next_day = run_command(*options, f"data.path={days[1]}", "day=next")
    assert (next_day.exit_code, next_day.err) == (0, "")
    assert summary(tmp_path / "run")["steps"] == 12 + STEPS_PER_DAY


def test_a_run_is_loaded_at_its_latest_day(tmp_path):
    days = []
    for day in range(2):
        draw = random.Random(day)
        rows = [
            f"{int(draw.random() < 0.4)},{draw.random()},u{draw.randint(0, 20)},i{draw.randint(0, 30)}"
            for _ in range(ROWS)
        ]
        (tmp_path / f"{day}.csv").write_text("\n".join(["y,x,user,item", *rows]) + "\n")
        table = table_of(tmp_path / f"{day}.csv")
        # Tables of hashed values have the same size every day.
        table["categorical"] = [
            {"name": "user_id", "expression": '"user"', "buckets": 16},
            {"name": "item", "buckets": 16},
        ]
        extend = ["mode=extend", f"fitted={days[-1]}"] if days else []
        days.append(tmp_path / f"day_{day}")
        preproc("dataset=any", f"table={_hydra(table)}", f"output={days[-1]}", *extend)
    options = [*OPTIONS, "eval.per_epoch=1", "eval.at_start=false", f"run_dir={tmp_path / 'run'}"]
    assert run_command(*options, f"data.path={days[0]}").err == ""
    best = Run.load(tmp_path / "run").num_steps
    with killed_at(2 * STEPS_PER_DAY - 1):
        run_command(*options, f"data.path={days[1]}", "day=next")
    assert Run.load(tmp_path / "run").num_steps > STEPS_PER_DAY >= best
    assert Run.load(tmp_path / "run", checkpoint="best").num_steps == best


@pytest.mark.doors
def test_the_best_of_the_day_before_stays_until_a_day_has_one(days, tmp_path):
    run_dir = tmp_path / "run"
    options = [*OPTIONS, "checkpoint.keep=2", "eval.per_epoch=1", f"run_dir={run_dir}"]
    assert run_command(*options, f"data.path={days[0]}").exit_code == 0
    best = run_dir / "checkpoints/best"
    before = os.readlink(best)
    next_day = [*options, f"data.path={days[1]}", "day=next"]
    with killed_at(STEPS_PER_DAY + 1):
        run_command(*next_day)
    with pytest.raises(ValueError, match="while it trains another day, wait for its first"):
        Run.load(run_dir)
    with killed_at(2 * STEPS_PER_DAY - 1):
        run_command(*next_day)
    assert (os.readlink(best), best.exists()) == (before, True)
    assert Run.load(run_dir).num_steps > STEPS_PER_DAY
    assert run_command(*next_day).exit_code == 0
    assert os.readlink(best) == f"step_{2 * STEPS_PER_DAY}"
    assert not (run_dir / "checkpoints" / before).exists()


def test_tables_grow_in_place(days, uninterrupted):
    path = uninterrupted / f"checkpoints/step_{STEPS_PER_DAY * DAYS}"
    sizes = {name: tensor.size for name, tensor in read_index(path).tensors.items()}
    rows = {f.name: f.cardinality for f in FeatureSpec.load(days[-1]).categorical}
    first = {f.name: f.cardinality for f in FeatureSpec.load(days[0]).categorical}
    assert {name: sizes[f"tables.{name}.weight"][0] for name in rows} == rows
    assert all(rows[name] > first[name] for name in rows)
    assert read_facts(path)["stage"]["number"] == 2


@pytest.mark.doors
def test_deltas_continue_over_days_and_name_retired_rows(days, tmp_path):
    gone = tmp_path / "gone"
    table = table_of(days[0].parent / "1.csv")
    extend = ["mode=extend", f"fitted={days[0]}", "retire_after=1"]
    preproc("dataset=any", f"table={_hydra(table)}", f"output={gone}", *extend)
    run_dir = tmp_path / "run"
    for data in (days[0], gone):
        train(data, run_dir, None, "checkpoint.delta_every=6")
    chain = [read_delta(path) for path in sorted((run_dir / "deltas").glob("step_*"), key=step_of)]
    retired = {
        name: sum(pq.read_table(gone / f"vocabulary/{name}.parquet")["retired"].to_pylist())
        for name in ("user_id", "item")
    }
    assert all(retired.values())
    named = [{name: table.tombstones for name, table in delta.tables.items()} for delta in chain]
    first = next(at for at, delta in enumerate(chain) if delta.parent.step == STEPS_PER_DAY)
    assert named.pop(first) == retired
    assert all(counts == dict.fromkeys(retired, 0) for counts in named)
    grown = {f.name: f.cardinality for f in FeatureSpec.load(gone).categorical}
    assert {name: table.rows for name, table in chain[first].tables.items()} == grown
    # Over the day on which the tables grew.
    assert_replayed(run_dir, tmp_path, base=12)


def test_a_finished_day_is_not_trained_again(days, uninterrupted, capsys):
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    train(days[-1], uninterrupted, None)
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


def shrunk(days: list[Path], root: Path) -> Path:
    """Write a day that names its parent, and has fewer values than that."""
    shutil.copytree(days[0], root)
    spec = yaml.safe_load((root / "feature_spec.yaml").read_text())
    of_next = yaml.safe_load((days[2] / "feature_spec.yaml").read_text())
    spec["metadata"] |= {"day": 2, "parent": of_next["metadata"]["parent"]}
    (root / "feature_spec.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    return root


def test_what_is_no_next_day_is_refused_in_one_line(days, tmp_path):
    run_dir = tmp_path / "run"
    with pytest.raises(ValueError, match="which has no checkpoint"):
        train(days[1], run_dir, None)
    train(days[0], run_dir, 12)
    with pytest.raises(ValueError, match="has not finished the day"):
        train(days[1], run_dir, None)
    train(days[0], run_dir, None)
    with pytest.raises(ValueError, match="day 2 after another fit than that of"):
        train(days[2], run_dir, None)
    with pytest.raises(ValueError, match="the schedule has ended before step 18"):
        train(days[1], run_dir, None, "scheduler.decay_start_step=4", "scheduler.decay_steps=4")
    with pytest.raises(ValueError, match=r"other settings: optimizer.lr=0.01 instead of 0.02"):
        train(days[1], run_dir, None, "optimizer.lr=0.02")
    other = compose_config(*OPTIONS)
    with pytest.raises(ValueError, match=r"is the day after that of .*set day=next"):
        train_run(
            replace(other, run_dir=str(run_dir), data=replace(other.data, path=str(days[1]))), ""
        )
    train(days[1], run_dir, None)
    with pytest.raises(ValueError, match="tables can only grow, not shrink"):
        train(shrunk(days, tmp_path / "shrunk"), run_dir, None)
    assert summary(run_dir)["steps"] == 2 * STEPS_PER_DAY


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["run_dir=r"], "set run_dir and data.path, or days"),
        (["run_dir=r", "data.path=d", "checkpoint.save=false"], "set checkpoint.save=true"),
        (["run_dir=r", "data.path=d", "data.multi_hot.hotness=[2,2]"], "leave one of them out"),
    ],
)
def test_a_day_that_cannot_be_is_refused(options, problem):
    with pytest.raises(ValueError, match=f"day=next .*{problem}$"):
        compose_config("day=next", *options)


def test_days_of_a_pattern_are_trained_in_their_order(days, uninterrupted, tmp_path):
    """The days of a run are found by their parents, also after some of them and with one that appears later."""
    (tmp_path / "data").mkdir()
    run_dir = tmp_path / "run"
    options = [*OPTIONS, f"days=[{tmp_path}/data/*]", f"run_dir={run_dir}", "day=next"]
    # Names say nothing of the order.
    for name, day in (("c", days[0]), ("a", days[1])):
        (tmp_path / "data" / name).symlink_to(day)
    ended = run_command(*options)
    assert ended.exit_code == 0, ended.err
    assert summary(run_dir)["steps"] == 2 * STEPS_PER_DAY
    (tmp_path / "data" / "b").symlink_to(days[2])

    def stop_when_all_are_trained(*_: object) -> None:
        if summary(run_dir)["steps"] == DAYS * STEPS_PER_DAY:
            os.kill(os.getpid(), signal.SIGTERM)

    with patch("nn.days.time.sleep", stop_when_all_are_trained):
        ended = run_command(*options, "watch_days=0.1")
    assert (ended.exit_code, ended.err) == (
        75,
        "stopped by SIGTERM while waiting for the next day; the same command resumes\n",
    )
    assert differences(uninterrupted, run_dir) == []
    with RunLock(logging.getLogger()) as lock:
        lock.take(run_dir)
        ended = run_command(*options)
    # The day, a process of its own, has printed that another one uses the directory.
    assert (ended.exit_code, ended.err) == (2, "")
    (tmp_path / "data" / "d").symlink_to(days[1])
    ended = run_command(*options)
    assert ended.exit_code == 2
    assert re.fullmatch(r"error: days: \S+/a and \S+/d follow the same day; .*\n", ended.err)


@pytest.mark.doors
def test_tables_in_host_memory_grow_too(days, tmp_path):
    """Days with most rows in host memory, one of them interrupted, have the bits of days without."""
    small = ["train.batch_size=4", "eval.batch_size=4", "train.max_steps=8", "eval.max_steps=2"]
    in_host = [
        f"sharding.tables={{{name}: {{type: table_wise, tier: host, cache: {cache}}}}}"
        for name, cache in (("item", 0.5), ("user_id", 0.7))
    ]
    device, host = tmp_path / "device", tmp_path / "host"
    for data, tables, kill_at in zip(
        days, (in_host[0], in_host[1], in_host[0]), (6, 8, 21), strict=True
    ):
        train(data, device, None, *small)
        train(data, host, kill_at, *small, tables)
        train(data, host, None, *small, tables)
    (line, *_) = (line for line in jsonl(host / "metrics.jsonl") if line.get("tier_rows_in"))
    assert {"tier_rows_out", "tier_bytes_out", "tier_ms", "tier_wait_ms"} <= line.keys()
    assert line["tier_bytes_in"] > line["tier_rows_in"]
    assert 0 < line["tier_hit_rate"] < 1
    last = f"checkpoints/step_{8 * DAYS}"
    assert tensors_of(host / last) == tensors_of(device / last)


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    index = read_index(checkpoint).tensors
    return {name: b"".join(block.tobytes() for block in index[name].blocks()) for name in index}
