"""Datasets of one id per row are accepted by the readers of NVIDIA's recipes, whatever their splits."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from tests.helpers.handwritten import write_files, write_handwritten
from tests.helpers.nvidia_rules import violated_rules
from tests.helpers.preproc_command import data_files, preproc, raw_line, write_lines
from tests.preproc.table.test_pipeline import _hydra

DAYS = 3


@pytest.fixture(scope="module")
def days(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("days")
    for day in range(DAYS):
        lines = [raw_line(i % 2, i1=i + day, c1=f"{i % 7:08x}", c2=f"{i:08x}") for i in range(200)]
        write_lines(directory / f"day_{day}", lines)
    return directory


def table(split: dict) -> str:
    columns = [f"x{i}" for i in range(40)]
    source = {"format": "tsv", "header": False, "columns": columns}
    description = {
        "sources": {"t": source | {"files": "DAYS/day_*"}},
        "label": {"name": "x0"},
        "numerical": ["x1"],
        "categorical": ["x14", "x15"],
        "split": split,
    }
    return f"table={_hydra(description)}"


BY_COLUMN = (
    "CASE CAST(x1 AS INTEGER) % 3 WHEN 0 THEN 'test' WHEN 1 THEN 'validation' ELSE 'train' END"
)
# Per case, the options, and whether there are rows for validation.
WRITTEN = {
    "fraction": (["dataset=criteo_kaggle", "source=DAYS/day_0"], False),
    "last_file": (["dataset=criteo_1tb", "source=DAYS/day_*", "frequency_limit=1"], True),
    "test_source": (
        ["dataset=criteo_1tb", "source=DAYS/day_0", "test_source=DAYS/day_1", "shuffle=true"],
        False,
    ),
    "any by file": (["dataset=any", table({"by": "last_file"})], True),
    "any by column": (["dataset=any", table({"by": "column", "expression": BY_COLUMN})], True),
    "any at random": (
        ["dataset=any", table({"by": "random", "train": 0.5, "validation": 0.2})],
        True,
    ),
    "synthetic": (
        [
            "dataset=synthetic",
            "data.synthetic.train_rows=64",
            "data.synthetic.test_rows=32",
            "data.synthetic.cardinalities=[5,300]",
        ],
        False,
    ),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_every_split_mode_fulfils_the_rules_of_nvidias_readers(tmp_path, days, case):
    options, validates = WRITTEN[case]
    options = [option.replace("DAYS", str(days)) for option in options]
    preproc(*options, f"output={tmp_path / 'out'}")
    assert violated_rules(tmp_path / "out") == []
    splits = FeatureSpec.load(tmp_path / "out").splits
    assert ("validation" in splits) == validates
    assert all(files.num_rows for files in splits.values())


def test_a_fit_that_is_applied_and_both_conversions_fulfil_them_too(tmp_path, days):
    logs = ["dataset=any", table({"by": "last_file"}).replace("DAYS", str(days))]
    preproc(*logs, f"output={tmp_path / 'fit'}")
    fitted = ("mode=transform", f"fitted={tmp_path / 'fit'}", "split_name=null")
    preproc(*logs, *fitted, f"output={tmp_path / 'out'}")
    assert violated_rules(tmp_path / "out") == []
    assert data_files(tmp_path / "out") == data_files(tmp_path / "fit")
    for there in ("binary", "parquet"):
        preproc("mode=convert", f"to={there}", f"path={tmp_path}/out", f"output={tmp_path / there}")
        back = tmp_path / f"from_{there}"
        preproc("mode=convert", f"path={tmp_path / there}", f"output={back}")
        assert violated_rules(back) == []
        assert data_files(back) == data_files(tmp_path / "fit")
        assert set(FeatureSpec.load(back).splits) == {"train", "test", "validation"}
    preproc("mode=verify", f"path={tmp_path / 'out'}")


def test_a_dataset_that_names_its_validation_rows_is_still_read(tmp_path):
    root = write_handwritten(tmp_path / "old")
    write_files(root, "validation", 3)
    path = root / "feature_spec.yaml"
    document = yaml.safe_load(path.read_text())
    test = document["source_spec"]["test"]
    named = [{**c, "files": [f"validation/{c['files'][0][5:]}"]} for c in test]
    document["source_spec"]["validation"] = named
    path.write_text(yaml.safe_dump(document))
    assert violated_rules(root) == ["splits ['test', 'train', 'validation']"]
    assert FeatureSpec.load(root).splits["validation"].num_rows == 3
    preproc("mode=convert", f"path={root}", f"output={tmp_path / 'new'}")
    assert violated_rules(tmp_path / "new") == []
    assert FeatureSpec.load(tmp_path / "new").splits["validation"].num_rows == 3


@pytest.mark.parametrize(
    ("feature", "more"),
    [
        (CategoricalFeature.of("a", 9, 2), {}),
        (CategoricalFeature.of("a", 9, None), {}),
        (CategoricalFeature.of("a", 2**31), {}),
        (CategoricalFeature.of("a", 9), {"numerical_dtype": "float32"}),
        (CategoricalFeature.of("a", 9), {"file_format": "parquet"}),
        (CategoricalFeature.of("a", 9), {"splits": ("train", "test", "validation", "later")}),
    ],
)
def test_a_dataset_that_their_readers_cannot_read_names_all_its_splits(tmp_path, feature, more):
    options = {"splits": ("train", "test", "validation")} | more
    with write_dataset(tmp_path, categorical=[feature], numerical=["n"], **options) as dataset:
        for split in options["splits"]:
            ids = np.zeros((4, feature.hotness or 1), np.int64)
            dataset[split].append(
                numerical=np.zeros((4, 1)),
                labels=[0, 1, 0, 1],
                ids={"a": ids.reshape(-1) if feature.hotness is None else ids},
                lengths={"a": [1] * 4} if feature.hotness is None else None,
            )
    document = yaml.safe_load((tmp_path / "feature_spec.yaml").read_text())
    assert list(document["source_spec"]) == list(options["splits"])
