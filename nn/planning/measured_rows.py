"""The distinct rows that a rank's batches ask for, of tables whose rows the dense component takes, and the events of their parts.

How often ids occur does not tell them: the rows of a user repeat the events of that user.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.schema import Config
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.sequences import SequenceGroup
from dataloading.dataset.source import Columns, Source
from dataloading.loader import Loader, LoaderSettings
from nn.planning.plan import Hardware, TablePlan
from nn.sharding.request_capacity import event_capacity, most_expected


def with_measured_rows(
    plan: Sequence[TablePlan],
    declared: Sequence[EmbeddingBagConfig],
    config: Config,
    source: Source,
    split: str,
    hardware: Hardware,
) -> list[TablePlan]:
    """Return the plan with what rank 0 and its group ask of each owner, and the capacity for events of rank 0's parts.

    As it is for clicks that are drawn, and raw keys.
    """
    tables = [table for table in plan if table.exchange == "rows" and table.hands_out_rows]
    if not tables or config.data.path is None or source.spec.dynamic_tables:
        return list(plan)
    features = {table.name: table.feature_names for table in declared}

    def counted(table: TablePlan, ids: dict[str, np.ndarray]) -> list[int]:
        distinct = np.unique(np.concatenate([ids[name] for name in features[table.table]]))
        owners = len(table.ranks) if table.is_row_wise else 1
        owner = distinct // -(-table.num_embeddings // owners)
        return np.bincount(owner, minlength=owners).tolist()

    names = [feature.name for feature in source.spec.categorical]
    rows = config.train.batch_size // hardware.world_size
    firsts = np.arange(0, rows, -(-rows // config.train.accumulate))

    def expected(ranks: int) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
        """Return the rows that some ranks ask of each owner, by table, and room for the first rank's events, by group."""
        counts, events = [], []
        for columns in _batches(config, source, split, hardware.world_size, ranks):
            ids = dict(zip(names, columns.ids, strict=True))
            counts.append([counted(table, ids) for table in tables])
            lengths = dict(zip(names, columns.lengths, strict=True))
            of_groups = [lengths[group.features[0]] for group in source.spec.sequences]
            events.append([_most_events(of, rows, firsts) for of in of_groups])
        asked = {
            table.table: tuple(map(most_expected, zip(*of_table, strict=True)))
            for table, of_table in zip(tables, zip(*counts, strict=True), strict=True)
        }
        room = map(event_capacity, zip(*events, strict=True)) if len(events) > 1 else ()
        groups = [group.name for group in source.spec.sequences]
        return asked, dict(zip(groups, room, strict=False))

    try:
        has_merged = 1 < hardware.groups < hardware.world_size
        of_rank, room = expected(1)
        of_group = expected(hardware.world_size // hardware.groups)[0] if has_merged else {}
    except (OSError, ValueError):
        # An estimate does without; the loader names what is wrong.
        return list(plan)
    return [
        replace(
            table,
            batch_rows=of_rank.get(table.table, ()),
            group_rows=of_group.get(table.table, ()),
            part_events=tuple(
                room[group.name]
                for group in groups_of_table(source.spec, features[table.table])
                if group.name in room
            ),
        )
        for table in plan
    ]


def _most_events(lengths: np.ndarray | None, rows: int, firsts: np.ndarray) -> int:
    """Return the events of the part that has most, of samples with such lengths, of which the first `rows` are a rank's."""
    assert lengths is not None, "groups are ragged"
    own = lengths[:rows]
    return int(np.add.reduceat(own, firsts[firsts < len(own)]).max())


def groups_of_table(spec: FeatureSpec, features: Collection[str]) -> list[SequenceGroup]:
    """Return the sequence groups whose first feature is one of a table's."""
    return [group for group in spec.sequences if group.features[0] in features]


def _batches(
    config: Config, source: Source, split: str, world_size: int, ranks: int
) -> Iterator[Columns]:
    """Yield batches of the first `ranks` ranks' loaders, those that a step measures."""
    settings = LoaderSettings(
        batch_size=config.train.batch_size,
        seed=config.seed,
        shuffle_block=config.data.shuffle_block,
        balances_events=True,
    )
    loaders = [
        Loader(source, split, settings, rank=rank, world_size=world_size) for rank in range(ranks)
    ]
    for step in loaders[0].spread_steps() or [0]:
        runs = np.concatenate([loader.rows(step).runs for loader in loaders])
        yield source.read(split, runs)
