"""N files per split with a file list, and file lists as input of preprocessing and training: the rows of one file."""

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from dataloading.dataset import parquet_writer
from dataloading.dataset.dataset_directory import verify_checksums
from dataloading.dataset.documents import file_list_text, read_file_list
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.file_states import file_states
from dataloading.dataset.open_dataset import open_dataset
from preproc.raw_files import find_files
from tests.dataloading.dataset.test_parquet import ROWS, same_columns, write
from tests.helpers.command import run_command
from tests.helpers.composed import TINY
from tests.helpers.datasets import write_clicks
from tests.helpers.preproc_command import Refused, preproc
from tests.helpers.runs import records, stored_bytes
from tests.preproc.convert.test_convert import write_csv_files
from tests.preproc.table.test_pipeline import build


def write_file_list(path: Path, names: list[str]) -> None:
    path.write_text(file_list_text(names))


def converted(root: Path, output: Path, *options: str) -> Path:
    preproc("mode=convert", "to=parquet", f"path={root}", f"output={output}", *options)
    return output


@pytest.mark.parametrize("num_files", [1, 3, 7])
def test_n_files_hold_the_rows_of_one(tmp_path, monkeypatch, num_files):
    monkeypatch.setattr(parquet_writer, "ROW_GROUP_ROWS", 8)
    monkeypatch.setattr("dataloading.dataset.parquet.KEPT_BYTES", 0)
    binary = write(tmp_path / "binary", "binary")
    out = converted(binary, tmp_path / "out", f"files_per_split={num_files}")
    for split, num_rows in ROWS.items():
        names = read_file_list(out / split / "_file_list.txt")
        assert names == [f"part_{number}.parquet" for number in range(num_files)]
        rows = [pq.read_metadata(out / split / name).num_rows for name in names]
        assert sum(rows) == num_rows
        assert max(rows) - min(rows) <= 1
        whole = np.array([[0, num_rows]])
        got, want = (
            open_dataset(FeatureSpec.load(root)).read(split, whole) for root in (out, binary)
        )
        same_columns(got, want)
    spec = FeatureSpec.load(out)
    assert "train/_file_list.txt" in spec.metadata["files"]
    assert verify_checksums(spec) == 2 * (num_files + 1)


def test_a_csv_is_divided_too(tmp_path):
    """Its rows are not known before it is read."""
    out = converted(write_csv_files(tmp_path / "csv"), tmp_path / "out", "files_per_split=3")
    rows = [pq.read_metadata(path).num_rows for path in sorted((out / "train").glob("*.parquet"))]
    assert rows == [2, 2, 3]


def test_more_files_than_rows_and_other_formats_are_refused(tmp_path):
    root = write(tmp_path / "binary", "binary")
    with pytest.raises(Refused, match=r"files_per_split=22: split 'test' has 21 rows, and a file"):
        converted(root, tmp_path / "out", "files_per_split=22")
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        Refused,
        match="files_per_split=2 is of mode=convert to=parquet, and to=binary would ignore it",
    ):
        preproc("mode=convert", f"path={root}", f"output={tmp_path / 'o'}", "files_per_split=2")


def with_lists(root: Path) -> dict[str, list[str]]:
    """Let the spec of a dataset in Parquet name the lists instead of the files; return the files per split."""
    path = root / "feature_spec.yaml"
    document = yaml.safe_load(path.read_text())
    files = {split: chunks[0]["files"] for split, chunks in document["source_spec"].items()}
    for split, chunks in document["source_spec"].items():
        chunks[0]["files"] = [f"{split}/_file_list.txt"]
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return files


def test_a_spec_may_name_a_list_whose_order_counts(tmp_path):
    binary = write(tmp_path / "binary", "binary")
    out = converted(binary, tmp_path / "out", "files_per_split=3")
    files = with_lists(out)
    spec = FeatureSpec.load(out)
    assert [path.relative_to(out).as_posix() for path in spec.splits["train"].parquet] == files[
        "train"
    ]
    assert "train/_file_list.txt" in file_states(spec)  # another order is other data
    names = read_file_list(out / "train" / "_file_list.txt")
    write_file_list(out / "train" / "_file_list.txt", names[::-1])
    backwards = open_dataset(FeatureSpec.load(out)).read("train", np.array([[0, 103]]))
    rows = [pq.read_metadata(out / "train" / name).num_rows for name in names]
    forwards = open_dataset(FeatureSpec.load(binary))
    starts = np.cumsum([0, *rows])
    runs = np.array([[starts[i], starts[i + 1]] for i in (2, 1, 0)])
    np.testing.assert_array_equal(backwards.labels, forwards.read("train", runs).labels)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["part_0.parquet", "part_9.parquet"], "file 'train/part_9.parquet' is missing from"),
        (["../test/part_0.parquet", "../../x"], "file 'train/../../x' lies outside the dataset"),
        (["/part_0.parquet"], "lists '/part_0.parquet'; want paths relative to the list"),
        (["part_0.parquet", "./part_0.parquet"], "lists 'part_0.parquet' twice"),
    ],
)
def test_a_list_of_a_spec_names_files_that_exist_once(tmp_path, names, message):
    out = converted(write(tmp_path / "b", "binary"), tmp_path / "out", "files_per_split=2")
    with_lists(out)
    write_file_list(out / "train" / "_file_list.txt", names)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        FeatureSpec.load(out)
    assert str(caught.value).count("\n") == 0


def test_a_run_on_n_files_has_the_result_of_one(tmp_path):
    """A split of this size stays in memory and is shuffled by rows, whatever its files."""
    root = write_clicks(tmp_path / "clicks")
    runs = {}
    for number in (1, 5):
        data = converted(root, tmp_path / f"data_{number}", f"files_per_split={number}")
        with_lists(data)
        runs[number] = tmp_path / f"run_{number}"
        options = [option for option in TINY if not option.startswith("data.")]
        ended = run_command(
            *options,
            *(f"data.path={data}", f"run_dir={runs[number]}", "log.loggers=[]"),
            *("train.tf32=false", "log.every=2"),
        )
        assert ended.exit_code == 0, ended.err
    assert records(runs[5]) == records(runs[1])
    assert stored_bytes(runs[5]) == stored_bytes(runs[1])


def test_a_source_may_be_a_list_and_keeps_its_order(tmp_path):
    lines = [f"{number % 2},{'abc'[number % 3]},{number}\n" for number in range(12)]
    header = "y,c,x\n"
    (tmp_path / "one.csv").write_text(header + "".join(lines))
    (tmp_path / "parts").mkdir()
    # In another order than that of the names.
    names = ["part_2.csv", "part_10.csv", "part_1.csv"]
    for index, name in enumerate(names):
        part = "".join(lines[4 * index : 4 * index + 4])
        (tmp_path / "parts" / name).write_text(header + part)
    write_file_list(tmp_path / "_file_list.txt", [f"parts/{name}" for name in names])
    table = {
        "sources": {"t": {"files": ""}},
        "label": {"name": "y"},
        "numerical": ["x"],
        "categorical": ["c"],
        "split": {"by": "fraction", "train": 0.75},
    }
    outputs = []
    for name in ("one.csv", "_file_list.txt"):
        table["sources"]["t"]["files"] = str(tmp_path / name)
        outputs.append(build(tmp_path / f"out_{len(outputs)}", table))
    assert outputs[0] == outputs[1]
    found = find_files(str(tmp_path / "_file_list.txt"), "source")
    assert [file.path.name for file in found] == names


def test_a_missing_file_of_a_source_is_named_with_its_list(tmp_path):
    write_file_list(tmp_path / "file_list.txt", ["a.tsv"])
    listed, missing = tmp_path / "file_list.txt", tmp_path / "a.tsv"
    with pytest.raises(ValueError, match=f"^{missing}: no such file, which {listed} lists"):
        find_files(str(listed), "source")
    missing.write_text("x\n")
    with pytest.raises(ValueError, match=f"source names {missing} twice"):
        find_files([str(listed), str(missing)], "source")
