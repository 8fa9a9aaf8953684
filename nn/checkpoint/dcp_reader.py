"""What torch.distributed.checkpoint loads through: the tensors that `nn.checkpoint.tensor_index` finds, no pickle among them."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from nn.checkpoint.tensor_index import ChunkReader, StoredTensor


class DcpReader(dcp.StorageReader):
    """Reads, of each tensor, the rows that this rank holds; what is stored in another dtype is rounded to the nearest.

    torch's own reader would take every chunk that it needs a row of into memory as a whole, on every rank.

    Args:
        tensors: what is stored, by name.
        sizes: what each is loaded into; larger than stored in the first dimension where a table has grown, whose
            further rows are then left as they are.
    """

    def __init__(
        self, tensors: Mapping[str, StoredTensor], sizes: Mapping[str, torch.Size]
    ) -> None:
        self._tensors = tensors
        self._sizes = sizes
        self._chunks = {
            (name, chunk.offsets): chunk for name, each in tensors.items() for chunk in each.chunks
        }

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Say which chunks there are."""
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, tensor in self._tensors.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes))
                for each in tensor.chunks
            ]
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            size = self._sizes.get(name, torch.Size(tensor.size))
            described[name] = TensorStorageMetadata(properties, size, chunks)
        return Metadata(described)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for, in the order of the files."""

        def place(item: ReadItem) -> tuple[str, int]:
            chunk = self._chunks[_key(item)]
            return chunk.file.name, chunk.start

        for item in sorted(plan.items, key=place):
            target = planner.resolve_tensor(item).detach()
            self._read(item, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, target: torch.Tensor) -> None:
        chunk, dtype = self._chunks[_key(item)], self._tensors[item.storage_index.fqn].dtype
        first, *columns = item.storage_offsets or (0,)
        count, *widths = item.lengths or (1,)
        where = tuple(slice(at, at + width) for at, width in zip(columns, widths, strict=True))
        rows = target if target.dim() else target.view(1)
        for row, block in ChunkReader(chunk, dtype).read(first, first + count):
            values = torch.from_numpy(block).view(getattr(torch, dtype))
            rows[row - first : row - first + len(block)] = values[(slice(None), *where)]

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept from one load to the next."""

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        """The index is known already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """None is given."""
        return checkpoint_id is None


def _key(item: ReadItem) -> tuple[str, tuple[int, ...]]:
    index = item.storage_index
    assert index.offset is not None, f"{index.fqn}: every chunk has an offset"
    return index.fqn, tuple(index.offset)
