"""The start of the commands: errors come before the slow imports, and Ctrl-C ends it with one line."""

import json
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.command import ROOT, run_command
from tests.helpers.composed import TINY
from tests.helpers.datasets import write_clicks
from tests.helpers.rank_processes import wait_until
from tests.nn.training.two_heads import write_two_labels
from tests.project.layout import is_ours

RECIPES = (
    *("dlrm", "preproc/__main__", "nn/export/__main__"),
    *("serving/export", "serving/run", "serving/rollback"),
)
# What a refusal may not import.
SLOW = ("torch", "torchrec", "duckdb", "numba", "pyarrow", "matplotlib")
# Runs commands in one process; prints exit code, text and slow imports of each.
SCRIPT = """
import json, sys
from tests.helpers.command import run_command
for recipe, arguments in json.load(sys.stdin):
    ended = run_command(*arguments, recipe=recipe)
    slow = [name for name in {slow} if name in sys.modules]
    print(json.dumps([ended.exit_code, ended.out, ended.err, slow]))
"""
EARLY = [
    (["data.path=/nope"], r"/nope/feature_spec.yaml: no such file; "),
    (["data.path={empty}"], r"empty/feature_spec.yaml: no such file; "),
    (["data.path={clicks}", "eval.split=nope"], r"no split 'nope', only train, test"),
    (["data.path={damaged}"], r"damaged/.*item.bin"),
    (["data.path={two}"], r"dlrm predicts one label, and the dataset has 2 \(click, rating\); set .* shared_bottom, mmoe"),
    (["data.path={clicks}", "model.name=din"], r"din reads a sequence group, and the dataset has none; make one by"),
    (["data.path={clicks}", "model.name=bst", "model.sequence=x"], r"model.sequence=x is no sequence group of"),
    (["checkpoint.restore=/nope"], r"checkpoint.restore=/nope is not a checkpoint \(there is no such directory\)"),
    (["checkpoint.restore={empty}"], r"is not a checkpoint \(there is no run.json in it\)"),
    (["checkpoint.restore={empty}/below/best"], r"\(no evaluation was better than that of the untrained model\); name"),
    (["mode=eval"], r"mode=eval needs a trained model: set checkpoint.restore"),
    (["run_dir={file}"], r"run_dir='.*file': .*/file is not a directory; set run_dir to"),
    (["run_dir={file}/below/it"], r"/file is not a directory; set run_dir to a directory"),
    (["model.name=nope"], r"there is no model.name=nope; "),
    (["model.name=no_such_module:Bar"], r"no_such_module cannot be imported \(ModuleNotFoundError"),
    (["model.top_mlp=[8]"], r"model.top_mlp must end in 1 \(the logit\), got \[8\]"),
    (["train.batch_size=0"], r"train.batch_size must be positive, got 0"),
    (["experiment=nope"], r"there is no experiment=nope; "),
]  # fmt: skip

EARLY_SERVING = [
    ("export", [], r"no checkpoint: set checkpoint="),
    ("export", ["checkpoint=/nope", "output=/nope/x"], r"checkpoint=/nope is not a checkpoint"),
    ("run", ["model=/nope"], r"error: /nope cannot be read"),
    ("run", ["model={empty}"], r"is no model directory and has no versions"),
    ("run", ["model={empty}", "token_file={file}"], r"token_file=.*file: want one line"),
    ("run", ["model={empty}", "port=70000"], r"port must be at most 65,535, got 70000"),
    ("rollback", ["model={empty}"], r"nothing to return to; it has the versions none"),
]  # fmt: skip


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("early")
    (root / "empty/below/step_7").mkdir(parents=True)
    (root / "file").touch()
    damaged = write_clicks(root / "damaged") / "train" / "item.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    write_clicks(root / "clicks")
    write_two_labels(root / "two", {"train": 8, "test": 8})
    return {name: root / name for name in ("empty", "file", "damaged", "clicks", "two")}


@pytest.fixture(scope="module")
def without_torch(paths) -> list[tuple[int | None, str, str, list[str]]]:
    """Outcomes of all commands of this file that must not import torch, from one process."""
    commands = [("dlrm", [text.format(**paths) for text in texts]) for texts, _ in EARLY]
    commands += [(recipe, ["--help"]) for recipe in RECIPES]
    commands += [("dcnv2", ["--cfg=job"])]
    commands += [
        (f"serving/{name}", [text.format(**paths) for text in texts])
        for name, texts, _ in EARLY_SERVING
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(slow=SLOW)],
        input=json.dumps(commands),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("index", range(len(EARLY)), ids=[texts[-1] for texts, _ in EARLY])
def test_what_needs_no_torch_is_refused_before_torch_is_imported(without_torch, index):
    exit_code, out, err, slow = without_torch[index]
    assert (exit_code, out, slow) == (2, "", []), err
    assert re.search(EARLY[index][1], err), err
    assert re.fullmatch(r"error: [^\n]+\n", err)


@pytest.mark.parametrize("index", range(len(EARLY_SERVING)))
def test_serving_refuses_before_torch_is_imported(without_torch, index):
    exit_code, out, err, slow = without_torch[index - len(EARLY_SERVING)]
    assert (exit_code, out, slow) == (2, "", []), err
    assert re.search(EARLY_SERVING[index][2], err), err
    assert re.fullmatch(r"error: [^\n]+\n", err)


def test_help_needs_no_torch(without_torch):
    for exit_code, out, err, slow in without_torch[len(EARLY) : len(EARLY) + len(RECIPES) + 1]:
        assert (exit_code or 0, err, slow) == (0, "", [])
        assert out
    assert "model.top_mlp=" in without_torch[len(EARLY)][1]


def test_the_help_of_preprocessing_names_every_dataset(without_torch):
    text = without_torch[len(EARLY) + 1][1]
    for path in filter(is_ours, (ROOT / "configs" / "dataset").glob("*.yaml")):
        assert re.search(rf"^dataset={path.stem} +\S+ \S+", text, re.MULTILINE), path.stem


def test_a_refusal_takes_about_a_second(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(ROOT / "dlrm.py"), "data.path=/nope"], capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stdout) == (2, "")
    # With torch and TorchRec it takes seven.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_a_dataset_without_its_split_is_refused_by_a_run_of_synthetic_clicks_too(tmp_path):
    ended = run_command(*TINY, f"run_dir={tmp_path / 'run'}", "eval.split=nope")
    assert (ended.exit_code, ended.err.count("\n")) == (2, 1)
    assert "the synthetic stream: no split 'nope', only train, test" in ended.err


def catches(process: subprocess.Popen, signum: int) -> bool:
    """Return whether a process has a handler of a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return bool(int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (signum - 1) & 1)


@pytest.mark.parametrize(
    ("signum", "exit_code", "text"),
    [
        (signal.SIGINT, 130, "interrupted: nothing was written; rerun the same command\n"),
        (signal.SIGTERM, 75, "stopped by SIGTERM: nothing was written; rerun the same command\n"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [["dlrm.py"], ["main.py"], ["-m", "preproc", "source=x", "output=y"], ["-m", "nn.export"]],
    ids=["dlrm", "main", "preproc", "export"],
)
def test_a_signal_during_the_imports_ends_a_command_with_one_line(command, signum, exit_code, text):
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    # Python catches SIGINT from its own start; SIGTERM is caught by the command.
    assert wait_until(lambda: catches(process, signal.SIGTERM), 60)
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (exit_code, text)
