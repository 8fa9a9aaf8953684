"""A run directory, mutated: checkpoints, records and configuration; resume, restore, export, curves."""

import json
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nn.checkpoint.tensor_index import INDEX_FILE
from nn.modes.train import train as train_run
from nn.observability.records import read_run
from nn.plots.curves import draw_curves
from tests.fuzz.commands import as_export, as_recipe
from tests.fuzz.harness import Fuzzer
from tests.fuzz.mutations import (
    JSON_LITERALS,
    YAML_LITERALS,
    BytesEdit,
    Edit,
    apply_bytes,
    apply_edits,
    apply_kind,
    as_json,
    as_yaml,
    bytes_edits,
    document_edits,
    kinds_of_file,
)
from tests.helpers.composed import compose_config, compose_with_hydra

OPTIONS = [
    "device=cpu",
    "data.synthetic.train_rows=192",
    "data.synthetic.test_rows=48",
    "data.synthetic.cardinalities=[50,7]",
    "data.synthetic.num_numerical=2",
    "model.embedding_dim=4",
    "model.bottom_mlp=[4,4]",
    "model.top_mlp=[4,1]",
    "train.batch_size=64",
    "train.epochs=1",
    "eval.batch_size=48",
    "log.loggers=[]",
    "log.every=1",
    "checkpoint.save_every=2",
]
STEP = "checkpoints/step_2"
RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True)
class Run:
    """A run that ended after its checkpoint of step 2 of 3."""

    run_dir: Path
    facts: dict[str, Any]
    index: dict[str, Any]

    def copy_to(self, room: Path) -> Path:
        """Copy it to `room`, as the same run; return the copy."""
        return shutil.copytree(self.run_dir, room / "run", symlinks=True)


def train(run_dir: Path, *more: str) -> None:
    """Run the recipe in this process, without the plot."""
    options = [*OPTIONS, f"run_dir={run_dir}", *more]
    config = compose_config(*options)
    text = OmegaConf.to_yaml(compose_with_hydra(*options), resolve=True)
    with patch("nn.observability.run_directory.draw_curves"):
        train_run(config, text)


def _make_run(run_dir: Path) -> Run:
    train(run_dir)
    # As after a kill: the last checkpoint and the summary are missing.
    shutil.rmtree(run_dir / "checkpoints/step_3")
    (run_dir / "summary.json").unlink()
    facts = json.loads((run_dir / STEP / RUN_FILE).read_text())
    index = json.loads((run_dir / STEP / INDEX_FILE).read_text())
    return Run(run_dir, facts, index)


def write_checkpoint(path: Path, facts: dict[str, Any], index_text: str) -> None:
    """Write run.json and tensors.json with right sizes and checksums, whatever else they say."""
    index = index_text.encode("utf-8", "surrogatepass")
    (path / INDEX_FILE).write_bytes(index)
    if isinstance(facts, dict):
        facts = {key: value for key, value in facts.items() if key != "crc32"}
        if isinstance(facts.get("files"), dict) and INDEX_FILE in facts["files"]:
            facts["files"] = facts["files"] | {INDEX_FILE: len(index)}
        if "index_crc32" in facts:
            facts["index_crc32"] = zlib.crc32(index)
        text = as_json(facts)
        try:
            # With a literal in it, the checksum is of what a reader parses.
            parsed = json.loads(text)
            canonical = json.dumps(parsed, sort_keys=True).encode()
        except (ValueError, TypeError, RecursionError, OverflowError):
            canonical = b""
        text = as_json(facts | {"crc32": zlib.crc32(canonical)})
    else:
        text = as_json(facts)
    (path / RUN_FILE).write_bytes(text.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True, slots=True)
class CheckpointChange:
    """Edits of a checkpoint, and the way to read it: resume, restore, eval or a format of the export."""

    edits: list[Edit]
    way: str


WAYS = ("resume", "restore", "npy", "safetensors", "tf2")


def _read_checkpoint(run_dir: Path, way: str, room: Path) -> None:
    path = run_dir / STEP
    if way == "resume":
        as_recipe(lambda: train(run_dir))
    elif way == "restore":
        parts = "checkpoint.parts=[dense,tables]"
        as_recipe(lambda: train(room / "new", f"checkpoint.restore={path}", parts))
    else:
        as_export(checkpoint=str(path), output=str(room / "out"), format=way)


def _changed_index(made: Run, change: CheckpointChange, room: Path) -> None:
    run_dir = made.copy_to(room)
    text = as_json(apply_edits(made.index, change.edits))
    write_checkpoint(run_dir / STEP, made.facts, text)
    _read_checkpoint(run_dir, change.way, room)


def _changed_facts(made: Run, change: CheckpointChange, room: Path) -> None:
    run_dir = made.copy_to(room)
    facts = apply_edits(made.facts, change.edits)
    write_checkpoint(run_dir / STEP, facts, as_json(made.index))
    _read_checkpoint(run_dir, change.way, room)


@dataclass(frozen=True, slots=True)
class FileChange:
    """A change of the bytes of one file of a run."""

    file: str
    edits: list[BytesEdit]
    way: str


def _changed_bytes(made: Run, change: FileChange, room: Path) -> None:
    run_dir = made.copy_to(room)
    path = run_dir / change.file
    path.write_bytes(apply_bytes(path.read_bytes(), change.edits))
    _read_checkpoint(run_dir, change.way, room)


def _changed_kind(made: Run, change: tuple[tuple[str, str], str], room: Path) -> None:
    (file, kind), way = change
    run_dir = made.copy_to(room)
    apply_kind(run_dir / file, kind)
    _read_checkpoint(run_dir, way, room)


def _files(made: Run) -> list[str]:
    paths = [p for p in made.run_dir.rglob("*") if p.is_file() and not p.is_symlink()]
    return sorted(
        str(path.relative_to(made.run_dir))
        for path in paths
        if not {"best"} & set(path.relative_to(made.run_dir).parts)
    )


def _changed_config(made: Run, edits: list[Edit], room: Path) -> None:
    """A run that was killed before its first checkpoint."""
    run_dir = made.copy_to(room)
    shutil.rmtree(run_dir / "checkpoints")
    document = yaml.safe_load((run_dir / "config.yaml").read_text())
    text = as_yaml(apply_edits(document, edits))
    (run_dir / "config.yaml").write_text(text, errors="surrogatepass")
    as_recipe(lambda: train(run_dir))


def _records(made: Run) -> list[Any]:
    return [json.loads(line) for line in (made.run_dir / "metrics.jsonl").read_text().splitlines()]


def _changed_records(made: Run, change: tuple[list[Edit], bool], room: Path) -> None:
    edits, draw = change
    run_dir = made.copy_to(room)
    records = apply_edits(_records(made), edits)
    lines = (
        [as_json(record) for record in records] if isinstance(records, list) else [as_json(records)]
    )
    text = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
    (run_dir / "metrics.jsonl").write_bytes(text)
    if draw:
        as_recipe(lambda: draw_curves(read_run(run_dir), room / "curves.png"))
    else:
        as_recipe(lambda: train(run_dir))


def _changed_summary(made: Run, edits: list[Edit], room: Path) -> None:
    """A run that has ended."""
    run_dir = made.copy_to(room)
    shutil.move(run_dir / STEP, run_dir / "checkpoints/step_3")
    path = run_dir / "checkpoints/step_3"
    write_checkpoint(path, made.facts | {"num_steps": 3}, as_json(made.index))
    summary = {"steps": 3, "test_auc": 0.5, "samples_per_s": 1.0, "step_ms": None}
    (run_dir / "summary.json").write_text(
        as_json(apply_edits(summary, edits)), errors="surrogatepass"
    )
    as_recipe(lambda: train(run_dir))


def _decisive(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts without the configuration, which has most nodes."""
    return {key: value for key, value in facts.items() if key != "config"}


def _with_way(edits: st.SearchStrategy) -> st.SearchStrategy[CheckpointChange]:
    return st.builds(CheckpointChange, edits, st.sampled_from(WAYS))


FUZZERS = [
    Fuzzer(
        "checkpoint: tensors.json",
        _make_run,
        lambda made: _with_way(document_edits(made.index, JSON_LITERALS)),
        _changed_index,
        15,
    ),
    Fuzzer(
        "checkpoint: run.json",
        _make_run,
        lambda made: _with_way(
            st.one_of(
                document_edits(made.facts, JSON_LITERALS),
                document_edits(_decisive(made.facts), JSON_LITERALS),
            )
        ),
        _changed_facts,
        12,
    ),
    Fuzzer(
        "run: bytes of files",
        _make_run,
        lambda made: st.builds(
            FileChange, st.sampled_from(_files(made)), bytes_edits(), st.sampled_from(WAYS)
        ),
        _changed_bytes,
        10,
    ),
    Fuzzer(
        "run: kinds of file",
        _make_run,
        lambda made: st.tuples(kinds_of_file(_files(made)), st.sampled_from(WAYS)),
        _changed_kind,
        8,
    ),
    Fuzzer(
        "run: config.yaml",
        _make_run,
        lambda made: document_edits(
            yaml.safe_load((made.run_dir / "config.yaml").read_text()), YAML_LITERALS
        ),
        _changed_config,
        8,
    ),
    Fuzzer(
        "run: metrics.jsonl",
        _make_run,
        lambda made: st.tuples(document_edits(_records(made), JSON_LITERALS), st.booleans()),
        _changed_records,
        8,
    ),
    Fuzzer(
        "run: summary.json",
        _make_run,
        lambda _: document_edits({"steps": 3, "test_auc": 0.5}, JSON_LITERALS),
        _changed_summary,
        6,
    ),
]
