"""Checkpoints from anybody, with right checksums: refused with one line, before a file that they name is opened."""

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from logging import Logger
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nn.build import model_spec
from nn.checkpoint import state as checkpoint
from nn.checkpoint.directory import RUN_FILE, commit
from nn.checkpoint.tensor_index import INDEX_FILE, Chunk, _any_overlap, parse_index
from nn.checkpoint.tf2 import tf2_index
from nn.distributed.errors import SharedError
from nn.distributed.process_group import HostChannel, Ranks
from nn.embedding.declared_tables import table_of_feature
from nn.export.tables import export_tables
from nn.models.registry import declared_tables
from nn.resume import ResumePoint, load, own_resume_point
from tests.helpers.composed import TINY, Built, build, compose_config, ranks_of_cpu

TRAINER = {
    "loss_sum": 0.5,
    "loss_steps": 1,
    "test": {"step": 1, "test_auc": 0.5, "test_log_loss": None},
    "untrained_test_auc": None,
    "restored_test_auc": None,
    "best_metric": "auc",
    "best_rows": {},
    "best_auc": 0.5,
    "best_step": 1,
    "evals_since_best": 0,
    "last_record": None,
    "first_step": 0,
    "other_days": {},
    "ends_stage": True,
}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[Ranks]:
    """Open one process group for all readers."""
    with ranks_of_cpu() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def built(ranks) -> Built:
    return build(compose_config(*TINY))


@pytest.fixture(scope="module")
def original(tmp_path_factory, built) -> Path:
    """Return a checkpoint as a run writes it."""
    directory = tmp_path_factory.mktemp("original")
    config, spec = built.config, model_spec(built.config, built.source)
    built.train(0, 1)
    state = built.step.state_dict()
    checkpoint.write(directory, 1, state, built.step, HostChannel())
    facts = checkpoint.facts_of(config, spec, built.ranks)
    return commit(directory, 1, facts | {"num_steps": 1, "trainer": TRAINER})


@pytest.fixture
def saved(original, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("nn.checkpoint.directory.APPEARS_WITHIN_S", 0)
    return shutil.copytree(original, tmp_path / "run/checkpoints/step_1")


def sign(path: Path, facts: dict[str, Any]) -> None:
    """Write run.json with right checksums of itself and of the index."""
    facts["index_crc32"] = facts.get("index_crc32") and zlib.crc32((path / INDEX_FILE).read_bytes())
    facts.pop("crc32", None)
    facts["crc32"] = zlib.crc32(json.dumps(facts, sort_keys=True).encode())
    (path / RUN_FILE).write_text(json.dumps(facts))


def edit_facts(path: Path, change: Callable[[dict], Any]) -> None:
    facts = json.loads((path / RUN_FILE).read_text())
    change(facts)
    sign(path, facts)


def edit_index(path: Path, change: Callable[[dict], Any]) -> None:
    index = json.loads((path / INDEX_FILE).read_text())
    change(index)
    (path / INDEX_FILE).write_text(json.dumps(index))
    facts = json.loads((path / RUN_FILE).read_text())
    facts["files"][INDEX_FILE] = (path / INDEX_FILE).stat().st_size
    sign(path, facts)


def one_line(message: str) -> str:
    assert "\n" not in message
    assert 0 < len(message) < 1500, message
    return message


def restore_and_export(path: Path, built: Built, output: Path) -> list[str]:
    """Return the refusals of a checkpoint that is named, by each reader."""
    messages = []
    tables = table_of_feature(declared_tables(built.config.model, built.source.spec))
    for read in (
        lambda: checkpoint.check(path, built.source.spec, tables),
        lambda: checkpoint.restore(path, built.step, with_optimizer=True),
        lambda: checkpoint.trainer_rows(path),
        lambda: export_tables(path, output),
    ):
        try:
            read()
        except ValueError as error:
            messages.append(one_line(str(error)))
    return messages


def resume(path: Path, built: Built) -> tuple[list[str], bool]:
    """Return what a run says that resumes in its own directory, and whether it uses the checkpoint."""
    config = compose_config(*TINY, f"run_dir={path.parent.parent}", "mode=train")
    logger, messages = Logger("hostile"), []
    logger.addFilter(lambda record: messages.append(one_line(record.getMessage())))
    try:
        start = own_resume_point(config, built.source, built.ranks, logger, ResumePoint())
        if start.is_continuation:
            load(config, start, built.step, logger)
    except (ValueError, SharedError) as error:
        return [one_line(str(error))], False
    return messages, start.is_continuation


def test_the_original_is_restored_exported_and_resumed(saved, built, tmp_path):
    assert restore_and_export(saved, built, tmp_path / "out") == []
    assert resume(saved, built) == ([], True)


def weight(index: dict) -> dict:
    return index["tensors"]["tables.cat_0.weight"]


def chunk(index: dict) -> dict:
    return weight(index)["chunks"][0]


NAMES = [
    "../fifo",
    "{outside}/fifo",
    "link",
    "fifo",
    "..",
    ".",
    "",
    "a/../b",
    "\0",
    "\ud800",
    3,
    None,
]
INITIAL = {"seed": 1, "table": "cat_0", "bound": 0.1}
INDEXES: dict[str, Callable[[dict], Any]] = {
    **{f"file {name!r}": lambda x, name=name: chunk(x).update(file=name) for name in NAMES},
    "format text": lambda x: x.update(format="1"),
    "format missing": lambda x: x.pop("format"),
    "tensors a list": lambda x: x.update(tensors=[1]),
    "a tensor a list": lambda x: x["tensors"].update({"tables.cat_0.weight": [1]}),
    "a tensor null": lambda x: x["tensors"].update({"tables.cat_0.weight": None}),
    "tables a number": lambda x: x.update(tables=3),
    "tables of numbers": lambda x: x.update(tables=[3]),
    "a table twice": lambda x: x["tables"].append(x["tables"][0]),
    "dtype object": lambda x: weight(x).update(dtype="object"),
    "dtype a list": lambda x: weight(x).update(dtype=["float32"]),
    "dtype a mapping": lambda x: weight(x).update(dtype={}),
    "size negative": lambda x: weight(x).update(size=[-500, 8]),
    "size two negatives": lambda x: weight(x).update(size=[-500, -8]),
    "size text": lambda x: weight(x).update(size="500"),
    "size floats": lambda x: weight(x).update(size=[500.0, 8.0]),
    "size nan": lambda x: weight(x).update(size=[float("nan"), 8]),
    "size true": lambda x: weight(x).update(size=[True, 8]),
    "size huge": lambda x: weight(x).update(size=[10**30, 8]),
    "size huge and empty": lambda x: weight(x).update(size=[10**15, 0], chunks=[]),
    "size of 10,000 dimensions": lambda x: weight(x).update(size=[1] * 10_000, chunks=[]),
    "offsets negative": lambda x: chunk(x).update(offsets=[-1, 0]),
    "offsets short": lambda x: chunk(x).update(offsets=[0]),
    "sizes short": lambda x: chunk(x).update(sizes=[500]),
    "start true": lambda x: chunk(x).update(start=True),
    "start huge": lambda x: chunk(x).update(start=10**30),
    "start beyond the end": lambda x: chunk(x).update(start=2**60),
    "chunk twice": lambda x: weight(x)["chunks"].append(chunk(x)),
    "no chunks": lambda x: weight(x)["chunks"].clear(),
    "chunks a mapping": lambda x: weight(x).update(chunks={}),
    "chunks of numbers": lambda x: weight(x).update(chunks=[1]),
    "checksums missing": lambda x: chunk(x).update(crc32=[]),
    "checksums text": lambda x: chunk(x).update(crc32=["1"]),
    "no file": lambda x: chunk(x).pop("file"),
    **{
        f"initial weights {named}": lambda x, of=of: weight(x).update(initial=of)
        for named, of in {
            "a number": 3,
            "a list": [1],
            "empty": {},
            "of another table": INITIAL | {"table": "cat_1"},
            "of a table no text": INITIAL | {"table": "\ud800"},
            "of a seed text": INITIAL | {"seed": "1"},
            "without a bound": {"seed": 1, "table": "cat_0"},
            "of a bound nan": INITIAL | {"bound": math.nan},
            "of a bound below 0": INITIAL | {"bound": -0.1},
        }.items()
    },
    "initial weights of numbers": lambda x: weight(x).update(dtype="int32", initial=INITIAL),
}


@pytest.mark.parametrize("change", INDEXES.values(), ids=INDEXES)
def test_a_hostile_index_is_refused_by_every_reader(saved, built, tmp_path, change):
    os.mkfifo(tmp_path / "run/checkpoints/fifo")
    os.mkfifo(saved / "fifo")
    (saved / "link").symlink_to("../fifo")

    def changed(index: dict) -> None:
        outside = chunk(index)
        change(index)
        if outside.get("file") == "{outside}/fifo":
            outside["file"] = f"{tmp_path}/run/checkpoints/fifo"

    edit_index(saved, changed)
    assert len(restore_and_export(saved, built, tmp_path / "out")) >= 2
    messages, is_used = resume(saved, built)
    assert not is_used
    assert "is not used" in messages[0]
    assert not saved.exists()
    assert saved.with_name("step_1.damaged").exists()


WEIGHTLESS: dict[str, Callable[[dict], Any]] = {
    "a tensor of another name": lambda x: x["tensors"].update({"tables": weight(x)}),
    "a tensor of no name": lambda x: x["tensors"].update({"": weight(x)}),
    "a scalar as a weight": lambda x: weight(x).update(
        size=[], chunks=[chunk(x) | {"offsets": [], "sizes": []}]
    ),
    "logits without labels": lambda x: x["tensors"].update(
        {"trainer.logits": x["tensors"].pop("tables.cat_0.weight")}
    ),
}


@pytest.mark.parametrize("change", WEIGHTLESS.values(), ids=WEIGHTLESS)
def test_an_index_of_other_tensors_is_refused_or_they_are_ignored(saved, built, tmp_path, change):
    edit_index(saved, change)
    messages = restore_and_export(saved, built, tmp_path / "out")
    resume(saved, built)
    assert not any("values to unpack" in message for message in messages)


COUNT = 2**70
FACTS: dict[str, Callable[[dict], Any]] = {
    **{
        f"file {name!r}": lambda x, name=name: x["files"].update({str(name): 0})
        for name in NAMES[:10]
    },
    "files a list": lambda x: x.update(files=["tensors.json"]),
    "files missing": lambda x: x.pop("files"),
    "files negative": lambda x: x["files"].update({"rank_00000.bin": -1}),
    "files nan": lambda x: x["files"].update({"rank_00000.bin": float("nan")}),
    "files text": lambda x: x["files"].update({"rank_00000.bin": "x"}),
    "steps negative": lambda x: x.update(num_steps=-1),
    "steps huge": lambda x: x.update(num_steps=COUNT),
    "steps text": lambda x: x.update(num_steps="1"),
    "steps a float": lambda x: x.update(num_steps=1.0),
    "steps true": lambda x: x.update(num_steps=True),
    "steps nan": lambda x: x.update(num_steps=float("nan")),
    "steps a list": lambda x: x.update(num_steps=[[[[1] * 100] * 100]]),
    "steps missing": lambda x: x.pop("num_steps"),
    "fingerprint a number": lambda x: x.update(feature_spec=3),
    "fingerprint missing": lambda x: x.pop("feature_spec"),
    "version text": lambda x: x.update(format_version="1"),
    "version negative": lambda x: x.update(format_version=-3),
    "version missing": lambda x: x.pop("format_version"),
    "checksum of the index missing": lambda x: x.pop("index_crc32"),
}
FACTS_TO_RESUME: dict[str, Callable[[dict], Any]] = {
    "steps of another directory": lambda x: x.update(num_steps=7),
    "config a list": lambda x: x.update(config=[]),
    "config missing": lambda x: x.pop("config"),
    "config without data": lambda x: x["config"].pop("data"),
    "config of numbers": lambda x: x["config"].update(data=3),
    "samples a list": lambda x: x.update(data_samples=[1]),
    "samples of text": lambda x: x.update(data_samples={"train/label.bin": "x"}),
    "files of text": lambda x: x.update(data_files={"train/label.bin": [1]}),
    "trainer missing": lambda x: x.pop("trainer"),
    "trainer a list": lambda x: x.update(trainer=[]),
    "trainer empty": lambda x: x.update(trainer={}),
    "best step negative": lambda x: x["trainer"].update(best_step=-1),
    "best step a path": lambda x: x["trainer"].update(best_step="../../x"),
    "best AUC text": lambda x: x["trainer"].update(best_auc="x"),
    "loss text": lambda x: x["trainer"].update(loss_sum="x"),
    "loss steps negative": lambda x: x["trainer"].update(loss_steps=-1),
    "first step text": lambda x: x["trainer"].update(first_step="x"),
    "restored AUC text": lambda x: x["trainer"].update(restored_test_auc="x"),
    "evaluation a list": lambda x: x["trainer"].update(test=[]),
    "evaluation of text": lambda x: x["trainer"]["test"].update(test_auc="x"),
    "row capacity text": lambda x: x["trainer"].update(row_capacity="x"),
    "row capacity without rows": lambda x: x["trainer"].update(row_capacity={"shards": []}),
    "row capacity of text": lambda x: x["trainer"].update(
        row_capacity={"shards": [], "rows": {"8": [["x"]]}}
    ),
    "row capacity of no batch size": lambda x: x["trainer"].update(
        row_capacity={"shards": [], "rows": {"x": [[1]]}}
    ),
    "parts a number": lambda x: x["trainer"].update(parts=7),
    "part without rows": lambda x: x["trainer"].update(parts=[{"name": "a", "identity": None}]),
    "part of more": lambda x: x["trainer"].update(
        parts=[{"name": "a", "rows": 1, "identity": None, "more": 1}]
    ),
}


@pytest.mark.parametrize("change", FACTS.values(), ids=FACTS)
def test_a_hostile_description_is_refused_by_every_reader(saved, built, tmp_path, change):
    os.mkfifo(tmp_path / "run/checkpoints/fifo")
    os.mkfifo(saved / "fifo")
    (saved / "link").symlink_to("../fifo")
    edit_facts(saved, change)
    assert len(restore_and_export(saved, built, tmp_path / "out")) >= 1
    messages, is_used = resume(saved, built)
    assert not is_used
    assert messages


@pytest.mark.parametrize("change", FACTS_TO_RESUME.values(), ids=FACTS_TO_RESUME)
def test_a_run_does_not_resume_from_a_hostile_description(saved, built, change):
    edit_facts(saved, change)
    messages, is_used = resume(saved, built)
    assert not is_used
    assert "is not used" in messages[0]


TEXTS = {
    "500 brackets": '{"format_version": 1, "x": ' + "[" * 500 + "]" * 500 + "}",
    "endless brackets": "[" * 100_000,
    "a list": "[]",
    "a number": "3",
    "null": "null",
    "nothing": "",
    "a key twice": '{"format_version": 1, "format_version": 1}',
    "5,000 digits": '{"format_version": ' + "9" * 5000 + "}",
    "a newer version": '{"format_version": 1' + "0" * 4000 + "}",
}


@pytest.mark.parametrize("name", [INDEX_FILE, RUN_FILE])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_that_is_no_description_is_refused(saved, built, tmp_path, name, text):
    (saved / name).write_text(text)
    if name == INDEX_FILE:
        edit_facts(saved, lambda facts: facts["files"].update({name: len(text)}))
    assert restore_and_export(saved, built, tmp_path / "out")
    messages, is_used = resume(saved, built)
    assert not is_used
    assert messages


@pytest.mark.parametrize("kind", ["FIFO", "device", "circle", "directory"])
@pytest.mark.parametrize("name", [INDEX_FILE, RUN_FILE, "__0_0.bin"])
def test_only_regular_files_of_a_checkpoint_are_opened(saved, built, tmp_path, kind, name):
    if name not in (INDEX_FILE, RUN_FILE):
        name = next(path.name for path in saved.iterdir() if path.suffix == ".bin")
    (saved / name).unlink()
    match kind:
        case "FIFO":
            os.mkfifo(saved / name)
        case "device":
            (saved / name).symlink_to("/dev/zero")
        case "circle":
            (saved / name).symlink_to(name)
        case "directory":
            (saved / name).mkdir()
    if name not in (INDEX_FILE, RUN_FILE):
        edit_facts(saved, lambda facts: facts["files"].pop(name))
    assert restore_and_export(saved, built, tmp_path / "out")
    messages, is_used = resume(saved, built)
    assert not is_used
    assert messages


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step_1"])
def test_a_circle_of_links_is_no_checkpoint(saved, built, tmp_path, name):
    shutil.rmtree(tmp_path / "run" / name)
    (tmp_path / "run" / name).symlink_to(Path(name).name)
    assert len(restore_and_export(saved, built, tmp_path / "out")) >= 3


def test_many_chunks_are_compared_at_once():
    def grid(rows: int, columns: int, width: int = 1) -> list[Chunk]:
        return [
            Chunk((row, column), (1, width), Path("x"), 0)
            for row in range(rows)
            for column in range(columns)
        ]

    assert not _any_overlap(grid(60, 60))
    assert not _any_overlap(grid(1, 9000))
    assert not _any_overlap(grid(9000, 1))
    assert _any_overlap(grid(1, 9000, 2))
    assert _any_overlap([*grid(60, 60), Chunk((59, 59), (1, 1), Path("x"), 0)])
    assert _any_overlap([Chunk((0, 0), (9, 9), Path("x"), 0), Chunk((8, 8), (1, 1), Path("x"), 0)])
    assert _any_overlap([Chunk((0,), (9,), Path("x"), 0), Chunk((8,), (9,), Path("x"), 0)])
    assert not _any_overlap([Chunk((0,), (9,), Path("x"), 0), Chunk((9,), (9,), Path("x"), 0)])
    assert _any_overlap([Chunk((), (), Path("x"), 0)] * 2)
    # A tensor of more dimensions is not sharded.
    cube = Chunk((0, 0, 0), (2, 2, 1), Path("x"), 0)
    assert not _any_overlap([cube])
    assert _any_overlap([cube, cube])


def test_an_index_names_files_that_need_not_exist(tmp_path):
    index = {
        "format": 1,
        "tables": ["a"],
        "tensors": {
            "tables.a.weight": {
                "dtype": "float32",
                "size": [2, 4],
                "chunks": [
                    {"offsets": [0, 0], "sizes": [2, 4], "file": "x", "start": 0, "crc32": [1]}
                ],
            }
        },
    }
    parsed = parse_index(tmp_path, json.dumps(index).encode())
    assert parsed.tensors["tables.a.weight"].chunks[0].file == tmp_path / "x"


FORM = "{{'descr': {}, 'fortran_order': False, 'shape': {}}}"
HEADERS = {
    "negative": FORM.format("'<f4'", "(-2, -4)"),
    "huge and empty": FORM.format("'<f4'", f"({10**30}, 0)"),
    "one dimension": FORM.format("'<f4'", "(8,)"),
    "objects": FORM.format("'|O'", "(2, 4)"),
    "a nested dtype": FORM.format("[" * 90 + "]" * 90, "(2, 4)"),
    "parentheses": "(" * 9000,
    "brackets": "[" * 9000 + "]" * 9000,
    "signs": "-" * 9000 + "1",
    "an open text": "'''",
    "zeros": "\0" * 64,
    "60,000 blanks": " " * 60_000,
    "5,000 digits": FORM.format("'<f4'", f"({'9' * 5000}, 1)"),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_hostile_header_of_a_tf2_table_is_refused(tmp_path, header):
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    (tmp_path / "feature_0.npy").write_bytes(start + header.encode() + bytes(32))
    with pytest.raises(ValueError, match=r"feature_0\.npy") as caught:
        tf2_index(tmp_path, ["table"])
    one_line(str(caught.value))


@pytest.mark.parametrize("kind", ["FIFO", "circle"])
def test_only_regular_tables_of_the_tf2_recipe_are_opened(tmp_path, kind):
    np.save(tmp_path / "feature_0.npy", np.zeros((2, 4), np.float32))
    if kind == "FIFO":
        os.mkfifo(tmp_path / "feature_1.npy")
    else:
        (tmp_path / "feature_1.npy").symlink_to("feature_1.npy")
    with pytest.raises(ValueError, match=r"feature_1\.npy"):
        tf2_index(tmp_path, ["a", "b"])
