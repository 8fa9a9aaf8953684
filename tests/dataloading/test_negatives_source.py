"""Negatives behind every row: against a loop over rows, the same however they are read, and what is refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from configs.schema import DrawRule, NegativesConfig
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.source import EPOCH_ROWS, BatchTarget
from dataloading.negatives_source import DRAWS, NegativesSource
from dataloading.randomness import stream_key, uniform
from nn.checks import open_checked
from nn.library.loaded_run import Run
from tests.helpers.command import run_command
from tests.helpers.composed import build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.nn.training.plain_training import resumes_bit_by_bit

ITEMS, ROWS, K, SEED = 12, 203, 3, 5
ITEM = "data.negatives.per_row=3", "data.negatives.features=[item,kind]"
HISTORY = "data.negatives.history=past"


def write_rows(root: Path, **options) -> Path:
    """Write rows of few items, the first ones most often; an item has one kind, and some rows have most items in the past."""
    random = np.random.default_rng(1)
    features = [
        CategoricalFeature.of("user", 30),
        CategoricalFeature.of("item", ITEMS),
        CategoricalFeature.of("kind", 5),
        CategoricalFeature.of("past", ITEMS, None, "item"),
        CategoricalFeature.of("pair", ITEMS, 2, "item"),
    ]
    with write_dataset(root, categorical=features, numerical=("n",), **options) as directory:
        for split, rows in (("train", ROWS), ("test", 40)):
            item = np.minimum(random.geometric(0.3, rows) - 1, ITEMS - 1)
            lengths = random.integers(0, 7, rows)
            directory[split].append(
                numerical=random.normal(size=(rows, 1)),
                labels=np.ones(rows, bool),
                ids={
                    "user": random.integers(0, 30, rows),
                    "item": item,
                    "kind": item % 5,
                    "past": random.integers(0, ITEMS, lengths.sum()),
                    "pair": random.integers(0, ITEMS, (rows, 2)),
                },
                lengths={"past": lengths},
            )
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("positives") / "data")


def source_of(data: Path, **options) -> NegativesSource:
    settings = {"per_row": K, "features": ["item", "kind"], "history": "past"} | options
    return NegativesSource(open_dataset(FeatureSpec.load(data)), NegativesConfig(**settings), SEED)


def lists(columns, name: str) -> list[list[int]]:
    index = [f.name for f in columns.layout.spec.categorical].index(name)
    ids, lengths = columns.ids[index], columns.lengths[index]
    if lengths is None:
        return ids.reshape(len(columns.labels), -1).tolist()
    return [part.tolist() for part in np.split(ids, lengths.cumsum()[:-1])]


def by_loop(data: Path, split: str, epoch: int, rule: DrawRule, history: str | None):
    """Return item, kind and label of every row, drawn one by one."""
    stored = open_dataset(FeatureSpec.load(data))
    count = stored.num_rows(split)
    read = stored.read(split, np.array([[0, count]]))
    items, kinds = (np.array(lists(read, name))[:, 0].tolist() for name in ("item", "kind"))
    past = [[] for _ in items] if history is None else lists(read, history)
    key, rows = stream_key("negatives", SEED, split), []
    for row, item in enumerate(items):
        rows.append((item, kinds[row], 1.0))
        for number in range(1, K + 1):
            at = epoch * EPOCH_ROWS + row * (K + 1) + number
            for draw in range(DRAWS):
                (u,) = uniform(key, np.array([at * DRAWS + draw], np.uint64))
                drawn = int(u * count)
                if rule is DrawRule.uniform:
                    found, kind = 1 + int(u * (ITEMS - 1)), kinds[row]
                else:
                    found, kind = items[drawn], kinds[drawn]
                if found not in (0, item, *past[row]):
                    break
            rows.append((found, kind, 0.0))
    return rows


@pytest.mark.parametrize("history", [None, "past", "pair"])
@pytest.mark.parametrize("rule", list(DrawRule))
def test_negatives_are_those_of_a_loop(data, rule, history):
    features = ["item", "kind"] if rule is DrawRule.frequency else ["item"]
    source = source_of(data, rule=rule, history=history, features=features)
    assert source.num_rows("train") == ROWS * (K + 1)
    for split, epoch in (("train", 0), ("train", 3), ("test", 0)):
        wanted = by_loop(data, split, epoch, rule, history)
        shift = epoch * EPOCH_ROWS
        found = source.read(split, np.array([[0, len(wanted)]]) + shift)
        items, kinds = (np.array(lists(found, name))[:, 0] for name in ("item", "kind"))
        assert list(zip(items, kinds, found.labels, strict=True)) == wanted
        stored = open_dataset(source.spec).read(split, np.array([[0, len(wanted) // (K + 1)]]))
        np.testing.assert_array_equal(found.numerical, np.repeat(stored.numerical, K + 1, 0))
        for name in ("user", "past", "pair"):
            assert lists(found, name)[:: K + 1] == lists(found, name)[K :: K + 1]
        # However they are read: in any order, and padded.
        rows = np.random.default_rng(3).permutation(len(wanted))[:50]
        some = source.read(split, np.stack([rows, rows + 1], 1) + shift, BatchTarget(64))
        assert lists(some, "past")[:50] == [lists(found, "past")[row] for row in rows]
        np.testing.assert_array_equal(some.labels, [*found.labels[rows], *[0] * 14])
        np.testing.assert_array_equal(some.ids[1], items[rows])


def test_items_are_drawn_by_their_rule(data):
    counts = {}
    for rule in DrawRule:
        source = source_of(data, rule=rule, history=None, features=["item"], per_row=40)
        found = source.read("train", np.array([[0, ROWS * 41]]))
        counts[rule] = np.bincount(found.ids[1][found.labels == 0], minlength=ITEMS)
        assert counts[rule][0] == 0
    rest = counts[DrawRule.uniform][1:]
    # Its own item, which a row may not draw, is often item 1.
    assert rest[3:].min() > 0.85 * rest[3:].mean() > 0.7 * rest[3:].max()
    stored = np.bincount(
        open_dataset(FeatureSpec.load(data)).read("train", np.array([[0, ROWS]])).ids[1]
    )
    assert np.corrcoef(counts[DrawRule.frequency][1:], stored[1:])[0, 1] > 0.98


def test_a_row_without_another_item_is_named(tmp_path):
    root = write_rows(tmp_path / "data")
    np.ones(ROWS, "i1").tofile(root / "train/item.bin")
    source = source_of(root)
    with pytest.raises(
        ValueError, match=r"64 draws gave no other item for row 7 of split 'train'; lower"
    ):
        source.read("train", np.array([[7 * (K + 1), 9 * (K + 1)]]))


def overrides(data: Path, *others: str) -> list[str]:
    return [
        "model.name=embedding_mlp",
        "model.embedding_dim=8",
        "model.hidden=[8]",
        f"data.path={data}",
        "data.shuffle_block=16",
        "train.batch_size=64",
        "eval.batch_size=64",
        "optimizer.name=sgd",
        "device=cpu",
        "log.pictures=false",
        *ITEM,
        HISTORY,
        *others,
    ]


def rows_read(options: list[str], steps: range) -> list[list[tuple]]:
    """Return user, item and label of this rank's rows, step after step."""
    with ranks_of_cpu():
        built = build(compose_config(*options))
        batches = built.train_loader.batches(steps.start, len(steps))
        read = [
            [
                *zip(
                    *(b.feature(n).values().tolist() for n in ("user", "item")),
                    b.labels.tolist(),
                    strict=False,
                )
            ]
            for b in batches
        ]
        built.step.close()
    return read


def test_ranks_and_resumed_runs_read_the_same_rows(data):
    alone = rows_read(overrides(data), range(30))
    assert rows_read(overrides(data), range(17, 30)) == alone[17:]
    both = run_distributed(rows_read, 2, overrides(data), range(30))
    assert [[*one, *other] for one, other in zip(*both, strict=True)] == alone
    # 13 steps an epoch, whose negatives are drawn anew.
    epochs = [
        sorted(row for step in alone[first : first + 13] for row in step) for first in (0, 13)
    ]
    assert epochs[0] != epochs[1]
    assert [row for row in epochs[0] if row[2]] == [row for row in epochs[1] if row[2]]


def test_a_run_resumes_bit_by_bit_in_its_second_epoch(data, tmp_path):
    assert resumes_bit_by_bit(tmp_path, overrides(data, "train.batch_size=256"), 1)


def test_a_run_shows_its_rows_and_scores_those_of_the_dataset(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = overrides(
        data, "run_dir=run", "data.validation_fraction=0.2", "eval.split=validation"
    )
    ended = run_command(*options, recipe="main")
    assert not ended.exit_code, ended.err
    shown = " ".join(ended.out.split())
    assert "648 training rows, 164 validation rows" in shown
    assert "negatives 3 of 4 rows, item, kind by frequency, none of them in past" in shown
    scores = "mode=predict config=run/config.yaml checkpoint.restore=run/checkpoints/best output=scores.csv"
    ended = run_command(*scores.split(), "predict.split=train", recipe="main")
    assert not ended.exit_code, ended.err
    assert len(Path("scores.csv").read_text().splitlines()) == ROWS + 1
    assert Run.load("run").summary()["test_auc"] is not None


REFUSED = [
    ([ITEM[0]], "data.negatives.per_row has no effect without data.negatives.features, the features"),
    ([HISTORY], "data.negatives.history has no effect without data.negatives.features, the features"),
    ([*ITEM, "data.negatives.rule=uniform"], "data.negatives.rule=uniform draws ids of one feature, got"),
    ([*ITEM, "data.negatives.history=user"], "data.negatives.history: 'user' has the table 'user', and 'item' 'item'"),
    ([*ITEM, "data.negatives.history=cart"], "data.negatives names 'cart', which the dataset lacks; it has user,"),
    ([ITEM[0], "data.negatives.features=[item,item]"], "data.negatives.features=['item', 'item'] names a feature twice; name"),
    ([*ITEM, "data.negatives.history=item"], "data.negatives.history=item is one of data.negatives.features; name a"),
    ([ITEM[0], "data.negatives.features=[pair]"], "data.negatives.features: 'pair' has raw keys, several ids per row"),
    ([*ITEM, "tasks={label: {teacher: old}}"], "tasks.label.teacher has scores of the rows of the dataset, and data.neg"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_is_refused_before_the_run(data, options, message):
    base = [option for option in overrides(data) if "negatives" not in option]
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        open_checked(compose_config(*base, *options))
    assert "\n" not in str(refused.value)


def test_regression_labels_are_refused(tmp_path):
    stars = RowColumn("stars", dtype=np.dtype(np.float32))
    root = write_rows(tmp_path / "data", label=[stars])
    with pytest.raises(
        ValueError, match="labels rows with 0, and 'stars' is a regression label; leave it out"
    ):
        source_of(root)
