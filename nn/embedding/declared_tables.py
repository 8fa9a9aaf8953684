"""Tables that a model declares: the usual ones, their sizes, and the checks of the declaration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from configs.messages import shown
from configs.schema import ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec

if TYPE_CHECKING:
    # TorchRec takes seven seconds to import; models import this file, and `--help` models.
    from torchrec.modules.embedding_configs import EmbeddingBagConfig


def one_table_per_feature(options: ModelConfig, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
    """Declare a table per categorical feature, all of one width, which sum the ids of a bag.

    Args:
        options: columns and dtype.
        spec: names and rows.
    """
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

    return [
        EmbeddingBagConfig(
            name=table_name(feature.name),
            embedding_dim=options.embedding_dim,
            num_embeddings=feature.cardinality,
            feature_names=[feature.name],
            pooling=PoolingType.SUM,
            data_type=DataType[options.embedding_dtype.name.upper()],
        )
        for feature in spec.categorical
    ]


def check_tables(
    tables: Sequence[EmbeddingBagConfig], options: ModelConfig, spec: FeatureSpec
) -> None:
    """Check that the tables match the features of the dataset and that the training step supports them.

    Raises:
        ValueError: the first table or feature that is wrong.
    """
    problem = _contradiction(tables, spec) or _unsupported(tables, options, spec)
    if problem is not None:
        raise ValueError(f"model.name={options.name}: {problem}")


def _contradiction(tables: Sequence[EmbeddingBagConfig], spec: FeatureSpec) -> str | None:
    """Return the first contradiction of tables and features, or None."""
    by_name: dict[str, EmbeddingBagConfig] = {}
    for table in tables:
        other = by_name.setdefault(table.name, table)
        if other is not table:
            return (
                f"features {shown(other.feature_names[0])} and {shown(table.feature_names[0])} would share the table "
                f"name {shown(table.name)}; rename one of them in the feature spec, or name the tables apart"
            )
        if table.name != table_name(table.name):
            return f"no module can have the table name {shown(table.name)}; use {shown(table_name(table.name))}"
    cardinality = {feature.name: feature.cardinality for feature in spec.categorical}
    for table in tables:
        for feature in table.feature_names:
            if feature not in cardinality:
                return (
                    f"table {shown(table.name)} is of feature {shown(feature)}, which the dataset lacks; it has "
                    f"{', '.join(cardinality)}"
                )
            if table.num_embeddings < cardinality[feature]:
                return (
                    f"table {shown(table.name)} has {table.num_embeddings} rows, and ids of feature {shown(feature)} "
                    f"need {cardinality[feature]}"
                )
    with_table = {feature for table in tables for feature in table.feature_names}
    for feature in cardinality:
        if feature not in with_table:
            return (
                f"feature {shown(feature)} has no table; declare one, or take it out of the dataset's "
                "feature spec"
            )
    return None


def _unsupported(
    tables: Sequence[EmbeddingBagConfig], options: ModelConfig, spec: FeatureSpec
) -> str | None:
    """Return the first property of the tables that the training step does not support yet, or None; kept here only."""
    cardinality = {feature.name: feature.cardinality for feature in spec.categorical}
    used = Counter(feature for table in tables for feature in table.feature_names)
    for table in tables:
        where = f"table {shown(table.name)}"
        if len(table.feature_names) != 1:
            return f"{where} is shared by {len(table.feature_names)} features, which is not supported yet"
        feature = table.feature_names[0]
        if used[feature] > 1:
            return f"feature {shown(feature)} has {used[feature]} tables, and several are not supported yet"
        if table.embedding_dim != tables[0].embedding_dim:
            return (
                f"{where} has {table.embedding_dim} columns and {shown(tables[0].name)} "
                f"{tables[0].embedding_dim}; different widths are not supported yet"
            )
        if table.embedding_dim % 4:
            return f"{where} has {table.embedding_dim} columns; only multiples of 4 are supported"
        if table.num_embeddings != cardinality[feature]:
            return (
                f"{where} has {table.num_embeddings} rows for {cardinality[feature]} ids; further rows are "
                "not supported yet"
            )
        if table.pooling.name != "SUM":
            return f"{where} has pooling {table.pooling.name.lower()}; only sum is supported yet"
        if table.data_type.name != options.embedding_dtype.name.upper():
            return (
                f"{where} is {table.data_type.name.lower()}; a dtype other than "
                f"model.embedding_dtype={options.embedding_dtype.name} is not supported yet"
            )
        if table.need_pos or table.weight_init_min is not None or table.weight_init_max is not None:
            return (
                f"{where} has position weights or initial weights of its own, which are not supported yet; "
                "all tables begin uniform in +-1/sqrt(rows)"
            )
    return None


def table_of_feature(tables: Sequence[EmbeddingBagConfig]) -> dict[str, str]:
    """Return the table of every feature, in the order of the tables."""
    return {feature: table.name for table in tables for feature in table.feature_names}


def ids_per_sample(tables: Sequence[EmbeddingBagConfig], spec: FeatureSpec) -> dict[str, float]:
    """Return the mean number of ids that a sample looks up in every table.

    Args:
        tables: as declared.
        spec: feature spec after the expansion of ids.
    """
    hotness = {feature.name: feature.mean_hotness for feature in spec.categorical}
    return {
        table.name: sum(hotness[feature] for feature in table.feature_names) for table in tables
    }


def pooled_columns(tables: Sequence[EmbeddingBagConfig]) -> int:
    """Return the columns of all embeddings of a sample."""
    return sum(table.embedding_dim * len(table.feature_names) for table in tables)


def table_name(feature: str) -> str:
    """Return the name of a feature's table: that of the feature, changed if no module can have it (`cat_0.bin`, `type`)."""
    name = feature.replace(".", "_")
    return f"{name}_" if hasattr(nn.ModuleDict(), name) else name
