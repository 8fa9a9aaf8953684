"""Features and labels of a dataset as models need them."""

from collections.abc import Sequence
from typing import Any

from configs.messages import shown
from configs.schema import SUGGESTED, ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.sequences import SequenceGroup
from dataloading.embedding_sizes import suggested_embedding_dim


def chosen_features(
    key: str,
    names: Sequence[str] | None,
    known: Sequence[str],
    default: Sequence[str] | None = None,
) -> list[str]:
    """Return the features that an option names.

    `names`: its value; null chooses `default`. `default`: features without the option; None is all. Raises ValueError: the
    dataset lacks a feature, or it is named twice.
    """
    if names is None:
        return list(known if default is None else default)
    for name in names:
        if name not in known:
            raise ValueError(
                f"{key} names {shown(name)}, which the dataset lacks; it has {', '.join(known) or 'none'}"
            )
        if list(names).count(name) > 1:
            raise ValueError(f"{key} names {shown(name)} twice; name each feature once")
    return list(names)


def chosen_group(options: Any, spec: FeatureSpec) -> SequenceGroup | None:
    """Return the group that `model.sequence` names, by default the only one; None where `history_features` are named instead.

    Raises ValueError: the dataset has no such group, or none is named of several.
    """
    groups = {group.name: group for group in spec.sequences}
    name, has = options.sequence, ", ".join(groups) or "none"
    if name is None and getattr(options, "history_features", None):
        return None
    if name is None and len(groups) == 1:
        return spec.sequences[0]
    if name is None:
        how = "name one by model.sequence" if groups else "make one by table.sequence"
        how += ", or set model.history_features" * hasattr(options, "history_features")
        raise ValueError(
            f"model.name={options.name} reads a sequence group, and the dataset has {has}; {how}"
        )
    if name not in groups:
        raise ValueError(f"model.sequence={name} is no sequence group of the dataset; it has {has}")
    return groups[name]


def in_table_order(spec: FeatureSpec) -> list[str]:
    """Return the categorical features in the order of their vectors, where every one has the usual table."""
    return [feature.name for sharing in spec.table_features.values() for feature in sharing]


def rates(options: Any) -> dict[str, Any]:
    """Return the arguments of `MLP`, and of layers of it, that the options of most models have."""
    return {"dropout": options.dropout, "batch_norm": options.batch_norm}


def table_widths(options: ModelConfig, spec: FeatureSpec) -> dict[str, int]:
    """Return the columns of the vectors of every table, by `model.embedding_dims` and the names of `spec.table_features`.

    Raises ValueError: the option names a feature that the dataset lacks, or gives two widths to one table.
    """
    if options.embedding_dims == SUGGESTED:
        return {
            table: suggested_embedding_dim(first.cardinality)
            for table, (first, *_) in spec.table_features.items()
        }
    dims: dict[str, int] = options.embedding_dims
    chosen_features("model.embedding_dims", list(dims), [x.name for x in spec.categorical])
    widths = {}
    for table, features in spec.table_features.items():
        names = [feature.name for feature in features]
        named = [dims[name] for name in names if name in dims]
        if len(set(named)) > 1:
            raise ValueError(
                f"model.embedding_dims gives {named} columns to features {', '.join(names)}, which share a table; name one "
                "of them"
            )
        widths[table] = named[0] if named else options.embedding_dim
    return widths
