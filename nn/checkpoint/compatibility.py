"""Selection of the tensors that a run loads from a checkpoint, and checks of their shapes and of the dataset."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.messages import shown
from configs.schema import Component
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.lineage import vocabularies
from nn.checkpoint.tensor_index import StoredTensor, TensorIndex, read_index
from nn.checkpoint.tf2 import find_tf2_tables, tf2_index

if TYPE_CHECKING:
    import torch

AVERAGE = "dense_ema."
"""Prefix of the average of a weight of the dense component."""
LAYER_STATE = "dense_state."
"""Prefix of the state of layers that only training needs: the scales of `train.fp8`."""


def open_index(path: Path, tables: Sequence[str]) -> TensorIndex:
    """Read the index of a checkpoint of this recipe or of the TF2 recipe. Raises ValueError: `path` is neither."""
    folder = find_tf2_tables(path)
    return read_index(path) if folder is None else tf2_index(folder, tables)


def select_tensors(
    index: TensorIndex,
    components: Collection[Component],
    *,
    with_optimizer: bool,
    frozen: Collection[Component] = (),
) -> dict[str, StoredTensor]:
    """Return the weights of some components and, optionally, the state of their optimizers."""
    return {
        name: tensor
        for name, tensor in index.tensors.items()
        if component_of(name) in components
        and (is_weight(name) or (with_optimizer and component_of(name) not in frozen))
    }


def match_options(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, torch.Size]
) -> tuple[dict[str, StoredTensor], dict[str, torch.Size], str | None]:
    """Return what to load if checkpoint and run differ in `train.ema_decay` or `train.fp8`.

    A run that begins an average takes the weights for it, and one that begins to multiply in 8 bits begins with new scales. A
    run without leaves them out. Returns both without what is left out, and a note for the user if there is something.
    """
    tensors, notes = dict(stored), []
    averages = [name for name in tensors if name.startswith(AVERAGE)]
    wanted_averages = [name for name in shapes if name.startswith(AVERAGE)]
    if averages and not wanted_averages:
        for name in averages:
            del tensors[name]
        notes.append(
            "has an average of the dense component, which train.ema_decay=null leaves out: the weights themselves are used"
        )
    elif wanted_averages and not averages:
        for name in wanted_averages:
            weight = f"dense.{name.removeprefix(AVERAGE)}"
            if weight in tensors:
                tensors[name] = tensors[weight]
        notes.append("has no average of the dense component: it starts at the restored weights")
    in_file = {name for name in tensors if name.startswith(LAYER_STATE)}
    in_run = {name for name in shapes if name.startswith(LAYER_STATE)}
    left_out = set() if in_file and in_run else in_file | in_run
    if left_out:
        notes.append(
            "has scales of 8-bit products, which train.fp8=off leaves out"
            if in_file
            else "was trained without train.fp8: its scales begin from the first step"
        )
    return (
        {name: tensor for name, tensor in tensors.items() if name not in left_out},
        {name: size for name, size in shapes.items() if name not in left_out},
        "; it ".join(notes) or None,
    )


def component_of(name: str) -> Component | None:
    """Return the component of a tensor; None for tensors of the training loop."""
    kind = name.partition(".")[0]
    return {
        "tables": Component.tables,
        "keys": Component.tables,
        "dense": Component.dense,
        "dense_ema": Component.dense,
        "dense_optimizer": Component.dense,
        "dense_state": Component.dense,
    }.get(kind)


def is_weight(name: str) -> bool:
    """Return whether a tensor is a weight, the average of one, or the keys of rows; False for what training alone needs."""
    kind, last = name.partition(".")[0], name.rpartition(".")[2]
    return kind in ("dense", "dense_ema") or (kind, last) in (
        ("tables", "weight"),
        ("keys", "keys"),
    )


def differences(
    stored: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], *, grow: bool
) -> list[str]:
    """Describe the differences between the shapes in a checkpoint and the shapes in a run."""
    return [
        *(
            f"{name} {tuple(stored[name])} instead of {tuple(size)}"
            for name, size in wanted.items()
            if name in stored
            and tuple(stored[name]) != tuple(size)
            and not (grow and name.startswith("tables.") and _is_grown(stored[name], size))
        ),
        *(f"no {name}" for name in wanted if name not in stored),
        *(f"unexpected {name}" for name in stored if name not in wanted),
    ]


def remedy(
    path: Path,
    stored: Mapping[str, Sequence[int]],
    wanted: Mapping[str, Sequence[int]],
    *,
    grow: bool,
    is_own: bool,
) -> str:
    """Return what the user can do about `differences`.

    `is_own`: whether the checkpoint is the run's own; such a run can only be resumed without changes.
    """
    new_run = (
        f"start a new run: checkpoint.restore={path} with another run_dir and " if is_own else ""
    )
    if not grow and not differences(stored, wanted, grow=True):
        option = f"{new_run or 'set '}checkpoint.grow=true"
        return f"if the ids that both have mean the same, {option}"
    parts = "checkpoint.parts=[dense,tables]"
    without = [
        component
        for component in Component
        if _has_state(wanted, component) and not _has_state(stored, component)
    ]
    rest = {
        name: size
        for name, size in wanted.items()
        if is_weight(name) or component_of(name) not in without
    }
    if without and not differences(stored, rest, grow=grow):
        return (
            f"it has no optimizer state of {' and '.join(component.name for component in without)}, which may have been "
            f"frozen (train.freeze) or trained with sgd; to continue training from its weights, {new_run or 'set '}{parts}"
        )
    return (
        "use the model, embedding_dim and optimizer that it was trained with, or load only the weights that fit: "
        f"{new_run}{parts} or one of the two"
    )


def _has_state(names: Collection[str], component: Component) -> bool:
    return any(component_of(name) is component and not is_weight(name) for name in names)


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
    """Return why a checkpoint cannot be loaded for a dataset, with the remedy; None if it can.

    `how_to_grow`: remedy if larger tables are the only difference.
    """
    if fingerprint == spec.fingerprint():
        return None
    weights = {
        feature: index.tensors.get(f"tables.{table}.weight") for feature, table in tables.items()
    }
    stored_rows = {
        feature: weight.size[0]
        for feature, weight in weights.items()
        if weight is not None and weight.size
    }
    # Equal fingerprints with the checkpoint's row counts mean that only row counts differ.
    if len(stored_rows) == len(weights) and spec.fingerprint(stored_rows) == fingerprint:
        return _row_count_mismatch(stored_rows, spec, grow, how_to_grow)
    return (
        "was trained on other features than this dataset's (names, order, cardinalities or hotness "
        "differ); set data.path to the dataset it was trained on, or checkpoint.allow_changes=true if the "
        "features mean the same"
    )


def vocabulary_mismatch(facts: Mapping[str, Any], metadata: Mapping[str, Any]) -> str | None:
    """Return why a dataset gives other values the ids that a model has learnt; None if nothing shows that it does.

    `facts`: run.json of the checkpoint; those of earlier versions list no vocabularies.
    """
    here = vocabularies(metadata)
    learnt = facts.get("vocabularies", {})
    other = [name for name, checksum in learnt.items() if here.get(name, checksum) != checksum]
    if not other:
        return None
    more = f" and {len(other) - 4} more" if len(other) > 4 else ""
    return (
        f"was trained with other vocabularies than this dataset's, of {', '.join(map(shown, other[:4]))}{more}: the same id "
        "means another value"
    )


def _row_count_mismatch(
    stored_rows: Mapping[str, int], spec: FeatureSpec, grow: bool, how_to_grow: str
) -> str | None:
    pairs = [(f.name, stored_rows[f.name], f.cardinality) for f in spec.categorical]
    shrunk = [(name, old, new) for name, old, new in pairs if old > new]
    if not shrunk and grow:
        return None
    changed = shrunk or [(name, old, new) for name, old, new in pairs if old < new]
    listed = ", ".join(f"{name} {old:,} instead of {new:,}" for name, old, new in changed[:4])
    more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    if shrunk:
        return (
            f"has tables with more rows than this dataset ({listed}{more}), but tables can only grow, not "
            "shrink; set data.path to the dataset it was trained on"
        )
    return (
        f"has tables with fewer rows than this dataset ({listed}{more}); if the ids that both have mean "
        f"the same, {how_to_grow}; the additional rows are initialized from the seed"
    )
