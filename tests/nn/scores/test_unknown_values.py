"""Features of raw rows of which no value is known: a warning of the command and of the library, and none otherwise."""

import warnings

import pandas as pd
import pyarrow as pa
import pytest

from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from nn.library.loaded_run import Run
from nn.scores.unknown_values import UnknownValues
from tests.helpers.command import run_command
from tests.preproc.table.test_pipeline import build

ROWS = 40
OPTIONS = [
    *("device=cpu", "train.batch_size=16", "eval.batch_size=16", "log.pictures=false"),
    *("log.loggers=[]", "model.embedding_dim=4", "model.bottom_mlp=[8,4]", "model.top_mlp=[8,1]"),
]


def spec_of(*features: CategoricalFeature) -> FeatureSpec:
    return FeatureSpec(None, (), "float32", (), features, {}, {})


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"a": [0] * 20, "b": [0] * 19 + [1]}, "'a'"),
        ({"a": [3] + [0] * 19, "b": [2] * 20}, None),
        ({"a": [0] * 20, "b": [0] * 20}, "'a', 'b'"),
        ({"a": [0] * 5, "b": [0] * 5}, None),
        ({"a": [[0, 0], [0, 4]] * 10, "b": [[]] * 20}, "'b'"),
    ],
)
def test_features_without_any_id_are_named(columns, named):
    unknown = UnknownValues(
        spec_of(
            CategoricalFeature.of("a", 9),
            CategoricalFeature.of("b", 9),
            CategoricalFeature.of("c", 1),
        )
    )
    table = pa.table(columns | {"c": [0] * len(columns["a"])})
    unknown.add(table.slice(0, 4))
    unknown.add(table.slice(4).to_batches()[0])
    if named is None:
        assert unknown.note is None
    else:
        assert f"no row of 20 has a known value of {named}: " in str(unknown.note)


def test_unknown_values_are_noted_and_whole_numbers_that_became_floats_refused(tmp_path):
    frame = pd.DataFrame(
        {"y": [0, 1] * ROWS, "item": list(range(8)) * (ROWS // 4), "city": ["x", "y"] * ROWS}
    )
    frame.to_csv(tmp_path / "fit.csv", index=False)
    table = {
        "sources": {"t": {"files": str(tmp_path / "fit.csv")}},
        "label": {"name": "y"},
        "categorical": ["item", "city"],
        "split": {"train": 0.5},
    }
    build(tmp_path / "data", table)
    run_dir = tmp_path / "run"
    ended = run_command(*OPTIONS, f"data.path={tmp_path / 'data'}", f"run_dir={run_dir}")
    assert ended.exit_code == 0, ended.err
    floats, others = (frame.assign(item=frame["item"] + number) for number in (0.0, 90))
    for name, rows in (("same", frame), ("others", others), ("floats", floats)):
        rows.to_parquet(tmp_path / f"{name}.parquet")
        scored = run_command(
            *OPTIONS,
            "mode=predict",
            f"fitted={tmp_path / 'data'}",
            f"source={tmp_path / name}.parquet",
            f"checkpoint.restore={run_dir / 'checkpoints/best'}",
            f"output={tmp_path / name}.csv",
        )
        if name == "floats":
            assert scored.exit_code == 2
            assert "in other writing: '0.0' here, '0' in the fit" in scored.err
            continue
        assert scored.exit_code == 0, scored.err
        text = f"warning: no row of {2 * ROWS} has a known value of 'item': "
        assert (text in scored.out) == (name == "others")
    run = Run.load(run_dir, fitted=tmp_path / "data")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.predict(frame)
    with pytest.warns(UserWarning, match="known value of 'item'"):
        run.predict(others)
    with pytest.raises(ValueError, match=r"in other writing: '0\.0' here, '0' in the fit"):
        run.predict(floats)
    with pytest.raises(ValueError, match="batch_size=0; want a whole number"):
        run.predict(frame, batch_size=0)
    with pytest.raises(ValueError, match="the table: "):
        run.predict(frame.assign(item=[2**70] * len(frame)))
