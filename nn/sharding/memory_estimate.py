"""Estimate of the peak of a GPU's memory: the tables, as planned, and everything that a step needs beside them.

A table's size is exact. The rest is computed from shapes, as the step of `nn/training/train_step.py` allocates it;
`benchmarks/README.md` compares the sum with measured peaks. Not included, since torch's allocator does not hold them: the
CUDA context, NCCL's buffers and the code of kernels, together 1 to 2 GiB of what `nvidia-smi` shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from configs.schema import Amp, Config
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import embedding_columns
from nn.models.model import Model
from nn.models.registry import build_meta, declared_tables
from nn.sharding.plan import TablePlan

ID_BYTES = 8
BATCHES_ON_DEVICE = 3
"""The batch being trained, the next one, and the graph's own copy."""
CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""Torch's default on Hopper, per stream; there are two, the step's and the graph's."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes on one rank's GPU, by purpose.

    Attributes:
        tables: weights and optimizer state, as planned.
        expansion: further ids of each stored id (`data.multi_hot`), as planned.
        dense_tables: gradients of the replicated tables, as large as their weights.
        dense_half: weights, gradients and optimizer state of the MLPs, and autocast's 16-bit copies of the weights.
        batches: numbers, labels and ids of the batches on the device, and the ids that this rank's tables were sent.
        lookups: local embeddings, those that are sent, and the gradients that return.
        dense_pass: peak of activations and gradients, in the graph's own memory.
        update: ids sorted out of place with their positions, and partial sums of rows that cross blocks.
        evaluation: embeddings of an evaluation with another batch size, and its activations beyond the graph's memory.
        workspaces: workspaces of cuBLAS.
    """

    tables: int
    expansion: int
    dense_tables: int
    dense_half: int
    batches: int
    lookups: int
    dense_pass: int
    update: int
    evaluation: int
    workspaces: int

    @property
    def total(self) -> int:
        """Sum of all purposes."""
        return sum(getattr(self, field.name) for field in fields(self))


def plan_memory(
    config: Config,
    spec: FeatureSpec,
    plan: Sequence[TablePlan],
    world_size: int,
    dense_states: int,
) -> list[RankMemory]:
    """Estimate the peak of every rank's GPU while training.

    Args:
        config: configuration of the run.
        spec: the dataset as stored; `plan` knows what is looked up.
        plan: of the tables.
        world_size: ranks.
        dense_states: numbers per weight that the dense component keeps: its optimizer's state, and its average.
    """
    global_batch = config.train.batch_size
    batch = global_batch // world_size
    amp = config.train.amp
    activation_bytes = 4 if amp is Amp.off else 2
    model = build_meta(config.model, spec)
    activations = model.activations()
    dense_half = model.num_parameters() * (4 * (2 + dense_states) + (0 if amp is Amp.off else 2))
    row = 4 * (len(spec.numerical) + len(spec.row_columns)) + ID_BYTES * sum(
        x.mean_hotness for x in spec.categorical
    )
    embedding_bytes = _embedding_bytes(config, spec)
    local = batch * embedding_bytes
    dense_pass = _dense_pass(config, model, batch * activation_bytes, local)
    eval_batch = config.eval.batch_size // world_size
    eval_columns = max((sum(layer) for layer in model.linear_layers()), default=0)
    eval_columns += activations.forward_columns
    widest_table = max(table.embedding_dim for table in plan)
    memories = []
    for rank in range(world_size):
        sent, ids = _work_of(config, rank, plan, global_batch, batch)
        eval_sent, eval_ids = _work_of(config, rank, plan, config.eval.batch_size, eval_batch)
        evaluation = eval_batch * embedding_bytes + 3 * eval_ids * ID_BYTES
        # Alone, a rank's lookups are at local already.
        evaluation += eval_sent if world_size > 1 else 0
        memories.append(
            RankMemory(
                tables=_sum_of(rank, plan),
                expansion=sum(table.expansion_bytes for table in plan if rank in table.ranks),
                dense_tables=sum(
                    4 * table.num_embeddings * table.embedding_dim
                    for table in plan
                    if table.sharding == "data_parallel" and rank in table.ranks
                ),
                dense_half=dense_half,
                batches=int(BATCHES_ON_DEVICE * batch * row + 3 * ids * ID_BYTES),
                lookups=local + (2 * sent if world_size > 1 else 0),
                dense_pass=dense_pass,
                update=3 * ids * (ID_BYTES + 4) + update_bytes(ids, widest_table),
                evaluation=(eval_batch != batch) * evaluation
                + max(eval_columns * eval_batch * activation_bytes - dense_pass, 0),
                workspaces=2 * CUBLAS_WORKSPACE_BYTES,
            )
        )
    return memories


def update_bytes(num_ids: int, columns: int) -> int:
    """Return the memory of the update's levels, and 4 bytes per id that tell tables apart.

    See `nn.embedding.triton_launcher`: a block of 32 ids has 5 numbers, and leaves two sums with 9 bytes beside them, which
    are the ids of the next level.
    """
    block_bytes = 4 * 5 + 2 * (4 * columns + 9)
    blocks = num_ids / 32 * 16 / 15
    return round(blocks * block_bytes) + 4 * num_ids


def _embedding_bytes(config: Config, spec: FeatureSpec) -> int:
    """Return the bytes per sample of its own embeddings."""
    return embedding_columns(declared_tables(config.model, spec), spec) * _sent_bytes(config)


def _sent_bytes(config: Config) -> int:
    """Return the bytes of an element of an embedding that is looked up; fp16 is sent as fp32."""
    return 2 if config.train.amp is Amp.bf16 else 4


def _work_of(
    config: Config, rank: int, plan: Sequence[TablePlan], global_batch: int, batch: int
) -> tuple[int, int]:
    """Return the bytes that a rank looks up for all ranks per step, and its ids, those of replicated tables included."""
    elements = ids = 0.0
    for table in plan:
        if rank not in table.ranks:
            continue
        is_replicated = table.sharding == "data_parallel"
        rows = batch if is_replicated else global_batch
        split = len(table.ranks)
        columns = table.embedding_dim / (split if table.sharding == "column_wise" else 1)
        elements += 0 if is_replicated else rows * columns * table.num_vectors
        is_row_wise = table.sharding in ("row_wise", "table_row_wise")
        ids += rows * table.hotness / (split if is_row_wise else 1)
    return round(elements) * _sent_bytes(config), round(ids)


def _sum_of(rank: int, plan: Sequence[TablePlan]) -> int:
    return sum(
        size
        for table in plan
        for holder, size in zip(table.ranks, table.bytes_per_rank, strict=True)
        if holder == rank
    )


def _dense_pass(config: Config, model: Model, column_bytes: int, local: int) -> int:
    """Return the bytes of the fullest of three moments; memory of the first is reused by the later ones.

    Args:
        config: configuration of the run.
        model: the dense component.
        column_bytes: of one column of activations.
        local: gradients of the embeddings of this rank's rows, bytes.
    """
    layers = model.linear_layers()
    # What backward needs again: the input of every layer, which is the output of the one before.
    saved = sum(before for before, _ in layers) + model.activations().backward_columns
    saved += model.columns_kept_by_layers()
    widest = max((max(layer) for layer in layers), default=0)
    gradients = 2 * widest  # of one layer's output and of its input
    top = (saved + gradients) * column_bytes
    interaction = local + (layers[0][1] if layers else 0) * column_bytes
    # Under fp16 they are checked for overflows at the end: absolute values, and two booleans per number.
    checked = local * 5 // 2 if config.train.amp is Amp.fp16 else 0
    return max(top, interaction, checked)
