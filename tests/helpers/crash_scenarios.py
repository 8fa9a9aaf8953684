"""Small commands for `tests.end_to_end.crash_points`: what they read, how they start, and how their results are compared.

Each runs in a directory with `input/`, which it reads, and `work/`, which it writes. A start is a fork that has all imports and
the composed options already. Pictures are written, but not drawn, which would take most of the time.
"""

import os
import random
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from hydra import compose as compose_files
from hydra import initialize_config_module
from omegaconf import DictConfig

from configs.command_line import checked, register
from configs.export_schema import ExportConfig
from configs.schema import Component
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.storage.object_store import ObjectStore
from nn.checkpoint.directory import find_damage, list_checkpoints, read_facts
from nn.distributed.launcher import reserved_port
from nn.export.tables import Selection, export_tables
from nn.replay import replay
from tests.helpers.composed import compose_with_hydra
from tests.helpers.distributed import launched_as
from tests.helpers.file_system_faults import FAULTS, run_with_fault
from tests.helpers.preproc_command import compose_preproc, raw_line, write_lines
from tests.helpers.runs import jsonl, records, stored_bytes, summary, timeless
from tests.helpers.seccomp import Call

PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(3000)
SILENT_RANK_WAIT_S = 0.3

TRAINING = [
    *("data.synthetic.train_rows=512", "data.synthetic.test_rows=64"),
    *("data.synthetic.cardinalities=[50,20]", "data.synthetic.num_numerical=2"),
    *("model.embedding_dim=4", "model.bottom_mlp=[4]", "model.top_mlp=[4,1]"),
    *("train.batch_size=32", "eval.batch_size=64", "train.max_steps=8", "eval.per_epoch=4"),
    *("checkpoint.save_every=3", "checkpoint.keep=1", "log.every=4", "train.tf32=false"),
    *("optimizer.lr=0.05", "device=cpu", "run_dir=work/run"),
]


@dataclass(frozen=True)
class Scenario:
    """A command.

    Attributes:
        command: called in every rank, in the directory of the case; may raise SystemExit.
        differences: (undisturbed `work`, `work`, output of the disturbed start) to what differs.
        prepare: makes `input`, and `start` if the command begins with files in `work`.
        num_ranks: number of processes.
    """

    command: Callable[[], None]
    differences: Callable[[Path, Path, str], list[str]]
    prepare: Callable[[Path], None] = lambda directory: None
    num_ranks: int = 1

    def ranks(self, case: Path) -> Callable[[int], int]:
        """Return what each rank calls with its number."""
        return partial(self._run_rank, case, reserved_port() if self.num_ranks > 1 else 0)

    def _run_rank(self, case: Path, port: int, rank: int) -> int:
        os.chdir(case)
        if self.num_ranks > 1:
            os.environ |= launched_as(rank, self.num_ranks, self.num_ranks, port)
        try:
            self.command()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0
        return 0


def warm_up() -> None:
    """Import everything and compose all options in this process, without starting a thread."""
    import matplotlib.backends.backend_agg  # noqa: F401
    import torch

    torch.set_num_threads(1)
    os.environ["COLUMNS"] = "200"
    patch("main.SILENT_RANK_WAIT_S", SILENT_RANK_WAIT_S).start()
    patch("matplotlib.figure.Figure.savefig", _save_picture).start()
    patch("matplotlib.backends.backend_agg.FigureCanvasAgg.print_png", _save_picture).start()
    for compose in PREPARED:
        compose()


def _save_picture(figure: Any, target: Any, **options: Any) -> None:
    if hasattr(target, "write"):
        target.write(PICTURE)
        return
    with open(target, "wb") as stream:
        stream.write(PICTURE)


PREPARED: list[Callable[[], object]] = []
"""Called once in the process whose forks are the starts."""


@cache
def composed_training(*overrides: str) -> DictConfig:
    """Return the composed options of a training."""
    return compose_with_hydra(*TRAINING, *overrides)


@cache
def composed_export(*overrides: str) -> DictConfig:
    """Return the composed options of an export."""
    register(ExportConfig, "export_schema")
    with initialize_config_module("configs", version_base="1.3"):
        return compose_files("export", list(overrides))


def train(*overrides: str) -> Callable[[], None]:
    """Return the command `dlrm.py` without Hydra's composition."""

    def command() -> None:
        from main import _process, _run

        _process()(partial(_run, composed_training(*overrides)))()

    PREPARED.append(lambda: composed_training(*overrides))
    return command


def train_on_new_machines() -> Callable[[], None]:
    """Return the command of a training with a mirror that has lost its disk since an earlier start."""
    mirrored = "checkpoint.mirror=null"
    command = train(mirrored)

    def on_new_machine() -> None:
        mirror, run_dir = Path("work/mirror").absolute(), Path("work/run")
        if mirror.exists():
            shutil.rmtree(run_dir, ignore_errors=True)
        composed_training(mirrored).checkpoint.mirror = f"file://{mirror}"
        with patch.object(ObjectStore, "upload", _upload_whole):
            command()

    return on_new_machine


def _upload_whole(store: ObjectStore, source: Path, name: str) -> None:
    """Write a file of a folder as an object store does: it appears when all of its bytes have arrived."""
    target = Path(store.path) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_file = Path(store.path).with_name(f"arriving-{target.name}")
    shutil.copyfile(source, partial_file)
    partial_file.replace(target)


def mirror_differences(wanted: Path, got: Path, output: str) -> list[str]:
    """Compare two finished runs, and each with its mirror."""
    own = [tree_differences(work / "run", work / "mirror", "") for work in (wanted, got)]
    # Links, folders of loggers and the list of saves are not mirrored, nor what is left of a kill before the upload.
    kept = [
        [d for d in found if not re.match(r"tensorboard|\S+best|checkpoints/saved", d)]
        for found in own
    ]
    return [
        # The list of saves stays on the machine that made them.
        *(d for d in run_differences(wanted, got, output) if "checkpoints/saved" not in d),
        *(f"mirror: {d}" for d in kept[1] if d not in kept[0]),
    ]


def run_differences(wanted: Path, got: Path, output: str) -> list[str]:
    """Compare two finished runs."""
    wanted, got = wanted / "run", got / "run"
    # A checkpoint that could not be written may be the one that was kept as the best.
    is_lost = "could not be written" in output
    checks = {
        "metrics.jsonl": records(got) == records(wanted),
        "summary.json": _result(got, is_lost) == _result(wanted, is_lost),
    }
    if (wanted / "curves.png").exists():
        path = got / "curves.png"
        checks["curves.png"] = path.exists() and path.read_bytes() == PICTURE
    checkpoints = got / "checkpoints"
    if (wanted / "checkpoints").exists():
        checks["the last checkpoint"] = stored_bytes(got) == stored_bytes(wanted)
        for path in list_checkpoints(checkpoints):
            checks[path.name] = find_damage(path, read_facts(path), 0, 1) is None
        last = f"checkpoints/step_{summary(wanted)['steps']}"
        checks["run.json"] = _facts(got / last) == _facts(wanted / last)
    if (wanted / "deltas").exists():
        checks["deltas"] = _make_the_last_checkpoint(got)
    for name in ("restarts.jsonl", "checkpoints/saved.jsonl"):
        checks[name] = not (got / name).exists() or bool(jsonl(got / name))
    missing = names(wanted) - names(got)
    of_saves = ("checkpoints/", "deltas/")
    missing = {name for name in missing if not (is_lost and name.startswith(of_saves))}
    more = names(got) - names(wanted) - {"restarts.jsonl"}
    return [
        *(f"{name} differs" for name, is_equal in checks.items() if not is_equal),
        *(f"{name} is missing" for name in sorted(missing)),
        *(f"{name} is left" for name in sorted(more)),
    ]


def _result(run_dir: Path, is_lost: bool) -> dict[str, Any]:
    result = summary(run_dir)
    return result | {"best_checkpoint": None} if is_lost else result


def _make_the_last_checkpoint(run_dir: Path) -> bool:
    """Tell whether the deltas after the oldest checkpoint make the export of the last one."""
    last, *_, first = list_checkpoints(run_dir / "checkpoints")
    with TemporaryDirectory() as room:
        wanted, got = Path(room) / "wanted", Path(room) / "got"
        selection = Selection(parts=list(Component), optimizer=False)
        export_tables(last, wanted, selection)
        replay(first, [str(run_dir / "deltas")], got)
        return not tree_differences(wanted, got, "")


def _facts(path: Path) -> dict[str, Any]:
    facts = read_facts(path)
    # Its identity is drawn.
    facts.pop("chain", None)
    # Its address has the directory of the case.
    facts["config"]["checkpoint"]["mirror"] = None
    facts["trainer"]["test"] = timeless(facts["trainer"]["test"])
    return facts | {"files": None}


def names(directory: Path) -> set[str]:
    """Return the names of all files, links and directories, but the folder of TensorBoard.

    Its file names have times, and a start whose disk is full when it makes the folder trains without it.
    """
    found = (path.relative_to(directory) for path in directory.rglob("*"))
    return {path.as_posix() for path in found if path.parts[0] != "tensorboard"}


LOCKS = {".out.lock", ".out.preproc.lock"}


def tree_differences(wanted: Path, got: Path, output: str) -> list[str]:
    """Compare two directories byte by byte. A kill before the last removal may leave the file of a lock; nobody holds it."""
    differing = [
        name
        for name in names(wanted) & names(got)
        if (wanted / name).is_file() and (wanted / name).read_bytes() != (got / name).read_bytes()
    ]
    return [
        *(f"{name} differs" for name in sorted(differing)),
        *(f"{name} is missing" for name in sorted(names(wanted) - names(got))),
        *(f"{name} is left" for name in sorted(names(got) - names(wanted) - LOCKS)),
    ]


def preprocess(*overrides: str) -> Callable[[], None]:
    """Return the command `python -m preproc` without Hydra's composition."""

    def compose() -> DictConfig:
        return compose_preproc(*overrides)

    def command() -> None:
        from preproc.__main__ import run

        run(compose())

    PREPARED.append(compose)
    return command


def export(*overrides: str) -> Callable[[], None]:
    """Return the command `python -m nn.export` without Hydra's composition."""

    def compose() -> DictConfig:
        return composed_export(*overrides)

    def command() -> None:
        from nn.export.__main__ import run

        checked(run)(compose())

    PREPARED.append(compose)
    return command


def resumed_training(directory: Path) -> None:
    """Make the run directory of a training that was killed while its second checkpoint was completed."""
    scenario = SCENARIOS["training"]

    def start(name: str, at: int | None) -> list[Call]:
        case = directory / name
        (case / "work").mkdir(parents=True)
        ranks = scenario.ranks(case)
        return run_with_fault(ranks, case / "work", case / "log", FAULTS["kill"], at).calls

    names = [call.path.name for call in start("whole", None)]
    start("killed", names.index("step_6") + 1)
    shutil.move(directory / "killed" / "work", directory / "start")


def trained(directory: Path) -> None:
    """Train, and keep the last checkpoint as input."""
    case = directory / "trained"
    (case / "work").mkdir(parents=True)
    run_with_fault(SCENARIOS["training"].ranks(case), case / "work", case / "log")
    (directory / "input").mkdir()
    shutil.move(case / "work" / "run" / "checkpoints" / "step_8", directory / "input" / "step_8")


def raw_logs(directory: Path) -> None:
    """Write two files of raw lines, with texts without a code and a bad line."""
    draw = random.Random(1)
    (directory / "input").mkdir()
    for day in range(2):
        lines = [
            raw_line(
                draw.randint(0, 1),
                i1=draw.choice(["", 5, 70]),
                c1=f"{draw.randint(0, 9):08x}",
                c2=draw.choice(["", "x", "ffffffff"]),
            )
            for _ in range(40)
        ]
        write_lines(directory / "input" / f"day_{day}.gz", [*lines, "bad"], compress=True)


def clicks(directory: Path) -> None:
    """Write a CSV file of clicks."""
    draw = random.Random(1)
    (directory / "input").mkdir()
    rows = [
        f"{draw.randint(0, 1)},{draw.choice(['', 3, 80])},{draw.choice('abc')},{draw.choice(['x|y', 'x', ''])}"
        for _ in range(60)
    ]
    write_lines(directory / "input" / "clicks.csv", ["clicked,age,city,tags", *rows])


def fitted_clicks(directory: Path) -> None:
    """Write a CSV file of clicks, and the dataset that was made of it."""
    clicks(directory)
    _preprocess_once(directory, TABLE, directory / "input" / "fitted")


def next_clicks(directory: Path) -> None:
    """Write a CSV file of clicks with new values, and the dataset of the day before."""
    fitted_clicks(directory)
    text = (directory / "input" / "clicks.csv").read_text()
    for old, new in ((",a,", ",d,"), ("x|y", "y|z")):
        text = text.replace(old, new)
    (directory / "input" / "next.csv").write_text(text)


def trained_day(directory: Path) -> None:
    """Write the datasets of two days, and begin with a run that was trained on the first one."""
    next_clicks(directory)
    _preprocess_once(directory, NEXT_DAY, directory / "input" / "next")
    scenario = Scenario(train("data.path=input/fitted", *OF_DAYS), run_differences)
    case = directory / "trained"
    (case / "work").mkdir(parents=True)
    (case / "input").symlink_to(directory / "input")
    run_with_fault(scenario.ranks(case), case / "work", case / "log")
    shutil.move(case / "work", directory / "start")


def keyed_dataset(directory: Path) -> None:
    """Write a dataset of raw keys, more of them than rows of their table."""
    rng = np.random.default_rng(5)
    with write_dataset(
        directory / "input" / "keys",
        categorical=[CategoricalFeature.of_keys("user", 24), CategoricalFeature.of("item", 9)],
        numerical=("n",),
        splits=("train", "test"),
    ) as writer:
        for split, rows in (("train", 512), ("test", 64)):
            users = np.arange(rows) // 8 + rng.integers(1, 12, rows)
            writer[split].append(
                labels=rng.random(rows) < 0.4,
                numerical=rng.normal(size=(rows, 1)),
                ids={"user": users * 0x9E3779B97F4A7C1, "item": rng.integers(0, 9, rows)},
            )


def dataset(directory: Path) -> None:
    """Write a dataset as input."""
    (directory / "input").mkdir()
    _preprocess_once(directory, SYNTHETIC, directory / "input" / "out")


def older_dataset(directory: Path) -> None:
    """Begin with a dataset that is to be replaced."""
    (directory / "start").mkdir()
    _preprocess_once(directory, [*SYNTHETIC, "seed=7"], directory / "start" / "out")


def _preprocess_once(directory: Path, options: Sequence[str], output: Path) -> None:
    scenario = Scenario(preprocess(*options), tree_differences)
    case = directory / f"before_{output.name}"
    (case / "work").mkdir(parents=True)
    (case / "input").symlink_to(directory / "input")
    run_with_fault(scenario.ranks(case), case / "work", case / "log")
    shutil.move(case / "work" / "out", output)


TABLE = [
    "dataset=any",
    "table={sources:{clicks:{files:input/clicks.csv}},label:{name:clicked},"
    "numerical:[{name:age,transforms:[{fill:0},standardise]}],"
    "categorical:[city,{name:tags,separator:'|'}],split:{train:0.75},keep:[city]}",
    *("numerical_dtype=float32", "shuffle=true", "threads=2", "output=work/out"),
]
NEXT_DAY = [
    *(option.replace("clicks.csv", "next.csv") for option in TABLE),
    *("mode=extend", "fitted=input/fitted"),
]
OF_DAYS = ["train.batch_size=8", "eval.batch_size=8", "checkpoint.delta_every=2"]
SYNTHETIC = [
    *("dataset=synthetic", "data.synthetic.train_rows=200", "data.synthetic.test_rows=40"),
    *("data.synthetic.cardinalities=[50,20]", "data.synthetic.num_numerical=2"),
    *("threads=2", "output=work/out"),
]
CRITEO = [
    *("dataset=criteo_kaggle", "source=input/day_*.gz", "on_bad=quarantine", "shuffle=true"),
    *("threads=2", "output=work/out"),
]
EXPORT = ["checkpoint=input/step_8", "output=work/out"]

SCENARIOS: dict[str, Scenario] = {
    "training": Scenario(train(), run_differences),
    "training_deltas": Scenario(
        train("checkpoint.delta_every=2", "checkpoint.keep=9"), run_differences
    ),
    "training_2_ranks": Scenario(train(), run_differences, num_ranks=2),
    **{
        f"training_{tier}_tier": Scenario(
            train(
                f"sharding.tables={{cat_0: {{tier: {tier}, cache: 0.16}}}}",
                *("data.synthetic.cardinalities=[2000,20]", "data.synthetic.exponent=0"),
                *("sharding.disk_path=work/disk", "sharding.read_ahead_gib=0.00003"),
            ),
            run_differences,
        )
        for tier in ("host", "disk")
    },
    "training_keys": Scenario(
        train(
            *("data.path=input/keys", "data.dynamic.admit_after=2", "data.shuffle_block=0"),
            *("checkpoint.delta_every=2", "checkpoint.keep=9"),
        ),
        run_differences,
        keyed_dataset,
    ),
    "training_next_day": Scenario(
        train("data.path=input/next", "day=next", *OF_DAYS), run_differences, trained_day
    ),
    "training_mirror": Scenario(train_on_new_machines(), mirror_differences),
    "training_resumed": Scenario(train(), run_differences, resumed_training),
    "evaluation": Scenario(
        train("mode=eval", "checkpoint.restore=input/step_8"), run_differences, trained
    ),
    "preprocessing": Scenario(preprocess(*CRITEO), tree_differences, raw_logs),
    "preprocessing_table": Scenario(preprocess(*TABLE), tree_differences, clicks),
    "preprocessing_transform": Scenario(
        preprocess(*TABLE, "mode=transform", "fitted=input/fitted"), tree_differences, fitted_clicks
    ),
    "preprocessing_extend": Scenario(preprocess(*NEXT_DAY), tree_differences, next_clicks),
    "preprocessing_synthetic": Scenario(preprocess(*SYNTHETIC), tree_differences),
    "preprocessing_overwrite": Scenario(
        preprocess(*SYNTHETIC, "overwrite=true"), tree_differences, older_dataset
    ),
    "conversion_parquet": Scenario(
        preprocess("mode=convert", "path=input/out", "to=parquet", "output=work/out"),
        tree_differences,
        dataset,
    ),
    **{
        f"export_{format}": Scenario(export(*EXPORT, f"format={format}"), tree_differences, trained)
        for format in ("npy", "safetensors", "tf2")
    },
}
"""By the name in the report."""
