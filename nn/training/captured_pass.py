"""A pass over the rows of a batch: launched operation by operation, or captured as a CUDA graph."""

from collections.abc import Sequence

from torch import Tensor

from dataloading.batch import Batch
from nn.ops.cuda_graph import CudaGraph
from nn.sharding.batch_rows import BatchRows
from nn.sharding.local_ids import LocalIds
from nn.training.forward_backward import Forward, ForwardBackward

PassFunction = ForwardBackward | Forward
"""Its `run` on the device has constant shapes and addresses; the host reads nothing back."""


class LaunchedPass:
    graph = None

    def __init__(self, function: PassFunction) -> None:
        self._function = function

    def run(self, rows: BatchRows, batch: Batch) -> Tensor:
        rows.arrive()
        logits = self._function.run(rows.ids, batch)
        rows.ids_are_read()
        return logits


class CapturedPass:
    """A pass as a CUDA graph.

    Its inputs, the memory of the batch and ids that were exchanged, are copied before a replay, so that the next batch can
    arrive meanwhile. It shares the memory of the graph `beside`.
    """

    def __init__(
        self, function: PassFunction, rows: BatchRows, batch: Batch, beside: CudaGraph | None
    ) -> None:
        rows.arrive()
        ids = rows.ids
        # On one GPU ids may need no exchange (`StepRunner`): they are in the batch's memory then.
        self._is_exchanged = ids.owned is not batch.flat_ids

        def run(memory: Tensor, *of_ids: Tensor) -> Tensor:
            mine = batch.at(memory)
            here = ids.of_memory(*of_ids) if of_ids else LocalIds(mine.flat_ids, ids.replicated)
            return function.run(here, mine)

        self.graph: CudaGraph[Tensor] = CudaGraph(
            run, *self._inputs(ids, batch), warm_up=function.without_updates(), beside=beside
        )

    def _inputs(self, ids: LocalIds, batch: Batch) -> Sequence[Tensor]:
        """Return the inputs of the graph, which have the same layout for every batch."""
        return (batch.memory, ids.joined()) if self._is_exchanged else (batch.memory,)

    def run(self, rows: BatchRows, batch: Batch) -> Tensor:
        """Replay the pass on new inputs; the next call overwrites the logits."""
        self.graph.load(*self._inputs(rows.ids, batch))
        # Before the replay and the wait for rows, so that the next batch's exchange and mapping need not wait for them.
        rows.ids_are_read()
        rows.arrive()
        return self.graph.replay()


AnyPass = LaunchedPass | CapturedPass
