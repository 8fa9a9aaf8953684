"""Groups with pools: a row sees the last events of each kind in its slice of a log."""

from dataclasses import replace

import numpy as np
import pytest
import yaml

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.sequences import EventColumn, EventPools, SequenceGroup
from nn.models.description import _group, _group_of
from tests.helpers.datasets import make_loader
from tests.helpers.preproc_command import preproc

INT8 = np.dtype(np.int8)
GROUP = SequenceGroup(
    "history",
    ("hist",),
    9,
    (EventColumn("time", np.dtype(np.int64)), EventColumn("kind", INT8)),
    "time",
    EventPools("kind", (1, 2, 4)),
)
DRAW = np.random.default_rng(5)
KINDS = DRAW.choice([0, 1, 2, 4], 300, p=[0.1, 0.5, 0.05, 0.35])
ENDS = DRAW.integers(1, 300, 50)
SLICES = np.stack([np.maximum(ENDS - DRAW.integers(0, 60, 50), 0), ENDS], axis=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("pools") / "data"
    features = [CategoricalFeature.of("item", 300), CategoricalFeature.of("hist", 300, None)]
    with write_dataset(root, categorical=features, sequences=[GROUP]) as dataset:
        dataset.append_events(
            ids={"hist": np.arange(300)}, events={"time": np.arange(300), "kind": KINDS}
        )
        for split in ("train", "test"):
            dataset[split].append(
                ids={"item": np.arange(50)},
                labels=np.arange(50) % 2,
                slices={"history": SLICES},
                moments={"history": ENDS},
            )
    return root


def seen(start, end):
    """Return the events of one row by the definition."""
    found = []
    for kind in (1, 2, 4):
        found += [at for at in range(start, end) if KINDS[at] == kind][-3:]
    return sorted(found)


def test_a_row_sees_the_last_events_of_each_pool(root):
    spec = FeatureSpec.load(root)
    assert spec.sequences == (GROUP,)
    wanted = [seen(*ends) for ends in SLICES]
    columns = open_dataset(spec).read("train", np.array([[7, 20], [3, 4]]))
    order = [*range(7, 20), 3]
    assert columns.ids[1].tolist() == [at for row in order for at in wanted[row]]
    assert columns.lengths[1].tolist() == [len(wanted[row]) for row in order]
    assert columns.events[1].tolist() == [KINDS[at] for row in order for at in wanted[row]]
    assert columns.events[0].tolist() == [ENDS[row] - at for row in order for at in wanted[row]]
    assert spec.categorical[1].mean_hotness == np.mean([len(events) for events in wanted])
    assert 5 < spec.categorical[1].mean_hotness < 9


@pytest.mark.parametrize("form", ["binary", "parquet"])
def test_converted_rows_have_the_events_of_their_pools(root, tmp_path, form):
    preproc("mode=convert", f"path={root}", f"output={tmp_path / 'own'}", f"to={form}")
    spec = FeatureSpec.load(tmp_path / "own")
    assert spec.sequences == (replace(GROUP, pools=None),)
    assert spec.fingerprint() == FeatureSpec.load(root).fingerprint()
    preproc("mode=verify", f"path={root}")
    batches = []
    for source in (root, tmp_path / "own"):
        loader = make_loader(open_dataset(FeatureSpec.load(source)), "train", batch_size=16)
        batch = loader.batch(1)
        batches.append([batch.ids.values().tolist(), [n.tolist() for n in batch.events]])
    assert batches[0] == batches[1]


def test_a_model_description_has_no_pools():
    assert _group_of(_group(GROUP)) == replace(GROUP, pools=None)


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([1, 2], r"sequence_spec\.history\.pools: got \[1, 2\], want a mapping with of and values"),
        (
            {"of": "hist", "values": [1]},
            r"pools\.of: got 'hist', want one of its numbers \(time, kind\)",
        ),
        ({"of": "kind", "values": [1, 1]}, "want 1 to max_length=9 different integers"),
    ],
)
def test_wrong_pools_are_named(root, tmp_path, pools, message):
    document = yaml.safe_load((root / "feature_spec.yaml").read_text())
    document["sequence_spec"]["history"]["pools"] = pools
    (tmp_path / "feature_spec.yaml").write_text(yaml.dump(document))
    with pytest.raises(ValueError, match=message):
        FeatureSpec.load_features(tmp_path)
