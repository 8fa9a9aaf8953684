"""The dynamic path: TorchRec's lookup, for ragged features, row-wise tables and tables in host memory."""

import torch
from torch import Tensor

from dataloading.batch import Batch
from nn.models.tasks import loss_share
from nn.sharding.sharded_embeddings import Exchange, ShardedEmbeddings
from nn.training.sparse_path import PassContext


class DynamicPath:
    """A step launched operation by operation; see `SparsePath` for the methods.

    Args:
        tables: the sharded tables.
        context: the other objects of a pass.
    """

    def __init__(self, tables: ShardedEmbeddings, context: PassContext) -> None:
        self._tables = tables
        self._context = context
        # Per group of tables: this rank's lookup and its gradient, kept from a pass to its update.
        self._lookups: list[Tensor] = []
        self._lookup_gradients: list[Tensor] = []

    def start(self, batch: Batch) -> Exchange:
        """Send the numbers of ids."""
        return self._tables.start_input_dist(batch)

    def finish(self, ids: Exchange) -> Exchange:
        """Send the ids; the host waits until it knows their number."""
        self._tables.finish_input_dist(ids)
        return ids

    def prepare_update(self, step: int, lr: float) -> None:
        """Set learning rate and step count, of FBGEMM's kernels too."""
        self._tables.prepare_update(step, lr)
        self._tables.prepare_fused_update(step, lr)

    def forward_backward(self, batch: Batch, ids: Exchange) -> Tensor:
        """Return the logits [B], detached; the gradients of the lookups are kept for `update`."""
        context = self._context
        gradients, loss_scale = context.gradients, context.loss_scale
        # A lookup with gradients requires its backward pass: replicated tables would wait for it in the next step.
        with torch.set_grad_enabled(context.update_tables):
            lookups = self._tables.look_up(ids)
        leaves = [values.detach().requires_grad_() for values in lookups]
        gradients.clear()
        with context.autocast():
            embeddings = self._tables.output_dist(ids.context, leaves)
            logits = context.dense(batch.numerical, embeddings)
        share = loss_share(
            context.tasks,
            logits,
            batch.labels,
            batch.num_valid,
            batch.global_valid,
            batch.weights,
            context.total_weight(batch.weights),
        )
        loss = context.ranks.all_reduce_sum(share.detach().clone())
        is_good = torch.isfinite(loss)
        # TorchRec divides the gradients that it sends back by the number of ranks.
        world_size = context.ranks.world_size
        (share * (loss_scale * world_size)).backward()
        # A lookup that the model did not use has no gradient.
        used = [
            (values, leaf.grad)
            for values, leaf in zip(lookups, leaves, strict=True)
            if leaf.grad is not None
        ]
        lookup_gradients = [gradient for _, gradient in used]
        if loss_scale != 1:
            for gradient in lookup_gradients:
                gradients.signal += ~torch.isfinite(gradient).all()
            lookup_gradients = [gradient / loss_scale for gradient in lookup_gradients]
        gradients.sum(context.ranks)
        if loss_scale != 1:
            is_good = is_good & gradients.are_finite() & (gradients.signal == 0)
        gradients.vector.div_(loss_scale * world_size)
        gradients.clip()
        context.readback.record(loss, is_good)
        if context.update_tables:
            self._lookups = [values for values, _ in used]
            self._lookup_gradients = lookup_gradients
        return logits.detach()

    def update(self) -> None:
        """Update all tables with the gradients of the latest pass."""
        lookups, gradients = self._lookups, self._lookup_gradients
        self._lookups, self._lookup_gradients = [], []
        self._tables.update(lookups, gradients)

    def predict(self, batch: Batch, ids: Exchange) -> Tensor:
        """Return the logits [B]."""
        embeddings = self._tables.output_dist(ids.context, self._tables.look_up(ids))
        with self._context.autocast():
            return self._context.dense(batch.numerical, embeddings)

    def close(self) -> None:
        """Do nothing: there are no graphs."""
