"""Synthetic click stream: rows as functions of their index, ids by a power law, labels that can be learned.

pytest tests/dataloading/test_synthetic.py
"""

import subprocess
import sys

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from dataloading.dataset.source import BatchTarget
from dataloading.randomness import power_law, stream_key, uniform
from dataloading.synthetic import SyntheticSource
from tests.helpers.datasets import synthetic_source

CARDINALITIES = (1, 3, 50, 1000, 292_775_614)


def make(**changes: object) -> SyntheticSource:
    arguments = {
        "train_rows": 20_000,
        "test_rows": 9000,
        "num_numerical": 4,
        "cardinalities": list(CARDINALITIES),
        "hotness": [1, 1, 2, 1, 3],
        "seed": 1,
    }
    return synthetic_source(**(arguments | changes))


def read(source: SyntheticSource, *runs: tuple[int, int], split: str = "train", **rest: object):
    return source.read(split, np.array(runs, np.int64).reshape(-1, 2), **rest)


@pytest.fixture(scope="module")
def source() -> SyntheticSource:
    return make()


def test_a_row_does_not_depend_on_the_rows_read_with_it(source):
    whole = read(source, (0, 17_000))
    for runs in ([(8190, 8195)], [(16_999, 17_000), (0, 3), (1, 2)], [(5, 8500)]):
        rows = np.concatenate([np.arange(*run) for run in runs])
        part = read(source, *runs)
        assert np.array_equal(part.numerical, whole.numerical[rows])
        assert np.array_equal(part.labels, whole.labels[rows])
        for feature, ids, of_all in zip(source.spec.categorical, part.ids, whole.ids, strict=True):
            assert np.array_equal(
                ids.reshape(-1, feature.hotness), of_all.reshape(-1, feature.hotness)[rows]
            )


def test_another_process_makes_the_same_rows(source):
    code = (
        "from tests.dataloading.test_synthetic import make, read; c = read(make(), (5, 9));"
        "print([i.tolist() for i in c.ids], c.numerical.tolist(), c.labels.tolist())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    columns = read(source, (5, 9))
    assert (
        printed.strip()
        == f"{[ids.tolist() for ids in columns.ids]} {columns.numerical.tolist()} {columns.labels.tolist()}"
    )


@pytest.mark.parametrize("change", [{"seed": 2}, {"exponent": 1.2}])
def test_another_seed_or_exponent_makes_other_rows(source, change):
    other, own = read(make(**change), (0, 100)), read(source, (0, 100))
    assert [ids.tolist() for ids in other.ids] != [ids.tolist() for ids in own.ids]


def test_splits_and_features_are_independent(source):
    train, test = read(source, (0, 9000)), read(source, (0, 9000), split="test")
    columns = [
        *train.numerical.T,
        *test.numerical.T,
        train.ids[3],
        test.ids[3],
        *train.ids[2].reshape(-1, 2).T,
    ]
    correlation = np.corrcoef(np.stack(columns)) - np.eye(len(columns))
    assert np.abs(correlation).max() < 0.06


def test_shapes_and_dtypes_are_those_of_any_source(source):
    columns = read(source, (0, 10), into=BatchTarget(12))
    assert (columns.numerical.shape, columns.numerical.dtype) == ((12, 4), np.float32)
    assert (columns.labels.shape, columns.labels.dtype) == ((12,), np.float32)
    assert [len(ids) for ids in columns.ids] == [10, 10, 20, 10, 30]
    assert {ids.dtype for ids in columns.ids} == {np.dtype(np.int32)}
    assert columns.lengths == [None] * 5
    assert not columns.numerical[10:].any()
    assert not columns.labels[10:].any()


def test_zero_rows_and_zero_numericals_are_allowed():
    columns = read(make(num_numerical=0), into=BatchTarget(2))
    assert columns.numerical.shape == (2, 0)
    assert not any(map(len, columns.ids))


def test_ids_stay_in_their_tables(source):
    columns = read(source, (0, 20_000))
    for ids, rows in zip(columns.ids, CARDINALITIES, strict=True):
        assert ids.min() == 0
        assert ids.max() < rows
    assert columns.ids[4].max() > 200_000_000


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 1.45, 3.0])
@pytest.mark.parametrize("rows", [1, 2, 100])
def test_ids_follow_their_power_law(exponent, rows):
    """The share of ids up to i is that of the continuous law on [1, rows + 1), integrated numerically."""
    numbers = uniform(stream_key("test"), np.arange(40_000, dtype=np.uint64))
    ids = power_law(numbers, rows, exponent).astype(int)
    edges = np.linspace(1, rows + 1, 200 * rows + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    density = (middles**-exponent).reshape(rows, -1).sum(1)
    counted = np.bincount(ids, minlength=rows) / len(ids)
    assert len(counted) == rows
    assert np.abs(np.cumsum(counted) - np.cumsum(density) / density.sum()).max() < 0.012


@pytest.mark.parametrize("number", [0.0, 1 - 2**-52])
def test_the_extremes_of_the_power_law_lie_in_the_table(number):
    for rows in CARDINALITIES:
        for exponent in (0, 0.999, 1, 1.05, 1.45):
            assert 0 <= power_law(np.array([number]), rows, exponent)[0] < rows


def test_uniform_numbers_are_splitmix64():
    """First outputs of the generator seeded with 1234567, as published with its reference implementation."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    numbers = uniform(1234567, np.arange(1, 4, dtype=np.uint64))
    assert numbers.tolist() == [(output >> 12) / 2**52 for output in published]


def test_numericals_have_mean_0_and_variance_1(source):
    numerical = read(source, (0, 20_000)).numerical
    assert np.abs(numerical.mean(0)).max() < 0.03
    assert np.abs(numerical.std(0) - 1).max() < 0.03


@pytest.mark.parametrize(
    "change", [{}, {"exponent": 0.0}, {"num_numerical": 0}, {"cardinalities": [5], "hotness": []}]
)
def test_positive_rate_and_best_auc_are_as_documented(change):
    source = make(**change)
    assert 0.25 < read(source, (0, 20_000)).labels.mean() < 0.30
    assert (0.65 if change else 0.80) < source.teacher_auc() < 0.86


def test_ids_too_rare_to_be_learned_have_no_effect():
    source = make(
        cardinalities=[292_775_614, 200_000_000], hotness=[], exponent=0.0, num_numerical=0
    )
    _, logits = source._make("test", np.arange(9000, dtype=np.uint64))
    assert logits.min() == logits.max()
    assert 0.25 < read(source, (0, 20_000)).labels.mean() < 0.30


def test_the_best_auc_is_that_of_the_teachers_logits(source):
    columns, logits = source._make("test", np.arange(9000, dtype=np.uint64))
    assert source.teacher_auc() == pytest.approx(roc_auc_score(columns.labels, logits), abs=1e-12)


def test_the_labels_can_be_learned_but_not_from_shuffled_ones(source):
    """Logistic regression on one-hot frequent ids reaches a good part of the AUC of the teacher."""

    def features(columns) -> np.ndarray:
        bags = [ids.reshape(len(columns.labels), -1) for ids in columns.ids]
        hot = [(bag[:, :, None] == np.arange(60)).mean(1) for bag in bags[1:]]
        return np.concatenate([columns.numerical, *hot], axis=1)

    train, test = read(source, (0, 8000)), read(source, (0, 4000), split="test")
    model = LogisticRegression(max_iter=100).fit(features(train), train.labels)
    auc = roc_auc_score(test.labels, model.decision_function(features(test)))
    assert 0.70 < auc < source.teacher_auc()
    shuffled = np.random.default_rng(0).permutation(train.labels)
    model = LogisticRegression(max_iter=100).fit(features(train), shuffled)
    assert abs(roc_auc_score(test.labels, model.decision_function(features(test))) - 0.5) < 0.1


def test_an_unknown_split_is_named(source):
    with pytest.raises(ValueError, match="the synthetic stream: no split 'dev', only train, test"):
        source.num_rows("dev")


def test_names_change_no_value(source):
    names = ["user", "item", "kind", "page", "day"]
    named = make(names=names)
    assert [feature.name for feature in named.spec.categorical] == names
    one, other = read(source, (5, 900)), read(named, (5, 900))
    assert np.array_equal(one.numerical, other.numerical)
    assert np.array_equal(one.labels, other.labels)
    assert all(np.array_equal(*ids) for ids in zip(one.ids, other.ids, strict=True))
