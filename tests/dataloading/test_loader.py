"""Loader: the same batches for any timing of the threads, and no thread left at the end.

pytest tests/dataloading/test_loader.py
"""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dataloading.batch import Batch
from dataloading.dataset.binary import BinarySource
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.loader import Loader
from tests.helpers.datasets import make_loader

ROWS = {"train": 50, "test": 21}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a dataset whose columns all hold the row number."""
    root = tmp_path_factory.mktemp("loader") / "dataset"
    features = [CategoricalFeature.of("row", 100), CategoricalFeature.of("pair", 100, 2)]
    with write_dataset(root, categorical=features, numerical=("n", "m")) as dataset:
        for split, num_rows in ROWS.items():
            rows = np.arange(num_rows)
            dataset[split].append(
                numerical=np.stack([rows, -rows], axis=1),
                labels=rows % 2,
                ids={"row": rows, "pair": np.stack([rows, rows + 1], axis=1)},
            )
    return root


@pytest.fixture(scope="module")
def source(root: Path) -> BinarySource:
    return BinarySource(FeatureSpec.load(root))


@pytest.fixture(scope="module")
def ragged_source(tmp_path_factory: pytest.TempPathFactory) -> BinarySource:
    """Return a source whose row r has the ids 0 ... r % 3 - 1 of `tags` and the id r of `row`."""
    root = tmp_path_factory.mktemp("ragged") / "dataset"
    features = [CategoricalFeature.of("tags", 3, None), CategoricalFeature.of("row", 100)]
    with write_dataset(root, categorical=features) as dataset:
        for split, num_rows in ROWS.items():
            rows = np.arange(num_rows)
            flat = np.concatenate([np.arange(row % 3) for row in rows])
            dataset[split].append(
                labels=rows % 2, ids={"tags": flat, "row": rows}, lengths={"tags": rows % 3}
            )
    return BinarySource(FeatureSpec.load(root))


def rows_of(batch: Batch) -> list[int]:
    return batch.ids["row"].values().tolist()


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader-")]


def test_a_batch_holds_its_rows_in_every_column(source):
    loader = make_loader(source, "train", batch_size=8, shuffle_block=3, seed=4)
    for batch in loader.batches(num_steps=loader.steps_per_epoch):
        rows = torch.tensor(rows_of(batch))
        assert len(rows) == batch.num_valid == batch.global_valid
        assert torch.equal(batch.numerical, torch.stack([rows, -rows], dim=1).float())
        assert torch.equal(batch.labels, (rows % 2).float())
        assert (
            batch.ids["pair"].values().tolist()
            == torch.stack([rows, rows + 1], dim=1).flatten().tolist()
        )
        assert batch.ids.values().dtype == batch.ids.lengths().dtype == torch.int32


def test_a_ragged_batch_holds_its_rows(ragged_source, monkeypatch):
    plain = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **rest: plain(*args, **rest).fill_(77))
    loader = make_loader(
        ragged_source, "train", batch_size=16, rank=1, world_size=2, shuffle_block=1
    )
    batches = [loader.batch(step) for step in range(loader.steps_per_epoch)]
    assert [(batch.num_valid, len(batch.labels)) for batch in batches] == [(8, 8)] * 3 + [(1, 1)]
    batches.append(make_loader(ragged_source, "test", batch_size=32, rank=3, world_size=4).batch(0))
    assert (batches[-1].num_valid, len(batches[-1].labels)) == (3, 6)
    for batch in batches:
        rows, padding = rows_of(batch), [0] * (len(batch.labels) - batch.num_valid)
        assert batch.ids["row"].lengths().tolist() == [1] * batch.num_valid + padding
        assert batch.ids["tags"].lengths().tolist() == [row % 3 for row in rows] + padding
        assert batch.ids["tags"].values().tolist() == [
            tag for row in rows for tag in range(row % 3)
        ]
        assert batch.ids.length_per_key() == [len(batch.ids["tags"].values()), batch.num_valid]
        assert batch.labels.tolist() == [row % 2 for row in rows] + padding
        assert batch.numerical.shape == (len(batch.labels), 0)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_evaluation_sees_every_row_once_on_any_number_of_ranks(source, world):
    seen = []
    for rank in range(world):
        loader = make_loader(source, "test", batch_size=8, rank=rank, world_size=world)
        for batch in loader.batches(num_steps=loader.steps_per_epoch):
            seen += rows_of(batch)
            assert batch.ids["row"].lengths().tolist() == [1] * batch.num_valid + [0] * (
                len(batch.labels) - batch.num_valid
            )
            assert not batch.labels[batch.num_valid :].any()
            assert not batch.numerical[batch.num_valid :].any()
    assert sorted(seen) == list(range(ROWS["test"]))


@pytest.mark.parametrize(("threads", "prefetch"), [(1, 1), (1, 4), (4, 1), (4, 8), (2, 100)])
def test_order_depends_on_neither_threads_nor_prefetch(source, threads, prefetch):
    plain = make_loader(source, "train", batch_size=8, shuffle_block=2, seed=1)
    wanted = [rows_of(plain.batch(step)) for step in range(15)]
    loader = make_loader(
        source, "train", batch_size=8, shuffle_block=2, seed=1, workers=threads, prefetch=prefetch
    )
    assert [rows_of(batch) for batch in loader.batches(num_steps=15)] == wanted


class SlowSource(BinarySource):
    """Source that is slowest for the first rows."""

    def read(self, split, runs, *rest):
        time.sleep(0.03 if runs[0, 0] == 0 else 0)
        return super().read(split, runs, *rest)


def test_a_slow_batch_is_not_overtaken(source):
    loader = make_loader(SlowSource(source.spec), "test", batch_size=3, workers=4, prefetch=7)
    batches = loader.batches(num_steps=7)
    assert rows_of(next(batches)) == [0, 1, 2]
    assert [rows_of(batch)[0] for batch in batches] == [3, 6, 9, 12, 15, 18]


def test_resuming_at_a_step_continues_the_same_run(source):
    def loader() -> Loader:
        return make_loader(source, "train", batch_size=8, shuffle_block=4, seed=2)

    whole = [rows_of(batch) for batch in loader().batches(num_steps=20)]
    for step in (1, 6, 7, 13):
        assert [rows_of(batch) for batch in loader().batches(step, 20 - step)] == whole[step:]


def test_epochs_follow_each_other_in_new_orders(source):
    loader = make_loader(source, "train", batch_size=20, shuffle_block=1)
    assert loader.steps_per_epoch == 3
    epochs = [
        [row for batch in loader.batches(3 * epoch, 3) for row in rows_of(batch)]
        for epoch in range(3)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(50))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_without_a_shuffle_the_order_is_that_on_disk(source):
    loader = make_loader(source, "train", batch_size=20)
    assert [row for batch in loader.batches(num_steps=3) for row in rows_of(batch)] == list(
        range(50)
    )


def test_without_a_number_of_steps_batches_never_end(source):
    batches = make_loader(source, "test", batch_size=21).batches()
    assert [len(rows_of(next(batches))) for _ in range(5)] == [21] * 5
    batches.close()


class CountingSource(BinarySource):
    reads = 0

    def read(self, *arguments):
        self.reads += 1
        return super().read(*arguments)


def test_no_more_than_prefetch_batches_are_read_ahead(source):
    counting = CountingSource(source.spec)
    batches = make_loader(counting, "train", batch_size=1, workers=2, prefetch=3).batches()
    next(batches)
    time.sleep(0.1)
    assert counting.reads == 1 + 3
    batches.close()


def test_an_error_in_a_thread_reaches_the_consumer_at_its_batch(root, tmp_path):
    spec = FeatureSpec.load(root)
    bad = np.fromfile(root / "train/row.bin", np.int8)
    bad[33] = 111
    path = tmp_path / "row.bin"
    bad.tofile(path)
    spec.splits["train"].ids["row"] = path
    loader = make_loader(BinarySource(spec), "train", batch_size=10)
    seen = []
    with pytest.raises(
        ValueError, match=f"feature 'row': id 111 at row 33 of {path} lies outside its table of 100"
    ):
        seen.extend(rows_of(batch) for batch in loader.batches(num_steps=5))
    assert [batch[0] for batch in seen] == [0, 10, 20]
    gc.collect()
    assert loader_threads() == []


def test_closing_early_leaves_no_thread(source):
    batches = make_loader(source, "train", batch_size=2, workers=3, prefetch=6).batches()
    next(batches)
    assert loader_threads()
    batches.close()
    assert loader_threads() == []


def test_dropping_the_iterator_leaves_no_thread(source):
    for _ in make_loader(source, "train", batch_size=2).batches():
        break
    gc.collect()
    assert loader_threads() == []


def test_a_batch_does_not_change_while_others_are_read(source):
    loader = make_loader(source, "train", batch_size=5)
    kept = list(loader.batches(num_steps=10))
    assert [rows_of(batch) for batch in kept] == [
        list(range(step * 5, step * 5 + 5)) for step in range(10)
    ]


def test_a_training_batch_larger_than_the_split_is_named(source, root):
    message = f"batch size 64 is larger than the 50 rows of split 'train' of {root}; want a train.batch_size of at most that many"
    with pytest.raises(ValueError, match=message):
        make_loader(source, "train", batch_size=64)


def test_an_evaluation_batch_may_be_larger_than_the_split(source):
    loader = make_loader(source, "test", batch_size=64, rank=1, world_size=4)
    (batch,) = loader.batches(num_steps=loader.steps_per_epoch)
    assert (batch.num_valid, batch.global_valid, len(batch.labels)) == (6, 21, 6)


def test_a_world_that_does_not_divide_the_batch_is_named(source):
    with pytest.raises(
        ValueError, match=r"train.batch_size=10 does not divide evenly over 4 ranks; .* such as 8"
    ):
        make_loader(source, "train", batch_size=10, world_size=4)


def test_an_unknown_split_is_named(source):
    with pytest.raises(ValueError, match="no split 'dev', only train, test"):
        make_loader(source, "dev", batch_size=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_for_a_gpu_are_pinned(source):
    batch = next(make_loader(source, "train", batch_size=8, device="cuda").batches(num_steps=1))
    assert batch.memory.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_of_reader_processes_is_reused_once_the_gpu_has_copied_it(source):
    loader = make_loader(source, "train", batch_size=5, prefetch=2, shuffle_block=1, device="cuda")
    loader.fork_readers()
    assert loader.reader_pids
    moved = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for batch in loader.batches(num_steps=30):
            assert batch.memory.is_pinned()
            torch.cuda._sleep(10_000_000)  # about 5 ms, for which the copies wait
            moved.append(batch.at(batch.memory.to("cuda", non_blocking=True)))
    torch.cuda.synchronize()
    loader.close()
    for step, batch in enumerate(moved):
        wanted = loader.batch(step)
        assert torch.equal(batch.ids.values().cpu(), wanted.ids.values())
        assert torch.equal(batch.numerical.cpu(), wanted.numerical)
        assert torch.equal(batch.labels.cpu(), wanted.labels)
