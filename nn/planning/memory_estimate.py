"""Estimate of the peak of a GPU's memory: the tables, as planned, and everything that a step needs beside them.

A table's size is exact. The rest is computed from shapes, as the step of `nn/training/train_step.py` allocates it;
`benchmarks/README.md` compares the sum with measured peaks. Not included, since torch's allocator does not hold them: the
CUDA context, NCCL's buffers and the code of kernels, together 1 to 2 GiB of what `nvidia-smi` shows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from configs.schema import Amp, Config, Fp8
from dataloading.dataset.batch_layout import BatchLayout, id_counts
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import embedding_columns
from nn.embedding.multi_hot import MultiHot
from nn.models.model import Activations
from nn.models.registry import build_meta, declared_tables
from nn.planning.measured_rows import groups_of_table
from nn.planning.plan import TablePlan, replicated_weights
from nn.planning.row_requests import Requests, not_requested, requests_of
from nn.planning.table_sizes import FP32_BYTES, ID_BYTES

POSITION_BYTES = 8
BATCHES_ON_DEVICE = 3
"""The memory of the batch that is trained and of the next one, and the copy of a graph that reads batches from anywhere."""
CUBLAS_WORKSPACE_BYTES = 32 * 2**20
"""Torch's default on Hopper, per stream; there are two, the step's and the graph's."""
SORTED_KEY_BYTES = 2 * ID_BYTES + POSITION_BYTES
"""Keys, unsorted and sorted, and their positions. The radix sort's scratch is used again."""
EVALUATED_ID_BYTES = 24
"""Ids of an evaluation with another batch size: batches, exchange, positions and the graph's input."""
REQUEST_BYTES = 64
"""Of each id of a table whose rows are asked for: its key, sorted and not, its row's number and position."""
MAPPED_ID_BYTES = 64
"""Per id of a table in host memory: position and bounds in the batches of training and evaluation, its slot in three copies, and
the rows that one mapping moves."""
IDS_OF_A_PART = 10
"""Torch's gradient of an embedding adds up that many ids of a row at once, and then their sums."""
LISTED_BYTES = 12
"""Row, column and factor of each key's gradient, listed where a table has several lookups or a ragged one."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    tables: int  # weights and optimizer state, as planned
    expansion: int  # further ids of each stored id (`data.multi_hot`), as planned
    dense_tables: int  # gradients of the replicated tables, as large as their weights
    dense_component: int  # weights, gradients and optimizer state of the MLPs, and autocast's 16-bit copies of the weights
    batches: int  # numbers, labels and ids of the batches on the device, and the ids that this rank's tables were sent
    lookups: int  # local embeddings, those that are sent, and the gradients that return
    dense_pass: int  # peak of activations and gradients, in the graph's own memory
    # keys sorted out of place with their positions, partial sums of rows that cross blocks, and the sources of the
    # gradients of tables with several lookups
    update: int
    evaluation: int  # embeddings of an evaluation with another batch size, and its activations beyond the graph's memory
    workspaces: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def plan_memory(
    config: Config, spec: FeatureSpec, plan: Sequence[TablePlan], world_size: int, dense_states: int
) -> list[RankMemory]:
    """Estimate the peak of the GPU of every rank of a group, which are all ranks without groups, while training."""
    step = _Step(config, spec, plan, world_size)
    rows = config.train.batch_size, step.rank_rows
    lookups = [_rank_lookups(step, rank, *rows) for rank in range(step.group_size)]
    # Weights, gradients and states, and autocast's copies.
    weight_bytes = FP32_BYTES * (2 + dense_states) + (0 if config.train.amp is Amp.off else 2)
    dense_component = step.model.num_parameters() * weight_bytes
    dense_pass = _dense_pass_bytes(step)
    batch_bytes, arrived_id_bytes = _batch_bytes(step, spec)
    hop_bytes = 0
    if config.sharding.two_hops:
        # The largest exchange: sorted for the first hop, as it arrives, and sorted for the second.
        sent = [of_rank.elements * step.sent_bytes for of_rank in lookups]
        hop_bytes = 3 * max(step.rank_rows * step.vector_bytes, *sent)
    memories = []
    for rank, of_rank in enumerate(lookups):
        held = [table for table in plan if rank in table.ranks]
        arrived_bytes = of_rank.arrived_ids * arrived_id_bytes
        memories.append(
            RankMemory(
                tables=sum(table.bytes_per_rank[table.ranks.index(rank)] for table in held),
                expansion=sum(table.expansion_bytes for table in held),
                dense_tables=FP32_BYTES * replicated_weights(held),
                dense_component=dense_component,
                batches=batch_bytes + arrived_bytes + _mapping_bytes(step, of_rank),
                lookups=_lookup_bytes(step, of_rank) + hop_bytes,
                dense_pass=dense_pass,
                update=_update_bytes(step, of_rank),
                evaluation=_evaluation_bytes(step, rank, dense_pass),
                workspaces=2 * CUBLAS_WORKSPACE_BYTES,
            )
        )
    return memories


class _Step:
    """Step as far as the ranks have it in common: the samples of each, the model and its tables, and the bytes of a number."""

    def __init__(
        self, config: Config, spec: FeatureSpec, plan: Sequence[TablePlan], world_size: int
    ) -> None:
        self.config, self.plan, self.world_size = config, plan, world_size
        self.group_size = config.sharding.group_size or world_size
        self.num_groups = world_size // self.group_size
        self.rank_rows = config.train.batch_size // world_size
        self.eval_rank_rows = config.eval.batch_size // world_size
        # Samples that the dense component takes at once.
        self.part_rows = -(-self.rank_rows // config.train.accumulate)
        # Of a number in activations, and in vectors and rows that are looked up; fp16 is sent as fp32.
        self.activation_bytes = FP32_BYTES if config.train.amp is Amp.off else 2
        self.sent_bytes = 2 if config.train.amp is Amp.bf16 else FP32_BYTES
        # With the ids that the model sees, of which `spec` has those that are stored.
        self.spec = MultiHot(spec, config.data.multi_hot).expanded_spec(spec)
        self.counts = id_counts(self.spec, self.rank_rows)
        # Per sample, with the unused positions of ragged features.
        self.ids = {name: of.capacity / self.rank_rows for name, of in self.counts.items()}
        declared = declared_tables(config.model, self.spec)
        self.features = {table.name: table.feature_names for table in declared}
        # Of all vectors of a sample.
        self.vector_bytes = embedding_columns(declared, self.spec) * self.sent_bytes
        self.model = build_meta(config.model, self.spec)
        self.layers = self.model.linear_layers()
        self.activations = self.model.activations()
        self.requests = requests_of(config, self.spec, plan, world_size)
        self.eval_requests = requests_of(config, self.spec, plan, world_size, self.eval_rank_rows)
        self.by_vectors = not_requested(plan, self.requests)
        # A model with a prefix takes a matrix, to which what arrives from ranks is copied, unless it takes parts of a batch.
        is_whole = self.part_rows == self.rank_rows
        self.has_matrix = self.group_size > 1 and self.model.prefix_columns > 0 and is_whole
        arriving = [table for table in self.by_vectors if not table.is_replicated]
        columns = round(sum(table.num_vectors * table.embedding_dim for table in arriving))
        # Of a sample's vectors, with what arrives beside the matrix.
        self.looked_up_bytes = self.vector_bytes + self.has_matrix * columns * self.sent_bytes

    def keys(self, table: TablePlan) -> float:
        """Return a table's ids per sample, of all its features."""
        return sum(self.ids[name] for name in self.features[table.table])


@dataclass(frozen=True, slots=True)
class _RankLookups:
    """Lookups of a rank in tables whose vectors are sent: sharded ones for all ranks, and replicated ones for its own samples."""

    rank: int
    kinds: tuple[tuple[list[TablePlan], int], ...]  # tables of either kind, and samples
    elements: int  # numbers of the vectors of sharded tables
    arrived_ids: int  # once per feature, whatever number of tables takes them


def _rank_lookups(step: _Step, rank: int, global_rows: int, rank_rows: int) -> _RankLookups:
    held = [table for table in step.by_vectors if rank in table.ranks]
    sharded = [table for table in held if not table.is_replicated]
    replicated = [table for table in held if table.is_replicated]
    kinds = ((sharded, global_rows), (replicated, rank_rows))
    elements = sum(global_rows * table.num_vectors * table.columns_on(rank) for table in sharded)
    ids = 0.0
    for tables, samples in kinds:
        features = dict.fromkeys(name for table in tables for name in step.features[table.table])
        for name in features:
            count = step.ids[name]
            # Of a ragged one also where samples begin, their lengths, and the sample of each id.
            ids += samples * (count if step.counts[name].hotness else 2 * count + 2)
    return _RankLookups(rank, kinds, round(elements), round(ids))


def _batch_bytes(step: _Step, stored: FeatureSpec) -> tuple[int, int]:
    """Return the bytes of batches on the device, and those of each id that arrives at its table."""
    layout = BatchLayout.of(stored, step.rank_rows)
    batch_bytes = BATCHES_ON_DEVICE * layout.num_bytes
    is_fixed = step.spec == stored and all(feature.hotness for feature in stored.categorical)
    are_vectors = all(not x.is_replicated and x.exchange == "vectors" for x in step.plan)
    if step.world_size == 1 and is_fixed and are_vectors:
        # Ids are looked up where they are, without an exchange.
        return batch_bytes, ID_BYTES
    # The id exchange has a copy of its input, and positions.
    (num_ids,) = layout.ids.shape
    exchange_bytes = (layout.ids.dtype.itemsize + POSITION_BYTES) * num_ids
    # What arrives has two places, and is copied to the graph of evaluation. Between ranks it is also received and put in order.
    arrived_bytes = 3 * ID_BYTES + (ID_BYTES + POSITION_BYTES if step.world_size > 1 else 0)
    return batch_bytes + exchange_bytes, arrived_bytes


def _mapping_bytes(step: _Step, lookups: _RankLookups) -> int:
    """Return the memory to map the ids of tables in host memory or on disk, and the rows that are asked of them, to slots."""
    ids = sum(
        samples * step.keys(table)
        for tables, samples in lookups.kinds
        for table in tables
        if table.has_arena
    )
    rows = sum(
        len(asked.tiers - {"device"}) * asked.of_groups(lookups.rank) for asked in step.requests
    )
    return round(MAPPED_ID_BYTES * ids) + MAPPED_ID_BYTES * rows


def _lookup_bytes(step: _Step, lookups: _RankLookups) -> int:
    """Return the memory of a rank's own vectors, of those that are sent with the gradients that return, and of rows."""
    total = step.rank_rows * step.looked_up_bytes
    if step.group_size > 1:
        row_wise = [table for table in step.by_vectors if table.is_row_wise]
        # Of these, each rank computes a part.
        columns = round(sum(table.num_vectors * table.embedding_dim for table in row_wise))
        parts_bytes = step.rank_rows * step.group_size * columns * step.sent_bytes
        total += 2 * (lookups.elements // step.num_groups * step.sent_bytes + parts_bytes)
    if step.num_groups > 1:
        total += lookups.elements * step.sent_bytes  # gradients of all groups
    return total + sum(_row_bytes(step, asked, lookups.rank) for asked in step.requests)


def _row_bytes(step: _Step, asked: Requests, rank: int) -> int:
    """Return the memory of rows sent and received, and of float32 gradient sums of ids, or of what is merged.

    Sums are sent behind the peak.
    """
    received = sum(asked.capacity)
    moved = received
    if asked.is_sent:
        # Rows of one of several memories are looked up beside those that are sent.
        copies = 2 if len(asked.tiers) > 1 else 1
        moved += copies * asked.asked_of(rank)
    sums = received if asked.has_sums else 0
    sums += asked.merged[rank] if asked.merged else 0
    return asked.columns * (step.sent_bytes * moved + FP32_BYTES * sums)


def _update_bytes(step: _Step, lookups: _RankLookups) -> int:
    """Return the memory of sorted keys, and of the update beside them."""
    num_bytes = 0.0
    for tables, samples in lookups.kinds:
        # The tables of a kind are looked up and updated by the same launches.
        keys = {table.table: samples * step.keys(table) for table in tables}
        num_keys = sum(keys.values())
        features = [[step.counts[name] for name in step.features[table]] for table in keys]
        if any(len(of) > 1 or not all(count.hotness for count in of) for of in features):
            num_bytes += LISTED_BYTES * num_keys
        num_bytes += SORTED_KEY_BYTES * num_keys
        for table in tables:
            num_bytes += update_bytes(keys[table.table], table.columns_on(lookups.rank))
    return round(num_bytes) + sum(_request_keys_bytes(of, lookups.rank) for of in step.requests)


def _request_keys_bytes(asked: Requests, rank: int) -> int:
    """Return the memory of keys: of this rank's ids, and of the rows that are asked of it."""
    of_ids = REQUEST_BYTES * asked.keys
    if not asked.hands_out:
        of_ids += LISTED_BYTES * asked.keys
    if asked.has_sums:
        of_ids += update_bytes(asked.keys, asked.columns)
    if asked.merged:
        rows = asked.asked_of(rank)
        of_ids += REQUEST_BYTES * rows + update_bytes(rows, asked.columns)
    rows = asked.of_groups(rank)
    of_rows = SORTED_KEY_BYTES * rows + update_bytes(rows, asked.columns)
    return of_ids + len(asked.tiers) * of_rows


def update_bytes(num_keys: float, columns: int) -> int:
    """Return the memory of the update's levels of one table, and 4 bytes per key that tell tables apart.

    See `nn.embedding.triton_launcher`: a block of 32 keys has 5 numbers, and leaves two sums with 9 bytes beside them, which
    are the keys of the next level. Sums have as many columns as the table's width class, the next power of two.
    """
    width_class = 1 << (columns - 1).bit_length()
    block_bytes = 4 * 5 + 2 * (4 * width_class + 9)
    blocks = num_keys / 32 * 16 / 15
    return round(blocks * block_bytes + 4 * num_keys)


def _evaluation_bytes(step: _Step, rank: int, dense_pass: int) -> int:
    """Return the embeddings of an evaluation with another batch size, and its activations beyond the graph's memory."""
    rows = step.eval_rank_rows
    # It takes all samples at once, or as many as training does.
    at_once = rows if step.part_rows == step.rank_rows else min(rows, step.part_rows)
    widest = max((sum(layer) for layer in step.layers), default=0)
    forward_columns = widest + step.activations.forward_columns
    total = max(at_once * forward_columns * step.activation_bytes - dense_pass, 0)
    if rows == step.rank_rows:
        return total
    lookups = _rank_lookups(step, rank, step.config.eval.batch_size, rows)
    total += rows * step.looked_up_bytes + lookups.arrived_ids * EVALUATED_ID_BYTES
    if step.group_size > 1:
        total += lookups.elements // step.num_groups * step.sent_bytes
    for asked in step.eval_requests:
        requested = sum(asked.capacity) + (asked.asked_of(rank) if asked.is_sent else 0)
        total += requested * asked.columns * step.sent_bytes + REQUEST_BYTES * asked.keys
    return total


def _dense_pass_bytes(step: _Step) -> int:
    """Return the memory of the dense component's pass over a rank's batch."""
    rows = _RowBytes.of(step)
    of_part = _part_bytes(step, rows)
    if step.part_rows == step.rank_rows:
        return of_part
    if step.group_size > 1:
        # A part's vectors are copied out of the batch's.
        of_part += step.part_rows * step.vector_bytes
    # The gradients of all vectors are kept until the last part, and are checked together under fp16.
    gradients = step.rank_rows * step.vector_bytes
    return gradients + rows.sums + max(of_part, _check_bytes(step, gradients))


def _part_bytes(step: _Step, rows: "_RowBytes") -> int:
    """Return the memory of a part's pass at the fullest of three moments."""
    column_bytes = step.part_rows * step.activation_bytes
    vector_gradients = step.part_rows * step.vector_bytes
    layers, activations = step.layers, step.activations
    # What backward needs again: the input of every layer, which is the output of the one before.
    saved = sum(before for before, _ in layers) + activations.backward_columns
    saved += sum(getattr(layer, "kept_columns", 0) for layer in step.model.modules())
    # Of one layer's output and of its input.
    gradients = max((2 * max(layer) for layer in layers), default=0)
    if step.config.train.fp8 is not Fp8.off:
        # Copies in 8 bits by rows and by columns.
        gradients += max(map(max, layers), default=0)
    if step.group_size == 1 and layers and activations.reread_columns == layers[0][0]:
        # The first layer reads the embeddings, and nothing else, where they were looked up.
        saved -= activations.reread_columns
        first, *others = layers
        gradients = max(sum(first), *(2 * max(layer) for layer in others))
    elif step.has_matrix and step.sent_bytes == step.activation_bytes:
        saved -= min(activations.reread_columns, step.vector_bytes // step.sent_bytes)
    # A candidate's part of the gradients of rows is first, beside all activations.
    of_samples = max((saved + gradients) * column_bytes - rows.late, 0)
    top = of_samples + rows.kept + rows.gradients
    interaction = vector_gradients + (layers[0][1] if layers else 0) * column_bytes
    interaction += rows.gradients + rows.by_id
    return max(top, interaction, _check_bytes(step, vector_gradients))


def _check_bytes(step: _Step, gradients: int) -> int:
    """Return the memory of the check of gradients for overflows under fp16: absolute values, and two booleans per number."""
    return gradients * 5 // 2 if step.config.train.amp is Amp.fp16 else 0


@dataclass(frozen=True, slots=True)
class _RowBytes:
    """Bytes of a part's pass that follow from rows that are handed out, and from events."""

    gradients: int  # of all rows, in the dtype of the rows
    sums: int  # the same in float32, to which parts add
    by_id: int  # of the largest table: the gradient of each id, by feature and side by side; of parts torch's sums instead
    kept: int  # activations of events and rows, with gradients of events
    late: int  # those gradients, for which the layers of samples have made room

    @classmethod
    def of(cls, step: _Step) -> "_RowBytes":
        handed_out = {of.tables[0]: of for of in step.requests if of.hands_out}
        rows = {table: sum(of.capacity) for table, of in handed_out.items()}
        elements = sum(of.columns * rows[table] for table, of in handed_out.items())
        events_of_batch, events = _events(step)
        share = sum(events.values()) / max(sum(events_of_batch.values()), 1) if events else 1.0
        by_id = []
        for table, asked in handed_out.items():
            column_bytes = 2.0 * step.sent_bytes * asked.keys
            if not asked.has_sums:
                sums = rows[table] + share * asked.keys // IDS_OF_A_PART
                column_bytes = step.sent_bytes * share * asked.keys + FP32_BYTES * sums
            by_id.append(asked.columns * column_bytes)
        found, of_kernels = step.activations, Activations()
        if step.config.train.amp is not Amp.off and found.in_16_bits is not None:
            of_kernels = found.in_16_bits
        event_columns = found.event_columns | of_kernels.event_columns
        gradient_columns = found.event_gradient_columns | of_kernels.event_gradient_columns
        columns = _sum_of(event_columns, events) + _sum_of(found.row_columns, rows)
        beside = of_kernels.event_gradient_bytes
        return cls(
            gradients=step.sent_bytes * elements,
            sums=FP32_BYTES * elements,
            by_id=round(max(by_id, default=0)),
            kept=columns * step.activation_bytes + _sum_of(found.event_bytes, events) + beside,
            late=_sum_of(gradient_columns, events) * step.activation_bytes + beside,
        )


def _sum_of(columns: Mapping[str, int], counts: Mapping[str, int]) -> int:
    return sum(columns[name] * counts[name] for name in columns)


def _events(step: _Step) -> tuple[dict[str, int], dict[str, int]]:
    """Return the events of each sequence group that a rank's batch has room for, and those of a part."""
    groups = step.spec.sequences
    of_batch = {group.name: step.counts[group.features[0]].capacity for group in groups}
    measured = {
        group.name: events
        for table in step.plan
        if table.part_events
        for group, events in zip(
            groups_of_table(step.spec, step.features[table.table]), table.part_events, strict=True
        )
    }
    of_part = {}
    for group in groups:
        most = of_batch[group.name]
        if step.part_rows < step.rank_rows:
            most = step.part_rows * group.max_length
        of_part[group.name] = min(most, measured.get(group.name, of_batch[group.name]))
    return of_batch, of_part
