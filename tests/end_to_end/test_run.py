"""Complete runs from the command line: run directories, modes and refusals."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from configs.schema import Mode
from tests.helpers.command import ROOT, Ended, run_command, start_command
from tests.helpers.composed import DCNV2, TINY
from tests.helpers.datasets import plant, write_clicks

# Neither split divides evenly over batches and ranks.
ROWS = ["data.synthetic.train_rows=2021", "data.synthetic.test_rows=253"]
SHORT = [*TINY, *ROWS, "log.every=8", "train.tf32=false"]
PICTURES = "log.pictures=true"
ON_FILES = [option for option in TINY if not option.startswith("data.")]


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def refused(*arguments: str) -> str:
    """Run a command that must be refused with one line; return the line without `error: `."""
    ended = run_command(*arguments)
    assert ended.exit_code == 2, ended
    assert re.fullmatch(r"error: [^\n]+\n", ended.err), ended.err
    return ended.err.removeprefix("error: ").removesuffix("\n")


@pytest.fixture(scope="module")
def dlrm(tmp_path_factory) -> tuple[Ended, Path]:
    """Run `python dlrm.py` from another directory."""
    directory = tmp_path_factory.mktemp("dlrm")
    ended = start_command(
        str(ROOT / "dlrm.py"), *SHORT, PICTURES, "run_dir=run", directory=directory
    )
    return ended, directory / "run"


@pytest.fixture(scope="module")
def clicks(tmp_path_factory) -> Path:
    return write_clicks(tmp_path_factory.mktemp("run") / "clicks")


def test_dlrm_trains_and_prints_its_results(dlrm):
    ended, run_dir = dlrm
    assert (ended.exit_code, ended.err) == (0, "")
    summary = summary_of(run_dir)
    assert summary["untrained_test_auc"] < 0.5 < summary["test_auc"] < summary["teacher_auc"]
    for text in (
        "1 process on 1 host",
        "dlrm, 3 numerical and 5 categorical features, dim 8",
        "table_wise",
        "step 32/32",
        f"test AUC    {summary['test_auc']:.4f}",
        f"log loss    {summary['test_log_loss']:.4f}",
    ):
        assert text in ended.out


def test_the_run_directory_is_complete(dlrm):
    _, run_dir = dlrm
    assert {path.name for path in run_dir.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "curves.png",
        "metrics.jsonl",
        "model.json",
        "plan.json",
        "predictions.json",
        "predictions.png",
        "summary.json",
        "tensorboard",
    }
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert (config["recipe"], config["train"]["batch_size"]) == ("dlrm", 64)
    first, *records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    assert {"torch", "torchrec", "fbgemm", "git_commit", "world_size"} <= set(first)
    assert {"loss", "samples_per_s", "test_auc"} <= {key for record in records for key in record}
    plan = json.loads((run_dir / "plan.json").read_text())
    assert [row["table"] for row in plan] == [f"cat_{index}" for index in range(5)]
    saved = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert saved == {"step_24", "step_32", "best", "saved.jsonl"}
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    events = [path.parent.name for path in (run_dir / "tensorboard").rglob("events.*")]
    assert sorted(events) == ["tensorboard", "test", "train"]
    assert {
        "steps",
        "test_auc",
        "test_log_loss",
        "samples_per_s",
        "step_ms",
        "peak_hbm_bytes",
    } <= set(summary_of(run_dir))


@pytest.mark.doors
def test_two_ranks_under_torchrun_reach_the_metrics_of_one(dlrm, tmp_path):
    _, run_dir = dlrm
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ended = start_command(
        *torchrun, str(ROOT / "dlrm.py"), *SHORT, "run_dir=run", directory=tmp_path
    )
    assert (ended.exit_code, ended.err) == (0, "")
    assert ended.out.count("test AUC  ") == 1
    one, two = summary_of(run_dir), summary_of(tmp_path / "run")
    for name in ("test_auc", "test_log_loss"):
        assert two[name] == pytest.approx(one[name], abs=1e-5)
    assert (two["steps"], two["test_rows"]) == (one["steps"], one["test_rows"]) == (32, 253)


def test_dcnv2_trains_into_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run_command(*SHORT, *DCNV2, "train.max_steps=5", "log.every=2", recipe="dcnv2")
    assert (ended.exit_code, ended.err) == (0, "")
    (run_dir,) = (tmp_path / "runs" / "dcnv2").iterdir()
    assert summary_of(run_dir)["steps"] == 5
    assert "dcnv2, 3 numerical" in ended.out


def test_main_accepts_a_config_name_and_a_plan_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = run_command(
        "--config-name",
        "dcnv2",
        "mode=plan",
        "device=cuda",
        "sharding.world_size=4",
        "sharding.hbm_gib=139",
        "data=criteo_t3",
        "model.embedding_dim=128",
        recipe="main",
    )
    assert (ended.exit_code, ended.err) == (0, "")
    assert "21 others" in ended.out
    assert "of 26 tables" in ended.out
    assert re.search(r"per rank +at most [\d,.]+ GiB", ended.out)
    assert not list(tmp_path.iterdir())


def test_a_plan_opens_no_process_group_and_writes_itself_alone(dlrm, tmp_path, monkeypatch):
    def forbidden(*_):
        raise AssertionError("mode=plan starts nothing")

    monkeypatch.setattr("nn.session.process_group", forbidden)
    ended = run_command(*TINY, "mode=plan", f"run_dir={tmp_path / 'run'}")
    assert (ended.exit_code, ended.err) == (0, "")
    assert "of 5 tables" in ended.out
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "run").iterdir()}
    assert set(written) == {"plan.json", "model.json"}
    assert len(written["plan.json"]) == len(written["model.json"]["tables"]) == 5
    _, run_dir = dlrm
    assert "holds a run, whose plan.json it has" in refused(
        *TINY, "mode=plan", f"run_dir={run_dir}"
    )


def test_a_plan_that_does_not_fit_names_tables_and_remedies():
    message = refused(
        *["mode=plan", "device=cuda", "sharding.world_size=2", "sharding.hbm_gib=16"],
        "sharding.tiers=[device]",
        *["data=criteo_t3", "model.embedding_dim=128", "model.bottom_mlp=[64,128]"],
    )
    assert re.match(r"the tables do not fit: .*2 x 14\.4 GiB are usable", message)
    assert "; the largest are cat_" in message
    assert "Either start " in message


def test_evaluating_a_checkpoint_reproduces_the_metrics_of_training(dlrm, tmp_path):
    _, run_dir = dlrm
    restore = f"checkpoint.restore={run_dir / 'checkpoints' / 'step_32'}"
    ended = run_command(*SHORT, "mode=eval", restore, f"run_dir={tmp_path / 'run'}")
    assert (ended.exit_code, ended.err) == (0, "")
    trained, evaluated = summary_of(run_dir), summary_of(tmp_path / "run")
    for name in ("steps", "test_auc", "test_log_loss", "test_rows", "split", "teacher_auc"):
        assert evaluated[name] == trained[name]
    assert evaluated["samples_per_s"] is None
    numbers = [
        json.loads((path / "predictions.json").read_text()) for path in (run_dir, tmp_path / "run")
    ]
    assert numbers[0] == numbers[1]
    assert numbers[0]["step"] == 32
    assert numbers[0]["tasks"]["label"]["rows"] == trained["test_rows"]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_interrupted_run_reaches_the_metrics_of_an_uninterrupted_one(dlrm, tmp_path):
    _, run_dir = dlrm
    first = run_command(*SHORT, "train.max_steps=13", f"run_dir={tmp_path / 'first'}")
    restore = f"checkpoint.restore={tmp_path / 'first' / 'checkpoints' / 'step_13'}"
    second = run_command(*SHORT, restore, f"run_dir={tmp_path / 'second'}")
    assert first.exit_code == second.exit_code == 0, second.err
    # A long path wraps the line.
    assert "13 steps" in " ".join(second.out.split())
    uninterrupted, resumed = summary_of(run_dir), summary_of(tmp_path / "second")
    for name in ("steps", "epochs", "test_auc", "test_log_loss"):
        assert resumed[name] == uninterrupted[name]


def test_a_restored_run_has_no_untrained_auc(dlrm, tmp_path):
    _, run_dir = dlrm
    restore = f"checkpoint.restore={run_dir / 'checkpoints' / 'step_32'}"
    more = [
        "train.epochs=2",
        "train.max_steps=33",
        "eval.at_start=true",
        f"run_dir={tmp_path / 'run'}",
    ]
    assert run_command(*SHORT, restore, *more).exit_code == 0
    assert summary_of(tmp_path / "run")["untrained_test_auc"] is None


def test_hbm_gib_does_not_select_a_gpu(tmp_path):
    ended = run_command(*TINY, "device=auto", "sharding.hbm_gib=139", f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 0, ended.err
    assert "step: a CUDA graph" not in ended.out


def test_a_failed_save_at_the_end_keeps_the_results(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("nn.checkpoint.tensor_files.write_arrays", full)
        patched.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
        failed = run_command(*TINY, f"run_dir={tmp_path / 'run'}")
    assert failed.exit_code == 2
    message = failed.err
    assert re.search(
        r"warning: \S*/run/checkpoints has 0\.0 MiB free, and a checkpoint takes \S+ MiB: free",
        failed.out,
    )
    assert "the checkpoint could not be written below" in message
    assert "No space left on device" in message
    assert (
        "rerun the same command, which trains from the start again, or set checkpoint.s" in message
    )
    before = summary_of(tmp_path / "run")
    assert before["test_auc"] > 0
    assert "No space left on device" in before["checkpoint_problem"]
    assert (before["checkpoint"], before["best_checkpoint"]) == (None, None)
    ended = run_command(*TINY, f"run_dir={tmp_path / 'run'}")
    assert (ended.exit_code, ended.err) == (0, "")
    after = summary_of(tmp_path / "run")
    assert after["test_auc"] == before["test_auc"]
    assert (after["checkpoint"], after["checkpoint_problem"]) == ("checkpoints/step_32", None)


def test_an_interrupt_ends_with_one_line(tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nn.training.train_step.TrainStep.train", interrupt)
    ended = run_command(*TINY, f"run_dir={tmp_path / 'run'}")
    assert ended.exit_code == 130
    assert ended.err.splitlines()[-1].startswith(
        "interrupted: the same command resumes from the latest checkpoint"
    )
    assert "Traceback" not in ended.err


def test_a_plan_names_its_hardware():
    hardware = ["mode=plan", "device=cuda", "sharding.world_size=2", "sharding.hbm_gib=100"]
    out = run_command(*TINY, *hardware, "device=cuda").out
    assert re.search(r"plan for +2 x cuda on 1 node", out)
    assert re.search(r"memory +100.0 GiB per rank, 90.0 GiB of it for tables", out)


def test_a_finished_run_is_not_restored_for_training(dlrm, tmp_path):
    _, run_dir = dlrm
    path = run_dir / "checkpoints" / "step_32"
    message = refused(*SHORT, f"checkpoint.restore={path}", f"run_dir={tmp_path / 'run'}")
    assert message == (
        f"checkpoint.restore={path} has 32 steps behind it, and this run ends after 32; raise "
        "train.epochs or train.max_steps, or set mode=eval"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["train.batch_size=4096"],
            "batch size 4096 is larger than the 2048 rows of split 'train' of the synthetic stream; "
            "want a train.batch_size of at most that many",
        ),
        (["device=cuda"], "device=cuda, but torch sees no GPU here; train on the CPU with"),
        (["train.amp=fp16"], "train.amp=fp16 needs a GPU; on the CPU set train.amp=bf16 or off"),
        (["seed=-1"], "seed must not be negative, got -1"),
        (["data.path=nowhere"], r"nowhere\b.*feature_spec.yaml"),
        (["eval.split=validation"], "split 'validation'"),
        (["mode=inference", "eval.split=validation"], "split 'validation'"),
        (["checkpoint.restore=nowhere"], "checkpoint.restore=nowhere is not a checkpoint"),
        (["sharding.host_gib=0.00001"], "the tables do not fit: .* raise the frequency limit"),
        (["sharding.tables={cat_9:row_wise}"], "sharding.tables names cat_9, but the tables are"),
    ],
)
def test_invalid_options_are_refused_with_one_line_and_write_nothing(changes, message, tmp_path):
    assert re.search(message, refused(*TINY, f"run_dir={tmp_path / 'run'}", *changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.batch_size=4o96", "Value '4o96' of type 'str' could not be converted to Integer"),
        (
            "mode=evall",
            "Invalid value 'evall', expected one of [train, eval, inference, importance, predict, plan]",
        ),
        ("checkpoint.parts=tables", "a list is written as [a,b]"),
        ("train.epochs", "'train.epochs' has no value; write train.epochs=VALUE"),
        (
            "recipe=${nope}",
            "recipe: got '${nope}': Interpolation key 'nope' not found; write a value, or, in single quotes, ${KEY} of an option",
        ),
        (
            "experiment=dlrm_criteo_t9",
            "there is no experiment=dlrm_criteo_t9; did you mean dlrm_criteo_t3? choose one of",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_one_line(change, message, tmp_path):
    line = refused(*SHORT, f"run_dir={tmp_path / 'run'}", change)
    assert message in line
    assert "search path" not in line
    assert not (tmp_path / "run").exists()


def test_an_empty_run_dir_is_refused():
    assert refused(*SHORT, "run_dir=").startswith(
        "run_dir is empty, perhaps from an unset shell variable"
    )


def test_a_system_error_without_a_file_is_reported(monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nn.run.MODES", {Mode.train: full})
    line = refused(*SHORT, f"run_dir={tmp_path / 'run'}")
    assert line.startswith(
        f"No space left on device: a file of run_dir={tmp_path / 'run'}; free some space and rerun"
    )


def test_ranks_that_do_not_divide_the_batch_are_refused(monkeypatch, tmp_path):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    message = refused(*TINY, f"run_dir={tmp_path / 'run'}")
    assert message.startswith(
        "train.batch_size=64 does not divide evenly over 3 ranks; want a positive"
    )
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_left_unchanged(dlrm):
    _, run_dir = dlrm
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    ended = run_command(*SHORT, f"run_dir={run_dir}")
    assert (ended.exit_code, ended.err) == (0, "")
    assert (
        f"run_dir={run_dir} holds the complete run already (32 steps); nothing to do." in ended.out
    )
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_a_finished_run_without_its_curves_gets_them(dlrm, tmp_path):
    _, run_dir = dlrm
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy, symlinks=True)
    (copy / "curves.png").unlink()
    ended = run_command(*SHORT, PICTURES, f"run_dir={copy}")
    assert "nothing to do" in ended.out
    assert (copy / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_an_evaluation_that_was_killed_is_started_again(dlrm, tmp_path, monkeypatch):
    _, run_dir = dlrm
    restore = f"checkpoint.restore={run_dir / 'checkpoints' / 'step_32'}"
    evaluate = [*SHORT, "mode=eval", restore, f"run_dir={tmp_path / 'run'}"]

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "summary.json")

    with monkeypatch.context() as patched:
        patched.setattr("nn.session.RunDirectory.finish", full)
        assert "No space left on device: summary.json; free some space" in refused(*evaluate)
    assert run_command(*evaluate).exit_code == 0
    assert summary_of(tmp_path / "run")["test_auc"] == summary_of(run_dir)["test_auc"]


def test_the_run_directory_of_another_run_is_refused_and_left_unchanged(dlrm, tmp_path):
    _, run_dir = dlrm
    restore = f"checkpoint.restore={run_dir / 'checkpoints' / 'step_32'}"
    evaluate = [*SHORT, "mode=eval", restore, f"run_dir={tmp_path / 'run'}"]
    assert run_command(*evaluate).exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    message = refused(*SHORT, f"run_dir={tmp_path / 'run'}")
    assert "already holds the metrics.jsonl of an earlier run" in message
    ended = run_command(*evaluate)
    assert (ended.exit_code, ended.err) == (0, "")
    assert "holds the complete result of this command already; nothing to do" in ended.out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_truncated_file_is_named_before_anything_starts(tmp_path):
    root = write_clicks(tmp_path / "clicks")
    path = root / "train" / "item.bin"
    path.write_bytes(path.read_bytes()[:-1])
    message = refused(*ON_FILES, f"data.path={root}", f"run_dir={tmp_path / 'run'}")
    assert str(path) in message
    assert not (tmp_path / "run").exists()


def test_a_bad_id_ends_the_run_without_summary_or_checkpoint(tmp_path):
    root = write_clicks(tmp_path / "clicks")
    plant(root / "train" / "item.bin", 170, 101, "int8")
    run_dir = tmp_path / "run"
    message = refused(*ON_FILES, f"data.path={root}", f"run_dir={run_dir}", "data.shuffle_block=0")
    assert message.startswith(
        f"feature 'item': id 101 at row 170 of {root / 'train' / 'item.bin'} lies outside its table "
        "of 100 rows"
    )
    assert not {"summary.json", "curves.png"} & {path.name for path in run_dir.iterdir()}
    assert not list((run_dir / "checkpoints").glob("step_8"))


def test_a_loss_that_is_not_finite_has_its_own_exit_code(clicks, tmp_path):
    ended = run_command(
        *[*ON_FILES, f"data.path={clicks}", f"run_dir={tmp_path / 'run'}"],
        *["optimizer.name=sgd", "optimizer.lr=1e30"],
    )
    assert ended.exit_code == 3
    assert re.fullmatch(
        r"error: the loss is (nan|inf) at step \d \(learning rate 1e\+30\); .*\n", ended.err
    )
    assert not (tmp_path / "run" / "summary.json").exists()
