"""Selection of the tensors that a run loads from a checkpoint, and checks of their shapes and of the dataset."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.messages import first_of, shown
from configs.schema import Component
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.lineage import vocabularies
from nn.checkpoint.tensor_index import StoredTensor, TensorIndex

if TYPE_CHECKING:
    import torch

AVERAGE = "dense_ema."
"""Prefix of the average of a weight of the dense component."""
LAYER_STATE = "dense_state."
"""Prefix of the state of layers that only training needs: the scales of `train.fp8`."""


def match_options(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, torch.Size]
) -> tuple[dict[str, StoredTensor], dict[str, torch.Size], str | None]:
    """Return what to load if `train.ema_decay` or `train.fp8` differ: a run that begins an average takes the weights for it.

    A run that begins to multiply in 8 bits begins with new scales. A run without leaves them out, and the note says so.
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
    of_dense = ("dense", "dense_ema", "dense_optimizer", "dense_state")
    tables = {"tables": Component.tables, "keys": Component.tables}
    return (tables | dict.fromkeys(of_dense, Component.dense)).get(kind)


def is_weight(name: str) -> bool:
    """Return whether a tensor is a weight, the average of one, or the keys of rows; False for what training alone needs."""
    kind, last = name.partition(".")[0], name.rpartition(".")[2]
    return kind in ("dense", "dense_ema") or {"tables": "weight", "keys": "keys"}.get(kind) == last


def differences(
    stored: Mapping[str, Sequence[int]], wanted: Mapping[str, Sequence[int]], *, grow: bool
) -> list[str]:
    """Describe the differences between the shapes in a checkpoint and the shapes in a run."""

    def fits(name: str, size: Sequence[int]) -> bool:
        (old, *width), (new, *new_width) = stored[name] or (1,), size or (1,)
        may_grow = grow and name.startswith("tables.")
        return (
            width == new_width
            and len(stored[name]) == len(size)
            and (old == new or (may_grow and old < new))
        )

    return [
        *(
            f"{name} {tuple(stored[name])} instead of {tuple(size)}"
            for name, size in wanted.items()
            if name in stored and not fits(name, size)
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
    """Return what the user can do about `differences`; a run's own checkpoint (`is_own`) can only be resumed without changes."""
    new_run = (
        f"start a new run: checkpoint.restore={path} with another run_dir and " if is_own else ""
    )
    if not grow and not differences(stored, wanted, grow=True):
        option = f"{new_run or 'set '}checkpoint.grow=true"
        return f"if the ids that both have mean the same, {option}"
    parts = "checkpoint.parts=[dense,tables]"

    def with_state(names: Collection[str]) -> set[Component | None]:
        return {component_of(name) for name in names if not is_weight(name)}

    without = [c for c in Component if c in with_state(wanted) - with_state(stored)]
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
    config = path.parent.parent / "config.yaml"  # of the run whose checkpoint it is
    as_in = f" (config={config})" if config.is_file() and not is_own else ""
    return (
        f"use the model, embedding_dim and optimizer that it was trained with{as_in}, or load only the weights that fit: "
        f"{new_run}{parts} or one of the two"
    )


def feature_mismatch(
    index: TensorIndex,
    fingerprint: str,
    spec: FeatureSpec,
    tables: Mapping[str, str],
    *,
    grow: bool,
    how_to_grow: str = "set checkpoint.grow=true",
) -> str | None:
    """Return why a checkpoint cannot be loaded for a dataset, with the remedy; `how_to_grow` if only tables are larger."""
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
    if len(stored_rows) < len(weights) or spec.fingerprint(stored_rows) != fingerprint:
        return (
            "was trained on other features than this dataset's (names, order, cardinalities or hotness differ); set data.path "
            "to the dataset it was trained on, or checkpoint.allow_changes=true if the features mean the same"
        )
    pairs = [(f.name, stored_rows[f.name], f.cardinality) for f in spec.categorical]
    shrunk = [pair for pair in pairs if pair[1] > pair[2]]
    if not shrunk and grow:
        return None
    changed = shrunk or [pair for pair in pairs if pair[1] < pair[2]]
    listed = first_of([f"{name} {old:,} instead of {new:,}" for name, old, new in changed])
    if shrunk:
        return (
            f"has tables with more rows than this dataset ({listed}), but tables can only grow, not "
            "shrink; set data.path to the dataset it was trained on"
        )
    return (
        f"has tables with fewer rows than this dataset ({listed}); if the ids that both have mean "
        f"the same, {how_to_grow}; the additional rows are initialized from the seed"
    )


def vocabulary_mismatch(facts: Mapping[str, Any], metadata: Mapping[str, Any]) -> str | None:
    """Return why a dataset gives other values the ids that a model has learnt; None if run.json shows nothing of the kind."""
    here = vocabularies(metadata)
    learnt = facts.get("vocabularies", {})
    other = [name for name, checksum in learnt.items() if here.get(name, checksum) != checksum]
    if not other:
        return None
    return (
        f"was trained with other vocabularies than this dataset's, of {first_of([*map(shown, other)])}: the same id means "
        "another value"
    )
