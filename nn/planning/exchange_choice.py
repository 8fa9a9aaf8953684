"""Choice of what the ranks of the samples get of each table: the vectors of its lookups, or the distinct rows of a batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.schema import Exchange, TableOverride
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import hands_out_rows
from nn.planning.plan import Hardware, TablePlan
from nn.sharding.request_capacity import capacity_for
from nn.tiers.traffic import IdTraffic, expected_distinct

ID_BYTES = 4
ELEMENT_BYTES = 4
"""Of a row or vector in float32, or of its gradient."""


def wanted_exchanges(
    declared: Sequence[EmbeddingBagConfig],
    spec: FeatureSpec,
    overrides: Mapping[str, TableOverride],
    usual: Exchange | None,
) -> dict[str, Exchange | None]:
    """Return what is wanted of each table: rows where the dense component takes them; ValueError for rows of 16 bits."""
    wanted = {}
    for table in declared:
        override = overrides.get(table.name, TableOverride())
        chosen = override.exchange or usual
        wanted[table.name] = Exchange.rows if hands_out_rows(table, spec) else chosen
        if wanted[table.name] is Exchange.rows and table.data_type.name != "FP32":
            raise ValueError(
                f"table {table.name} has weights of 16 bits, and exchange: rows is for float32; set "
                "model.embedding_dtype=fp32, or another exchange"
            )
    return wanted


def with_exchanges(
    plan: Sequence[TablePlan],
    declared: Sequence[EmbeddingBagConfig],
    spec: FeatureSpec,
    wanted: Mapping[str, Exchange | None],
    batch_size: int,
    hardware: Hardware,
    traffic_of: Callable[[str], IdTraffic],
) -> list[TablePlan]:
    """Return the plan with the exchange of each table; `batch_size` is that of a rank."""
    hotness = {feature.name: feature.mean_hotness for feature in spec.categorical}
    ranks, groups = hardware.table_ranks, hardware.groups

    def is_in_rows(table: TablePlan, config: EmbeddingBagConfig) -> bool:
        chosen = wanted[table.table]
        if chosen is not None and chosen is not Exchange.least:
            return chosen is Exchange.rows
        # The rounding of 16 bits depends on the table, and tables whose rows are asked for are updated as one.
        if config.data_type.name != "FP32" or table.sharding == "column_wise":
            return False
        if chosen is None and groups == 1:
            # A vector of more ids than ranks is fewer bytes than its rows would be without repetitions.
            are_few = all(hotness[feature] <= ranks for feature in config.feature_names)
            return table.is_row_wise and (config.pooling.name == "NONE" or are_few)
        if hardware.world_size == 1 or table.is_replicated:
            return False
        rows, columns = table.num_embeddings, table.embedding_dim
        share = traffic_of(table.table).share
        asked, merged = (
            capacity_for(expected_distinct(samples * table.hotness, share, 0, rows))
            for samples in (batch_size, batch_size * ranks)
        )
        # Of a row-wise table, every rank gets the ids, and sends a part of the vectors.
        sent = batch_size * (ranks if table.is_row_wise else 1)
        vectors, id_bytes = sent * table.num_vectors, ID_BYTES * table.hotness
        # Within a group, a column is sent in a row or vector, and in its gradient.
        in_group, of_column = ELEMENT_BYTES * columns * 2 * (ranks > 1), ELEMENT_BYTES * columns
        # To each other group go the distinct rows of all ranks with their gradients, or all ids with those of the vectors.
        in_rows = asked * (ID_BYTES + in_group)
        in_rows_between = merged / ranks * (ID_BYTES + of_column)
        in_vectors = sent * id_bytes + vectors * in_group
        in_vectors_between = sent * id_bytes + vectors * of_column
        more_between = in_rows_between - in_vectors_between
        return in_rows - in_vectors + (groups - 1) * more_between < 0

    by_name = {table.name: table for table in declared}
    return [
        replace(table, exchange="rows" if is_in_rows(table, by_name[table.table]) else "vectors")
        for table in plan
    ]
