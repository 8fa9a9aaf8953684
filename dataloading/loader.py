"""Loader: batches from a source and a partition, read ahead by threads or by processes."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import count, islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from dataloading.batch import Batch
from dataloading.batch_memory import Slots
from dataloading.batch_reader import BatchReader
from dataloading.dataset.source import EPOCH_ROWS, Source
from dataloading.gather import expand, runs_of
from dataloading.keys.batch_keys import BatchKeys
from dataloading.keys.pipeline import KeyPipeline
from dataloading.partition import RankRows, Shuffle, balanced, check_batch, num_steps, rows_at
from dataloading.reader_processes import ReaderProcesses

if TYPE_CHECKING:
    # Numba is imported only where there are keys.
    from dataloading.keys.described_keys import DescribedKeys
    from dataloading.keys.key_maps import KeyMaps

Read = TypeVar("Read")
READERS = 4
RAGGED_READERS = 8
"""Ragged rows take two to three times as long to read: with four readers, the step of one H200 waited for them."""
RUNS_OF_RANK = 64
"""Runs of rows that a rank gets where batches are balanced. More take longer to deal, and part rows that share events."""
SPREAD_STEPS = 16
"""Batches that are read to measure what batches of events ask for."""
GOLDEN = (5**0.5 - 1) / 2
SLOTS_IN_USE = 2
"""Slots beyond the batches read ahead: one for the batch in use, one that the device may still copy from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Settings of a loader that are the same on every rank."""

    batch_size: int  # rows of a batch over all ranks
    seed: int = 0  # of the shuffle
    # rows that stay together when an epoch is shuffled, rounded up to the source's granule; 0 keeps the order on disk
    shuffle_block: int = 0
    # batches read ahead; None: `READERS`, or `RAGGED_READERS` where a feature is ragged
    prefetch: int | None = None
    workers: int | None = None  # threads or processes that read; None: the same
    # whether the rows are scored and not trained, so that a split may have fewer than a batch
    only_scores: bool = False
    admits_keys: bool = False  # whether raw keys are counted and admitted, which is for training
    # whether the ranks' rows of a full batch have about equally many events, which is for training
    balances_events: bool = False


class Loader:
    """Batches of one split for one rank, in an order that depends on the step alone.

    Each of `workers` threads, or processes after `fork_readers`, reads complete batches straight into their tensors. At most
    `prefetch` batches are in flight, so no more workers are busy. The batches are yielded in the order of the steps, independent
    of the timing of the workers. They are in host memory, and the training step copies them.

    `key_maps`: rows for raw keys; None for a dataset without. Raises ValueError: the split does not exist, the training
    split is smaller than a batch, or the batch does not divide over the ranks.
    """

    def __init__(
        self,
        source: Source,
        split: str,
        settings: LoaderSettings,
        *,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        key_maps: "KeyMaps | None" = None,
    ) -> None:
        self.source = source
        self._dynamic = [index for index, f in enumerate(source.spec.categorical) if f.is_dynamic]
        self._key_maps = key_maps if self._dynamic else None
        assert not self._dynamic or key_maps is not None, "raw keys need their maps"
        self._admits = settings.admits_keys
        # Keys are mapped in the order of the global batch, of which a rank's are a part.
        self._balances = settings.balances_events and world_size > 1 and not self._dynamic
        self.split = split
        self.batch_size = settings.batch_size
        self.num_rows = source.num_rows(split)
        is_trained = split == "train" and not settings.only_scores
        option = "train.batch_size" if is_trained else "eval.batch_size"
        check_batch(self.batch_size, world_size, option)
        if is_trained and self.batch_size > self.num_rows:
            raise ValueError(
                f"batch size {self.batch_size} is larger than the {self.num_rows} rows of split '{split}' of "
                f"{source.spec.root or 'the synthetic stream'}; want a train.batch_size of at most that many"
            )
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        # Reader threads need the index of the current device.
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.seed = settings.seed
        granule = source.granule(split)
        self.shuffle_block = -(-settings.shuffle_block // granule) * granule
        self._batch_reader = BatchReader(source, split, pin=self.device.type == "cuda")
        usual = RAGGED_READERS if self._batch_reader.num_ragged else READERS
        self.prefetch = settings.prefetch or usual
        self.workers = settings.workers or usual
        self.steps_per_epoch = num_steps(self.num_rows, self.batch_size)
        self._slots: Slots | None = None
        self._readers: ReaderProcesses | None = None

    def fork_readers(self) -> None:
        """Fork processes that read instead of threads; `ReaderProcesses` explains when to call this.

        The memory of batches is reused then. A batch stays valid until the second `next()` after its own.
        Copies of it must be queued before the next `next()`, on the stream that is current there.

        It does nothing with Parquet row groups larger than the batch of a rank: several processes would decode the
        same row group. A row group across the border of two batches is decoded twice in any case. Nor with rows that
        grow, of which the processes would know none that came later.

        The size of a batch with ragged features depends on its rows. A slot has room for twice the capacity of a step; a
        larger batch is read by the calling thread. Raises ValueError: the system has too little memory
        for the processes or for the batches that they read ahead.
        """
        is_decoded_twice = self.source.granule(self.split) > self.batch_size // self.world_size
        if is_decoded_twice or self.source.grows(self.split):
            return
        num_processes = min(self.workers, self.prefetch)
        self.source.before_fork(self.split, num_processes)
        size = -(-min(self.batch_size, self.num_rows) // self.world_size)
        num_slots, slot_bytes = self.prefetch + SLOTS_IN_USE, self._batch_reader.slot_bytes(size)
        try:
            slots = Slots(num_slots, slot_bytes, max(self._batch_reader.num_ragged, 1))
        except OSError as error:
            raise ValueError(
                f"{num_slots} batches of {slot_bytes / 2**20:.1f} MiB, which are read ahead, do not fit in memory "
                f"({error.strerror}); lower data.prefetch or the batch size"
            ) from None

        def read(slot: int, step: int) -> None:
            self._batch_reader.read_into(slots, slot, self.rows(step))

        self._slots = slots
        self._readers = ReaderProcesses(read, num_slots, num_processes)

    @property
    def reader_pids(self) -> list[int]:
        """Ids of the reader processes; empty if threads read."""
        return self._readers.pids if self._readers is not None else []

    def close(self) -> None:
        """End the reader processes, if any, and free their memory."""
        self.end_readers()
        if self._slots is not None:
            self._slots.unpin()
        self._slots = None

    def end_readers(self) -> None:
        """End the reader processes without waiting for the GPU, which may hang after another rank has failed."""
        if self._readers is not None:
            self._readers.close()
        self._readers = None

    def rows(self, step: int) -> RankRows:
        """Return the rows of this rank at `step`, counted over epochs.

        Balanced ones follow from the rows of the global batch alone, so that all ranks agree without an exchange.
        """
        shuffle = self._shuffle(step)
        rows = self._rows(step, shuffle)
        if not self._balances or rows.global_valid < self.batch_size:
            return rows
        whole = self._rows(step, shuffle, 0, 1).runs
        events = self.source.event_counts(self.split, whole)
        if events is None:
            return rows
        own = balanced(events, self.world_size, self._together)[self.rank]
        return replace(rows, runs=runs_of(expand(whole)[own]), global_rows=own.astype(np.int32))

    @cached_property
    def _together(self) -> int:
        """Rows that stay on one rank where batches are balanced: they divide those of a rank."""
        rows = self.batch_size // self.world_size
        most = max(rows // RUNS_OF_RANK, 1)
        return next(size for size in range(most, 0, -1) if rows % size == 0)

    def spread_steps(self) -> list[int]:
        """Return steps of full batches, spread over an epoch, that tell together what a batch asks for.

        None for rows without events, of which any batch tells it, for raw keys, which are admitted in the order of the steps,
        and for rows that grow.
        """
        num_full = self.num_rows // self.batch_size
        has_events = self.source.spec.sequences and not self.source.grows(self.split)
        if self._dynamic or not has_events or not num_full:
            return []
        # At no constant distance: windows of a log may have the same users at the same places.
        return sorted({int(number * GOLDEN % 1 * num_full) for number in range(SPREAD_STEPS)})

    def _shuffle(self, step: int) -> Shuffle | None:
        """Return the order of the epoch of `step`; None for that on disk."""
        epoch = step // self.steps_per_epoch
        return Shuffle(self.seed, epoch, self.shuffle_block) if self.shuffle_block else None

    def _rows(
        self,
        step: int,
        shuffle: Shuffle | None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> RankRows:
        """Return the rows of a rank at `step`, by default of this one."""
        found = rows_at(
            step % self.steps_per_epoch,
            num_rows=self.num_rows,
            batch_size=self.batch_size,
            rank=self.rank if rank is None else rank,
            world_size=world_size or self.world_size,
            shuffle=shuffle,
        )
        if not self.source.draws_anew:
            return found
        return replace(found, runs=found.runs + step // self.steps_per_epoch * EPOCH_ROWS)

    def batch(self, step: int) -> Batch:
        """Read the batch of `step` in the calling thread.

        In training the rows of raw keys are undefined, since keys are admitted in the order of the steps.
        """
        batch = self._read(step)
        if self._key_maps is not None and not self._admits:
            keys = self._described(batch, step)
            self._map_keys(lambda: keys)
        return batch

    def _read(self, step: int) -> Batch:
        return self._batch_reader.read(self.rows(step))

    def batches(
        self, start_step: int = 0, num_steps: int | None = None
    ) -> Generator[Batch, None, None]:
        """Yield the batches of steps [start_step, start_step + num_steps), epoch after epoch.

        `start_step`: first step, counted over epochs; resuming needs nothing else. `num_steps`: number of steps; None:
        without end. Raises ValueError: an invalid row, raised at the batch that holds it.
        """
        steps = islice(count(start_step), num_steps)
        if self._key_maps is not None and self._admits:
            self._key_maps.rewind()
        if self._readers is None or self._slots is None:
            return self._read_by_threads(steps)
        return self._read_by_processes(steps, self._readers, self._slots)

    def _in_order(
        self, steps: Iterator[int], start: Callable[[int], Callable[[], Read]]
    ) -> Generator[Read, None, None]:
        """Yield what was read at each of `steps`, of which `prefetch` are started ahead; `start` returns how to wait for it."""
        pending = deque(start(step) for step in islice(steps, self.prefetch))
        while pending:
            read = pending.popleft()()
            pending.extend(start(step) for step in islice(steps, 1))
            yield read
            del read  # so that the consumer holds the only reference

    def _read_by_threads(self, steps: Iterator[int]) -> Generator[Batch, None, None]:
        pool = ThreadPoolExecutor(
            min(self.workers, self.prefetch),
            thread_name_prefix=f"loader-{self.split}",
            initializer=self._enter_thread,
        )

        def start(step: int) -> Callable[[], Batch]:
            read = pool.submit(self._read, step)
            if mapper is None:
                return read.result

            def described() -> tuple[Batch, "DescribedKeys"]:
                return read.result(), self._described(read.result(), step)

            return mapper.submit(described, self._map_keys).result

        with ExitStack() as stack:
            mapper = self._mapper(stack)
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)
            yield from self._in_order(steps, start)

    def _read_by_processes(
        self, steps: Iterator[int], readers: ReaderProcesses, slots: Slots
    ) -> Generator[Batch, None, None]:
        assert not readers.num_pending, "one iterator at a time"
        if self.device.type == "cuda":
            slots.pin()
            # An earlier iterator may have been dropped while its last batch was being copied.
            torch.cuda.synchronize()

        # Counts do not depend on the order of rows, and all batches of an epoch but the last one have the same.
        counts = cache(lambda is_last: self._rows(self.steps_per_epoch - 1 if is_last else 0, None))

        def finished(step: int) -> tuple[int, Batch]:
            slot = readers.finish()
            rows = counts((step + 1) % self.steps_per_epoch == 0)
            batch = self._batch_reader.batch_in(slots, slot, rows)
            return slot, self._read(step) if batch is None else batch

        def described(step: int) -> tuple[tuple[int, Batch], "DescribedKeys"]:
            slot, batch = finished(step)
            return (slot, batch), self._described(batch, step)

        def start(step: int) -> Callable[[], tuple[int, Batch]]:
            slots.wait_for_copies(readers.next_slot)
            readers.start(step)
            if mapper is None:
                return partial(finished, step)
            return mapper.submit(partial(described, step), self._map_keys).result

        def drain() -> None:
            while readers.num_pending:
                with suppress(ValueError, OSError, MemoryError, RuntimeError):
                    readers.finish()

        with ExitStack() as stack:
            stack.callback(drain)
            mapper = self._mapper(stack)
            for slot, batch in self._in_order(steps, start):
                yield batch
                slots.are_copied(slot)

    def _mapper(self, stack: ExitStack) -> KeyPipeline | None:
        """Return the threads that map the keys of batches, in the order of the steps and ahead of them; None without keys.

        They end with `stack`; then nothing writes to a batch any more.
        """
        if self._key_maps is None:
            return None
        mapper = KeyPipeline(f"keys-{self.split}", self._enter_thread)
        stack.callback(mapper.close)
        if self._admits:
            stack.callback(self._key_maps.stop)
        return mapper

    def _map_keys(self, described: "Callable[[], DescribedKeys]") -> None:
        assert self._key_maps is not None, "there are raw keys"
        if self._admits:
            self._key_maps.map(described)
        else:
            self._key_maps.look_up(described)

    def _described(self, batch: Batch, step: int) -> "DescribedKeys":
        """Return the raw keys of a batch.

        In training, one rank of a node maps those of all ranks, so that every node has the same maps: columns are read quickly,
        and the nodes exchange nothing.
        """
        maps = self._key_maps
        assert maps is not None, "there are raw keys"
        maps_all = self._admits and maps.maps_all
        rank, world_size = (0, 1) if maps_all else (self.rank, self.world_size)
        runs = self._rows(step, self._shuffle(step), rank, world_size).runs
        first = min(self.rank * len(batch.labels), batch.global_valid) if maps_all else 0

        def keys_of(feature: int) -> BatchKeys:
            keys = self.source.read_keys(self.split, runs, feature)
            if keys.lengths is None:
                before = first * (self.source.spec.categorical[feature].hotness or 1)
            else:
                before = int(keys.lengths[:first].sum())
            own = batch.feature(self.source.spec.categorical[feature].name).values()
            return BatchKeys(keys, own.numpy(), before)

        return maps.describe(keys_of)

    def _enter_thread(self) -> None:
        # A new thread starts on GPU 0 and would create a CUDA context there when it pins memory.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
