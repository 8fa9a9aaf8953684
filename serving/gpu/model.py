"""A model directory on a GPU: lookup, dense component and scores of a padded batch as one CUDA graph."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Self
from weakref import WeakSet

import torch
from torch import Tensor

from configs.messages import shown
from nn.ops.cuda_graph import CudaGraph
from serving.gpu.dense import dense_on
from serving.gpu.inputs import InputLayout
from serving.gpu.lookup import ServedLookup
from serving.gpu.row_cache import RowCache
from serving.gpu.tables import DeviceTable, hot_rows, to_device
from serving.inference.dense import load_program
from serving.inference.key_rows import KeyRows, load_key_rows
from serving.inference.model_rows import Rows
from serving.inference.raw_values import RawValues
from serving.inference.requests import IdInputs
from serving.inference.scores import ScoreHead
from serving.inference.tables import MappedTable
from serving.manifest import DENSE, Manifest, ModelError

SMALLEST_BATCH = 32
RAGGED_IDS_PER_ROW = 8
"""Capacity for the ids of ragged features at first; it grows with the requests."""
MOST_ROWS_OF_TABLE = 2**31
"""Blocks hold ids in 32 bits: larger ones would become negative."""
SHARE_OF_FREE_MEMORY = 0.8
"""For tables, if no option says how much."""

# P: rows of a padded batch, T: columns of all embeddings, O: outputs


class GpuModel:
    """Tables and dense component of a model on a GPU.

    Batches are padded to the next power of two. Each such size is one CUDA graph, captured at the start; all read the same block
    of inputs and share their memory, so one thread at a time may score. `raw`: its transformation of raw values; None if only ids
    are served. `max_batch`: rows of the largest batch; more rows are scored in parts. `keys`: rows of raw keys by feature.
    """

    def __init__(
        self,
        manifest: Manifest,
        tables: Sequence[DeviceTable],
        dense: Callable[[Tensor, Tensor], Tensor],
        raw: RawValues | None,
        max_batch: int,
        dtype: torch.dtype,
        keys: Mapping[str, KeyRows],
    ) -> None:
        self.manifest, self.raw, self.id_inputs = manifest, raw, IdInputs(manifest, keys)
        self._tables, self._dense, self._dtype = tables, dense, dtype
        self._row_cache = RowCache(tables, manifest.id_slices())
        self.sampled = self._row_cache.sampled
        self._device = tables[0].hot.device
        self._head = ScoreHead(manifest, self._device)
        self._stream = _free_stream(self._device) if self._device.type == "cuda" else None
        _models.add(self)
        self._sizes = padded_sizes(max_batch)
        self._scores = self._host((max_batch, len(manifest.outputs)), torch.float32)
        self._make_room(RAGGED_IDS_PER_ROW * self._sizes[-1] if manifest.ragged else 0)

    @classmethod
    def load(
        cls,
        directory: Path,
        manifest: Manifest,
        *,
        max_batch: int,
        dense_dtype: torch.dtype = torch.float32,
        table_bytes: int | None = None,
        device: torch.device | str = "cuda",
    ) -> Self:
        """Copy a model directory to a GPU.

        `table_bytes`: of the tables on the GPU; None for most of what is free. `device`: a GPU; or the CPU, on which Triton
        interprets. Raises ModelError: it is damaged, or the GPU has too little memory.
        """
        device = torch.device(device)
        if max(feature.cardinality for feature in manifest.categorical) > MOST_ROWS_OF_TABLE:
            raise ModelError(f"{directory} has ids of more than 31 bits; serve it with device=cpu")
        if manifest.handed_out:
            raise ModelError(
                f"{directory} takes rows of table {shown(manifest.handed_out[0][0].name)} itself, such as those of events, which "
                "only a CPU looks up yet; serve it with device=cpu"
            )
        keys = load_key_rows(directory, manifest)
        raw = RawValues.load(directory, manifest, keys)
        dense = dense_on(load_program(directory / DENSE), device, dense_dtype)
        stored = [MappedTable(directory, table, manifest.dtype) for table in manifest.tables]
        if table_bytes is None:
            table_bytes = 1 << 62
            if device.type == "cuda":
                table_bytes = int(torch.cuda.mem_get_info(device)[0] * SHARE_OF_FREE_MEMORY)
        counts = hot_rows(manifest.tables, manifest.dtype, table_bytes)
        try:
            tables = to_device(stored, counts, device)
            return cls(manifest, tables, dense, raw, max_batch, dense_dtype, keys)
        except torch.OutOfMemoryError as error:
            raise ModelError(
                f"{directory}: the GPU has too little memory ({str(error).splitlines()[0]}); set a smaller table_gib or max_batch"
            ) from None

    def scores(self, *parts: Rows) -> Tensor:
        """Return the scores of rows, one part after another, float32 [B, O] in host memory."""
        size, count = self._sizes[-1], sum(map(len, parts))
        if count > size:
            rows = Rows.joined(parts)
            blocks = [rows.part(i, min(i + size, count)) for i in range(0, count, size)]
            return torch.cat([self.scores(block) for block in blocks])
        needed = sum(len(ids.values) for part in parts for ids in part.ragged.values())
        if needed > self._ragged_capacity:
            self._make_room(2 * needed)
        with torch.inference_mode():
            padded = next(size for size in self._sizes if size >= count)
            layout, queue = self._passes[padded]
            used = layout.fill(self._pinned, parts)
            self._block[:used].copy_(self._pinned[:used], non_blocking=True)
            scores = self._scores[:count]
            scores.copy_(queue()[:count], non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._row_cache.learn(parts)
            return scores.clone()

    def _make_room(self, ragged_ids: int) -> None:
        """Allocate the block of inputs for so many ids of ragged features, and capture the graphs that read it.

        Raises OutOfMemoryError: the GPU has too little memory; smaller requests are answered as before.
        """
        size = InputLayout(self.manifest, self._sizes[-1]).first_value + ragged_ids
        pinned = self._host((size,), torch.int32)
        block = torch.zeros(size, dtype=torch.int32, device=self._device)
        # By padded size: where its inputs lie, and what queues its pass and returns scores [P, O], which the next overwrites.
        passes: dict[int, tuple[InputLayout, Callable[[], Tensor]]] = {}
        # The largest first: the others find their memory in its pool.
        first: CudaGraph | None = None
        for padded in reversed(self._sizes):
            layout = InputLayout(self.manifest, padded)
            queue = self._function(layout, block)
            if self._stream is not None:
                with torch.inference_mode():
                    graph = CudaGraph(queue, stream=self._stream, beside=first)
                first, queue = first or graph, graph.replay
            passes[padded] = layout, queue
        self._ragged_capacity, self._passes = ragged_ids, passes
        self._pinned, self._block = pinned, block

    def _function(self, layout: InputLayout, block: Tensor) -> Callable[[], Tensor]:
        look_up = ServedLookup(self.manifest, self._tables, layout)
        num_columns, dtype = self.manifest.num_columns, self._dtype
        dense, head = self._dense, self._head

        def scores() -> Tensor:
            out = torch.empty(layout.num_rows, num_columns, dtype=dtype, device=block.device)
            look_up(block, out)
            return head(dense(layout.numerical(block), out).float(), layout.keep_rates(block))

        return scores

    def _host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=self._device.type == "cuda")


_models: "WeakSet[GpuModel]" = WeakSet()
"""Those that exist."""


def _free_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream on which no other model that exists was captured.

    cuBLAS has one workspace per stream, so the graphs of a stream write to the same memory; and a model answers while the next
    one is captured.
    """
    held = {model._stream for model in _models}
    streams = (_capture_stream(device, number) for number in count())
    return next(stream for stream in streams if stream not in held)


@cache
def _capture_stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def padded_sizes(max_batch: int) -> list[int]:
    """Return the sizes of padded batches, ascending: powers of two, and the largest batch itself."""
    sizes, size = [], SMALLEST_BATCH
    while size < max_batch:
        sizes.append(size)
        size *= 2
    return [*sizes, max_batch]
