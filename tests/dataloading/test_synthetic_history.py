"""Synthetic histories: events as functions of their row, sessions, and labels to which the order of events matters.

pytest tests/dataloading/test_synthetic_history.py
"""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dataloading.dataset.binary import BinarySource
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.source import BatchTarget
from tests.helpers.datasets import make_loader, synthetic_source
from tests.helpers.preproc_command import preproc

TABLES = {"user": 30, "item": 1000, "genre": 20}


def plain(**history):
    return synthetic_source(
        train_rows=2000,
        test_rows=9000,
        num_numerical=2,
        names=list(TABLES),
        cardinalities=list(TABLES.values()),
        seed=3,
        **history,
    )


@pytest.fixture(scope="module")
def source():
    return plain(history=["item", "genre"], history_length=12.0, history_max_length=40)


@pytest.fixture(scope="module")
def columns(source):
    return source.read("train", np.array([[0, 2000]]))


def test_events_are_a_group_that_shares_the_tables(source, columns):
    [group] = source.spec.sequences
    assert (group.name, group.features, group.time) == (
        "history",
        ("hist_item", "hist_genre"),
        "hist_time",
    )
    assert [feature.table for feature in source.spec.categorical[3:]] == ["item", "genre"]
    assert len(columns.events) == 1
    assert len(columns.events[0]) == len(columns.ids[3]) == len(columns.ids[4])
    lengths = columns.lengths[3]
    assert lengths.mean() == pytest.approx(12, abs=0.7)
    assert (lengths.min(), lengths.max()) == (0, 40)


def test_the_events_of_rows_are_known_without_reading_them(source, columns):
    counts = source.event_counts("train", np.array([[5, 9], [0, 2]]))
    assert counts.tolist() == columns.lengths[3][[5, 6, 7, 8, 0, 1]].tolist()
    assert plain().event_counts("train", np.array([[5, 9]])) is None


def test_a_history_changes_no_other_column(columns):
    alone = plain().read("train", np.array([[0, 2000]]))
    assert np.array_equal(alone.numerical, columns.numerical)
    assert all(np.array_equal(*ids) for ids in zip(alone.ids, columns.ids[:3], strict=True))
    assert plain().spec.sequences == ()


def test_events_are_those_of_their_row_wherever_it_is_read(source, columns):
    some = source.read("train", np.array([[700, 703], [20, 21]]), into=BatchTarget(6))
    ends = np.cumsum(columns.lengths[3])
    wanted = np.concatenate(
        [np.arange(ends[r] - columns.lengths[3][r], ends[r]) for r in (700, 701, 702, 20)]
    )
    for got, whole in (
        (some.ids[3], columns.ids[3]),
        (some.ids[4], columns.ids[4]),
        (some.events[0], columns.events[0]),
    ):
        assert got.tolist() == whole[wanted].tolist()
    assert some.labels.tolist() == [*columns.labels[[700, 701, 702, 20]], 0, 0]


def test_ages_fall_and_sessions_repeat_ids(columns):
    lengths, ages = columns.lengths[3].astype(int), columns.events[0]
    first = np.zeros(len(ages), bool)
    first[(np.cumsum(lengths) - lengths)[lengths > 0]] = True
    assert ages.min() >= 1
    assert (np.diff(ages)[~first[1:]] < 0).all()
    item = columns.ids[3]
    repeats = (item[1:] == item[:-1])[~first[1:]].mean()
    apart = (item[2:] == item[:-2])[~(first[2:] | first[1:-1])].mean()
    far = (item[20:] == item[:-20]).mean()
    assert repeats > apart + 0.02 > far + 0.04
    # A power law.
    assert np.bincount(item, minlength=1000)[:10].sum() > 0.25 * len(item)


def test_the_order_of_events_matters_to_the_labels(source):
    rows = np.arange(9000, dtype=np.uint64)
    columns, logits = source._make("test", rows)
    best = roc_auc_score(columns.labels, logits)
    assert source.teacher_auc("test") == pytest.approx(best)
    events = source._events(columns)
    order = np.argsort(
        np.repeat(rows, events.lengths) + np.random.default_rng(1).random(len(events.ages))
    )
    shuffled = replace(events, ids=[ids[order] for ids in events.ids])
    none = replace(events, lengths=np.zeros_like(events.lengths))
    score = [
        roc_auc_score(
            columns.labels,
            source._teacher.logits(columns.numerical, source._bags(columns), changed),
        )
        for changed in (shuffled, none)
    ]
    assert best > score[0] + 0.02 > score[1] + 0.03


def test_the_dataset_and_its_loader_have_the_events_of_the_stream(tmp_path, source, columns):
    preproc(
        "dataset=synthetic",
        "data.synthetic.train_rows=2000",
        "data.synthetic.test_rows=64",
        "data.synthetic.num_numerical=2",
        "data.synthetic.cardinalities=[30,1000,20]",
        "data.synthetic.names=[user,item,genre]",
        "data.synthetic.history=[item,genre]",
        "data.synthetic.history_length=12",
        "data.synthetic.history_max_length=40",
        "seed=3",
        f"output={tmp_path / 'out'}",
        "numerical_dtype=float32",
    )
    spec = FeatureSpec.load(tmp_path / "out")
    assert spec.sequences == source.spec.sequences
    got = BinarySource(spec).read("train", np.array([[0, 2000]]))
    assert all(np.array_equal(*ids) for ids in zip(got.ids, columns.ids, strict=True))
    assert np.array_equal(got.events[0], columns.events[0])
    assert np.array_equal(got.labels, columns.labels)
    loader = make_loader(source, "train", batch_size=100, workers=2)
    threads = next(loader.batches(7, 1))
    loader.fork_readers()
    forked = next(loader.batches(7, 1))
    assert threads.events[0].tolist() == forked.events[0].tolist()
    assert len(threads.events[0]) == columns.lengths[3][700:800].sum()
    loader.close()
