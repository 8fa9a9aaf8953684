"""Runs with tables on disk, whose files and checkpoints have changed rows only, against runs with all rows on the device."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nn.checkpoint.tensor_index import SPARSE_FORMAT, read_index
from nn.embedding.pretrained import FileRows
from nn.tiers import table_file
from tests.helpers.command import run_command
from tests.helpers.composed import TINY

ROWS = 2_000_000
BASE = [
    *TINY,
    f"data.synthetic.cardinalities=[{ROWS},40,7,300,1000]",
    *(
        "data.synthetic.exponent=0",
        "train.batch_size=16",
        "eval.batch_size=16",
        "train.max_steps=24",
    ),
    *("optimizer.embedding_name=rowwise_adagrad", "checkpoint.save_every=8", "checkpoint.keep=3"),
    "log.every=1",
]
TABLES = "sharding.tables={cat_0: {tier: disk, cache: 0.0001}, cat_4: {tier: disk, cache: 0.2}}"


def on_disk(directory: Path) -> list[str]:
    # Host memory has room for some rows only, so that others leave for the journal.
    return [TABLES, f"sharding.disk_path={directory / 'disk'}", "sharding.read_ahead_gib=0.00003"]


def checkpoint_of(run: Path, step: int) -> dict[str, np.ndarray]:
    tensors = read_index(run / "checkpoints" / f"step_{step}").tensors
    return {name: np.concatenate([*tensor.blocks()]) for name, tensor in tensors.items()}


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("plain") / "run"
    assert run_command(*BASE, f"run_dir={run}").exit_code == 0
    return run


@pytest.fixture
def real_disk() -> Iterator[Path]:
    with TemporaryDirectory(dir="/var/tmp") as directory:
        yield Path(directory)


def test_a_run_that_stops_and_resumes_has_the_bits_of_one_on_the_device(
    plain, tmp_path, real_disk, monkeypatch
):
    # By which a journal grows.
    monkeypatch.setattr(table_file, "EXTENT_BYTES", 2**16)
    # A file system in memory has no holes where they were read.
    run, disk = tmp_path / "run", on_disk(real_disk)
    first = run_command(*BASE, *disk, f"run_dir={run}", "train.max_steps=12")
    assert first.exit_code == 0
    ended = run_command(*BASE, *disk, f"run_dir={run}")
    assert ended.exit_code == 0
    assert losses(run) == losses(plain)
    same(checkpoint_of(run, 24), checkpoint_of(plain, 24))
    # Of 2 million rows at most 24 * 16 have changed, each on a page or two of the file, the journal and the state's.
    found = re.search(
        r"tables on disk: ([\d.]+) GiB at their peak, ([\d.]+) GiB with all", ended.out + ended.err
    )
    assert found is not None
    stored, full = float(found[1]), float(found[2])
    assert full == pytest.approx((ROWS + 1000) * 36 / 2**30, abs=6e-4)
    assert stored < full / 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tier_disk_peak_bytes"] > 0
    assert summary["tier_disk_full_bytes"] == (ROWS + 1000) * 36
    # Of this process, which has torch.
    assert 2**28 < summary["peak_host_bytes"] < 2**36
    stat = os.stat(run / "checkpoints" / "step_24" / "rank_00000.bin")
    assert stat.st_size > ROWS * 36
    assert 512 * stat.st_blocks < stat.st_size / 4
    index = json.loads((run / "checkpoints" / "step_24" / "tensors.json").read_text())
    assert index["format"] == SPARSE_FORMAT


def test_a_sparse_checkpoint_goes_on_on_the_device_and_a_full_one_on_disk(plain, tmp_path):
    sparse = tmp_path / "sparse"
    half = (*BASE, "train.max_steps=16")
    assert run_command(*half, *on_disk(tmp_path), f"run_dir={sparse}").exit_code == 0
    for origin, tables in ((sparse, []), (plain, on_disk(tmp_path))):
        run = tmp_path / f"after_{origin.name}"
        start = f"checkpoint.restore={origin / 'checkpoints' / 'step_16'}"
        assert run_command(*BASE, *tables, start, f"run_dir={run}").exit_code == 0
        same(checkpoint_of(run, 24), checkpoint_of(plain, 24))


def test_deltas_are_those_of_rows_on_the_device(tmp_path):
    options = (*BASE, "checkpoint.delta_every=6")
    found = {}
    for name, tables in (("device", []), ("disk", on_disk(tmp_path))):
        run = tmp_path / name
        assert run_command(*options, *tables, f"run_dir={run}").exit_code == 0
        files = sorted((run / "deltas").rglob("*.bin"))
        found[name] = [(file.relative_to(run), file.read_bytes()) for file in files]
    assert found["device"]
    assert found["disk"] == found["device"]


@pytest.mark.parametrize("name", ["vectors.npy", "vectors.parquet"])
def test_a_table_on_disk_begins_with_the_vectors_of_a_file(tmp_path, monkeypatch, name):
    """The ids of the Parquet file have no order; it is read as often as for a table on the device."""
    rows = 2**18 + 1000
    vectors, rng = tmp_path / name, np.random.default_rng(1)
    values = rng.random((rows, 4), dtype=np.float32)
    if name.endswith("npy"):
        np.save(vectors, values)
    else:
        lists = pa.FixedSizeListArray.from_arrays(values.ravel(), 4)
        pq.write_table(pa.table({"id": rng.permutation(rows), "vector": lists}), vectors)
    options = (
        *(*BASE, f"data.synthetic.cardinalities=[{rows},40,7,300,1000]"),
        *(f"model.pretrained={{cat_0: {vectors}}}", "model.embedding_dims={cat_0: 4}"),
        *("train.max_steps=8", "checkpoint.save_every=8"),
    )
    reads: list[object] = []
    batches = FileRows._batches
    monkeypatch.setattr(FileRows, "_batches", lambda *call: (reads.append(call), batches(*call))[1])
    found, num_reads = [], []
    table = "sharding.tables={cat_0: {tier: disk, cache: 0.001}}"
    for where, tables in (("device", []), ("disk", [*on_disk(tmp_path), table])):
        reads.clear()
        run = tmp_path / where
        assert run_command(*options, *tables, f"run_dir={run}").exit_code == 0
        found.append(checkpoint_of(run, 8))
        num_reads.append(len(reads))
    same(found[1], found[0])
    assert num_reads[1] == num_reads[0]
