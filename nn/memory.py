"""What a GPU will hold at its fullest moment: the tables, which the planner prices, and everything a step needs beside them.

A table's size is exact. The rest is counted from shapes, as the step of `nn/step.py` allocates it; `benchmarks/README.md`
sets the sum beside measured peaks. Not counted, since torch's allocator does not hold them: the CUDA context, NCCL's
buffers and the code of kernels, together 1 to 2 GiB of what `nvidia-smi` shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from configs.schema import Amp, Config, ModelName, OptimizerName
from dataloading.feature_spec import FeatureSpec
from nn.model import build_dense
from nn.plan import TablePlan

# B: rows of the global batch, b: rows of a rank, F: categorical features, D: columns of a table

ID_BYTES = 8
DENSE_STATES = {
    OptimizerName.sgd: 0,
    OptimizerName.adagrad: 1,
    OptimizerName.rowwise_adagrad: 1,
    OptimizerName.adam: 2,
}
"""Numbers of state that the dense half's rule keeps beside each weight."""
BATCHES_ON_DEVICE = 3
"""The batch being trained, the next one, and the graph's own copy."""
CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""Torch's default on Hopper, a stream: the step's and the graph's."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank's GPU, by purpose.

    Attributes:
        tables: weights and optimizer state, as planned.
        expansion: what makes several ids of each stored one (`data.multi_hot`), as planned.
        dense_tables: gradients of the tables without a fused rule, as large as their weights.
        dense_half: weights, gradients and optimizer state of the MLPs, and autocast's 16-bit copies of the weights.
        batches: numbers, labels and ids of the batches on the device, and the ids that this rank's tables were sent.
        lookups: what the rank looked up for the global batch, and the graph's copy of it.
        dense_pass: embeddings at home, activations and their gradients, in the graph's own memory: the most at any time.
        update: ids sorted with their positions, out of place.
        workspaces: of cuBLAS.
    """

    tables: int
    expansion: int
    dense_tables: int
    dense_half: int
    batches: int
    lookups: int
    dense_pass: int
    update: int
    workspaces: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, each.name) for each in fields(self))


def plan_memory(
    config: Config, spec: FeatureSpec, plan: Sequence[TablePlan], world_size: int
) -> list[RankMemory]:
    """Estimate the peak of every rank's GPU while training.

    Args:
        config: the whole run.
        spec: the dataset as stored; `plan` knows what is looked up.
        plan: where the tables live.
        world_size: ranks.
    """
    global_batch = config.train.batch_size
    batch = global_batch // world_size
    amp = config.train.amp
    sent_bytes = 2 if amp is Amp.bf16 else 4  # an embedding's element; fp16 travels as fp32
    activation_bytes = 4 if amp is Amp.off else 2
    layers = dense_layers(config, spec)
    parameters = sum(before * after + after for before, after in layers)
    states = DENSE_STATES[config.rules.name]
    dense_half = parameters * (4 * (2 + states) + (0 if amp is Amp.off else 2))
    home = batch * len(spec.categorical) * config.model.embedding_dim * sent_bytes
    row = 4 * (len(spec.numerical) + 1) + ID_BYTES * sum(x.mean_hotness for x in spec.categorical)
    memories = []
    for rank in range(world_size):
        columns, ids = _work_of(rank, plan, global_batch, batch)
        looked_up = columns * sent_bytes
        memories.append(
            RankMemory(
                tables=_sum_of(rank, plan),
                expansion=sum(each.expansion_bytes for each in plan if rank in each.ranks),
                dense_tables=sum(
                    4 * table.num_embeddings * table.embedding_dim
                    for table in plan
                    if table.kernel == "dense" and rank in table.ranks
                ),
                dense_half=dense_half,
                batches=int(BATCHES_ON_DEVICE * batch * row + 3 * ids * ID_BYTES),
                lookups=2 * looked_up,
                dense_pass=_dense_pass(
                    config,
                    layers,
                    batch * activation_bytes,
                    looked_up,
                    # Alone, a rank's lookups are at home already.
                    home if world_size > 1 else 0,
                    home,
                ),
                update=3 * ids * (ID_BYTES + 4),
                workspaces=2 * CUBLAS_WORKSPACE_BYTES,
            )
        )
    return memories


def dense_layers(config: Config, spec: FeatureSpec) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of every linear layer of the dense half, padding of the inputs included."""
    with torch.device("meta"):
        dense = build_dense(config.model, spec)
    return [
        (layer.in_features, layer.out_features)
        for layer in dense.modules()
        if isinstance(layer, nn.Linear)
    ]


def _work_of(
    rank: int, plan: Sequence[TablePlan], global_batch: int, batch: int
) -> tuple[int, int]:
    """Return elements that a rank looks up in a step, and the ids it needs for that."""
    elements = ids = 0.0
    for table in plan:
        if rank not in table.ranks:
            continue
        rows = batch if table.sharding == "data_parallel" else global_batch
        split = len(table.ranks)
        columns = table.embedding_dim / (split if table.sharding == "column_wise" else 1)
        elements += rows * columns
        ids += rows * table.hotness / (split if table.sharding == "row_wise" else 1)
    return round(elements), round(ids)


def _sum_of(rank: int, plan: Sequence[TablePlan]) -> int:
    return sum(
        size
        for table in plan
        for holder, size in zip(table.ranks, table.bytes_per_rank, strict=True)
        if holder == rank
    )


def _dense_pass(
    config: Config,
    layers: Sequence[tuple[int, int]],
    column_bytes: int,
    looked_up: int,
    received: int,
    home: int,
) -> int:
    """The fullest of three moments of the backward pass.

    Weights' gradients come last (`nn/weight_copies.py`), so inputs and gradients of all layers are there until the end.

    Args:
        config: names the model.
        layers: as `dense_layers` returns them.
        column_bytes: of one column of activations.
        looked_up: gradients of what this rank looked up, bytes.
        received: embeddings that came from other ranks, bytes.
        home: gradients of the embeddings of this rank's rows, bytes.
    """
    # The input of every layer, which is the output of the one before, and its output's gradient.
    kept = sum(before + after for before, after in layers)
    widest = max(max(layer) for layer in layers)
    num_cross_layers = 0
    if config.model.name is ModelName.dcnv2:
        num_cross_layers = config.model.cross.num_layers
        # x0 * (W x + b): the product's gradient needs W x + b too, one x wide, in every cross layer.
        kept += num_cross_layers * widest
    # Gradients on their way: of a layer's output and input, and of all cross layers' outputs.
    passing = max(2, num_cross_layers) * widest * column_bytes
    moments = (passing, home, (home if received else 0) + looked_up)
    return received + kept * column_bytes + max(moments)
