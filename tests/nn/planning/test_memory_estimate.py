"""Memory estimate of a GPU: against peaks measured on H200, term by term, and how it grows."""

import re
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.rows import ROWS
from configs.schema import Amp, Config, Device
from dataloading.dataset.batch_layout import id_counts
from dataloading.dataset.feature_spec import FeatureSpec
from nn.build import build_plan, open_source, planned_hardware
from nn.distributed.sharded_tensor import local_tensors
from nn.layers.distinct_rows import DistinctRows
from nn.layers.interactions.adaptive_mlp import AdaptiveMLP
from nn.layers.interactions.target_attention import TargetAttention
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence_events import SequenceEvents
from nn.models.din import DIN
from nn.models.model import Model
from nn.models.options import AttentionPooling
from nn.models.registry import build_meta, find_model
from nn.modes.plan import fitting_chunks
from nn.planning.memory_estimate import RankMemory, plan_memory, update_bytes
from nn.planning.plan import Hardware, TablePlan
from nn.planning.row_requests import requests_of
from nn.sharding.local_ids import Capacity
from nn.sharding.merged_rows import RowSums
from nn.sharding.sharded_lookup import ShardedLookup, _ById
from nn.training.dense_optimizer import dense_rule
from nn.training.train_step import TrainStep
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu, tiny
from tests.nn.models.test_hstu_memory import NoKernel, Peak
from tests.nn.models.test_kinds_of_tables import Kinds

GIB = 2**30
ON_H200 = ["device=cuda", "sharding.hbm_gib=139.8"]


def ranks_of(recipe: str, *overrides: str, world_size: int = 1) -> list[RankMemory]:
    config = compose_config(
        *ON_H200, f"sharding.world_size={world_size}", *overrides, recipe=recipe
    )
    source = open_source(config)
    _, plan = build_plan(config, source, planned_hardware(config))
    states = dense_rule(config.effective_optimizer).states_per_weight
    return plan_memory(config, source.spec, plan, world_size, states)


@pytest.mark.parametrize(
    ("name", "measured_gib"),
    [  # benchmarks/README.md
        ("dlrm_t15_1", 17.0),
        ("dlrm_t15_4", 5.8),
        ("dlrm_t15_4_weak", 7.2),
        ("dlrm_t0_4", 116.4),
        ("dcnv2_t15_1", 52.2),
        ("dcnv2_mlperf_1", 124.3),
        ("dcnv2_mlperf_4", 35.7),
        ("dlrm_t15_1_fp16", 18.9),
        ("dlrm_t15_1_tf32", 18.2),
        ("dlrm_t15_2_rows", 8.8),
    ],
)
def test_the_peak_is_within_a_fortieth_of_what_was_measured(name, measured_gib):
    row = ROWS[name]
    overrides = [f"experiment={row.experiment}", *row.overrides]
    planned = ranks_of(row.recipe, *overrides, world_size=row.world_size)[0].total / GIB
    assert planned == pytest.approx(measured_gib, rel=0.025)


@pytest.mark.parametrize(("amp", "measured_gib"), [("off", 6.34), ("bf16", 4.56)])
def test_embeddings_that_the_first_layer_reads_in_place_are_counted_once(amp, measured_gib):
    """65.5 million ids of 4 columns; benchmarks/README.md."""
    planned = ranks_of("dlrm", "experiment=embedding_mlp_sok", f"train.amp={amp}")[0].total / GIB
    assert planned == pytest.approx(measured_gib, rel=0.05)


class Moved(torch.autograd.Function):
    """Memory of the kernels that copy vectors to events, and add them up: they keep nothing."""

    @staticmethod
    def forward(ctx, values: Tensor, count: int) -> Tensor:
        ctx.count = len(values)
        return values.new_empty(count, *values.shape[1:])

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(ctx.count, *grad.shape[1:]), None


def planned_of(config: Config) -> tuple[RankMemory, FeatureSpec, int]:
    """Return the plan of one H200, with the dataset's features and the rows that a batch has capacity for."""
    config.device, config.sharding.hbm_gib = Device.cuda, 139.8
    source = open_source(config)
    _, plan = build_plan(config, source, planned_hardware(config))
    states = dense_rule(config.effective_optimizer).states_per_weight
    (planned,) = plan_memory(config, source.spec, plan, 1, states)
    asked = requests_of(config, source.spec, plan, 1)
    return planned, source.spec, sum(sum(each.capacity) for each in asked)


@pytest.mark.parametrize(
    ("name", "measured"),
    [("din_1_bf16_events", 173_729_280), ("din_1_bf16_100", 757_078_528)],
)
def test_the_peak_of_din_is_within_a_twentieth_of_what_was_measured(name, measured):
    planned, *_ = planned_of(ROWS[name].config())
    assert planned.total == pytest.approx(measured, rel=0.05)


def pass_over_events(config: Config, model_class: type[Model]) -> tuple[int, int]:
    """Return the bytes of a pass over a batch with the sums of rows, as planned and as allocated."""
    planned, spec, capacity = planned_of(config)
    rows, columns = config.train.batch_size, config.model.embedding_dim
    # A CPU would cast elsewhere.
    dtype = torch.float32 if config.train.amp is Amp.off else torch.bfloat16
    (group,), counts = spec.sequences, id_counts(spec, rows)
    (history,), (item,) = group.features, config.model.item_features
    with FakeTensorMode():
        model = model_class.build(config.model, spec)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        table = torch.empty(capacity + 1, columns, dtype=dtype, requires_grad=True)
        starts, lengths = torch.empty(2, rows, dtype=torch.int32)
        bags = SimpleNamespace(take_sorted=lambda *_: None, update=lambda *_: None)
        requests: Any = SimpleNamespace(
            rows_of=lambda at: table.new_empty(len(at), columns),
            sums_by_id=RowSums(lambda _: bags, table.shape, table.device),
        )
        ids: Any = SimpleNamespace(local=None, keys=None, order=None)
        positions = {
            name: torch.empty(counts[name].capacity, dtype=torch.int32) for name in (item, history)
        }
        pooled = torch.empty(rows, 2 * columns, dtype=dtype, requires_grad=True)
        with Peak() as counted:
            found = _ById.apply(table, requests, ids, *positions.values())
            vectors = dict(zip(positions, found, strict=True))
            del found

            def rows_of(table_name: str, feature: str) -> DistinctRows:
                return DistinctRows(
                    table, positions[feature], starts, lengths, vectors=lambda: vectors[feature]
                )

            def sequence_of(name: str) -> SequenceEvents:
                at = positions[history]
                return SequenceEvents(
                    {history: replace(rows_of("", history), hotness=0)},
                    {group.numbers[0].name: torch.empty(len(at))},
                    starts,
                    lengths,
                    torch.empty_like(at),
                    group.max_length,
                )

            numerical = torch.empty(rows, 0, dtype=dtype)
            embeddings = PooledEmbeddings.with_rows(pooled, rows_of, sequence_of)
            loss = model(numerical, embeddings).sum()
            vectors.clear()
            loss.backward()
    return planned.dense_pass + 4 * (capacity + 1) * columns, counted.most


PLAIN_UNITS: list[dict[str, Any]] = [
    {"attention_pooling": AttentionPooling.softmax},
    {"attention_hidden": [200, 80]},
    {"attention_hidden": [80]},
    {"embedding_dim": 64},
]


@pytest.mark.parametrize("options", PLAIN_UNITS, ids=str)
def test_an_attention_unit_without_kernels_keeps_its_layers_in_16_bits_too(options):
    def dense_pass(amp: Amp) -> int:
        config = ROWS["din_1_bf16_events"].config()
        config.train.amp = amp
        for name, value in options.items():
            setattr(config.model, name, value)
        return planned_of(config)[0].dense_pass

    assert 2 * dense_pass(Amp.bf16) == dense_pass(Amp.off)


@pytest.mark.parametrize(
    ("amp", "options"),
    [(Amp.off, {}), (Amp.bf16, {}), (Amp.bf16, PLAIN_UNITS[0])],
    ids=str,
)
def test_a_pass_of_din_over_events_allocates_what_is_planned(monkeypatch, amp, options):
    """The attention's gradients are made when the last MLP's have gone."""
    kernels = SimpleNamespace(
        expand=lambda values, at: Moved.apply(values, len(at.samples)),
        pool=lambda values, at, how: Moved.apply(values, len(at.starts)),
        softmax=lambda scores, at: Moved.apply(scores, len(scores)),
    )
    monkeypatch.setattr("nn.layers.sequence._jagged", lambda values: kernels)
    if amp is Amp.bf16:
        fused = pytest.importorskip("nn.ops.triton.target_attention")
        monkeypatch.setattr("nn.layers.interactions.target_attention.can_fuse", lambda *_: True)
        monkeypatch.setattr(fused, "_launch", lambda *_: None)
        monkeypatch.setattr(fused, "column_sums", lambda sums: sums.new_empty(sums.shape[1]))
        monkeypatch.setattr("nn.ops.triton.jagged._pool", NoKernel())
    for layer in (TargetAttention, AdaptiveMLP):
        monkeypatch.setattr(layer, "initialise", lambda *_: None)
    config = ROWS["din_1_bf16_events"].config()
    config.train.amp = amp
    for name, value in options.items():
        setattr(config.model, name, value)
    planned, counted = pass_over_events(config, DIN)
    assert planned == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sasrec", []),
        ("sasrec", ["train.amp=off", "model.expansion=4"]),
        ("sasrec", ["model.residual=gated", "model.blocks=4"]),
        ("bst", ["model.expansion=1"]),
        ("bst", ["model.expansion=2", "model.blocks=4"]),
        ("bst", ["model.expansion=1", "train.amp=off"]),
        ("bst", ["model.expansion=4"]),
        ("bst", ["model.expansion=4", "model.pooling=mean"]),
    ],
)
def test_a_pass_of_transformer_blocks_allocates_what_is_planned(monkeypatch, name, options):
    pytest.importorskip("nn.ops.triton.jagged_attention")
    kernels = {
        "jagged": ("_pool", "_expand"),
        "layer_norm": ("_norm", "_norm_gradient"),
        "jagged_attention": ("_clear", "_forward", "_query_gradient", "_key_gradient"),
    }
    for module, names in kernels.items():
        for kernel in names:
            monkeypatch.setattr(f"nn.ops.triton.{module}.{kernel}", NoKernel())
    sums = "nn.ops.triton.layer_norm.column_sums"
    monkeypatch.setattr(sums, lambda of: of.new_empty(of.shape[1]))
    monkeypatch.setattr("nn.layers.sequence.can_fuse", lambda *_: True)
    transformer = "nn.layers.interactions.transformer"
    monkeypatch.setattr(f"{transformer}.truncated_normal_", lambda *_: None)
    monkeypatch.setattr(f"{transformer}.time_bucket", lambda times, _: times.int())
    row = ROWS["sasrec_1_events"]
    overrides = [f"model.name={name}" if "model.name=" in of else of for of in row.overrides]
    config = replace(row, overrides=(*overrides, *options)).config()
    planned, counted = pass_over_events(config, find_model(name))
    assert planned == pytest.approx(counted, rel=0.01)


def test_layers_are_those_of_the_network_with_padded_inputs():
    config = compose_config(*TINY)
    spec = open_source(config).spec
    # 3 numerical features padded to 8; 6 vectors make 8 + 15 products, padded to 24
    assert build_meta(config.model, spec).linear_layers() == [(8, 16), (16, 8), (24, 16), (16, 1)]


def test_each_term_is_what_its_shapes_say():
    config = compose_config(*TINY, "data.synthetic.hotness=[1,2,1,1,3]", "train.amp=off")
    spec = open_source(config).spec
    tables = [
        TablePlan("cat_0", 500, 8, 1.0, "table_wise", "fused", (0,), (1000,)),
        TablePlan("cat_1", 40, 8, 2.0, "column_wise", "fused", (0, 1), (200, 200), 7),
        TablePlan("cat_4", 300, 8, 3.0, "row_wise", "fused", (0, 1), (50, 50)),
        TablePlan("cat_2", 7, 8, 1.0, "data_parallel", "dense", (0, 1), (9, 9)),
    ]
    first, second = plan_memory(config, spec, tables, 2, 1)
    assert (first.tables, second.tables) == (1259, 259)
    assert first.dense_tables == second.dense_tables == 4 * 7 * 8
    assert first.expansion == second.expansion == 7
    # weights and biases of four layers; weight, gradient and adagrad's sum
    parameters = 8 * 16 + 16 + 16 * 8 + 8 + 24 * 16 + 16 + 16 + 1
    assert first.dense_component == 4 * 3 * parameters
    # 64 rows in total, 32 here: 8 columns of one table, 4 of another, 8 of partial sums, sent and returned; 5 local
    elements = 64 * 8 + 64 * 4 + 64 * 8
    local = 32 * 5 * 8 * 4
    # and of the row-wise table the parts of both ranks, with their gradients
    assert first.lookups == 2 * 4 * elements + local + 2 * 4 * 32 * 2 * 8
    ids = 64 * 1 + 64 * 2 + 64 * 3 + 32 * 1
    levels = update_bytes(64 * 2, 4) + update_bytes(64 * 3, 8) + update_bytes(32, 8)
    assert first.update == pytest.approx(16 * ids + update_bytes(64, 8) + levels, abs=2)
    assert second.update == pytest.approx(16 * (ids - 64) + levels, abs=2)
    # 3 numbers, a label and 8 ids per row, each aligned to 256 bytes
    assert first.batches == 3 * (512 + 256 + 1024) + 32 * 12 * 8 + (12 + 12) * ids
    # the inputs of all layers, and two gradients of the widest
    assert first.dense_pass == (8 + 16 + 24 + 16 + 2 * 24) * 32 * 4
    # twice as many rows, local and sent; its widest layer takes less than the dense pass
    assert first.evaluation == 2 * (local + 4 * elements + 3 * 8 * ids)
    assert first.total == sum(asdict(first).values())


def test_what_arrives_lies_beside_the_matrix_of_a_model_with_a_prefix():
    tables = [
        TablePlan("cat_0", 500, 8, 1.0, "column_wise", "fused", (0, 1), (200, 200)),
        TablePlan("cat_4", 300, 8, 3.0, "row_wise", "fused", (0, 1), (50, 50)),
        TablePlan("cat_2", 7, 8, 1.0, "data_parallel", "dense", (0, 1), (9, 9)),
    ]
    further = ["data.synthetic.hotness=[1,1,1,1,3]", "train.amp=off", "eval.batch_size=64"]

    def planned(*overrides: str) -> RankMemory:
        config = compose_config(*tiny("dcnv2"), *further, *overrides)
        return plan_memory(config, open_source(config).spec, tables, 2, 1)[0]

    whole, chunked = planned(), planned("train.accumulate=2")
    # 5 vectors of 8 columns; two of them arrive, and of the second the parts of both ranks. The owners' part, sent and returned
    of_rows = 32 * (5 + 2) * 8 * 4 + 2 * 4 * 32 * 2 * 8
    assert whole.lookups == of_rows + 2 * 4 * 64 * (4 + 8)
    # Chunks have no matrix: one is copied and joined at a time, and the gradients of all vectors are kept.
    vectors = 32 * 5 * 8 * 4
    assert chunked.lookups == whole.lookups - 32 * 2 * 8 * 4
    assert chunked.dense_pass == (whole.dense_pass + vectors) // 2 + vectors // 2 + vectors


def test_a_group_looks_up_for_its_own_ranks_and_updates_with_all():
    config = compose_config(*TINY, "train.amp=off")
    spec = open_source(config).spec
    tables = [TablePlan("cat_0", 500, 8, 1.0, "table_wise", "fused", (0,), (1000,))]
    (flat, _), four = (
        plan_memory(config, spec, tables, 2, 1),
        plan_memory(config, spec, tables, 4, 1),
    )
    config.sharding.group_size = 2
    first, second = plan_memory(config, spec, tables, 4, 1)
    assert first.tables == 1000
    # 16 rows here: 32 of the group are sent and returned, and gradients of all 64 arrive
    local = 16 * 5 * 8 * 4
    assert first.lookups - local == 4 * 8 * (2 * 32 + 64)
    assert (four[0].lookups - local, second.lookups) == (4 * 8 * 2 * 64, local)
    assert first.update == four[0].update == flat.update
    config.sharding.group_size, config.sharding.two_hops = None, True
    in_two_hops = plan_memory(config, spec, tables, 4, 1)
    # What the owner sends is more than what a rank gets, and each rank may pass as much on.
    for rank, before in zip(in_two_hops, four, strict=True):
        assert rank.lookups - before.lookups == 3 * max(4 * 8 * 64, local)


def test_layers_that_keep_more_than_inputs_are_counted():
    def dense_pass(*overrides: str) -> int:
        return ranks_of("dlrm", *TINY, "model.top_mlp=[32,16,1]", *ON_H200, *overrides)[
            0
        ].dense_pass

    # Dropout is part of ReLU's kernels. A normalization keeps its input, and dropout after it has an output of its own.
    plain, column = dense_pass("train.amp=off"), 64 * 4
    assert dense_pass("train.amp=off", "model.dropout=0.5") == plain
    normalised = dense_pass("train.amp=off", "model.batch_norm=true")
    assert normalised == plain + (32 + 16) * column
    both = dense_pass("train.amp=off", "model.batch_norm=true", "model.dropout=0.5")
    assert both == normalised + (32 + 16) * column


def test_chunks_divide_activations_and_keep_the_gradients_of_all_vectors():
    options = (*TINY, *ON_H200, "train.batch_size=65536", "eval.batch_size=65536")
    whole, chunked = (
        ranks_of("dcnv2", *options, f"train.accumulate={chunks}")[0] for chunks in (1, 8)
    )
    vectors = 65_536 * 5 * 8 * 4
    assert chunked.lookups == whole.lookups
    assert chunked.dense_pass == pytest.approx(whole.dense_pass / 8 + vectors, rel=1e-3)


def test_evaluation_in_batches_of_the_same_size_needs_no_further_memory():
    assert ranks_of("dlrm", *TINY, *ON_H200, "eval.batch_size=64")[0].evaluation == 0


def launched(step: TrainStep, batch_size: int) -> tuple[int, int, int]:
    """Return what a rank on a GPU would allocate for its update, in bytes, with its numbers of ids and keys."""
    launcher = pytest.importorskip("nn.embedding.triton_launcher").TritonLauncher
    static = ShardedLookup(
        step.tables.rank_tables,
        batch_size,
        Capacity(),
        replicated_gradients=[torch.empty(shape) for shape in step.tables.replicated_shapes],
        prefix_columns=0,
        in_chunks=False,
    )
    size = ids = keys = 0
    for bags in (static._lookup_bags, static._replica_bags):
        if not bags.tables:
            continue
        kernels = launcher(
            bags.tables,
            bags._lookups,
            bags._key_bases,
            bags._sources,
            bags.num_samples,
            step.tables.rank_tables.config,
        )
        if bags._sources is not None:
            sources = bags._sources
            size += sum(each.nbytes for each in (sources.rows, sources.columns, sources.factors))
        for width_class in kernels._classes:
            for level in width_class._levels:
                parts = (level.blocks, level.sums, level.sums_keys, level.sums_exist)
                size += sum(tensor.nbytes for tensor in parts)
        size += bags._base_of_key.nbytes
        ids += bags.num_ids
        keys += sum(bags._counts)
    return size, ids, keys


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["sharding.tables={cat_1: data_parallel, wide_cat_0: data_parallel}"],
        ["model.name=dlrm", "model.embedding_dim=16", "model.bottom_mlp=[16]"],
        ["model.name=dlrm", "model.embedding_dim=128", "model.bottom_mlp=[128]"],
    ],
)
def test_the_update_takes_what_the_launcher_allocates(overrides):
    batch_size = 4096
    config = compose_config(
        *TINY,
        f"model.name={Kinds.__module__}:Kinds",
        "data.synthetic.hotness=[3,1,2,5,1]",
        f"train.batch_size={batch_size}",
        f"data.synthetic.train_rows={batch_size}",
        "train.amp=off",
        *overrides,
    )
    with ranks_of_cpu():
        built = build(config)
        allocated, ids, keys = launched(built.step, batch_size)
        tables = built.step.tables
        weights = [shard.weight.nbytes for shard in tables.shards()]
        states = [
            part.nbytes
            for tensor in tables.optimizer_state().values()
            for part in local_tensors(tensor)
        ]
        hardware = planned_hardware(config)
        _, plan = build_plan(config, built.source, hardware)
        (planned,) = plan_memory(config, built.source.spec, plan, 1, 1)
        built.step.close()
    assert planned.update - 16 * keys == pytest.approx(allocated, rel=0.02)
    assert planned.tables == sum(weights) + sum(states)
    # Twelve ids per row: 2 batches, and the graph's input. Replicated tables need an exchange, once per group of tables:
    # its copy and positions, and 3 arrived.
    has_replicas = "data_parallel" in "".join(overrides)
    assert ids == batch_size * (18 if has_replicas else 12)
    row = 3 * (4 * (3 + 1) + 4 * 12) + has_replicas * 12 * 12
    assert planned.batches == batch_size * row + (12 if has_replicas else 4) * ids
    assert (keys > ids) == (config.model.name != "dlrm")


def test_ids_of_a_feature_count_once_for_all_its_tables():
    def planned(*overrides: str) -> RankMemory:
        kinds = ["data.synthetic.hotness=[3,1,2,5,1]", *TINY, *ON_H200, "train.amp=off"]
        return ranks_of("dlrm", *kinds, *overrides)[0]

    # 12 ids per row, in a batch of 64. Every feature has two tables there.
    one, two = planned(), planned(f"model.name={Kinds.__module__}:Kinds")
    assert one.batches == two.batches
    # 3 vectors of 8 columns of one table without pooling, 8, 4 and 8 columns, and five of one column
    assert two.lookups == 64 * 4 * (3 * 8 + 8 + 4 + 8 + 5)


def test_a_shared_table_counts_the_expansions_of_all_its_features():
    config = compose_config(
        *TINY, f"model.name={Kinds.__module__}:Kinds", "data.multi_hot.hotness=[1,3,2,1,1]"
    )
    _, plan = build_plan(config, open_source(config), planned_hardware(config))
    # Kinds shares the table of cat_1 with cat_2: 2 more ids for 40, 1 more for 7, of 4 bytes
    counted = {table.table: table.expansion_bytes for table in plan if table.expansion_bytes}
    assert counted == {"cat_1": 4 * (80 + 7), "wide_cat_1": 4 * 80, "wide_cat_2": 4 * 7}


def test_16_bit_halves_activations_and_embeddings_and_keeps_a_copy_of_the_weights():
    full, half = (
        ranks_of("dlrm", *TINY, f"train.amp={amp}", *ON_H200)[0] for amp in ("off", "bf16")
    )
    assert half.lookups * 2 == full.lookups
    assert half.dense_pass * 2 == full.dense_pass
    assert half.dense_component * 6 == full.dense_component * 7


def test_a_plan_for_gpus_tells_the_peak_and_whether_it_fits():
    plan = ["mode=plan", *TINY, "device=cuda", "train.batch_size=65536"]
    fits = run_command(*plan, "sharding.hbm_gib=1").out
    assert "GiB at its peak on rank 0" in fits
    assert "too much" not in fits
    # Two chunks take 0.111 GiB, four 0.104 GiB, and as many as rows 0.097 GiB.
    assert "set train.accumulate=4, lower" in run_command(*plan, "sharding.hbm_gib=0.108").out
    in_chunks = run_command(*plan, "sharding.hbm_gib=0.108", "train.accumulate=4").out
    assert "too much" not in in_chunks
    assert "do not: lower train.batch_size" in run_command(*plan, "sharding.hbm_gib=0.05").out
    assert "at its peak" not in run_command("mode=plan", *TINY).out


@pytest.mark.parametrize(
    ("options", "chunks"),
    [((), 2), (("model.name=fcn",), None), (("train.amp=bf16", "train.fp8=full"), None)],
)
def test_a_plan_advises_no_chunks_that_are_refused(options, chunks):
    def needed(config: Config) -> list[RankMemory]:
        rank = ranks_of("dlrm", *TINY)[0]
        return [replace(rank, tables=2 * GIB // config.train.accumulate)]

    config = compose_config(*TINY, *options)
    hardware = Hardware("cuda", 1, 1, int(1.5 * GIB), GIB)
    assert fitting_chunks(config, hardware, needed) == chunks


def test_a_plan_compares_the_link_to_host_memory_with_a_step_on_a_gpu():
    plan = ["mode=plan", *TINY, "device=cuda", "sharding.hbm_gib=1", "sharding.host_gib=9"]
    in_host = "sharding.tables={cat_0: {tier: host, cache: 1.0}}"
    text = run_command(*plan, in_host).out
    found = re.search(r"device\nstep +at least ([0-9.]+) ms beside it", text)
    assert found, text
    assert float(found[1]) < 1
    assert "at least" not in run_command(*plan).out
