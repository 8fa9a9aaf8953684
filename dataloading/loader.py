"""Source and partition made into an iterator of batches, read ahead by background threads."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from dataloading.batch import Batch, fixed_layout, jagged
from dataloading.columns import Allocate, Columns, Source
from dataloading.partition import RankRows, Shuffle, check_batch, num_steps, rows_at


class Loader:
    """Batches of one split for one rank, in an order that depends on the step alone.

    Each of `threads` threads reads a whole batch, straight into the tensors that are handed out; up to `prefetch`
    batches are read or being read at a time, so no more threads than that are busy. Batches come in order whatever the
    threads do, and stay on the host: the step moves them.

    Args:
        source: where rows come from.
        split: `train`, `test`, ...
        batch_size: rows of a batch over all ranks.
        rank: of `world_size` ranks.
        world_size: divides `batch_size`.
        device: pinned memory is used if this is a GPU.
        seed: of the shuffle.
        shuffle_block: rows that stay together when an epoch is shuffled, rounded up to what the source reads together; 0
            keeps the order on disk.
        prefetch: batches read ahead.
        threads: reader threads.

    Raises:
        ValueError: the split does not exist, the training split is smaller than a batch, or the batch does not divide
            over the ranks.

    Attributes:
        steps_per_epoch: batches of an epoch, its partial last one counted.
        data_wait_ms: how long the last `next()` waited for its batch.
    """

    def __init__(
        self,
        source: Source,
        split: str,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        seed: int = 0,
        shuffle_block: int = 0,
        prefetch: int = 4,
        threads: int = 4,
    ) -> None:
        self.source = source
        self.split = split
        self.batch_size = batch_size
        self.num_rows = source.num_rows(split)
        check_batch(batch_size, world_size)
        if split == "train" and batch_size > self.num_rows:
            raise ValueError(
                f"batch size {batch_size} is larger than the {self.num_rows} rows of split '{split}' of "
                f"{source.spec.root or 'the synthetic stream'}; want at most that many"
            )
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):  # the threads must be told which one
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.seed = seed
        granule = source.granule(split)
        self.shuffle_block = -(-shuffle_block // granule) * granule
        self.prefetch = prefetch
        self.threads = threads
        self.steps_per_epoch = num_steps(self.num_rows, batch_size)
        self.data_wait_ms = 0.0

    def rows(self, step: int) -> RankRows:
        """Return the rows of this rank at `step`, counted over epochs."""
        epoch, step = divmod(step, self.steps_per_epoch)
        shuffle = Shuffle(self.seed, epoch, self.shuffle_block) if self.shuffle_block else None
        return rows_at(
            step,
            num_rows=self.num_rows,
            batch_size=self.batch_size,
            rank=self.rank,
            world_size=self.world_size,
            shuffle=shuffle,
        )

    def batch(self, step: int) -> Batch:
        """Read the batch of `step` in the calling thread."""
        rows = self.rows(step)
        memory = _Memory(pin=self.device.type == "cuda")
        columns = self.source.read(self.split, rows.runs, rows.padded_to, memory.allocate)
        spec = self.source.spec
        keys = tuple(feature.name for feature in spec.categorical)
        hotness = tuple(feature.hotness for feature in spec.categorical)
        values = memory.tensor(columns.values)
        shared = None
        if None in hotness:
            lengths = memory.tensor(_lengths(columns, hotness, rows, memory.allocate))
            ids = jagged(keys, values, lengths, None, [len(each) for each in columns.ids])
        else:
            shared = fixed_layout(keys, hotness, rows.num_valid, rows.padded_to, values.dtype)  # type: ignore[arg-type]
            ids = shared.jagged(values)
        numerical, labels = memory.tensor(columns.numerical), memory.tensor(columns.labels)
        return Batch(numerical, labels, ids, rows.num_valid, rows.global_valid, shared)

    def batches(self, start_step: int = 0, num_steps: int | None = None) -> Iterator[Batch]:
        """Yield the batches of steps [start_step, start_step + num_steps), epoch after epoch.

        Args:
            start_step: counted over epochs; resuming needs nothing else.
            num_steps: None goes on for ever.

        Raises:
            ValueError: what the source found wrong with a row, raised at the batch that holds it.
        """
        pool = ThreadPoolExecutor(
            min(self.threads, self.prefetch),
            thread_name_prefix=f"loader-{self.split}",
            initializer=self._enter_thread,
        )
        steps = islice(count(start_step), num_steps)
        try:
            pending = deque(pool.submit(self.batch, step) for step in islice(steps, self.prefetch))
            while pending:
                asked = perf_counter()
                batch = pending.popleft().result()
                self.data_wait_ms = (perf_counter() - asked) * 1e3
                pending.extend(pool.submit(self.batch, step) for step in islice(steps, 1))
                yield batch
                del batch  # the consumer alone decides how long it lives
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _enter_thread(self) -> None:
        # A new thread starts on GPU 0 and would make a context there when it pins memory.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)


class _Memory:
    """Hands tensors out as arrays and finds them again, since pinning is a property of the tensor's own storage."""

    def __init__(self, pin: bool) -> None:
        self._pin = pin
        self._tensors: dict[int, tuple[np.ndarray, Tensor]] = {}

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        tensor = torch.empty(
            shape, dtype=getattr(torch, np.dtype(dtype).name), pin_memory=self._pin
        )
        array = tensor.numpy()
        self._tensors[id(array)] = (array, tensor)
        return array

    def tensor(self, array: np.ndarray) -> Tensor:
        return self._tensors[id(array)][1]


def _lengths(
    columns: Columns, hotness: tuple[int | None, ...], rows: RankRows, allocate: Allocate
) -> np.ndarray:
    """Return the ids of each row, feature after feature, [F * B], in the dtype of the ids."""
    lengths = allocate((len(hotness) * rows.padded_to,), columns.values.dtype)
    table = lengths.reshape(len(hotness), rows.padded_to)
    for row, each, ragged in zip(table, hotness, columns.lengths, strict=True):
        if each is None:
            row[:] = ragged
        else:
            row[: rows.num_valid] = each
            row[rows.num_valid :] = 0
    return lengths
