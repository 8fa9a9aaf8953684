"""Sequence groups on disk: the same batches from own events, a log of events and Parquet, and mistakes that are named.

pytest tests/dataloading/dataset/test_sequences.py
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from configs.schema import DrawRule, NegativesConfig
from dataloading.dataset import parquet, parquet_writer
from dataloading.dataset.binary import BinarySource
from dataloading.dataset.dataset_directory import verify_checksums, write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.sequences import EventColumn, EventPools, SequenceGroup
from dataloading.dataset.source import BatchTarget
from dataloading.gather import expand
from dataloading.held_out_source import HeldOutSource
from dataloading.loader import Loader, LoaderSettings
from dataloading.negatives_source import NegativesSource
from dataloading.permuted_source import PermutedSource
from tests.helpers.datasets import make_loader
from tests.helpers.event_datasets import FEATURES, GROUPS, LOG, TIMES, rows_of, write_events


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sequences")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_writer, "ROW_GROUP_ROWS", 8)
        patch.setattr(parquet_writer, "PART_ROWS", 24)
        return {
            "own": write_events(folder / "own"),
            "log": write_events(folder / "log", "log"),
            "parquet": write_events(folder / "parquet", file_format="parquet"),
        }


@pytest.fixture
def copy(roots, tmp_path):
    """Return a function that copies a dataset."""
    return lambda name: shutil.copytree(roots[name], tmp_path / name)


def columns_of(batch):
    """Return all columns of a batch as lists."""
    ids = batch.ids
    return [
        batch.labels.tolist(),
        ids.keys(),
        ids.values().tolist(),
        ids.lengths().tolist(),
        [numbers.tolist() for numbers in batch.events],
    ]


def batches(source, **settings):
    ranks = settings.pop("world_size", 1)
    loaders = [
        Loader(
            source, "train", LoaderSettings(batch_size=16, **settings), rank=rank, world_size=ranks
        )
        for rank in range(ranks)
    ]
    return [[columns_of(loader.batch(step)) for step in range(8)] for loader in loaders]


def test_every_form_gives_the_events_of_the_rows(roots, monkeypatch):
    slices, moments, _ = rows_of("train")
    rows = np.array([[30, 33], [4, 5], [0, 1]])
    wanted = [*slices[30:33], slices[4], slices[0]]
    at = np.concatenate([np.arange(*ends) for ends in wanted])
    lengths = [end - start for start, end in wanted]
    ages = np.repeat([*moments[30:33], moments[4], moments[0]], lengths) - TIMES[at]
    for name, root in roots.items():
        for kept in (parquet.KEPT_BYTES, 0):
            monkeypatch.setattr(parquet, "KEPT_BYTES", kept)
            columns = open_dataset(FeatureSpec.load(root)).read("train", rows, into=BatchTarget(6))
            assert columns.ids[1].tolist() == LOG["hist_item"][at].tolist(), name
            assert columns.ids[3].tolist() == LOG["hist_genre"][at].tolist(), name
            assert columns.lengths[1].tolist() == [*lengths, 0], name
            assert columns.events[0].tolist() == ages.tolist(), name
            assert columns.events[1].tolist() == LOG["hist_rating"][at].tolist(), name
            assert columns.events[0].dtype == columns.events[1].dtype == np.float32


@pytest.mark.parametrize(
    "settings", [{}, {"shuffle_block": 1}, {"shuffle_block": 4, "world_size": 2}]
)
def test_loaders_of_every_form_give_the_same_batches(roots, settings):
    wanted, *others = (
        batches(open_dataset(FeatureSpec.load(root)), **settings) for root in roots.values()
    )
    assert all(other == wanted for other in others)


def dealt(source, world_size, *, steps=range(2, 6), **settings):
    """Return, of each step, the rows of each rank in the file and in the global batch, and the events of its batch."""
    loaders = [
        make_loader(
            source,
            "train",
            rank=rank,
            world_size=world_size,
            batch_size=16,
            balances_events=True,
            **settings,
        )
        for rank in range(world_size)
    ]
    found = []
    for step in steps:
        of_ranks = [(loader.rows(step), loader.batch(step)) for loader in loaders]
        assert step % 4 == 3 or {batch.num_valid for _, batch in of_ranks} == {16 // world_size}
        found.append(
            [
                (
                    expand(rows.runs).tolist(),
                    batch.global_rows.tolist(),
                    int(
                        batch.feature("hist_item").lengths().sum()
                        + batch.feature("query").lengths().sum()
                    ),
                )
                for rows, batch in of_ranks
            ]
        )
    return found


def test_sources_tell_how_many_events_rows_have(roots):
    own, log, listed = (open_dataset(FeatureSpec.load(root)) for root in roots.values())
    held_out = HeldOutSource(own, 0.3)
    negatives = NegativesSource(
        log, NegativesConfig(per_row=2, features=["item"], rule=DrawRule.uniform), 1
    )
    for source, split in (
        (log, "train"),
        (listed, "test"),
        (held_out, "validation"),
        (negatives, "train"),
    ):
        runs = np.array([[7, 9], [2, 6]])
        _, history, _, _, searches = source.read(split, runs).lengths
        assert source.event_counts(split, runs).tolist() == (history + searches).tolist()
    history, searches = GROUPS
    pooled = replace(history, pools=EventPools("hist_rating", (1, 2)))
    spec = replace(log.spec, sequences=(pooled, searches))
    counts = BinarySource(spec, {"train": log._columns["train"]}).event_counts(
        "train", np.array([[0, 6]])
    )
    assert counts.tolist() == [0, 1, 2, 3, 0, 1], "of a group with pools they are not at hand"
    spec = replace(log.spec, sequences=(pooled,))
    assert BinarySource(spec, {}).event_counts("train", np.array([[0, 6]])) is None


@pytest.mark.parametrize("settings", [{"shuffle_block": 1}, {"shuffle_block": 4, "seed": 3}, {}])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_the_events_of_the_same_global_batches(roots, settings, world_size):
    source = open_dataset(FeatureSpec.load(roots["own"]))
    for of_one, of_ranks in zip(
        dealt(source, 1, **settings), dealt(source, world_size, **settings), strict=True
    ):
        [(rows, global_rows, events)] = of_one
        assert global_rows == [*range(len(global_rows))]
        held = {
            number: row
            for own, numbers, _ in of_ranks
            for row, number in zip(own, numbers, strict=False)
        }
        assert [held[number] for number in range(len(rows))] == rows
        each = [count for _, _, count in of_ranks]
        assert sum(each) == events
        # The last batch of an epoch has fewer rows, and stays as it is.
        if len(rows) == 16:
            assert max(each) - min(each) <= 3
    several = dealt(source, world_size, **settings)
    assert dealt(source, world_size, steps=[4, 5], **settings) == several[2:]


def test_batches_are_balanced_where_lengths_are_at_hand(roots, monkeypatch):
    own, log, listed = (open_dataset(FeatureSpec.load(root)) for root in roots.values())
    wanted = dealt(own, 2, shuffle_block=1)
    assert dealt(log, 2, shuffle_block=1) == dealt(listed, 2, shuffle_block=1) == wanted
    assert dealt(HeldOutSource(log, 0.05), 2, steps=[0])[0] == dealt(log, 2, steps=[0])[0]
    plain = make_loader(own, "train", batch_size=16, world_size=2)
    assert plain.rows(0).runs.tolist() == [[0, 8]]
    # Row groups are decoded by the ranks that read them.
    monkeypatch.setattr(parquet, "KEPT_BYTES", 0)
    groups = dealt(open_dataset(FeatureSpec.load(roots["parquet"])), 2, steps=[0])
    assert [rows for rows, _, _ in groups[0]] == [[*range(8)], [*range(8, 16)]]


def test_a_spec_has_its_groups_and_reads_back(roots):
    own, log, listed = (FeatureSpec.load(root) for root in roots.values())
    assert own.sequences == log.sequences == listed.sequences == GROUPS
    assert FeatureSpec.load_features(roots["log"]).sequences == GROUPS
    assert own.fingerprint() == log.fingerprint() == listed.fingerprint()
    assert own.fingerprint() != replace(own, sequences=()).fingerprint()
    means = {f.name: f.mean_hotness for f in log.categorical}
    assert means["hist_item"] == means["hist_genre"] == own.categorical[1].mean_hotness > 2
    for root in roots.values():
        verify_checksums(FeatureSpec.load(root))
    assert sorted(path.name for path in (roots["log"] / "events").iterdir()) == [
        "hist_genre.bin",
        "hist_item.bin",
        "hist_rating.bin",
        "hist_time.bin",
    ]


def test_a_dataset_without_groups_has_the_spec_of_before(tmp_path):
    with write_dataset(tmp_path / "data", categorical=FEATURES[:1], splits=["train"]) as dataset:
        dataset["train"].append(labels=[0, 1], ids={"item": np.array([1, 2])})
    document = yaml.safe_load((tmp_path / "data/feature_spec.yaml").read_text())
    assert list(document) == ["channel_spec", "feature_spec", "metadata", "source_spec"]
    assert list(document["channel_spec"]) == ["categorical", "label", "numerical"]
    spec = FeatureSpec.load(tmp_path / "data")
    # Of the version before sequence groups.
    assert spec.fingerprint().startswith("e885a2ec1154401d")


@pytest.mark.parametrize("name", ["own", "log", "parquet"])
def test_reader_processes_give_the_batches_of_threads(roots, name):
    spec = FeatureSpec.load(roots[name])
    for rank in range(2):
        loader = make_loader(
            open_dataset(spec),
            "train",
            batch_size=16,
            shuffle_block=2,
            rank=rank,
            world_size=2,
            workers=2,
            prefetch=3,
        )
        wanted = [columns_of(batch) for batch in loader.batches(0, 8)]
        loader.fork_readers()
        assert len(loader.reader_pids) == 2
        assert [columns_of(batch) for batch in loader.batches(0, 8)] == wanted
        # Resumed at a step, in the second epoch.
        assert [columns_of(batch) for batch in loader.batches(5, 3)] == wanted[5:]
        # The last batch of an epoch has 2 rows over both ranks, and each rank has one.
        assert len(wanted[3][0]) == 1
        loader.close()


def test_padding_rows_have_no_events(roots):
    loader = make_loader(
        open_dataset(FeatureSpec.load(roots["log"])), "test", batch_size=16, rank=1, world_size=2
    )
    batch = loader.batch(1)
    assert (batch.num_valid, len(batch.labels)) == (2, 3)
    lengths = batch.ids.lengths().view(len(FEATURES), -1)
    assert lengths[1, 2] == 0
    assert [len(numbers) for numbers in batch.events] == [lengths[1].sum()] * 2
    moved = batch.at(batch.memory.clone())
    assert columns_of(moved) == columns_of(batch)


def test_a_batch_larger_than_its_slot_is_read_too(tmp_path):
    """Short rows set the room of a slot, and the rows of a few batches are as long as they may be."""
    group = SequenceGroup("history", ("hist",), 400)
    with write_dataset(
        tmp_path / "data",
        categorical=[CategoricalFeature.of("hist", 50, None)],
        sequences=[group],
        splits=["train"],
    ) as dataset:
        lengths = np.ones(2000, int)
        lengths[40:42] = 400
        dataset["train"].append(
            labels=np.arange(2000) % 2,
            ids={"hist": np.arange(lengths.sum()) % 50},
            lengths={"history": lengths},
        )
    loader = make_loader(
        open_dataset(FeatureSpec.load(tmp_path / "data")), "train", batch_size=20, workers=2
    )
    wanted = [columns_of(batch) for batch in loader.batches(0, 4)]
    loader.fork_readers()
    assert [columns_of(batch) for batch in loader.batches(0, 4)] == wanted
    loader.close()


def test_derived_sources_keep_the_events_with_their_rows(roots):
    source = open_dataset(FeatureSpec.load(roots["log"]))
    held = HeldOutSource(source, 0.2).read("validation", np.array([[0, 10]]))
    wanted = source.read("train", np.array([[40, 50]]))
    assert [numbers.tolist() for numbers in held.events] == [n.tolist() for n in wanted.events]
    permuted = PermutedSource(source, "hist_genre", (1, 2))
    columns = permuted.read("train", np.array([[0, 50]]), into=BatchTarget(52))
    plain = source.read("train", np.array([[0, 50]]))
    assert columns.ids[0].tolist() == plain.ids[0].tolist()
    assert columns.ids[4].tolist() == plain.ids[4].tolist()
    assert columns.lengths[1].tolist() == columns.lengths[3].tolist() != plain.lengths[1].tolist()
    assert sorted(columns.events[1].tolist()) == sorted(plain.events[1].tolist())
    # Items and ratings are still those of one event.
    assert (columns.ids[1] / 56).tolist() == columns.events[1].tolist()


def test_raw_keys_of_events_are_read_for_every_form(tmp_path):
    """Keys of a group's feature, `vocabulary: dynamic`, are those of the slices."""
    features = [CategoricalFeature.of_keys("hist", 100, None)]
    keys, slices = np.arange(20) * 10**12, np.array([[4, 7], [0, 0], [2, 5]])
    group = SequenceGroup("history", ("hist",), 10)
    for form in ("log", "own", "parquet"):
        at = np.concatenate([np.arange(*ends) for ends in slices])
        with write_dataset(
            tmp_path / form,
            categorical=features,
            sequences=[group],
            splits=["train"],
            file_format="parquet" if form == "parquet" else "binary",
        ) as dataset:
            if form == "log":
                dataset.append_events(ids={"hist": keys})
                dataset["train"].append(labels=[0, 1, 0], slices={"history": slices})
            else:
                dataset["train"].append(
                    labels=[0, 1, 0],
                    ids={"hist": keys[at]},
                    lengths={"history": np.array([3, 0, 3])},
                )
        found = open_dataset(FeatureSpec.load(tmp_path / form)).read_keys(
            "train", np.array([[1, 3], [0, 1]]), 0
        )
        assert found.values().tolist() == keys[[2, 3, 4, 4, 5, 6]].tolist()
        assert found.lengths.tolist() == [0, 3, 3]


def test_events_beyond_two_to_the_31_are_read(tmp_path):
    """A log of 2**31 + 10 events, which is a sparse file."""
    group = SequenceGroup("history", ("hist",), 4, (EventColumn("value", np.dtype(np.int8)),))
    with write_dataset(
        tmp_path / "data",
        categorical=[CategoricalFeature.of("hist", 100, None)],
        sequences=[group],
        splits=["train"],
    ) as dataset:
        dataset.append_events(ids={"hist": np.arange(4)}, events={"value": np.arange(4)})
        dataset["train"].append(labels=[0, 1], slices={"history": np.array([[0, 2], [1, 4]])})
    num_events = 2**31 + 10
    for name, last in (("hist", [5, 6, 7]), ("value", [1, 2, 3])):
        with (tmp_path / f"data/events/{name}.bin").open("r+b") as file:
            file.truncate(num_events)
            file.seek(num_events - 3)
            file.write(bytes(last))
    np.array([[0, 2], [num_events - 3, num_events]]).tofile(
        tmp_path / "data/train/history.slices.bin"
    )
    columns = BinarySource(FeatureSpec.load(tmp_path / "data")).read("train", np.array([[0, 2]]))
    assert columns.ids[0].tolist() == [0, 1, 5, 6, 7]
    assert columns.events[0].tolist() == [0, 1, 1, 2, 3]


def damage(path, dtype, index, value):
    numbers = np.fromfile(path, dtype)
    numbers[index] = value
    numbers.tofile(path)


@pytest.mark.parametrize(
    ("file", "dtype", "index", "value", "message"),
    [
        (
            "train/history.slices.bin",
            "<i8",
            7,
            61,
            "feature 'hist_item': row 3 runs from 31 to 61 in {root}/train/history.slices.bin; want at most max_length=8 of",
        ),
        (
            "train/history.slices.bin",
            "<i8",
            6,
            40,
            "feature 'hist_item': row 3 runs from 40 to 34 in",
        ),
        (
            "train/history.slices.bin",
            "<i8",
            6,
            2,
            "feature 'hist_item': row 3 runs from 2 to 34 in",
        ),
        (
            "train/history.slices.bin",
            "<i8",
            6,
            -1,
            "feature 'hist_item': row 3 runs from -1 to 34 in",
        ),
        (
            "train/history.moments.bin",
            "<i8",
            3,
            TIMES[33],
            f"'hist_time': an event of time {TIMES[33]} at row 3 of {{root}}/events/hist_time.bin, whose moment is",
        ),
        (
            "events/hist_time.bin",
            "<i8",
            31,
            TIMES[33],
            f"'hist_time': an event of time {TIMES[32]} after one of {TIMES[33]} at row 3 of",
        ),
        (
            "events/hist_rating.bin",
            "<f4",
            33,
            np.nan,
            "'hist_rating': an event has nan at row 3 of {root}/events/hist_rating.bin; want a finite number",
        ),
        (
            "events/hist_genre.bin",
            "<i1",
            33,
            20,
            "feature 'hist_genre': id 20 at row 3 of {root}/events/hist_genre.bin lies outside its table of 20 rows",
        ),
    ],
)
def test_a_wrong_event_is_named_with_its_row_when_it_is_read(
    copy, file, dtype, index, value, message
):
    root = copy("log")
    damage(root / file, dtype, index, value)
    source = BinarySource(FeatureSpec.load(root))
    source.read("train", np.array([[4, 5]]))
    with pytest.raises(ValueError) as error:  # noqa: PT011, the message is compared
        source.read("train", np.array([[8, 9], [2, 4]]))
    assert message.format(root=root) in str(error.value)


@pytest.mark.parametrize(
    ("column", "rows", "message"),
    [
        (
            "hist_genre",
            [[1], [1, 2]],
            "feature 'hist_genre': 1 events at row 0 of {file}, and 'hist_item' has 2; want equally many in",
        ),
        ("hist_rating", [[1, 2], [1]], "feature 'hist_rating': 1 events at row 1 of"),
        (
            "hist_item",
            [[1] * 9, [1]],
            "feature 'hist_item': 9 events at row 0 of {file}; want at most max_length=8",
        ),
        (
            "history",
            [9, 8],
            "'hist_time': an event of time 8 at row 1 of {file}, whose moment is 8",
        ),
        ("hist_time", [[6, 5], [1, 2]], "'hist_time': an event of time 5 after one of 6 at row 0"),
        (
            "hist_rating",
            [[1, None], [1, 2]],
            "'hist_rating' misses a number at row 0 of {file}; want numbers only",
        ),
        ("hist_rating", [[1e300, 1.0], [1.0, 2.0]], "'hist_rating': an event has 1e+300 at row 0"),
        (
            "hist_time",
            [[1.5, 2], [1, 2]],
            "column 'hist_time': got 'list<element: double>', want a list of integers",
        ),
        ("history", [None, 9], "'history' is missing at row 0 of"),
    ],
)
def test_a_wrong_event_in_parquet_is_named(tmp_path, column, rows, message):
    columns = {
        "label": [0, 1],
        "hist_item": [[1, 2], [3, 4]],
        "hist_genre": [[1, 2], [3, 4]],
        "hist_time": [[5, 6], [7, 8]],
        "hist_rating": [[0.5, 1], [1, 1]],
        "history": [9, 9],
    }
    file = tmp_path / "train.parquet"
    pq.write_table(pa.table(columns | {column: rows}), file)
    document = {
        "channel_spec": {
            "categorical": ["hist_item", "hist_genre"],
            "label": ["label"],
            "numerical": [],
            "sequence": ["hist_time", "hist_rating"],
        },
        "feature_spec": {
            "hist_item": {"cardinality": 100, "dtype": "int8", "hotness": "ragged"},
            "hist_genre": {"cardinality": 100, "dtype": "int8", "hotness": "ragged"},
            "label": {"dtype": "bool"},
            "hist_time": {"dtype": "int64"},
            "hist_rating": {"dtype": "float32"},
        },
        "sequence_spec": {
            "history": {
                "features": ["hist_item", "hist_genre"],
                "numbers": ["hist_time", "hist_rating"],
                "time": "hist_time",
                "max_length": 8,
            }
        },
        "source_spec": {
            "train": [{"type": "parquet", "features": list(columns), "files": ["train.parquet"]}]
        },
    }
    (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError) as error:  # noqa: PT011, the message is compared
        open_dataset(FeatureSpec.load(tmp_path)).read("train", np.array([[0, 2]]))
    assert message.format(file=file) in str(error.value)


def history(document, name="history"):
    return document["sequence_spec"][name]


def second_files(document):
    """Return the files of the second chunk of `train`."""
    return document["source_spec"]["train"][1]["files"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: history(d).update(features=["item"]),
            "sequence_spec.history.features: got 'item', want names of categorical features with hotness: ragged",
        ),
        (
            lambda d: history(d).update(features=["nobody"]),
            "sequence_spec.history.features: got 'nobody'",
        ),
        (
            lambda d: history(d, "searches").update(features=["query", "hist_item"]),
            "got 'hist_item', want columns of no other group; it is one of 'history'",
        ),
        (
            lambda d: history(d).update(features=[]),
            "sequence_spec.history.features: got [], want at least one",
        ),
        (
            lambda d: history(d).update(time="hist_rating"),
            "sequence_spec.history.time: got 'hist_rating', want an int64 column of its numbers (hist_time, hist_rating)",
        ),
        (
            lambda d: history(d).update(time="clock"),
            "sequence_spec.history.time: got 'clock', want an int64",
        ),
        (
            lambda d: history(d).update(max_length=0),
            "sequence_spec.history.max_length: got 0, want an integer from 1",
        ),
        (
            lambda d: history(d).pop("max_length"),
            "sequence_spec.history.max_length: got None, want an integer",
        ),
        (
            lambda d: history(d).update(numbers=["hist_time"]),
            "sequence_spec: got ['hist_rating'], want a group for every column of events",
        ),
        (
            lambda d: history(d).update(numbers=["label"]),
            "sequence_spec.history.numbers: got ['label'], want columns of channel_spec.sequence",
        ),
        (
            lambda d: d["sequence_spec"].update(item={}),
            "sequence_spec: got 'item', want names of groups, which no column has",
        ),
        (
            lambda d: d.pop("sequence_spec"),
            "sequence_spec: got ['hist_time', 'hist_rating'], want a group",
        ),
        (
            lambda d: d["feature_spec"]["hist_rating"].update(dtype="float64"),
            "feature_spec.hist_rating.dtype: got 'float64', want one of int8",
        ),
        (
            lambda d: d["feature_spec"]["hist_genre"].update(mean_hotness=9.0),
            "feature_spec.hist_genre.mean_hotness: got 9.0, want",
        ),
        (lambda d: second_files(d).pop(), "want two files (events, slices)"),
        (
            lambda d: second_files(d).__setitem__(1, "test/history.slices.bin"),
            "the slices of all columns of 'history'",
        ),
        (
            lambda d: d["source_spec"]["train"].pop(),
            "got ['history'], want a chunk for every feature",
        ),
    ],
)
def test_a_spec_with_a_wrong_group_is_refused(copy, change, message):
    root = copy("log")
    path = root / "feature_spec.yaml"
    document = yaml.safe_load(path.read_text())
    # hist_item follows item and the label.
    document["source_spec"]["train"][1], document["source_spec"]["train"][2] = (
        document["source_spec"]["train"][2],
        document["source_spec"]["train"][1],
    )
    change(document)
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ValueError) as error:  # noqa: PT011, the message is compared
        FeatureSpec.load(root)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("file", "num_bytes", "message"),
    [
        (
            "train/history.slices.bin",
            16,
            "history.slices.bin is truncated: got 784 bytes, want 800 = 50 x 16 bytes",
        ),
        (
            "train/history.moments.bin",
            8,
            "history.moments.bin is truncated: got 392 bytes, want 400",
        ),
        (
            "events/hist_time.bin",
            8,
            "hist_time.bin has 472 bytes, want 480 = 60 x 8 bytes for the 60 events of",
        ),
        ("events/hist_item.bin", 1, "hist_item.bin has 119 bytes, want 118 = 59 x 2 bytes"),
    ],
)
def test_a_truncated_file_of_events_is_refused(copy, file, num_bytes, message):
    root = copy("log")
    path = root / file
    path.write_bytes(path.read_bytes()[:-num_bytes])
    with pytest.raises(ValueError) as error:  # noqa: PT011, the message is compared
        FeatureSpec.load(root)
    assert message in str(error.value)


def put(section, name, at=None, value=None):
    """Return a change of what the writer gets: `value` at a place, or nothing under `name`."""

    def change(columns):
        if at is None:
            del columns[section][name]
            return
        columns[section][name] = np.array(columns[section][name])
        columns[section][name][at] = value

    return change


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        (
            "own",
            put("moments", "history"),
            "group 'history': no moments; want whole seconds, int64 [50]",
        ),
        (
            "own",
            lambda columns: columns["events"].update(rating=columns["events"]["hist_rating"]),
            "no column or group ['rating']; want some of",
        ),
        (
            "own",
            lambda columns: columns["lengths"].update(
                history=columns["lengths"]["history"][:, None]
            ),
            "group 'history': want one length per row",
        ),
        (
            "own",
            put("events", "hist_rating"),
            "group 'history': no hist_rating; append all its columns at once",
        ),
        (
            "own",
            lambda columns: columns["events"].update(hist_item=columns["ids"].pop("hist_item")),
            "group 'history': no hist_item; append all its columns at once",
        ),
        (
            "own",
            put("lengths", "history"),
            "feature 'hist_item' is of group 'history': want lengths of the group beside its ids",
        ),
        (
            "own",
            put("lengths", "history", 5, 9),
            "group 'history': 9 events at row 5 of split 'train'; want 0 to max_length=8",
        ),
        (
            "own",
            put("lengths", "history", 5, -1),
            "group 'history': -1 events at row 5 of split 'train'",
        ),
        (
            "own",
            put("lengths", "history", 5, 4),
            "feature 'hist_item': got ids of shape (184,) for 50 lengths that sum to 183",
        ),
        (
            "own",
            put("moments", "history", 3, 0),
            "at row 3 of split 'train', whose moment is 0; want only events before",
        ),
        (
            "own",
            put("events", "hist_rating", 0, np.inf),
            "'hist_rating': an event has inf at row 1 of split 'train'",
        ),
        (
            "own",
            put("ids", "hist_genre", 0, 20),
            "feature 'hist_genre': id 20 at row 1 of split 'train' lies outside its table of 20 rows",
        ),
        (
            "log",
            put("slices", "history", 3, [0, 61]),
            "group 'history': slice [0, 61] at row 3 of split 'train' lies outside the 60 events appended so far",
        ),
        (
            "log",
            put("slices", "history", 3, [0, 9]),
            "group 'history': 9 events at row 3 of split 'train'; want 0 to max_length=8",
        ),
        ("log", put("slices", "history"), "history.slices.bin holds 0 rows and"),
    ],
)
def test_the_writer_refuses_a_wrong_event(tmp_path, form, change, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011, the message is compared
        write_events(tmp_path / "data", form, change=change)
    assert message in str(error.value)
    assert not (tmp_path / "data").exists()


def test_a_log_may_have_times_before_1970(tmp_path):
    columns = (
        CategoricalFeature.of("hist_item", 9, None),
        CategoricalFeature.of("hist_genre", 9, None),
    )
    with write_dataset(tmp_path / "data", categorical=columns, sequences=GROUPS[:1]) as dataset:
        dataset.append_events(
            ids={"hist_item": np.arange(3), "hist_genre": np.arange(3)},
            events={"hist_time": np.array([-5, 0, 7]), "hist_rating": np.ones(3)},
        )
        for split in ("train", "test"):
            moments = {"history": np.array([-1, 8])}
            slices = {"history": np.array([[0, 1], [0, 3]])}
            dataset[split].append(labels=np.array([0, 1]), slices=slices, moments=moments)
    source = open_dataset(FeatureSpec.load(tmp_path / "data"))
    assert source.read("train", np.array([[0, 2]])).events[0].tolist() == [4, 13, 8, 1]


def test_the_documented_example_and_spec_are_read(tmp_path, monkeypatch):
    text = (Path(__file__).parents[3] / "docs/data_format.md").read_text().split("## Sequences")[1]
    monkeypatch.chdir(tmp_path)
    code, document = (text.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "yaml"))
    hist_item, time = (
        CategoricalFeature.of("hist_item", 1000, None),
        EventColumn.of("hist_time", "int64"),
    )
    history = SequenceGroup("history", ("hist_item",), 100, (time,), "hist_time")
    exec(code, {"write_dataset": write_dataset, "hist_item": hist_item, "history": history})
    columns = BinarySource(FeatureSpec.load(tmp_path / "data/log")).read(
        "train", np.array([[0, 2]])
    )
    assert columns.ids[0].tolist() == [7, 7, 8]
    assert columns.events[0].tolist() == [50, 150, 50]
    spec = yaml.safe_load(document)
    spec["channel_spec"]["label"] = ["label"]
    spec["feature_spec"]["label"] = {"dtype": "bool"}
    (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(spec))
    [group] = FeatureSpec.load_features(tmp_path).sequences
    assert (group.time, group.max_length) == ("hist_time", 100)
