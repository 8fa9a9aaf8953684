"""Writer of deltas: training waits only until the changed rows are collected, and a thread writes them."""

import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from logging import Logger
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from torch import Tensor

from configs.messages import os_error_text
from configs.schema import CheckpointConfig, DeltaType
from dataloading.dataset.documents import read_regular
from dataloading.dataset.durable_files import sync_directory
from dataloading.keys.rekeyed import LEFT, Rekeyed
from nn.checkpoint.directory import DELTA, clear, commit, list_checkpoints, remove, unfinished
from nn.checkpoint.tensor_index import INDEX_FILE, UnreadableError
from nn.deltas.delta import CHAIN, KEYS, KeyChange, Link, delta_facts, identity
from nn.deltas.files import PIECE_ROWS, TakenRows, WrittenPart, changes, write_index, write_part
from nn.deltas.row_ids import encode_ids
from nn.deltas.scaled_rows import LEVELS
from nn.distributed.process_group import HostChannel, Ranks
from nn.sharding.sharded_tables import ShardedTables
from nn.sharding.tables import TouchedShard

THREAD_NAME = "delta-writer"
FREE_MEMORY = 0.5
"""Fraction of a GPU's free memory that a copy of a table's changed rows may take."""

Chain = Callable[[], dict[str, Any]]
"""Wait for a delta, and return the `chain` of a checkpoint of its step; ValueError if the delta could not be written."""


@dataclass(frozen=True, slots=True)
class DeltaRun:
    """Facts of a run for its deltas.

    `start`: the state that the run starts from; None if it is part of no chain. `start_rows`: rows of every table in that state;
    tables may have grown since. `forgotten`: rows that were overwritten in its checkpoint, and rows that have lost their key
    there, by the prefix of their tensors (`nn.checkpoint.forgetting`). `written`: called in a thread of rank 0 after every delta.
    """

    facts: Mapping[str, Any]
    start: Link | None
    start_rows: Mapping[str, int] = field(default_factory=dict)
    forgotten: Mapping[str, Sequence[int]] = field(default_factory=dict)
    written: Callable[[], None] = lambda: None


class DeltaWriter:
    """Writer of one delta at a time; all ranks must call its methods in the same order.

    If a delta cannot be written, one line reports it, and the next one holds its rows too. `needs_base`: whether no checkpoint
    holds the state that the first delta will begin at.
    """

    def __init__(
        self,
        directory: Path,
        tables: ShardedTables,
        dense: Callable[[], Mapping[str, Tensor]],
        run: DeltaRun,
        config: CheckpointConfig,
        ranks: Ranks,
        logger: Logger,
    ) -> None:
        self._written = run.written
        self._directory, self._tables, self._dense = directory, tables, dense
        self._facts, self._config = dict(run.facts), config
        self._integers = config.delta_dtype.name if config.delta_dtype in LEVELS else None
        self._ranks, self._logger = ranks, logger
        self._channel = HostChannel()
        is_cuda = ranks.device.type == "cuda"
        self._stream = torch.cuda.Stream(ranks.device) if is_cuda else None
        self.needs_base = run.start is None
        # A new chain has a name that no other one has; its first state is that of the first save.
        name = self._channel.broadcast(secrets.token_hex(16))
        self.end = run.start or Link(name, -1)
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._taken: list[TakenRows] = []
        self._retired: dict[str, np.ndarray] = {}
        self._rekeyed: dict[str, Rekeyed] = {}
        if run.start is not None:
            self._clear()
        for one in tables.touched_shards():
            # Rows by which tables have grown are in no parent, whether a step updates them or not.
            shard = one.shard
            before = run.start_rows.get(shard.table, shard.row_offset + len(shard.weight))
            one.touched[max(before - shard.row_offset, 0) :] = 1
            gone = torch.tensor(run.forgotten.get(f"tables.{shard.table}", ())).long()
            gone -= shard.row_offset
            mine = gone[(gone >= 0) & (gone < len(shard.weight))]
            one.touched[mine.to(one.touched.device)] = 1
        if tables.rekeyed is not None:
            for name in tables.rekeyed.sizes:
                rows = np.array(run.forgotten.get(f"{KEYS}{name}", ()), np.int64)
                tables.rekeyed.add({name: Rekeyed(rows, np.full(len(rows), LEFT))})

    def _clear(self) -> None:
        """Remove the deltas after the state that the run starts from, which are written again."""
        self._ranks.run_on_rank0(lambda: clear(self._directory, self.end.step))

    def retire(self, table: str, rows: np.ndarray) -> None:
        """Let the next delta name rows of a table, ascending, int64, whose values are retired: its tombstones."""
        self._retired[table] = rows

    def save(
        self, num_steps: int, trainer: Mapping[str, Any], beat: Callable[[], None] = lambda: None
    ) -> Chain:
        """Start a delta when the previous one is written; without a step since then there is none.

        `beat`: called while the loop waits for the writer. Raises RuntimeError: another rank has ended.
        """
        self.wait(beat)
        if self.end.step < 0:
            self.end = replace(self.end, step=num_steps)
            self._clear()
        done: Future[Link] = Future()
        if num_steps > self.end.step:
            self._take()
            facts = self._facts | {"num_steps": num_steps, "trainer": dict(trainer)}
            on_gpu = self._stream is not None
            taken = torch.cuda.current_stream().record_event() if on_gpu else None
            self._thread = Thread(
                target=self._write,
                args=(num_steps, facts, self._further(), taken, done),
                name=THREAD_NAME,
                daemon=True,
            )
            self._thread.start()
        else:
            done.set_result(self.end)
        return lambda: asdict(done.result())

    def wait(self, beat: Callable[[], None] = lambda: None) -> None:
        """Wait for the delta that is being written. Raises RuntimeError: another rank has ended."""
        thread = self._thread
        while thread is not None and thread.is_alive():
            thread.join(0.2)
            beat()
        if self._error is not None:
            raise self._error

    def _take(self) -> None:
        """Copy the changed rows of this rank's shards, and forget which they were."""
        shards = self._tables.touched_shards()
        self._take_keys(shards)
        for lost in self._taken:  # of a delta that could not be written
            shards[lost.position].touched[lost.ids] = 1
        self._taken = []
        for position, one in enumerate(shards):
            shard, ids = one.shard, one.touched.nonzero().view(-1)
            if len(ids):
                part = (shard.table, position, shard.row_offset, shard.column_offset)
                weight, at = shard.weight, ids
                if shard.initial is not None:
                    weight, at = shard.rows(ids), torch.arange(len(ids))
                # A row has one scale, so shards of some columns keep their numbers.
                is_whole = weight.shape[1] == self._tables.described[shard.table][1]
                integers = self._integers if is_whole else None
                self._taken.append(TakenRows(*part, ids, self._rows(weight, at), integers))
        self._tables.clear_touched()

    def _take_keys(self, shards: Sequence[TouchedShard]) -> None:
        """Take the rows that got other keys, which have other weights then, whether an update changes them or not."""
        if self._tables.rekeyed is None:
            return
        self._tables.rekeyed.put_back(self._rekeyed)  # of a delta that could not be written
        self._rekeyed = self._tables.rekeyed.take()
        for one in shards:
            of_map = self._rekeyed.get(self._tables.keys_of.get(one.shard.table, ""))
            if of_map is not None:
                rows = of_map.rows - one.shard.row_offset
                mine = rows[(rows >= 0) & (rows < len(one.shard.weight))]
                one.touched[torch.from_numpy(mine).to(one.touched.device)] = 1

    def _rows(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Return a copy of rows, on a GPU if it has room, so that training need not wait for the copy to the host."""
        as_bf16 = self._config.delta_dtype is DeltaType.bf16
        dtype = torch.bfloat16 if as_bf16 else weight.dtype
        num_bytes = len(ids) * weight.shape[1] * weight.itemsize
        if weight.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(weight.device)
            if num_bytes > FREE_MEMORY * free:
                rows = torch.empty(len(ids), weight.shape[1], dtype=dtype)
                for some, piece in zip(rows.split(PIECE_ROWS), ids.split(PIECE_ROWS), strict=True):
                    some.copy_(weight.index_select(0, piece))
                return rows
        # Of a GPU's table in host memory only the mask is on the GPU.
        return weight.index_select(0, ids.to(weight.device)).to(dtype)

    def _further(self) -> dict[str, Tensor]:
        """Return the tensors that rank 0 writes beside the rows: a copy of the dense component, tombstones, and raw keys."""
        if not self._ranks.is_rank0:
            return {}
        further = {name: value.detach().clone() for name, value in self._dense().items()}
        for table, rows in self._retired.items():
            further[f"tables.{table}.tombstones"] = torch.from_numpy(encode_ids(rows))
        for name, new in self._rekeyed.items():
            if len(new.rows):
                further[f"{KEYS}{name}.rows"] = torch.from_numpy(encode_ids(new.rows))
                keys = np.where(new.keys == LEFT, 0, new.keys)
                further[f"{KEYS}{name}.keys"] = torch.from_numpy(keys)
        return further

    def _write(
        self,
        num_steps: int,
        facts: dict[str, Any],
        further: dict[str, Tensor],
        taken: "torch.cuda.Event | None",
        done: "Future[Link]",
    ) -> None:
        """Write the files, and commit on rank 0; all ranks receive the result. Runs in the thread."""
        try:
            if self._stream is not None and taken is not None:
                torch.cuda.set_device(self._ranks.device)
                self._stream.wait_event(taken)
            directory = unfinished(self._directory, num_steps)
            part: list[WrittenPart] | str
            try:
                directory.mkdir(parents=True, exist_ok=True)
                path = directory / f"rank_{self._ranks.rank:05}.bin"
                part = write_part(path, self._taken, further, self._stream)
            except OSError as error:
                part = os_error_text(error)
            parts = self._channel.gather(part)
            problem = next((part for part in parts if isinstance(part, str)), None)
            end = None
            if problem is None and self._ranks.is_rank0:
                try:
                    end = self._commit(num_steps, facts, [p for rank in parts for p in rank])
                except OSError as error:
                    problem = os_error_text(error)
            end, problem = self._channel.broadcast((end, problem))
        except BaseException as error:
            # `wait` raises it in the training loop.
            self._error = error
            done.set_exception(error)
            return
        if end is not None:
            self.end, self._taken, self._retired, self._rekeyed = end, [], {}, {}
            done.set_result(end)
            return
        done.set_exception(ValueError(f"its delta could not be written: {problem}"))
        if self._ranks.is_rank0:
            shutil.rmtree(unfinished(self._directory, num_steps), ignore_errors=True)
            self._logger.warning(
                f"the delta of step {num_steps} could not be written: {problem}. The run continues, and the next delta holds its "
                "rows too"
            )

    def _commit(self, num_steps: int, facts: dict[str, Any], parts: Sequence[WrittenPart]) -> Link:
        """Write index and facts, and complete the delta; return the state that it leads to."""
        directory = unfinished(self._directory, num_steps)
        described = self._tables.described
        write_index(directory, list(described), parts)
        tables = changes(described, parts, self._retired)
        sizes = {} if self._tables.rekeyed is None else self._tables.rekeyed.sizes
        keys = {n: KeyChange(rows, len(self._rekeyed[n].rows)) for n, rows in sizes.items()}
        parent = self.end
        index_bytes = read_regular(directory / INDEX_FILE)
        end = Link(identity(parent, num_steps, tables, keys, index_bytes), num_steps)
        has_integers = any(part.tensor.endswith(".scale") for part in parts)
        info = delta_facts(parent, tables, keys, has_integers=has_integers)
        facts = facts | {CHAIN: asdict(end), DELTA: info}
        commit(self._directory, num_steps, facts)
        try:
            # Before a checkpoint that it leads to.
            sync_directory(self._directory)
            if self._config.delta_keep is not None:
                for path in list_checkpoints(self._directory)[self._config.delta_keep :]:
                    remove(path)
        except (OSError, UnreadableError) as error:
            self._logger.warning(
                f"the delta of step {num_steps} was written, but not all that follows it: {error}. The next delta removes older "
                "ones"
            )
        self._written()
        return end
