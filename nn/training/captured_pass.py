"""A pass over the rows of a batch: launched operation by operation, or captured as a CUDA graph."""

from collections.abc import Sequence

from torch import Tensor

from dataloading.batch import Batch
from nn.ops.cuda_graph import WARM_UP_PASSES, CudaGraph
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
    """A pass as CUDA graphs: of trained batches one for each turn, otherwise one.

    Its inputs are the memory of the batch, and that of ids that were exchanged. The graph of a turn reads them where they are,
    since the next batch arrives elsewhere. The other one has a copy. All share the memory of the graph `beside`. Ranks capture
    and replay the same graphs in the same order.
    """

    def __init__(
        self, function: PassFunction, rows: BatchRows, batch: Batch, beside: CudaGraph | None
    ) -> None:
        ids = rows.ids
        # On one GPU ids may need no exchange (`StepRunner`): they are in the batch's memory then.
        self._is_exchanged = ids.owned is not batch.flat_ids

        def run(memory: Tensor, *of_ids: Tensor) -> Tensor:
            mine = batch.at(memory)
            here = ids.of_memory(*of_ids) if of_ids else LocalIds(mine.flat_ids, ids.replicated)
            return function.run(here, mine)

        self._function, self._run, self._beside = function, run, beside
        # By turn; None: it copies its inputs.
        self._graphs: dict[int | None, CudaGraph[Tensor]] = {}

    @property
    def graph(self) -> CudaGraph[Tensor] | None:
        """The first graph, None before the first batch."""
        return next(iter(self._graphs.values()), None)

    def run(self, rows: BatchRows, batch: Batch) -> Tensor:
        """Replay the pass on new inputs; the next call overwrites the logits."""
        # They have the same layout for every batch.
        inputs = [batch.memory, rows.ids.joined()] if self._is_exchanged else [batch.memory]
        turn = rows.turn if isinstance(self._function, ForwardBackward) else None
        if turn in self._graphs and not self._graphs[turn].is_of(*inputs):
            # Of another prefetcher, or a larger batch has needed new memory.
            turn = None
        if turn not in self._graphs:
            rows.arrive()
            self._graphs[turn] = self._captured(inputs, in_place=turn is not None)
        graph = self._graphs[turn]
        if turn is None:
            graph.load(*inputs)
            # Before the replay and the wait for rows, so that the next batch's exchange and mapping need not wait for them.
            rows.ids_are_read()
        rows.arrive()
        logits = graph.replay()
        rows.ids_are_read()
        return logits

    def _captured(self, inputs: Sequence[Tensor], *, in_place: bool) -> CudaGraph[Tensor]:
        first = self.graph
        return CudaGraph(
            self._run,
            *inputs,
            warm_up=self._function.without_updates(),
            warm_ups=WARM_UP_PASSES if first is None else 0,
            beside=first or self._beside,
            in_place=in_place,
        )

    def close(self) -> None:
        """Release the graphs with their memory, even while this object is referenced."""
        for graph in self._graphs.values():
            graph.close()
        del self._function, self._run, self._beside


AnyPass = LaunchedPass | CapturedPass
