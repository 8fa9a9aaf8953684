"""The training benchmark: results read from a run, printed tables, and the plot."""

import json
import re
import signal
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import dataloading
from benchmarks.checkpoint import measured
from benchmarks.hstu_attention import flex_of, times_of
from benchmarks.launch import launched, started_by
from benchmarks.rows import ROOT, ROWS, Row
from benchmarks.train import (
    breakdown_table,
    command_of,
    memory_of,
    read_result,
    row_dataset,
    speed_line,
)
from configs.arguments import Choices, hydra_arguments
from configs.schema import Config
from nn.build import build_train_loader, open_source
from nn.models.registry import declared_tables
from nn.step_floor import floor_of, power_law_shares
from tests.helpers.command import hydra_that_reads_once, run_command, run_module
from tests.helpers.composed import TINY, compose_config, ranks_of_cpu
from tests.helpers.gpus import needs_one_gpu
from tests.helpers.rank_processes import has_ended, wait_until
from tests.helpers.runs import summary

pytestmark = pytest.mark.doors

ROW = Row("dlrm", 1, "none", "none")


@pytest.fixture(autouse=True, scope="module")
def reads_once():
    with hydra_that_reads_once():
        yield


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """Return the result of a row that is small enough for a CPU."""
    run_dir = tmp_path_factory.mktemp("benchmarks") / "run"
    options = [
        *(option for option in TINY if not option.startswith("train.batch_size")),
        "train.batch_size=16",
        "data.synthetic.train_rows=800",
        "sharding.tables={cat_0: {tier: disk, cache: 0.99}}",
        f"sharding.disk_path={run_dir.parent}",
        *command_of(ROW, run_dir, run_dir, 300)[8:],
    ]
    ended = run_command(*options)
    assert ended.exit_code == 0, ended.err
    config = compose_config(*TINY, "train.batch_size=16")
    floor = floor_of(config, open_source(config).spec, 1, power_law_shares(1.05))
    return json.loads(json.dumps(read_result("tiny", ROW, run_dir, floor)))


def test_the_loader_benchmark_reads_the_events_of_a_dataset(tmp_path, monkeypatch, capsys):
    names = ("names", "[user,item]"), ("history", "[item]"), ("cardinalities", "[9,30]")
    of_events = (*names, ("hotness", "[1,1]"), ("history_length", "12"))
    row = replace(ROWS["din_1_bf16_events"], train_rows=400, synthetic=of_events)
    monkeypatch.setattr("benchmarks.train.TEST_ROWS", 10)
    data = row_dataset(row, tmp_path)
    options = "batch_size=50", "shuffle_block=1", "epochs=1", "workers=1", "processes=1"
    monkeypatch.setattr(sys, "argv", ["dataloading", *options, f"--data={data}"])
    dataloading.main()
    on_disk, shuffled = capsys.readouterr().out.splitlines()[2:]
    assert on_disk.startswith("order on disk, dataset")
    assert shuffled.startswith("shuffled, dataset")
    rows, events = (
        float(re.search(rf"([\d.]+) M {unit}/s", shuffled)[1]) for unit in ("rows", "events")
    )
    assert events / 12 == pytest.approx(rows, abs=0.02 + rows / 5)


def test_the_loader_benchmark_refuses_what_is_no_dataset_in_one_line(tmp_path):
    ended = run_module("benchmarks.dataloading", "--data", str(tmp_path))
    assert (ended.exit_code, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith(f"error: --data={tmp_path}: {tmp_path}/feature_spec.yaml: no such")


def test_rows_of_listens_are_no_rows_of_torchrec(tmp_path):
    folders = ["--data", str(tmp_path), "--out", str(tmp_path / "out")]
    ended = run_module("benchmarks.peers.with_torchrec", *folders, "hstu_1")
    assert ended.exit_code == 2
    assert "invalid choice: 'hstu_1'" in ended.err
    assert not (tmp_path / "out").exists()


def test_a_sweep_goes_on_only_where_validation_rows_chose_the_checkpoints(tmp_path):
    for name, split in (("seed-1", "validation"), ("seed-2", "test"), ("seed-1-tested", "test")):
        path = tmp_path / "deepfm" / name / "config.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(f"eval: {{split: {split}}}\n")
    folders = ["--data", str(tmp_path), "--out", str(tmp_path)]
    ended = run_module("benchmarks.model_sweeps", *folders, "dlrm", "deepfm")
    assert (ended.exit_code, ended.out) == (2, "")
    assert f"error: {tmp_path}/deepfm/seed-2/config.yaml has another eval.split" in ended.err
    assert not (tmp_path / "dlrm").exists()


@needs_one_gpu
def test_flex_attention_is_measured_backward_too():
    attend, shape = flex_of(torch.full((2,), 2672, device="cuda"))
    assert min(times_of(attend, shape)) > 0


def test_the_command_of_a_row_sets_options_that_exist(tmp_path):
    command = command_of(ROW, tmp_path / "data", tmp_path / "run", 300)
    assert command[:5] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    assert command[5] == str(ROOT / "dlrm.py")
    hydra_arguments(command[6:], Choices(Config, groups=("experiment", "data")))
    assert {"profile.start_step=290", "train.max_steps=300"} <= set(command)


# Row -> model, global batch, numerical features, hotness.
FAMILY = {
    "movielens_1": ("embedding_mlp", 2048, 0, [1, 1, 3]),
    "wide_deep_1": ("wide_deep", 1024, 13, [1] * 28),
    "deepfm_1": ("deepfm", 4096, 13, [1] * 26),
    "sok_1": ("embedding_mlp", 65_536, 0, [10] * 100),
    "din_1": ("din", 8192, 0, [1, 1, 10, 50]),
    "wukong_1": ("wukong", 4096, 13, [1] * 26),
}


@pytest.mark.parametrize("name", FAMILY)
def test_a_row_of_the_family_has_its_features(name):
    config = ROWS[name].config()
    spec = open_source(config).spec
    hotness = [feature.hotness for feature in spec.categorical]
    shape = (config.model.name, config.train.batch_size, len(spec.numerical), hotness)
    assert shape == FAMILY[name]


# Those of small tables.
@pytest.mark.parametrize("name", ["movielens_1", "din_1"])
def test_a_row_of_the_family_trains(name, tmp_path):
    row = ROWS[name]
    small = [
        *command_of(row, tmp_path, tmp_path / "run", 20)[8:],
        *(f"experiment={row.experiment}", f"data={row.tables}", f"run_dir={tmp_path / 'run'}"),
        *("device=cpu", "train.batch_size=16", "eval.batch_size=16", "log.every=10"),
        *("data.synthetic.train_rows=320", "data.synthetic.test_rows=32"),
    ]
    ended = run_command(*dict((text.split("=")[0], text) for text in small).values(), recipe="main")
    assert (ended.exit_code, ended.err) == (0, "")
    assert summary(tmp_path / "run")["steps"] == 20


def test_items_and_histories_of_a_row_share_a_table():
    config = ROWS["din_1"].config()
    tables = declared_tables(config.model, open_source(config).spec)
    assert tables[0].feature_names == ["movieId", "history"]


def test_a_result_holds_speed_floor_and_breakdown(result):
    # six records of 50 steps, the first left out; an epoch has 50 steps
    assert result["num_records"] == 5
    speed = result["samples_per_s"]
    assert 0 < speed["min"] <= speed["median"] <= speed["max"]
    assert result["step_ms"] == pytest.approx(16 / speed["median"] * 1e3)
    assert result["times_the_floor"] == pytest.approx(result["step_ms"] / result["floor"]["ms"])
    assert result["breakdown"][0]["num_steps"] == 10
    assert result["peak_hbm_bytes"] is result["planned_hbm_bytes"] is None


def test_a_row_without_a_gpu_has_neither_memory_nor_kernels(result):
    assert speed_line(result).endswith("| none | none |")
    assert "no GPU" in breakdown_table([result])


def test_a_result_has_the_peaks_and_the_rows_of_tables_on_disk(result, tmp_path):
    sizes = "GPU 0.0, host [0-9.]+, disk 0.0; of tables on disk the rows of 0.0 were read in 4,800 samples"
    assert re.match(
        f"GiB at the peak: {sizes}, and those of at most 0.0 in 69,300,000", result["memory"]
    )
    assert result["tflops_per_s"] > 0
    # 300 GB in 100 steps and 100 GB in the next 100 of 1,000 samples: 1 GB a step until 69,300 of them.
    records = [{"tier_disk_bytes_in": 1e9 * each} for each in (4, 2, 1, 1)]
    bytes_of = {"tier_disk_peak_bytes": 2**33, "peak_host_bytes": 2**34, "peak_hbm_bytes": 2**35}
    for full, most in ((10**15, (400 + 69_100) / 1.073741824), (2**40, 1024)):
        text = json.dumps(bytes_of | {"tier_disk_full_bytes": full})
        (tmp_path / "summary.json").write_text(text)
        said = memory_of(records, 1000, tmp_path)
        assert said.startswith("GiB at the peak: GPU 32.0, host 16.0, disk 8.0; ")
        assert f"372.5 were read in 200,000 samples, and those of at most {most:,.1f} in" in said


def on_gpus(result, **ms_of_all_to_all: float):
    """Return `result` with a breakdown of GPUs: a matrix product, and an all-to-all with its ms per rank."""
    ranks = [
        {
            "on_gpu": True,
            "step_ms": 4.0,
            "overlap_ms": 0.25,
            "idle_ms": 0.5,
            "phases": [
                {"phase": "MLPs and cross", "ms": 2.0, "exposed_ms": 1.75, "num_kernels": 9},
                {"phase": "all-to-all", "ms": ms, "exposed_ms": ms / 2, "num_kernels": 3},
            ],
        }
        for ms in ms_of_all_to_all.values()
    ]
    memory = {"peak_hbm_bytes": 10 * 2**30, "planned_hbm_bytes": {"total": 9 * 2**30}}
    return result | {"breakdown": ranks} | memory


def test_the_tables_are_markdown_with_as_many_cells_as_columns(result):
    result_on_gpus = on_gpus(result, first=1.0, second=0.4)
    assert "| 10.0 | 9.0 (-10.0%) |" in speed_line(result_on_gpus)
    head, rule, line = breakdown_table([result_on_gpus]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert "| 1.00 (0.50), least 0.40 | 2.00 (1.75) | 0.25 | 0.50 |" in line
    assert "lookup" not in head


def test_a_dataset_has_the_tables_of_the_row_and_is_generated_once(tmp_path, monkeypatch):
    (tmp_path / "configs/data").mkdir(parents=True)
    (tmp_path / "configs/data/tiny.yaml").write_text(
        "synthetic: {train_rows: 9, test_rows: 9, num_numerical: 2, cardinalities: [50, 7], hotness: [1, 3]}\n"
    )
    made = []
    monkeypatch.setattr("benchmarks.train.ROOT", tmp_path)
    monkeypatch.setattr(
        "benchmarks.dataset.subprocess.run", lambda command, **_: made.append(command)
    )
    row = Row("dlrm", 1, "none", "tiny", exponent=0, train_rows=640)
    path = row_dataset(row, tmp_path / "data")
    assert path == tmp_path / "data/tiny_0_640"
    assert {
        "data.synthetic.cardinalities=[50, 7]",
        "data.synthetic.hotness=[1, 3]",
        "data.synthetic.exponent=0",
        "data.synthetic.train_rows=640",
    } <= set(made[0])
    path.mkdir(parents=True)
    (path / "feature_spec.yaml").touch()
    row_dataset(row, tmp_path / "data")
    assert len(made) == 1


def test_a_measurement_leaves_nothing_running(tmp_path):
    # As torchrun does it: the rank has a session of its own, and outlives its launcher.
    rank = "setsid sleep 600 & echo $! > pid; mv pid rank; wait"
    with launched(["bash", "-c", f"cd {tmp_path}; {rank}"], tmp_path / "log") as launcher:
        assert wait_until(lambda: (tmp_path / "rank").exists(), 60)
        pid = int((tmp_path / "rank").read_text())
        assert pid in started_by(launcher.pid)
    assert launcher.poll() == -signal.SIGKILL
    assert wait_until(lambda: has_ended(pid), 60)


def test_tables_on_disk_have_the_bits_of_tables_in_memory(tmp_path):
    ended = run_module("benchmarks.host_tables", "--check", "sgd", "--disk", str(tmp_path))
    assert ended.exit_code == 0, ended.err
    assert re.findall(r"equal (\w+)", ended.out) == ["True", "True"]


def test_a_checkpoint_is_timed_from_copy_to_restore(tmp_path):
    config = compose_config(*TINY, f"run_dir={tmp_path}")
    source = open_source(config)
    with ranks_of_cpu() as ranks:
        loader = build_train_loader(config, source, ranks)
        result = measured(config, source, loader, ranks, baseline_s=0.1)
    assert (
        tmp_path / "checkpoints" / f"step_{result['steps'] - result['steps meanwhile']}"
    ).is_dir()
    assert result["checkpoint GiB"] > 0
    assert result["later pause s"] > 0
    assert 0 < result["first pause s"] < result["written after s"]
    share = result["cost of a later save s"] / 3
    assert result["later save, % of 5 minutes"] == pytest.approx(share)
