"""Reader processes: the batches of reader threads, errors of dying processes, and no process left at the end.

pytest tests/dataloading/test_reader_processes.py
"""

import faulthandler
import gc
import os
import resource
import signal
import subprocess
import textwrap
from itertools import islice

import numpy as np
import pytest
import torch

from configs.schema import Config
from dataloading.batch_memory import Slots
from dataloading.dataset.binary import BinarySource
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.source import Source
from dataloading.loader import Loader
from dataloading.reader_processes import ReaderProcesses, shared_memory
from nn.build import Loaders, open_source
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.datasets import make_loader, synthetic_source
from tests.helpers.forks import python
from tests.helpers.rank_processes import has_ended, wait_until
from tests.helpers.runs import records

ROWS = {"train": 50, "test": 21}


def write(root, file_format="binary"):
    features = [CategoricalFeature.of("row", 100), CategoricalFeature.of("pair", 100, 2)]
    with write_dataset(
        root, categorical=features, numerical=("n",), file_format=file_format
    ) as dataset:
        for split, num_rows in ROWS.items():
            numbers = np.arange(num_rows)
            pairs = np.stack([numbers, numbers + 1], axis=1) % 100
            dataset[split].append(
                numerical=numbers[:, None],
                labels=numbers % 2,
                ids={"row": numbers % 100, "pair": pairs},
            )
    return FeatureSpec.load(root)


def write_ragged(root, length_of, file_format="binary"):
    """Write two ragged features between fixed ones; row r has length_of(r) and r % 3 ids in them."""
    features = [
        CategoricalFeature.of("row", 100),
        CategoricalFeature.of("tags", 1000, None),
        CategoricalFeature.of("pair", 100, 2),
        CategoricalFeature.of("few", 10, None),
    ]
    with write_dataset(
        root, categorical=features, numerical=("n",), weight="w", file_format=file_format
    ) as dataset:
        for split, num_rows in ROWS.items():
            rows = np.arange(num_rows)
            lengths = {"tags": np.array([length_of(row) for row in rows]), "few": rows % 3}
            dataset[split].append(
                numerical=rows[:, None],
                labels=rows % 2,
                weights=rows + 1.0,
                ids={
                    "row": rows % 100,
                    "tags": np.arange(lengths["tags"].sum()) % 1000,
                    "pair": np.stack([rows, rows + 1], axis=1) % 100,
                    "few": np.arange(lengths["few"].sum()) % 10,
                },
                lengths=lengths,
            )
    return FeatureSpec.load(root)


@pytest.fixture
def source(tmp_path) -> BinarySource:
    return BinarySource(write(tmp_path / "dataset"))


@pytest.fixture
def forked():
    """Return a function that makes loaders with reader processes; check that the processes end."""
    loaders = []

    def make(source: Source, split: str, **options) -> Loader:
        loaders.append(make_loader(source, split, **options))
        loaders[-1].fork_readers()
        return loaders[-1]

    yield make
    for loader in loaders:
        pids = loader.reader_pids
        loader.close()
        assert loader.reader_pids == []
        assert all(has_ended(pid) for pid in pids)


def contents(batch) -> list:
    lengths = batch.ids.lengths().tolist()
    weights = () if batch.weights is None else (batch.weights,)
    columns = (batch.numerical, batch.labels, batch.ids.values(), *weights)
    return [*(value.clone() for value in columns), lengths, batch.num_valid, batch.global_valid]


def same(one: list, other: list) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def test_the_rows_of_a_step_are_not_computed_where_batches_are_taken(source, forked, monkeypatch):
    loader = forked(source, "train", batch_size=8, shuffle_block=1)
    computed, rows_at = [], loader._rows
    monkeypatch.setattr(loader, "_rows", lambda *of: (computed.append(of), rows_at(*of))[1])
    steps = 3 * loader.steps_per_epoch
    taken = [(batch.num_valid, batch.layout.rows) for batch in loader.batches(num_steps=steps)]
    assert len(computed) == 2
    wanted = [rows_at(step, None) for step in range(steps)]
    assert taken == [(rows.num_valid, rows.padded_to) for rows in wanted]
    assert len(set(taken)) == 2


@pytest.mark.parametrize(
    ("kind", "workers", "prefetch"),
    [
        *(("files", *sizes) for sizes in ((1, 4), (4, 1), (2, 9))),
        ("synthetic", 3, 4),
        ("ragged", 1, 1),
        ("ragged parquet", 3, 4),
    ],
)
def test_processes_and_threads_read_the_same_batches(
    kind, source, forked, workers, prefetch, tmp_path
):
    if kind == "synthetic":
        settings = {"num_numerical": 2, "cardinalities": [7, 90], "hotness": [1, 3], "seed": 2}
        source = synthetic_source(train_rows=50, test_rows=21, **settings)
    elif kind != "files":
        file_format = "parquet" if kind == "ragged parquet" else "binary"
        spec = write_ragged(tmp_path / "ragged", lambda row: row % 5, file_format)
        source = open_dataset(spec)
    for split, block, batch_size, ranks in (
        ("train", 3, 8, 2),
        ("train", 0, 10, 1),
        ("test", 0, 64, 4),
    ):
        for rank in range(ranks):
            options = {"batch_size": batch_size, "rank": rank, "world_size": ranks}
            options |= {"shuffle_block": block, "prefetch": prefetch, "seed": 5}
            plain = make_loader(source, split, **options)
            loader = forked(source, split, workers=workers, **options)
            assert len(loader.reader_pids) == min(workers, prefetch)
            # Two epochs and a bit, with their partial batches; then from the middle, as a resumed run.
            for start in (0, 2):
                num_steps = 2 * plain.steps_per_epoch + 1
                found = [contents(batch) for batch in loader.batches(start, num_steps)]
                wanted = [contents(plain.batch(start + step)) for step in range(num_steps)]
                assert len(found) == num_steps
                assert all(map(same, found, wanted))


def test_a_batch_is_valid_until_the_second_next(source, forked):
    loader = forked(source, "train", batch_size=5, prefetch=2)
    before = None
    for step, batch in enumerate(loader.batches(num_steps=20)):
        if before is not None:
            assert before.ids["row"].values().tolist() == list(
                range((step - 1) % 10 * 5, (step - 1) % 10 * 5 + 5)
            )
        before = batch


def test_an_iterator_that_is_dropped_early_disturbs_no_later_one(source, forked):
    loader = forked(source, "train", batch_size=5, prefetch=4)
    for start in range(4):
        batches = loader.batches(start, 8)
        assert next(batches).ids["row"].values().tolist()[0] == start * 5
        batches.close()


def test_an_error_reaches_the_consumer_at_its_batch_and_spares_later_reads(tmp_path, forked):
    spec = write(tmp_path / "dataset")
    path = spec.splits["train"].ids["row"]
    ids = np.fromfile(path, np.int8)
    ids[33] = 111
    ids.tofile(path)
    loader = forked(BinarySource(spec), "train", batch_size=10)
    seen = []
    with pytest.raises(ValueError, match=f"feature 'row': id 111 at row 33 of {path} lies outside"):
        seen.extend(batch.ids["row"].values()[0].item() for batch in loader.batches(num_steps=5))
    assert seen == [0, 10, 20]
    assert len(list(loader.batches(0, 3))) == 3


class FailingSource(BinarySource):
    """Source that raises an error."""

    def __init__(self, spec: FeatureSpec, error: Exception) -> None:
        super().__init__(spec)
        self.error = error

    def read(self, *arguments):
        raise self.error


class OddError(Exception):
    """Error that cannot be constructed from its text."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (OddError(1, 2), RuntimeError, r"in a process that reads batches:(?s:.*)OddError: 1 and 2"),
        (MemoryError("no room"), MemoryError, "no room"),
        (OSError(5, "Input/output error", "row.bin"), OSError, "Input/output error: 'row.bin'"),
        (OSError("a library's own words"), OSError, "^a library's own words$"),
    ],
)
def test_other_errors_are_raised_as_by_a_thread(source, forked, error, kind, message):
    batches = forked(FailingSource(source.spec, error), "train", batch_size=10).batches()
    with pytest.raises(kind, match=message) as raised:
        next(batches)
    assert type(raised.value) is kind


def test_an_iterator_may_outlive_the_processes(source, forked):
    loader = forked(source, "train", batch_size=5)
    batches = loader.batches()
    next(batches)
    loader.close()
    batches.close()


def test_a_failed_fork_leaves_no_process(source, monkeypatch):
    fork, pids = os.fork, []

    def third_fails() -> int:
        if len(pids) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        pids.append(fork())
        return pids[-1]

    monkeypatch.setattr(os, "fork", third_fails)
    with pytest.raises(
        ValueError,
        match=r"process 3 of 4 that read batches cannot be started .*lower data\.workers",
    ):
        make_loader(source, "train", batch_size=5).fork_readers()
    assert len(pids) == 2
    assert all(has_ended(pid) for pid in pids)


def test_readers_of_the_first_loader_end_if_the_second_has_too_little_memory(source, monkeypatch):
    train, test = (make_loader(source, split, batch_size=5) for split in ("train", "test"))
    for loader in (train, test):
        loader.device = torch.device("cuda", 0)
    made = Slots.__init__
    pids = []

    def second_fails(slots: Slots, *sizes: int) -> None:
        pids.extend(train.reader_pids)
        if pids:
            raise OSError(12, "Cannot allocate memory")
        made(slots, *sizes)

    monkeypatch.setattr(Slots, "__init__", second_fails)
    with pytest.raises(
        ValueError,
        match=r"6 batches of \d\.\d MiB, .* do not fit in memory \(Cannot allocate memory\); lower data\.prefetch",
    ):
        Loaders(train, test).__enter__()
    assert len(pids) == 4
    assert all(has_ended(pid) for pid in pids)


def test_a_slot_is_no_larger_than_the_split(source, forked):
    loader = forked(source, "test", batch_size=2**40, world_size=4)
    (batch,) = loader.batches(num_steps=1)
    assert (batch.num_valid, batch.global_valid, len(batch.labels)) == (6, 21, 6)


@pytest.mark.parametrize(
    ("signum", "message"),
    [
        (signal.SIGKILL, "ended by SIGKILL; was it killed because memory ran out"),
        (signal.SIGBUS, "a file of the dataset became shorter while it was read"),
    ],
)
def test_a_process_that_dies_is_reported(source, forked, signum, message):
    faulthandler.disable()  # pytest's would dump the stack of a process that gets SIGBUS
    loader = forked(source, "train", batch_size=5, workers=2, prefetch=2)
    batches = loader.batches()
    next(batches)
    os.kill(loader.reader_pids[1], signum)
    # Batches that it had read before are still yielded.
    with pytest.raises(RuntimeError, match=message):
        list(islice(batches, 6))


def test_signals_that_end_a_run_leave_the_readers_to_it(source, forked):
    loader = forked(source, "train", batch_size=5)
    batches = loader.batches(num_steps=12)
    next(batches)
    for pid in loader.reader_pids:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, signum)
    assert len(list(batches)) == 11


def test_a_process_keeps_the_memory_of_its_arrays():
    faults = np.frombuffer(shared_memory(8 * 4), np.int64)

    def read(slot: int, number: int) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        arrays = [np.ones(2**19) for _ in range(8)]  # 8,192 pages
        del arrays
        faults[number] = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    readers = ReaderProcesses(read, num_slots=1, num_processes=1)
    for number in range(len(faults)):
        readers.start(number)
        readers.finish()
    readers.close()
    assert max(faults[1:]) < 100


def test_readers_end_with_the_process_that_forked_them():
    script = """
        import os, signal
        from tests.helpers.datasets import make_loader, synthetic_source
        source = synthetic_source(train_rows=50, test_rows=10, num_numerical=1, cardinalities=[5], seed=1)
        loader = make_loader(source, "train", batch_size=5)
        loader.fork_readers()
        next(loader.batches())
        print(*loader.reader_pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [python(), "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    pids = [int(word) for word in ended.stdout.split()]
    assert len(pids) == 4
    assert wait_until(lambda: all(has_ended(pid) for pid in pids), 10)


@pytest.mark.parametrize(("doublings", "by_thread"), [(0, [2, 7]), (1, [])])
def test_the_calling_thread_reads_a_batch_that_fits_in_no_slot(
    tmp_path, forked, monkeypatch, doublings, by_thread
):
    spec = write_ragged(tmp_path / "ragged", lambda row: 90 if 20 <= row < 30 else 1)
    monkeypatch.setattr("dataloading.batch_reader.SLOT_DOUBLINGS", doublings)
    plain = make_loader(BinarySource(spec), "train", batch_size=10)
    loader = forked(BinarySource(spec), "train", batch_size=10)
    assert loader.reader_pids
    wanted = [contents(plain.batch(step)) for step in range(10)]
    read = []
    monkeypatch.setattr(loader, "_read", lambda step: read.append(step) or plain.batch(step))
    found, grown = [], []
    for batch in loader.batches(0, 10):
        found.append(contents(batch))
        grown.append(batch.layout.doublings)
    assert all(map(same, found, wanted))
    assert grown == [(1, 0) if step in (2, 7) else () for step in range(10)]
    assert read == by_thread


@pytest.mark.parametrize("kept", [0, 1 << 28])
def test_processes_read_row_groups_and_threads_those_larger_than_a_batch(
    tmp_path, forked, monkeypatch, kept
):
    monkeypatch.setattr("dataloading.dataset.parquet.KEPT_BYTES", kept)
    monkeypatch.setattr("dataloading.dataset.parquet_writer.ROW_GROUP_ROWS", 8)
    spec = write(tmp_path / "parquet", "parquet")
    fits = kept > 0
    assert open_dataset(spec).granule("train") == (1 if fits else 8)
    options = {"batch_size": 10, "shuffle_block": 4, "seed": 3}
    plain = make_loader(open_dataset(spec), "train", **options)
    loader = forked(open_dataset(spec), "train", workers=2, **options)
    assert len(loader.reader_pids) == 2
    num_steps = 2 * plain.steps_per_epoch + 1
    found = [contents(batch) for batch in loader.batches(0, num_steps)]
    assert all(map(same, found, [contents(plain.batch(step)) for step in range(num_steps)]))
    small = forked(open_dataset(spec), "train", batch_size=4)
    assert bool(small.reader_pids) == fits
    assert next(small.batches()).num_valid == 4


class OwnerOfThreads:
    """Garbage that would end a process which collects it, as a process group that joins its threads does in a fork."""

    def __init__(self) -> None:
        self.itself, self.home = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGSEGV)


def test_a_process_collects_no_garbage_of_its_parent():
    memory = shared_memory(1)
    gc.disable()
    try:
        OwnerOfThreads()

        def read(slot: int, number: int) -> None:
            gc.collect()
            memory[slot] = number

        readers = ReaderProcesses(read, num_slots=1, num_processes=1)
    finally:
        gc.enable()
    readers.start(7)
    assert (readers.finish(), memory[0]) == (0, 7)
    readers.close()


def losses(config: Config, source: Source, *, processes: bool) -> list[float]:
    with ranks_of_cpu():
        built = build(config, source)
        if processes:
            built.train_loader.fork_readers()
            built.test_loader.fork_readers()
        found = built.train(0, 20)
        built.score(3)
        found += built.train(20, 25)
        pids = built.train_loader.reader_pids
        assert bool(pids) == processes
        built.train_loader.close()
        built.test_loader.close()
        return found


def test_a_run_is_the_same_with_processes_and_with_threads(tmp_path, monkeypatch):
    results, pids = [], []

    def enter(loaders: Loaders) -> Loaders:
        for loader in (loaders.train, loaders.test):
            loader.fork_readers()
            pids.extend(loader.reader_pids)
        return loaders

    options = [*TINY, "train.max_steps=24", "eval.per_epoch=1", "data.workers=2"]
    for name in ("threads", "processes"):
        if name == "processes":
            monkeypatch.setattr(Loaders, "__enter__", enter)
        run_dir = tmp_path / name
        assert run_command(*options, f"run_dir={run_dir}").exit_code == 0
        results.append(records(run_dir))
    assert results[0] == results[1]
    assert len(pids) == 4
    ended = run_command(*options, f"run_dir={tmp_path / 'diverged'}", "optimizer.lr=1e30")
    assert ended.exit_code == 3
    assert ended.err.startswith("error: the loss is")
    assert len(pids) == 8
    assert all(has_ended(pid) for pid in pids)


def test_a_model_learns_the_same_with_processes_and_with_threads():
    # An epoch of 10 steps and a tail.
    config = compose_config(*TINY, "data.synthetic.train_rows=650", "train.batch_size=64")
    source = open_source(config)
    assert losses(config, source, processes=True) == losses(config, source, processes=False)
