"""A boolean is 0 or 1 as a label, a weight and a numerical, and the text true or false as a value: fit, library and server."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nn.library.loaded_run import Run
from serving.manifest import Manifest
from tests.helpers.command import run_command
from tests.preproc.table.test_pipeline import build
from tests.serving.served_models import export, serving, tensor

ROWS = 120
SMALL = [
    *("model.embedding_dim=8", "model.bottom_mlp=[8]", "model.top_mlp=[8,1]", "device=cpu"),
    "log.pictures=false",
]
TABLE = {
    "label": {"name": "bought"},
    "weight": "counts",
    "split": {"train": 0.5},
    "numerical": ["member", "age"],
    "categorical": [
        "active",
        {"name": "both", "cross": ["active", "city"]},
        {"name": "hashed", "expression": "active", "buckets": 7},
        {"name": "flags", "list": True},
        {"name": "tags", "separator": "|", "hotness": 2, "take": "last", "length": True},
    ],
}


def drawn_rows() -> pa.Table:
    draw = np.random.default_rng(4)

    def booleans() -> list[bool]:
        return draw.integers(0, 2, ROWS).astype(bool).tolist()

    active = [None if number % 11 == 0 else value for number, value in enumerate(booleans())]
    columns = {"bought": booleans(), "counts": [True, *booleans()[1:]], "member": booleans()}
    columns |= {"age": draw.normal(size=ROWS).tolist(), "active": active}
    columns |= {"city": [["Rom", "Wien"][n % 2] for n in range(ROWS)]}
    columns |= {"tags": [["a", "", "b|a", "c||b|a", "|b"][n % 5] for n in range(ROWS)]}
    return pa.table(
        columns | {"flags": [[a, b] for a, b in zip(booleans(), booleans(), strict=True)]}
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, pa.Table]:
    """Preprocess, train and export; return the folder and the rows."""
    root, rows = tmp_path_factory.mktemp("booleans"), drawn_rows()
    pq.write_table(rows, root / "t.parquet")
    sources = {"t": {"files": str(root / "t.parquet")}}
    build(root / "data", TABLE | {"sources": sources}, "frequency_limit=1", "plot=false")
    paths = [f"data.path={root / 'data'}", f"run_dir={root / 'run'}", "train.batch_size=24"]
    ended = run_command(*paths, *SMALL, "optimizer.lr=0.1", "optimizer.embedding_lr=1")
    assert ended.exit_code == 0, ended.err
    export(root / "run/checkpoints/best", root / "models/1", fitted=str(root / "data"))
    return root, rows


def test_library_and_server_read_booleans_as_the_fit_did(trained):
    root, rows = trained
    run = Run.load(root / "run", fitted=root / "data")
    wanted = run.predict(rows)["score"].to_numpy()
    assert np.ptp(wanted) > 0.05
    assert Manifest.read(root / "models/1").numerical == ["member", "age", "tags_length"]
    np.testing.assert_array_equal(run.predict(rows.to_pandas())["score"], wanted)
    # Values by SQL's texts of booleans, and numbers that are 0 and 1.
    texts = [None if value is None else str(value).lower() for value in rows["active"].to_pylist()]
    same = rows.set_column(rows.column_names.index("active"), "active", pa.array(texts))
    same = same.set_column(2, "member", rows["member"].cast(pa.int8()))
    np.testing.assert_array_equal(run.predict(same)["score"], wanted)
    # Without the fit: features, of which numericals may be boolean, and ids may not.
    features = run.raw.transformed(rows)
    assert set(features["member"].to_pylist()) == {0.0, 1.0}
    index = features.column_names.index("member")
    plain = Run.load(root / "run")
    booleans = features.set_column(index, "member", rows["member"])
    np.testing.assert_allclose(plain.predict(booleans)["score"], wanted, atol=1e-9)
    index = features.column_names.index("active")
    with pytest.raises(ValueError, match=r"column 'active'.*bool.*integers"):
        plain.predict(features.set_column(index, "active", rows["member"]))
    with serving(root / "models") as client:
        numbers = [number for number, value in enumerate(texts) if value is not None]
        columns = rows.take(numbers).to_pydict()
        known = [tensor("member", "BOOL", columns["member"]), tensor("age", "FP64", columns["age"])]
        known += [tensor(name, "BYTES", columns[name]) for name in ("city", "tags")]
        flagged = [tensor(name, "BOOL", columns[name]) for name in ("active", "flags")]
        status, answer = client.infer([*known, *flagged])
        assert status == 200, answer
        got = answer["outputs"][0]
        assert got["name"] == "bought"
        np.testing.assert_allclose(got["data"], wanted[numbers], atol=1e-6)
        flags = np.char.lower(np.array(columns["flags"]).astype(str))
        in_texts = [
            tensor("active", "BYTES", np.array(texts)[numbers]),
            tensor("flags", "BYTES", flags),
        ]
        assert client.infer([*known, *in_texts])[1]["outputs"][0]["data"] == got["data"]
        as_features = [
            tensor("numerical", "FP64", np.zeros((1, 3))),
            tensor("ids", "INT64", [[0] * 5]),
        ]
        status, answer = client.infer(as_features)
        assert status == 400
        assert "'flags'" in answer["error"], "the ragged feature is missing"


def test_a_column_of_several_types_is_refused_by_its_name(trained):
    root, rows = trained
    run = Run.load(root / "run", fitted=root / "data")
    frame = rows.to_pandas()
    for values in ([1, "a"], [True, "b"], ["a", 2.5]):
        frame["city"] = pd.Series([*values, None] * (ROWS // 3), dtype=object)
        kinds = ", ".join(sorted(type(value).__name__ for value in values))
        with pytest.raises(ValueError, match=f"the table: column 'city' .* {kinds}; want one"):
            run.predict(frame)
