"""The distinct rows that a rank's first batch asks for, of tables whose rows the dense component takes.

How often ids occur does not tell them: the rows of a user repeat the events of that user.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.schema import Config
from dataloading.dataset.source import Source
from dataloading.loader import Loader, LoaderSettings
from nn.planning.plan import Hardware, TablePlan


def with_rows_of_first_batch(
    plan: Sequence[TablePlan],
    declared: Sequence[EmbeddingBagConfig],
    config: Config,
    source: Source,
    split: str,
    hardware: Hardware,
) -> list[TablePlan]:
    """Return the plan with what rank 0 and its group ask of each owner; as it is for clicks that are drawn, and raw keys."""
    tables = [table.table for table in plan if table.exchange == "rows" and not table.num_vectors]
    if not tables or config.data.path is None or source.spec.dynamic_tables:
        return list(plan)
    try:
        ids_of = partial(_ids_of_first_batch, config, source, split, hardware.world_size)
        has_merged = 1 < hardware.groups < hardware.world_size
        of_rank = ids_of(1)
        of_group = ids_of(hardware.world_size // hardware.groups) if has_merged else {}
    except (OSError, ValueError):
        # An estimate does without; the loader names what is wrong.
        return list(plan)
    features = {table.name: table.feature_names for table in declared}

    def counted(table: TablePlan, ids: dict[str, np.ndarray]) -> tuple[int, ...]:
        distinct = np.unique(np.concatenate([ids[name] for name in features[table.table]]))
        owners = len(table.ranks) if table.is_row_wise else 1
        owner = distinct // -(-table.num_embeddings // owners)
        return tuple(np.bincount(owner, minlength=owners).tolist())

    return [
        replace(
            table,
            batch_rows=counted(table, of_rank),
            group_rows=counted(table, of_group) if of_group else (),
        )
        if table.table in tables
        else table
        for table in plan
    ]


def _ids_of_first_batch(
    config: Config, source: Source, split: str, world_size: int, ranks: int
) -> dict[str, np.ndarray]:
    """Return the ids of each feature in the rows that the loaders of the first `ranks` ranks read first."""
    block = config.data.shuffle_block
    settings = LoaderSettings(
        batch_size=config.train.batch_size,
        seed=config.seed,
        shuffle_block=block,
        balances_events=True,
    )
    loaders = (
        Loader(source, split, settings, rank=rank, world_size=world_size) for rank in range(ranks)
    )
    runs = np.concatenate([loader.rows(0).runs for loader in loaders])
    names = [feature.name for feature in source.spec.categorical]
    return dict(zip(names, source.read(split, runs).ids, strict=True))
