"""The objects of a run, built from its configuration: source, plan, tables and dense component, loaders."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.messages import shown
from configs.options import MOST_SAMPLES
from configs.schema import Amp, Component, Config, Device, Fp8, Mode
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.source import Source
from dataloading.held_out_source import VALIDATION, HeldOutSource
from dataloading.id_counts import counts_of_ids
from dataloading.keys.rekeyed import KEYS
from dataloading.loader import READERS, Loader, LoaderSettings
from dataloading.negatives_source import NegativesSource
from dataloading.partition import num_steps
from dataloading.storage.local_copy import local_path
from dataloading.stream_source import StreamSource
from dataloading.synthetic import SyntheticSource
from nn.checkpoint.tensor_index import TensorIndex
from nn.distributed.host_memory import host_memory
from nn.distributed.process_group import HostChannel, Ranks, launched_world
from nn.embedding.declared_tables import ids_per_sample
from nn.embedding.multi_hot import MultiHot
from nn.embedding.optimizer import table_rule
from nn.embedding.pretrained import FileRows
from nn.layers.initialization import initialise_dense
from nn.models.registry import build_dense, declared_tables
from nn.models.tasks import tasks_of_run
from nn.planning.disk_room import check_disk, disk_need
from nn.planning.host_tables import read_ahead_bytes, with_expected_fetches
from nn.planning.measured_rows import with_measured_rows
from nn.planning.plan import Hardware, TablePlan
from nn.planning.plan_problem import PlanProblem
from nn.planning.planner import plan_tables
from nn.planning.table_sizes import weight_bytes_of
from nn.sharding.sharded_tables import ShardedTables
from nn.sharding.tables import TableSettings, TieredPlan
from nn.tiers.host_tier import DiskSettings
from nn.tiers.traffic import IdShare, IdTraffic, counted_share, power_law_share
from nn.training.train_step import TrainStep, loss_scale

if TYPE_CHECKING:
    # Numba is imported only where there are keys.
    from dataloading.keys.key_maps import KeyMaps

GIB = 2**30
MAX_ELEMENTS = 2**58
"""Elements of a table; torch counts its bytes, with those of its optimizer state, in 64 bits."""
TRAIN_SPLIT = "train"


def open_source(config: Config, trained: FeatureSpec | None = None) -> Source:
    """Open the dataset directory, or synthetic clicks; with rows that grow, or a validation split unless new rows are scored.

    `trained`: of the dataset whose capacities a step has, if it is another one.
    """
    data = config.data
    source: Source
    if data.path is not None:
        spec = FeatureSpec.load(local_path(data.path), data.feature_spec)
        spec = spec.with_event_weights(config.model.event_weights)
        source = open_dataset(spec if trained is None else spec.with_means_of(trained))
    else:
        source = SyntheticSource(data.synthetic, config.seed)
    if data.negatives.features and config.mode is not Mode.predict:
        source = NegativesSource(source, data.negatives, config.seed)
    if data.watch_dir is not None and config.mode is Mode.train:
        return StreamSource(source, Path(data.watch_dir))
    fraction = data.validation_fraction
    scores_others = config.mode is Mode.predict and config.predict.split != VALIDATION
    return source if fraction is None or scores_others else HeldOutSource(source, fraction)


def device_type(config: Config) -> str:
    """Return `cpu` or `cuda`; ValueError for device=cuda without a GPU, or a precision that the device lacks."""
    has_gpu = torch.cuda.is_available()
    if config.device is Device.cuda and not has_gpu:
        raise ValueError(
            "device=cuda, but torch sees no GPU here; train on the CPU with device=cpu, or install "
            "the CUDA build (`uv sync --extra cuda`) on a machine with an NVIDIA driver"
        )
    chosen = "cpu" if config.device is Device.cpu or not has_gpu else "cuda"
    if chosen == "cpu" and config.train.amp is Amp.fp16:
        raise ValueError("train.amp=fp16 needs a GPU; on the CPU set train.amp=bf16 or off")
    return chosen


def global_batch_size(config: Config) -> int:
    """Return the rows of a step over all ranks: those of the launcher, or with mode=plan those to plan for."""
    per_rank = config.train.batch_size_per_rank
    if per_rank is None:
        return config.train.batch_size
    world_size, _ = launched_world()
    if config.mode is Mode.plan and config.sharding.world_size is not None:
        world_size = config.sharding.world_size
    if per_rank * world_size > MOST_SAMPLES:
        raise ValueError(
            f"train.batch_size_per_rank={per_rank} on {world_size} ranks are {per_rank * world_size:,} rows per step; "
            f"want at most {MOST_SAMPLES:,}"
        )
    return per_rank * world_size


def hardware_of(
    config: Config, device_kind: str, world_size: int, local_world_size: int
) -> Hardware:
    """Describe the hardware to plan for: this machine, unless the options override it.

    Raises ValueError: there is neither a GPU nor hbm_gib, or the groups are of unequal size, or of parts of several nodes.
    """
    sharding = config.sharding
    _check_groups(sharding.group_size, world_size, local_world_size)
    hbm_bytes = 0
    if device_kind == "cuda":
        if sharding.hbm_gib is not None:
            hbm_bytes = int(sharding.hbm_gib * GIB)
        elif torch.cuda.is_available():
            hbm_bytes = torch.cuda.get_device_properties(0).total_memory
        else:
            raise ValueError(
                "there is no GPU whose memory could be used for the plan; set sharding.hbm_gib, such as "
                "sharding.hbm_gib=139 for an H200"
            )
    host_bytes = int(sharding.host_gib * GIB) if sharding.host_gib is not None else host_memory()
    return Hardware(
        device_kind,
        world_size,
        local_world_size,
        hbm_bytes,
        host_bytes,
        sharding.group_size,
        sharding.two_hops,
    )


def _check_groups(group_size: int | None, world_size: int, local_world_size: int) -> None:
    sizes = [
        size
        for size in range(1, world_size + 1)
        if world_size % size == 0 and max(size, local_world_size) % min(size, local_world_size) == 0
    ]
    if group_size is not None and group_size not in sizes:
        raise ValueError(
            f"sharding.group_size={group_size} does not divide {world_size} ranks of {local_world_size} per node into whole "
            f"nodes, or equal parts of one; want {' or '.join(map(str, sizes))}, or null for one group"
        )


def planned_device(config: Config) -> str:
    """Return the kind of the devices that `mode=plan` plans for; GPUs need not exist."""
    has_gpu = torch.cuda.is_available() or config.sharding.hbm_gib is not None
    on_gpu = config.device is Device.cuda or (config.device is Device.auto and has_gpu)
    return "cuda" if on_gpu else "cpu"


def planned_hardware(config: Config) -> Hardware:
    """Describe the hardware of `mode=plan`: ranks and GPUs need not exist; ValueError for nodes of unequal size."""
    started, started_local = launched_world()
    world_size = config.sharding.world_size or started
    local = config.sharding.local_world_size or (
        started_local if world_size == started else min(world_size, 8)
    )
    if world_size % local:
        raise ValueError(
            f"sharding.world_size={world_size} is no multiple of sharding.local_world_size={local}; "
            "all nodes must run equally many ranks"
        )
    return hardware_of(config, planned_device(config), world_size, local)


def build_plan(
    config: Config,
    source: Source,
    hardware: Hardware,
    declared: Sequence[EmbeddingBagConfig] | None = None,
) -> tuple[TieredPlan, list[TablePlan]]:
    """Plan the sharding of the tables; ValueError: they do not fit, an override is invalid, or the batch is indivisible."""
    if config.train.batch_size % hardware.world_size:
        raise ValueError(
            f"train.batch_size={config.train.batch_size} must be divisible by {hardware.world_size} ranks"
        )
    multi_hot = build_multi_hot(config, source)
    expanded = multi_hot.expanded_spec(source.spec)
    if declared is None:
        declared = _declared_tables(config, expanded)
    by_name = {table.name: table for table in declared}
    ids, stored = ids_per_sample(declared, expanded), ids_per_sample(declared, source.spec)

    @cache
    def traffic_of(name: str) -> IdTraffic:
        table = by_name[name]
        drawn = ids[name] / max(stored[name], 1e-9) - 1
        rows = table.num_embeddings
        return IdTraffic(id_share(config, source, table.feature_names, rows), rows, drawn)

    rule = table_rule(config.effective_optimizer.table_name)
    problem = PlanProblem(
        declared,
        expanded,
        config.sharding,
        rule,
        hardware,
        config.train.batch_size // hardware.world_size,
        multi_hot.expansion_bytes(),
        -(-live_samples(config) // hardware.world_size),
        traffic_of,
    )
    plan, rows = plan_tables(problem)
    room, memories, steps = read_ahead_bytes(config.sharding), 1 + len(rule.states), 0
    if plan.host_tables and config.mode in (Mode.train, Mode.plan):
        # Until a checkpoint or a delta is due at the latest; saves of the best evaluation may be earlier.
        all_rows, checkpoint = source.num_rows(TRAIN_SPLIT), config.checkpoint
        due = (checkpoint.save_every, checkpoint.delta_every) if checkpoint.save else ()
        ends = config.train.epochs * num_steps(all_rows, config.train.batch_size)
        steps = min(x for x in (ends, config.train.max_steps, *due) if x is not None)
    return plan, with_expected_fetches(
        plan, rows, traffic_of, config.train.batch_size, room, memories, steps
    )


def checked_plan(
    config: Config, source: Source, hardware: Hardware
) -> tuple[TieredPlan, list[TablePlan], str | None]:
    """Plan the sharding of the tables, and check the disk of those on disk, if it is here; ValueError: it has too little room.

    A plan of training has the rows of some batches. Returns the plan in both forms, and what `sharding.disk_path` has room
    for, as one line; None without tables on disk.
    """
    declared = _declared_tables(config, model_spec(config, source))
    plan, tables = build_plan(config, source, hardware, declared)
    if config.mode in (Mode.train, Mode.plan):
        tables = with_measured_rows(tables, declared, config, source, TRAIN_SPLIT, hardware)
    in_node = hardware.local_table_ranks
    filled = {
        table.name: table.num_embeddings * table.embedding_dim * weight_bytes_of(table)
        for table in declared
        if isinstance(table.init_fn, FileRows)
    }
    need = disk_need(tables, in_node, hardware.local_world_size // in_node, filled)
    if need is None or config.sharding.disk_path is None:
        return plan, tables, None
    path = Path(config.sharding.disk_path)
    return plan, tables, check_disk(path, need, may_be_elsewhere=config.mode is Mode.plan)


def without_a_node(config: Config, source: Source, hardware: Hardware) -> str | None:
    """Say whether a run would go on if a node were lost, as one line; None if it has only one."""
    left, in_node = hardware.world_size - hardware.local_world_size, hardware.local_world_size
    if not left:
        return None
    try:
        build_plan(config, source, hardware_of(config, hardware.device_type, left, in_node))
    except ValueError as error:
        return f"the run cannot go on: {error}"
    return f"the tables fit {left} x {hardware.device_type}, on which the run would resume"


def id_share(config: Config, source: Source, features: Sequence[str], cardinality: int) -> IdShare:
    """Return how often the rows of a table occur: as synthetic clicks are drawn, as its first feature was counted, or alike."""
    if config.data.path is None:
        return power_law_share(cardinality, config.data.synthetic.exponent)
    feature = next(known for known in source.spec.categorical if known.name == features[0])
    root = source.spec.root
    counts = None if root is None else counts_of_ids(root, feature)
    return power_law_share(cardinality, 0.0) if counts is None else counted_share(counts)


def live_samples(config: Config) -> int:
    """Return the rows of all batches at work: one beside a prefetched one, and another that waits for an evaluation."""
    train, scored = config.train.batch_size, config.eval.batch_size
    if config.mode is Mode.inference:
        scored = max(config.inference.batch_sizes)
    return max(2 * train, train + 2 * scored)


def build_multi_hot(config: Config, source: Source) -> MultiHot:
    """Build the expansion of one-hot ids, of none without data.multi_hot; ValueError if it is not for these features."""
    return MultiHot(source.spec, config.data.multi_hot, config.data.workers or READERS)


def model_spec(config: Config, source: Source) -> FeatureSpec:
    """Return the feature spec that the model sees: the stored one with the hotness of expanded features."""
    return build_multi_hot(config, source).expanded_spec(source.spec)


def build_key_maps(config: Config, spec: FeatureSpec, ranks: Ranks) -> "KeyMaps | None":
    """Build the maps from raw keys to rows, without keys; None for a dataset without raw keys."""
    if not spec.dynamic_tables:
        return None
    from dataloading.keys.shared_key_maps import KeyMaps, SharedKeyMaps

    kind = SharedKeyMaps if ranks.local_rank else KeyMaps
    return kind(spec, config.data.dynamic, ranks.local_world_size)


def stored_key_maps(config: Config, spec: FeatureSpec, index: TensorIndex) -> "KeyMaps | None":
    """Return maps with the keys of a checkpoint, for scores; None without raw keys, ValueError if the checkpoint has no keys."""
    if not spec.dynamic_tables:
        return None
    from dataloading.keys.key_maps import KeyMaps

    maps = KeyMaps(spec, config.data.dynamic)
    state = {}
    for table in maps.tables:
        stored = index.tensors.get(f"keys.{table}.{KEYS}")
        if stored is None:
            raise ValueError(f"the checkpoint has no keys of table {table}; it is of another model")
        state[f"{table}.{KEYS}"] = stored.array()
    maps.load(state)
    return maps


def build_step(
    config: Config,
    source: Source,
    plan: TieredPlan,
    ranks: Ranks,
    key_maps: "KeyMaps | None" = None,
) -> TrainStep:
    """Build tables and dense component with the seed's weights, and set the precision of float32 matrix products."""
    if key_maps is not None and ranks.world_size > 1:
        offers = HostChannel().gather(None if ranks.local_rank else key_maps.listen())
        key_maps.connect(offers[ranks.rank - ranks.local_rank])
    torch.set_float32_matmul_precision("high" if config.train.tf32 else "highest")
    path, read_ahead = config.sharding.disk_path, read_ahead_bytes(config.sharding)
    settings = TableSettings(
        config.effective_optimizer,
        config.train.amp,
        loss_scale(config),
        config.seed,
        tracks_rows=config.mode is Mode.train and config.checkpoint.delta_every is not None,
        disk=DiskSettings(Path(path), read_ahead) if path else None,
    )
    multi_hot = build_multi_hot(config, source)
    seen = multi_hot.expanded_spec(source.spec)
    declared = _declared_tables(config, seen)
    if not config.fills_tables:
        # No file of vectors is read, which may be gone.
        declared = [replace(table, init_fn=None) for table in declared]
    tables = ShardedTables(declared, source.spec, plan, ranks, settings, multi_hot)
    with ExitStack() as undo:
        # A process may end without Python's finalizers, and tables on disk have files.
        undo.callback(tables.close)
        dense = build_dense(config.model, seen, config.seed)
        initialise_dense(dense, config.seed)
        if config.train.fp8 is not Fp8.off:
            for layer in dense.fp8_layers():
                layer.use_fp8(weight_gradients=config.train.fp8 is Fp8.full)
        tasks = tasks_of_run(config, source.spec)
        step = TrainStep(tables, dense.to(ranks.device), tasks, config, ranks, key_maps)
        undo.pop_all()
    return step


@dataclass(frozen=True, slots=True)
class Loaders:
    """This rank's loaders of the training split and of the one to evaluate, if the mode has them; ends their readers."""

    train: Loader | None
    test: Loader | None

    def __enter__(self) -> Self:
        """Fork the reader processes of a GPU, before the process group exists; see `ReaderProcesses`."""
        try:
            for loader in self._all():
                if loader.device.type == "cuda":
                    loader.fork_readers()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        for loader in self._all():
            if error is None:
                loader.close()
            else:
                loader.end_readers()

    def _all(self) -> list[Loader]:
        return [loader for loader in (self.train, self.test) if loader is not None]


def build_loaders(
    config: Config, source: Source, ranks: Ranks, key_maps: "KeyMaps | None" = None
) -> Loaders:
    """Build the loaders that `config.mode` needs; ValueError for a split that is missing or too small."""
    train = test = None
    if config.mode is Mode.train:
        train = build_train_loader(config, source, ranks, key_maps)
    if config.mode is not Mode.inference:
        test = build_test_loader(config, source, ranks, key_maps=key_maps)
    return Loaders(train, test)


def build_train_loader(
    config: Config, source: Source, ranks: Ranks, key_maps: "KeyMaps | None" = None
) -> Loader:
    settings = _loader_settings(
        config,
        batch_size=config.train.batch_size,
        shuffle_block=config.data.shuffle_block,
        admits_keys=Component.tables not in config.train.freeze,
        balances_events=True,
    )
    return loader_of_rank(source, TRAIN_SPLIT, settings, ranks, key_maps)


def build_test_loader(
    config: Config,
    source: Source,
    ranks: Ranks,
    split: str | None = None,
    key_maps: "KeyMaps | None" = None,
) -> Loader:
    """Build this rank's loader of a split, by default the one to evaluate on, in the order on disk."""
    settings = _loader_settings(config, batch_size=config.eval.batch_size, only_scores=True)
    return loader_of_rank(source, split or config.eval.split, settings, ranks, key_maps)


def _loader_settings(config: Config, **own: Any) -> LoaderSettings:
    data = config.data
    return LoaderSettings(seed=config.seed, prefetch=data.prefetch, workers=data.workers, **own)


def loader_of_rank(
    source: Source, split: str, settings: LoaderSettings, ranks: Ranks, key_maps: "KeyMaps | None"
) -> Loader:
    return Loader(
        source,
        split,
        settings,
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=ranks.device,
        key_maps=key_maps,
    )


def _declared_tables(config: Config, seen: FeatureSpec) -> list[EmbeddingBagConfig]:
    """Return the tables that the model declares for what it sees. Raises ValueError: a table is larger than any memory."""
    tables = declared_tables(config.model, seen)
    for table in tables:
        if table.num_embeddings * table.embedding_dim >= MAX_ELEMENTS:
            raise ValueError(
                f"table {shown(table.name)} of {table.num_embeddings:,} rows and {table.embedding_dim:,} columns is larger than "
                "any memory; correct its cardinality, or lower model.embedding_dim"
            )
    return tables
