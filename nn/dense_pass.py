"""Everything of a step between the tables' lookup and the tables' update, as one function of static shapes.

It brings the looked-up embeddings home, runs the dense half and its loss forward and backward, averages the gradients
over ranks and leaves the embeddings' gradients with the ranks that own the tables. It changes no weight, so a step can
still be abandoned after it. On a GPU it is recorded once as a CUDA graph, collectives included, and replayed for every
whole batch; anything else runs it as it stands.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from configs.schema import Amp
from dataloading.batch import Batch
from nn.distributed import Ranks
from nn.flat_gradients import FlatGradients
from nn.sharding import ShardedTables

AMP_DTYPES = {Amp.bf16: torch.bfloat16, Amp.fp16: torch.float16}
WARM_UP_PASSES = 3


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass leaves.

    Attributes:
        logits: of this rank, [B], detached.
        gradients: of each looked-up tensor, loss scale included; as the tables' owners need them.
    """

    logits: Tensor
    gradients: list[Tensor]


class LossReadback:
    """Hands the loss to the host as soon as the forward pass is done, while the backward pass still runs."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._value = torch.zeros((), pin_memory=on_gpu)
        # External: recorded inside a graph, waited for outside of it.
        self._event = torch.cuda.Event(external=True) if on_gpu else None

    def record(self, loss: Tensor) -> None:
        """Queue the copy of a loss."""
        self._value.copy_(loss, non_blocking=True)
        if self._event is not None:
            self._event.record()

    def wait(self) -> float:
        """Wait for the loss recorded last."""
        if self._event is not None:
            self._event.synchronize()
        return self._value.item()


class DensePass:
    """The pass as a plain function of the device's queue.

    Args:
        tables: know how embeddings come home.
        dense: the dense half, on its device.
        gradients: where the dense half's gradients go.
        readback: where the loss goes.
        amp: precision of the dense half.
        loss_scale: multiplies the loss before the backward pass; 1 for none.
        ranks: this process.
    """

    def __init__(
        self,
        tables: ShardedTables,
        dense: nn.Module,
        gradients: FlatGradients,
        readback: LossReadback,
        *,
        amp: Amp,
        loss_scale: float,
        ranks: Ranks,
    ) -> None:
        self._tables = tables
        self._dense = dense
        self._gradients = gradients
        self._readback = readback
        self._dtype = AMP_DTYPES.get(amp)
        self._loss_scale = loss_scale
        self._ranks = ranks

    def autocast(self) -> AbstractContextManager:
        """The precision that the dense half runs in."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._ranks.device.type, self._dtype)

    def run(
        self,
        lookups: Sequence[Tensor],
        context: Any,
        numerical: Tensor,
        labels: Tensor,
        num_valid: int,
        global_valid: int,
    ) -> PassResult:
        """Run the pass.

        The loss is the mean over the rows of the global batch, whatever the number of ranks: each rank scales its sum
        so that the mean over ranks, which is what gradients are reduced by, is that global mean.

        Args:
            lookups: what this rank looked up, one tensor a group of tables; not differentiated through.
            context: of the exchange that `lookups` came from.
            numerical: [B, N].
            labels: [B].
            num_valid: rows of this rank that count.
            global_valid: rows over all ranks that count.
        """
        self._gradients.clear()
        leaves = [each.detach().requires_grad_() for each in lookups]
        with self.autocast():
            logits = self._dense(numerical, self._tables.bring_home(context, leaves))
        losses = binary_cross_entropy_with_logits(
            logits[:num_valid], labels[:num_valid], reduction="sum"
        )
        local_loss = losses / global_valid
        self._readback.record(self._ranks.all_reduce_sum(local_loss.detach().clone()))
        (local_loss * (self._ranks.world_size * self._loss_scale)).backward()
        self._gradients.average(self._ranks)
        return PassResult(logits.detach(), [leaf.grad for leaf in leaves])


class CapturedPass:
    """The pass recorded as a CUDA graph for batches of one size.

    Args:
        plain: the pass to record.
        lookups: example of what it will be given; shapes and dtypes are then fixed.
        context: of the exchange; the same object for every whole batch.
        batch: example.
    """

    def __init__(
        self, plain: DensePass, lookups: Sequence[Tensor], context: Any, batch: Batch
    ) -> None:
        self._lookups = [torch.empty_like(each).copy_(each.detach()) for each in lookups]
        self._numerical = batch.numerical.clone()
        self._labels = batch.labels.clone()
        arguments = (self._lookups, context, self._numerical, self._labels)
        rows = (batch.num_valid, batch.global_valid)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Compilation, cuBLAS workspaces and NCCL's connections are made outside of the recording.
            for _ in range(WARM_UP_PASSES):
                plain.run(*arguments, *rows)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Thread-local: the loader's threads go on allocating pinned memory meanwhile.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._result = plain.run(*arguments, *rows)

    def run(self, lookups: Sequence[Tensor], batch: Batch) -> PassResult:
        """Replay the pass on new inputs; the result's tensors are overwritten by the next call."""
        torch._foreach_copy_(self._lookups, [each.detach() for each in lookups])
        self._numerical.copy_(batch.numerical)
        self._labels.copy_(batch.labels)
        self._graph.replay()
        return self._result
