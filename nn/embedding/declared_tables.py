"""Tables that a model declares: the usual ones, their sizes, and the checks of the declaration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from configs.messages import shown
from configs.schema import ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.lookups import Lookup, Pooling

if TYPE_CHECKING:
    # TorchRec takes seven seconds to import; models import this file, and `--help` models.
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

Tables = list["EmbeddingBagConfig"]


def one_table_per_feature(
    options: ModelConfig,
    spec: FeatureSpec,
    columns: int | None = None,
    features: Sequence[str] | None = None,
    prefix: str = "",
) -> list[EmbeddingBagConfig]:
    """Declare a table per categorical feature, all of one width, which sum the ids of a bag.

    Features that share a vocabulary share a table (`FeatureSpec.table_features`), at the position of the first of them.

    `columns` replaces `options.embedding_dim`, `features` names those to look up, and `prefix` comes before the names of tables.
    """
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

    rows = {feature.name: feature.cardinality for feature in spec.categorical}
    tables = []
    for table, sharing in spec.table_features.items():
        names = [of.name for of in sharing if features is None or of.name in features]
        if names:
            declared = EmbeddingBagConfig(
                name=table_name(prefix + table),
                embedding_dim=options.embedding_dim if columns is None else columns,
                num_embeddings=max(rows[name] for name in names),
                feature_names=names,
                pooling=PoolingType.SUM,
                data_type=DataType[options.embedding_dtype.name.upper()],
                weight_init_max=options.embedding_init,
            )
            tables.append(declared)
    return tables


def check_tables(
    tables: Sequence[EmbeddingBagConfig], options: ModelConfig, spec: FeatureSpec
) -> None:
    """Check that the tables match the dataset's features and that the step supports them; ValueError for the first."""
    problem = _contradiction(tables, spec) or _unsupported(tables, options, spec)
    if problem is not None:
        raise ValueError(f"model.name={options.name}: {problem}")


def _contradiction(tables: Sequence[EmbeddingBagConfig], spec: FeatureSpec) -> str | None:
    by_name: dict[str, EmbeddingBagConfig] = {}
    for table in tables:
        if not table.feature_names:
            return f"table {shown(table.name)} has no feature; name the features that look it up"
        if table.name in by_name:
            first, second = by_name[table.name].feature_names[0], table.feature_names[0]
            return (
                f"the tables of features {shown(first)} and {shown(second)} have one name, {shown(table.name)}; rename a "
                "feature in the feature spec, or name them apart, such as by the prefix of one_table_per_feature"
            )
        by_name[table.name] = table
        if table.embedding_dim < 1:
            return (
                f"table {shown(table.name)} has {table.embedding_dim} columns; give it at least 1"
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
            return f"feature {shown(feature)} has no table; declare one, or take it out of the dataset's feature spec"
    return None


def _unsupported(
    tables: Sequence[EmbeddingBagConfig], options: ModelConfig, spec: FeatureSpec
) -> str | None:
    """Return the first property of the tables that no training step supports, or None; kept here only."""
    for table in tables:
        where = f"table {shown(table.name)}"
        if len(set(table.feature_names)) < len(table.feature_names):
            return f"{where} names a feature twice; one lookup can be read twice"
        if table.data_type.name != options.embedding_dtype.name.upper():
            return (
                f"{where} is {table.data_type.name.lower()}; a dtype other than "
                f"model.embedding_dtype={options.embedding_dtype.name} is not supported"
            )
        if table.need_pos or (
            table.weight_init_min is not None
            and (table.weight_init_max is None or table.weight_init_min != -table.weight_init_max)
        ):
            return (
                f"{where} has position weights or initial weights that are not symmetric, which are not supported; "
                "set weight_init_max alone for weights uniform in +-weight_init_max"
            )
        if hands_out_rows(table, spec) and table.data_type.name != "FP32":
            return f"{where} hands out its rows, which are float32 only; set model.embedding_dtype=fp32"
    return None


def hands_out_rows(table: EmbeddingBagConfig, spec: FeatureSpec) -> bool:
    """Return whether the dense component takes a table's distinct rows: without pooling, a ragged feature has no vectors."""
    ragged = {feature.name for feature in spec.categorical if feature.hotness is None}
    return table.pooling.name == "NONE" and bool(ragged & {*table.feature_names})


def handing_tables(tables: Sequence[EmbeddingBagConfig], spec: FeatureSpec) -> dict[str, str]:
    """Return the first table that hands out the rows of each feature, if any does."""
    return table_of_feature([table for table in tables if hands_out_rows(table, spec)])


def initial_bound(table: EmbeddingBagConfig) -> float:
    """Return the bound of a table's initial weights, which are uniform: 1/sqrt(rows), or the table's own."""
    return table.num_embeddings**-0.5 if table.weight_init_max is None else table.weight_init_max


def lookups_of(
    tables: Sequence[EmbeddingBagConfig], spec: FeatureSpec
) -> dict[str, tuple[Lookup, ...]]:
    """Return the lookups of every table, one per feature; `spec` has the hotness after the expansion of ids."""
    hotness = {feature.name: feature.hotness or 0 for feature in spec.categorical}
    found = {}
    for table in tables:
        pooling = Pooling[table.pooling.name.lower()]
        if hands_out_rows(table, spec):
            pooling = Pooling.rows
        found[table.name] = tuple(Lookup(f, hotness[f], pooling) for f in table.feature_names)
    return found


def keyed_tables(declared: Sequence[EmbeddingBagConfig], spec: FeatureSpec) -> dict[str, str]:
    """Return the tables for raw keys (`vocabulary: dynamic`), and the name of the map that has their keys."""
    features = {f.name: f.table or f.name for f in spec.categorical if f.is_dynamic}
    return {
        table.name: features[table.feature_names[0]]
        for table in declared
        if table.feature_names[0] in features
    }


def table_of_feature(tables: Sequence[EmbeddingBagConfig]) -> dict[str, str]:
    """Return the first table of every feature."""
    return {feature: names[0] for feature, names in tables_of_feature(tables).items()}


def tables_of_feature(tables: Sequence[EmbeddingBagConfig]) -> dict[str, list[str]]:
    tables_of: dict[str, list[str]] = {}
    for table in tables:
        for feature in table.feature_names:
            tables_of.setdefault(feature, []).append(table.name)
    return tables_of


def ids_per_sample(tables: Sequence[EmbeddingBagConfig], spec: FeatureSpec) -> dict[str, float]:
    """Return the mean number of ids that a sample looks up in every table; `spec` has the hotness after the expansion of ids."""
    hotness = {feature.name: feature.mean_hotness for feature in spec.categorical}
    return {table.name: sum(map(hotness.__getitem__, table.feature_names)) for table in tables}


def vectors_per_sample(tables: Sequence[EmbeddingBagConfig], spec: FeatureSpec) -> dict[str, float]:
    """Return the vectors that a sample looks up in every table: one per feature, or per id without pooling."""
    found = lookups_of(tables, spec).items()
    return {name: sum(lookup.num_vectors for lookup in lookups) for name, lookups in found}


def embedding_columns(tables: Sequence[EmbeddingBagConfig], spec: FeatureSpec) -> int:
    vectors = vectors_per_sample(tables, spec)
    return round(sum(table.embedding_dim * vectors[table.name] for table in tables))


def table_name(feature: str) -> str:
    """Return the name of a feature's table: that of the feature, changed if no module can have it (`cat_0.bin`, `type`)."""
    name = feature.replace(".", "_")
    return f"{name}_" if hasattr(nn.ModuleDict(), name) else name
