"""Which of a checkpoint's tensors a run takes, and whether they fit."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from configs.schema import Component
from dataloading.feature_spec import FeatureSpec
from nn.checkpoint.tensor_index import StoredTensor, TensorIndex, read_index
from nn.checkpoint.tf2 import find_tf2_tables, tf2_index


def open_index(path: Path, tables: Sequence[str]) -> TensorIndex:
    """Return what a checkpoint of ours holds, or one of the TF2 recipe.

    Raises:
        ValueError: it is neither.
    """
    folder = find_tf2_tables(path)
    return read_index(path) if folder is None else tf2_index(folder, tables)


def chosen(
    index: TensorIndex,
    components: Collection[Component],
    *,
    with_optimizer: bool,
    frozen: Collection[Component] = (),
) -> dict[str, StoredTensor]:
    """Return the tensors of these halves: their weights, and the state of their optimizers where it is wanted.

    Args:
        index: of the checkpoint.
        components: to load.
        with_optimizer: take optimizer state too.
        frozen: halves that have none.
    """
    return {
        name: tensor
        for name, tensor in index.tensors.items()
        if component_of(name) in components
        and (is_weight(name) or (with_optimizer and component_of(name) not in frozen))
    }


def component_of(name: str) -> Component | None:
    """Tell which half a tensor belongs to; None if to neither."""
    kind = name.partition(".")[0]
    return {
        "tables": Component.tables,
        "dense": Component.dense,
        "dense_optimizer": Component.dense,
    }.get(kind)


def is_weight(name: str) -> bool:
    """Tell weights from optimizer state."""
    kind, *_, last = name.split(".")
    return kind == "dense" or (kind == "tables" and last == "weight")


def differences(
    stored: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], *, grow: bool
) -> list[str]:
    """Say how the shapes of tensors that are stored differ from those that are wanted.

    Args:
        stored: by name.
        wanted: by name.
        grow: allow tables to have more rows than are stored.
    """
    return [
        *(
            f"{name} {tuple(stored[name])} instead of {tuple(size)}"
            for name, size in wanted.items()
            if name in stored
            and tuple(stored[name]) != tuple(size)
            and not (grow and name.startswith("tables.") and _is_grown(stored[name], size))
        ),
        *(f"no {name}" for name in wanted if name not in stored),
        *(f"{name}, which is not wanted" for name in stored if name not in wanted),
    ]


def remedy(
    path: Path,
    stored: Mapping[str, Sequence[int]],
    wanted: Mapping[str, Sequence[int]],
    *,
    grow: bool,
    is_own: bool,
) -> str:
    """Say what to do about `differences`.

    Args:
        path: of the checkpoint.
        stored: shapes by name.
        wanted: shapes by name.
        grow: tables were allowed to have more rows than are stored.
        is_own: it is the run's own, which can only go on as it is.
    """
    begin = (
        f"begin a new run: checkpoint.restore={path} with another run_dir and " if is_own else ""
    )
    if not grow and not differences(stored, wanted, grow=True):
        how = f"{begin or 'set '}checkpoint.grow=true"
        return f"if the ids that both have mean the same, {how}"
    parts = "checkpoint.parts=[dense,tables]"
    without = [
        half for half in Component if _has_state(wanted, half) and not _has_state(stored, half)
    ]
    rest = {
        name: size
        for name, size in wanted.items()
        if is_weight(name) or component_of(name) not in without
    }
    if without and not differences(stored, rest, grow=grow):
        return (
            f"it has no optimizer state of {' and '.join(each.name for each in without)}, which may have been frozen "
            f"(train.freeze) or learnt by sgd when it was saved; to train on from its weights, {begin or 'set '}{parts}"
        )
    return (
        "use the model, embedding_dim and optimizer that it was trained with, or take the weights that fit: "
        f"{begin}{parts} or one of the two"
    )


def _has_state(names: Collection[str], half: Component) -> bool:
    return any(component_of(name) is half and not is_weight(name) for name in names)


def _is_grown(stored: Sequence[int], wanted: Sequence[int]) -> bool:
    return tuple(stored[1:]) == tuple(wanted[1:]) and stored[0] <= wanted[0]


def feature_mismatch(
    index: TensorIndex,
    fingerprint: str,
    spec: FeatureSpec,
    tables: Mapping[str, str],
    *,
    grow: bool,
    how_to_grow: str = "set checkpoint.grow=true",
) -> str | None:
    """Say why a checkpoint may not be loaded for this dataset, and what to do; None if it may.

    Args:
        index: of the checkpoint.
        fingerprint: of the dataset that it was trained on.
        spec: this dataset.
        tables: feature -> its table.
        grow: allow tables to have more rows than are stored.
        how_to_grow: what to do where that is all that is lacking.
    """
    if fingerprint == spec.fingerprint():
        return None
    weights = {
        feature: index.tensors.get(f"tables.{table}.weight") for feature, table in tables.items()
    }
    stored_rows = {name: each.size[0] for name, each in weights.items() if each is not None}
    if len(stored_rows) == len(weights):
        # With the rows that the checkpoint has: is there another difference?
        categorical = tuple(
            replace(feature, cardinality=stored_rows[feature.name]) for feature in spec.categorical
        )
        if replace(spec, categorical=categorical).fingerprint() == fingerprint:
            return _why_other_rows(categorical, spec, grow, how_to_grow)
    return (
        "was trained on other features than this dataset's (names, order, cardinalities or hotness "
        "differ); set data.path to the dataset it was trained on, or checkpoint.allow_changes=true if they "
        "mean the same"
    )


def _why_other_rows(
    stored: Sequence, spec: FeatureSpec, grow: bool, how_to_grow: str
) -> str | None:
    pairs = list(zip(stored, spec.categorical, strict=True))
    shrunk = [each for each in pairs if each[0].cardinality > each[1].cardinality]
    if not shrunk and grow:
        return None
    changed = shrunk or [each for each in pairs if each[0].cardinality < each[1].cardinality]
    listed = ", ".join(
        f"{old.name} {old.cardinality:,} instead of {new.cardinality:,}" for old, new in changed[:4]
    )
    more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    if shrunk:
        return (
            f"has tables of more rows than this dataset ({listed}{more}), and a table can grow but not "
            "shrink; set data.path to the dataset it was trained on"
        )
    return (
        f"has tables of fewer rows than this dataset ({listed}{more}); if the ids that both have mean "
        f"the same, {how_to_grow}, and the further rows begin with the seed's weights"
    )
