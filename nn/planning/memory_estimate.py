"""Estimate of the peak of a GPU's memory: the tables, as planned, and everything that a step needs beside them.

A table's size is exact. The rest is computed from shapes, as the step of `nn/training/train_step.py` allocates it;
`benchmarks/README.md` compares the sum with measured peaks. Not included, since torch's allocator does not hold them: the
CUDA context, NCCL's buffers and the code of kernels, together 1 to 2 GiB of what `nvidia-smi` shows.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.schema import Amp, Config, Fp8
from dataloading.dataset.batch_layout import BatchLayout, id_counts
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import embedding_columns
from nn.embedding.multi_hot import MultiHot
from nn.models.model import Activations, Model
from nn.models.registry import build_meta, declared_tables
from nn.planning.measured_rows import groups_of_table
from nn.planning.plan import TablePlan
from nn.sharding.request_capacity import capacity_for
from nn.tiers.traffic import expected_distinct, power_law_share

ID_BYTES = 4
POSITION_BYTES = 8
BATCHES_ON_DEVICE = 3
"""The memory of the batch that is trained and of the next one, and the graph's copy."""
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
    # weights, gradients and optimizer state of the MLPs, and autocast's 16-bit copies of the weights
    dense_half: int
    # numbers, labels and ids of the batches on the device, and the ids that this rank's tables were sent
    batches: int
    lookups: int  # local embeddings, those that are sent, and the gradients that return
    dense_pass: int  # peak of activations and gradients, in the graph's own memory
    # keys sorted out of place with their positions, partial sums of rows that cross blocks, and the sources of the
    # gradients of tables with several lookups
    update: int
    # embeddings of an evaluation with another batch size, and its activations beyond the graph's memory
    evaluation: int
    workspaces: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def plan_memory(
    config: Config, spec: FeatureSpec, plan: Sequence[TablePlan], world_size: int, dense_states: int
) -> list[RankMemory]:
    """Estimate the peak of the GPU of every rank of a group, which are all ranks without groups, while training."""
    group_size = config.sharding.group_size or world_size
    num_groups = world_size // group_size
    global_batch, amp, is_sent = config.train.batch_size, config.train.amp, group_size > 1
    batch = global_batch // world_size
    # Of an element of activations, and of one that is looked up; fp16 is sent as fp32.
    activation_bytes, sent_bytes = 4 if amp is Amp.off else 2, 2 if amp is Amp.bf16 else 4
    seen = MultiHot(spec, config.data.multi_hot).expanded_spec(spec)
    model = build_meta(config.model, seen)
    dense_half = model.num_parameters() * (4 * (2 + dense_states) + (0 if amp is Amp.off else 2))
    batch_bytes, arrived_bytes = _bytes_of_batches(spec, seen, plan, batch, world_size)
    declared = declared_tables(config.model, seen)
    embedding_bytes = embedding_columns(declared, seen) * sent_bytes
    local = batch * embedding_bytes
    eval_batch = config.eval.batch_size // world_size
    features = _ids_of_tables(declared, seen, batch)
    requests = requests_of(config, seen, plan, world_size)
    rows, room = -(-batch // config.train.accumulate), _room_of_parts(seen, plan, features)
    events = _events(seen, batch), _events(seen, batch, rows, room)
    dense_pass = _dense_pass(
        config, model, events, batch, embedding_bytes, requests, is_alone=not is_sent
    )
    eval_requests = requests_of(config, seen, plan, world_size, eval_batch)
    others = not_requested(plan, requests)
    # Vectors of which each rank computes a part.
    partial_columns = round(sum(x.num_vectors * x.embedding_dim for x in others if x.is_row_wise))
    partial_bytes = batch * group_size * partial_columns * sent_bytes
    forward_bytes = _forward_values(config, model, batch, eval_batch) * activation_bytes
    works = [_work_of(rank, others, features, global_batch, batch) for rank in range(group_size)]
    # The exchange of most bytes: sorted for the first hop, as it arrives, and sorted for the second.
    largest = max([local, *(work.elements * sent_bytes for work in works)])
    in_hops = config.sharding.two_hops * 3 * largest
    memories = []
    for rank, work in enumerate(works):
        held = [table for table in plan if rank in table.ranks]
        eval_work = _work_of(rank, others, features, config.eval.batch_size, eval_batch)
        # Alone, a rank's lookups are at local already.
        evaluation = sum(asked.evaluation_bytes(rank, sent_bytes) for asked in eval_requests)
        evaluation += eval_batch * embedding_bytes + eval_work.ids * EVALUATED_ID_BYTES
        evaluation += is_sent * eval_work.elements // num_groups * sent_bytes
        lookups = local + is_sent * 2 * (work.elements // num_groups * sent_bytes + partial_bytes)
        lookups += in_hops + sum(asked.row_bytes(rank, sent_bytes) for asked in requests)
        lookups += (num_groups > 1) * work.elements * sent_bytes  # gradients of all groups
        mapping = work.mapping_bytes + sum(asked.mapping_bytes(rank) for asked in requests)
        memories.append(
            RankMemory(
                tables=sum(x.bytes_per_rank[x.ranks.index(rank)] for x in held),
                expansion=sum(x.expansion_bytes for x in held),
                dense_tables=4 * replicated_weights(held),
                dense_half=dense_half,
                batches=int(batch_bytes + work.ids * arrived_bytes + mapping),
                lookups=lookups,
                dense_pass=dense_pass,
                update=work.keys * SORTED_KEY_BYTES
                + work.update_bytes
                + sum(asked.key_bytes(rank) for asked in requests),
                evaluation=(eval_batch != batch) * evaluation + max(forward_bytes - dense_pass, 0),
                workspaces=2 * CUBLAS_WORKSPACE_BYTES,
            )
        )
    return memories


@dataclass(frozen=True, slots=True)
class Requests:
    """Tables of one width whose distinct rows are asked of their owners; a replicated table's, or a single rank's, is itself."""

    tables: tuple[str, ...]
    columns: int
    keys: int  # ids of all lookups of a rank's samples
    capacity: tuple[int, ...]  # rows that a rank can ask of each owner
    # distinct ones that a group can ask of each owner, if owners merge them
    merged: tuple[int, ...]
    tiers: frozenset[str]  # memories that their rows lie in
    hands_out: bool = False  # whether the dense component takes the rows
    # whether the gradients of a row are added up by the sort of its ids: chunks do it themselves
    has_sums: bool = True
    groups: int = 1  # of ranks, which all hold the tables

    @property
    def is_sent(self) -> bool:
        return len(self.capacity) > 1

    def asked_of(self, rank: int) -> int:
        return len(self.capacity) * self.capacity[rank if self.is_sent else 0]

    def of_groups(self, rank: int) -> int:
        """Return the rows that all groups ask of a rank."""
        return self.groups * (self.merged[rank] if self.merged else self.asked_of(rank))

    def row_bytes(self, rank: int, sent_bytes: int) -> int:
        """Return the memory of rows sent and received, and of float32 gradient sums of ids, or of what is merged.

        Sums are sent behind the peak.
        """
        asked, own = self.is_sent * self.asked_of(rank), sum(self.capacity)
        # Rows of one of several memories are looked up beside those that are sent.
        looked_up = asked * (1 + (len(self.tiers) > 1))
        sums = self.has_sums * own + (self.merged[rank] if self.merged else 0)
        return self.columns * (sent_bytes * (looked_up + own) + 4 * sums)

    def key_bytes(self, rank: int) -> int:
        """Return the memory of keys: of this rank's ids, and of the rows that are asked of it."""
        asked = self.of_groups(rank)
        of_asked = SORTED_KEY_BYTES * asked + update_bytes(asked, self.columns)
        of_merged = 0
        if self.merged:
            here = self.asked_of(rank)
            of_merged = REQUEST_BYTES * here + update_bytes(here, self.columns)
        of_own = REQUEST_BYTES * self.keys
        of_own += (not self.hands_out) * LISTED_BYTES * self.keys
        of_own += self.has_sums * update_bytes(self.keys, self.columns)
        return len(self.tiers) * of_asked + of_merged + of_own

    def mapping_bytes(self, rank: int) -> int:
        """Return the memory to map the rows that are asked of tables in host memory or on disk to slots."""
        return len(self.tiers - {"device"}) * MAPPED_ID_BYTES * self.of_groups(rank)

    def evaluation_bytes(self, rank: int, sent_bytes: int) -> int:
        rows = self.is_sent * self.asked_of(rank) + sum(self.capacity)
        return rows * self.columns * sent_bytes + REQUEST_BYTES * self.keys


def requests_of(
    config: Config,
    spec: FeatureSpec,
    plan: Sequence[TablePlan],
    world_size: int,
    batch: int | None = None,
) -> list[Requests]:
    """Return the tables whose rows are asked for, with their expected capacity, for `batch` rows of a rank or those of training.

    How often ids occur is not known before they are read: the power law of `data.synthetic.exponent` stands for it, unless the
    plan has those of measured batches.
    """
    batch = config.train.batch_size // world_size if batch is None else batch
    group_size = config.sharding.group_size or world_size
    asked = [table for table in plan if table.exchange == "rows"]
    of_tables = _ids_of_tables(declared_tables(config.model, spec), spec, batch)
    keys = {
        name: sum(ids.keys for ids in of_table.values()) for name, of_table in of_tables.items()
    }
    requests = []
    # A replicated table, and one whose rows the dense component takes, is alone.
    groups: dict[tuple[int, str], list[TablePlan]] = {}
    for table in asked:
        is_alone = table.sharding == "data_parallel" or not table.num_vectors
        alone = table.table if is_alone else ""
        groups.setdefault((table.embedding_dim, alone), []).append(table)
    for (columns, _), group in groups.items():
        is_replica = group[0].sharding == "data_parallel"
        num_groups = 1 if is_replica else world_size // group_size
        capacity = [0.0] * (1 if is_replica else group_size)
        merged = [0.0] * group_size * (num_groups > 1 and group_size > 1)
        for table in group:
            share = power_law_share(table.num_embeddings, config.data.synthetic.exponent)
            owners = (0,) if is_replica else table.ranks
            per_shard = -(-table.num_embeddings // len(owners))
            for number, rank in enumerate(owners):
                if table.batch_rows:
                    scale = batch / (config.train.batch_size // world_size)
                    capacity[rank] += table.batch_rows[number] * scale
                    if merged:
                        merged[rank] += table.group_rows[number] * scale
                    continue
                first = min(number * per_shard, table.num_embeddings)
                end = min(first + per_shard, table.num_embeddings)
                ids = batch * table.hotness
                capacity[rank] += expected_distinct(ids, share, first, end)
                if merged:
                    merged[rank] += expected_distinct(group_size * ids, share, first, end)
        requests.append(
            Requests(
                tuple(table.table for table in group),
                columns,
                round(batch * sum(keys[table.table] for table in group)),
                tuple(map(capacity_for, capacity)),
                tuple(map(capacity_for, merged)),
                frozenset(table.tier for table in group),
                not group[0].num_vectors,
                group[0].num_vectors > 0 or config.train.accumulate == 1,
                num_groups,
            )
        )
    return requests


def replicated_weights(tables: Sequence[TablePlan]) -> int:
    replicated = (x for x in tables if x.sharding == "data_parallel")
    return sum(x.num_embeddings * x.embedding_dim for x in replicated)


def not_requested(plan: Sequence[TablePlan], requests: Sequence[Requests]) -> list[TablePlan]:
    asked = {name for request in requests for name in request.tables}
    return [table for table in plan if table.table not in asked]


def _bytes_of_batches(
    spec: FeatureSpec, seen: FeatureSpec, plan: Sequence[TablePlan], batch: int, world_size: int
) -> tuple[int, int]:
    """Return the bytes of batches on the device, and those of each id that arrives at its table."""
    layout = BatchLayout.of(spec, batch)
    batch_bytes = BATCHES_ON_DEVICE * layout.num_bytes
    is_fixed = seen == spec and all(feature.hotness for feature in spec.categorical)
    are_vectors = all(x.sharding != "data_parallel" and x.exchange == "vectors" for x in plan)
    if world_size == 1 and is_fixed and are_vectors:
        # Ids are looked up where they are, without an exchange.
        return batch_bytes, ID_BYTES
    # The id exchange has a copy of its input, and positions.
    (num_ids,) = layout.ids.shape
    exchange_bytes = (layout.ids.dtype.itemsize + POSITION_BYTES) * num_ids
    # What arrives is copied to the graphs of training and evaluation. Between ranks it is also received and put in order.
    arrived_bytes = 3 * ID_BYTES + (ID_BYTES + POSITION_BYTES if world_size > 1 else 0)
    return batch_bytes + exchange_bytes, arrived_bytes


def _room_of_parts(
    spec: FeatureSpec, plan: Sequence[TablePlan], features: Mapping[str, Collection[str]]
) -> dict[str, int]:
    """Return the events of each sequence group that the dense component takes at most at once, where that is measured."""
    return {
        group.name: room
        for table in plan
        if table.part_events
        for group, room in zip(
            groups_of_table(spec, features[table.table]), table.part_events, strict=True
        )
    }


def _events(
    spec: FeatureSpec, batch: int, rows: int | None = None, room: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the events of each sequence group that a rank's batch has room for, or `rows` of it that are taken at once."""
    counts = id_counts(spec, batch)
    events = {group.name: counts[group.features[0]].capacity for group in spec.sequences}
    if rows is None:
        return events
    most = {**events, **(room or {})}
    if rows == batch:
        return {name: min(most[name], events[name]) for name in events}
    return {group.name: min(rows * group.max_length, most[group.name]) for group in spec.sequences}


def update_bytes(num_keys: float, columns: int) -> int:
    """Return the memory of the update's levels of one table, and 4 bytes per key that tell tables apart.

    See `nn.embedding.triton_launcher`: a block of 32 keys has 5 numbers, and leaves two sums with 9 bytes beside them, which
    are the keys of the next level. Sums have as many columns as the table's width class, the next power of two.
    """
    width_class = 1 << (columns - 1).bit_length()
    block_bytes = 4 * 5 + 2 * (4 * width_class + 9)
    blocks = num_keys / 32 * 16 / 15
    return round(blocks * block_bytes + 4 * num_keys)


@dataclass(frozen=True, slots=True)
class _Ids:
    """Ids of a feature per sample, on every rank that looks it up."""

    keys: float  # ids, with the unused positions of a ragged feature
    # ids, and of a ragged feature where samples begin, their lengths, and the sample of each id
    numbers: float
    is_ragged: bool  # whether samples differ in their number of ids


@dataclass(frozen=True, slots=True)
class _SparseWork:
    # elements of the embeddings that are looked up for all ranks; those of replicated tables do not count
    elements: int
    ids: int  # ids that arrive: once per feature, whatever number of tables takes them
    keys: int  # ids that are sorted: once per lookup
    update_bytes: int  # memory of the update beside sorted keys
    mapping_bytes: int  # memory to map the ids of tables in host memory to slots


def _ids_of_tables(
    declared: Sequence[EmbeddingBagConfig], spec: FeatureSpec, batch_size: int
) -> dict[str, dict[str, _Ids]]:
    ids = {}
    for name, count in id_counts(spec, batch_size).items():
        keys = count.capacity / batch_size
        numbers = keys if count.hotness else 2 * keys + 2
        ids[name] = _Ids(keys, numbers, not count.hotness)
    return {table.name: {name: ids[name] for name in table.feature_names} for table in declared}


def _work_of(
    rank: int,
    plan: Sequence[TablePlan],
    features: Mapping[str, Mapping[str, _Ids]],
    global_batch: int,
    batch: int,
) -> _SparseWork:
    """Return the lookups of a rank, by table -> feature -> its ids."""
    held = [table for table in plan if rank in table.ranks]
    replicated = [table for table in held if table.sharding == "data_parallel"]
    sharded = [table for table in held if table.sharding != "data_parallel"]
    elements = sum(global_batch * table.num_vectors * table.columns_on(rank) for table in sharded)
    ids = keys = size = 0.0
    # The tables of a group are looked up and updated by the same launches.
    for tables, rows in ((sharded, global_batch), (replicated, batch)):
        arriving: dict[str, float] = {}
        keys_of = {
            table.table: rows * sum(ids.keys for ids in features[table.table].values())
            for table in tables
        }
        for table in tables:
            arriving |= {name: ids.numbers for name, ids in features[table.table].items()}
            size += update_bytes(keys_of[table.table], table.columns_on(rank))
        ids += rows * sum(arriving.values())
        keys += sum(keys_of.values())
        looked_up = [features[table.table].values() for table in tables]
        has_listed = any(len(of) > 1 or any(ids.is_ragged for ids in of) for of in looked_up)
        size += LISTED_BYTES * has_listed * sum(keys_of.values())
    tiered = [features[table.table].values() for table in sharded if table.has_arena]
    mapping = MAPPED_ID_BYTES * global_batch * sum(ids.keys for of in tiered for ids in of)
    return _SparseWork(round(elements), round(ids), round(keys), round(size), round(mapping))


@dataclass(frozen=True, slots=True)
class _RowBytes:
    """Bytes of a pass that follow from rows that are handed out, and from events."""

    gradients: int  # of all rows, in the dtype of the rows
    sums: int  # the same in float32, to which chunks add
    # of the largest table: the gradient of each id, by feature and side by side; of chunks torch's sums instead
    by_id: int
    kept: int  # activations of events and rows, with gradients of events
    late: int  # those gradients, for which the layers of samples have made room

    @classmethod
    def of(
        cls,
        config: Config,
        model: Model,
        events_of: tuple[Mapping[str, int], Mapping[str, int]],
        requests: Sequence[Requests],
    ) -> "_RowBytes":
        """Return those of a pass over some rows of a rank's batch, of whose events `events_of` has those of both."""
        amp = config.train.amp
        narrow, sent_bytes = (4 if amp is Amp.off else 2), (2 if amp is Amp.bf16 else 4)
        tables = [asked for asked in requests if asked.hands_out]
        distinct = {asked.tables[0]: sum(asked.capacity) for asked in tables}
        elements = sum(asked.columns * sum(asked.capacity) for asked in tables)
        of_batch, events = events_of
        share = sum(events.values()) / max(sum(of_batch.values()), 1) if events else 1.0
        by_id = (
            asked.columns
            * (
                2 * sent_bytes * asked.keys
                if asked.has_sums
                else sent_bytes * share * asked.keys
                + 4 * (sum(asked.capacity) + share * asked.keys // IDS_OF_A_PART)
            )
            for asked in tables
        )
        found, of_kernels = model.activations(), Activations()
        if amp is not Amp.off and found.in_16_bits is not None:
            of_kernels = found.in_16_bits
        beside = of_kernels.event_gradient_bytes
        kept = _sum_of(found.event_columns | of_kernels.event_columns, events) * narrow + beside
        kept += _sum_of(found.row_columns, distinct) * narrow
        gradients = found.event_gradient_columns | of_kernels.event_gradient_columns
        late = _sum_of(gradients, events) * narrow + beside
        return cls(sent_bytes * elements, 4 * elements, round(max(by_id, default=0)), kept, late)


def _sum_of(columns: Mapping[str, int], counts: Mapping[str, int]) -> int:
    return sum(columns[name] * counts[name] for name in columns)


def _dense_pass(
    config: Config,
    model: Model,
    events_of: tuple[Mapping[str, int], Mapping[str, int]],
    batch: int,
    embedding_bytes: int,
    requests: Sequence[Requests],
    *,
    is_alone: bool,
) -> int:
    """Return the bytes of the dense component's pass over a rank's batch, whose rows have `embedding_bytes` of vectors.

    `events_of`: those that the batch has room for, and those of a part.
    """
    chunk, local = -(-batch // config.train.accumulate), batch * embedding_bytes
    of_rows = _RowBytes.of(config, model, events_of, requests)
    if chunk == batch:
        return _pass_over(config, model, batch, local, of_rows, is_alone)
    of_chunk = _pass_over(config, model, chunk, chunk * embedding_bytes, of_rows, is_alone)
    # Between ranks a chunk's vectors are copied out of the batch's.
    of_chunk += 0 if is_alone else chunk * embedding_bytes
    # The gradients of all vectors are kept until the last chunk, and are checked together under fp16.
    return local + of_rows.sums + max(of_chunk, _checked_bytes(config, local))


def _forward_values(config: Config, model: Model, batch: int, eval_batch: int) -> int:
    """Return the values of an evaluation's forward pass over the rows that it takes at once: all, or a chunk of training."""
    chunk = -(-batch // config.train.accumulate)
    rows = eval_batch if chunk == batch else min(eval_batch, chunk)
    widest = max((sum(layer) for layer in model.linear_layers()), default=0)
    return rows * (widest + model.activations().forward_columns)


def _pass_over(
    config: Config, model: Model, rows: int, local: int, of_rows: _RowBytes, is_alone: bool
) -> int:
    """Return the bytes of the fullest of three moments; `local` are gradients of the rank's embeddings, in bytes."""
    column_bytes = rows * (4 if config.train.amp is Amp.off else 2)
    layers = model.linear_layers()
    # What backward needs again: the input of every layer, which is the output of the one before.
    saved = sum(before for before, _ in layers) + model.activations().backward_columns
    saved += sum(getattr(layer, "kept_columns", 0) for layer in model.modules())
    # Of one layer's output and of its input.
    gradients = max((2 * max(layer) for layer in layers), default=0)
    if config.train.fp8 is not Fp8.off:
        # Copies in 8 bits by rows and by columns.
        gradients += max(map(max, layers), default=0)
    reread = model.activations().reread_columns
    if is_alone and layers and reread == layers[0][0]:
        # The first layer reads the embeddings, and nothing else, where they were looked up.
        saved -= reread
        first, *others = layers
        gradients = max(sum(first), *(2 * max(layer) for layer in others))
    # A candidate's part of the gradients of rows is first, beside all activations.
    of_samples = max((saved + gradients) * column_bytes - of_rows.late, 0)
    top = of_samples + of_rows.kept + of_rows.gradients
    interaction = local + (layers[0][1] if layers else 0) * column_bytes
    interaction += of_rows.gradients + of_rows.by_id
    return max(top, interaction, _checked_bytes(config, local))


def _checked_bytes(config: Config, local: int) -> int:
    """Return the memory of the check of gradients for overflows under fp16: absolute values, and two booleans per number."""
    return local * 5 // 2 if config.train.amp is Amp.fp16 else 0
