"""Content of a checkpoint, and its restore into both components and their optimizers with any sharding.

Names do not depend on the sharding: `tables.<table>.weight`, `tables.<table>.momentum1`, `dense.<parameter>`,
`dense.<buffer>`, `dense_ema.<parameter>` (with `train.ema_decay`), `dense_optimizer.<parameter>.<state>`,
`dense_state.<layer>.<state>` (with `train.fp8`). A table may therefore be sharded differently, or replicated, when it is
restored. `trainer.<name>` is state of the training loop.

No generator has state to save. Initial weights, the order of rows and synthetic clicks are functions of the seed and of
counters, and the schedule is a function of the step. The loader's position is the step.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from configs.messages import first_of
from configs.option_values import plain_values
from configs.schema import Component, Config, MultiHotConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.file_states import data_state, file_states
from dataloading.lineage import vocabularies
from nn.checkpoint.compatibility import (
    component_of,
    differences,
    feature_mismatch,
    is_weight,
    match_options,
    remedy,
    vocabulary_mismatch,
)
from nn.checkpoint.directory import (
    FORMAT_VERSION,
    UnreadableError,
    no_checkpoint,
    read_facts,
    unfinished,
    wait_for,
)
from nn.checkpoint.other_tables import with_other_tables
from nn.checkpoint.tensor_files import read_tensors, write_tensors
from nn.checkpoint.tensor_index import REMEDY, TRAINER_ROWS, TRAINER_WEIGHTS, read_index
from nn.checkpoint.tf2 import find_tf2_tables, tf2_index
from nn.distributed.process_group import HostChannel, Ranks
from nn.distributed.sharded_tensor import State
from nn.tiers.initial_rows import InitialRows

TRAINER, DENSE_OPTIMIZER = "trainer.", "dense_optimizer."


class Trained(Protocol):
    """Model and optimizers whose state a checkpoint holds, in the style of torch.distributed.checkpoint's `Stateful`."""

    frozen: frozenset[Component]
    table_names: list[str]  # in the order of the features
    initial_rows: Mapping[
        str, InitialRows
    ]  # by name, the weights whose changes tensors of the state are

    def state_dict(self, *, with_optimizer: bool = True) -> State:
        """Return this rank's shards of the state; the tensors are not copied."""

    def load_state_dict(self, state: State) -> None:
        """Load a state of the same names and shapes."""

    def state_shapes(self, *, with_optimizer: bool = True) -> dict[str, torch.Size]:
        """Return the global shapes of the state, including tables of other ranks."""

    def allocate_optimizer_state(self) -> None:
        """Allocate the optimizer state that the first step would allocate."""


def facts_of(config: Config, spec: FeatureSpec, ranks: Ranks) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "seed": config.seed,
        "world_size": ranks.world_size,
        "torch": torch.__version__,
        "feature_spec": spec.fingerprint(),
        "vocabularies": vocabularies(spec.metadata),
        "data_files": file_states(spec),
        **data_state(spec),
        "config": plain_values(config),
    }


def write(
    directory: Path, num_steps: int, state: State, step: Trained, channel: HostChannel
) -> None:
    """Write the tensors of a checkpoint to its unfinished directory, on all ranks; ValueError on all if one cannot."""
    path = unfinished(directory, num_steps)
    write_tensors(path, state, step.table_names, step.initial_rows, channel)


def incomplete_tensors(directory: Path, state: State) -> list[str]:
    """Return the names of tensors of `state` that the written files do not contain completely."""
    num_elements = {
        name: sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        for name, tensor in read_index(directory).tensors.items()
    }
    return [
        name for name, value in state.items() if num_elements.get(name) != math.prod(value.shape)
    ]


def check(
    path: Path,
    spec: FeatureSpec,
    tables: Mapping[str, str],
    *,
    components: Collection[Component] = tuple(Component),
    grow: bool = False,
    allow_changes: bool = False,
    multi_hot: MultiHotConfig | None = None,
) -> dict[str, Any]:
    """Return run.json of a checkpoint that fits this dataset, `num_steps` of the TF2 recipe's; ValueError if it does not.

    `multi_hot`: the options that draw further ids for those of the dataset, unless None.
    """
    if find_tf2_tables(path) is not None:
        if set(components) != {Component.tables}:
            raise ValueError(
                f"checkpoint.restore={path} is of the TF2 recipe, of which the tables can be loaded; set "
                "checkpoint.parts=[tables]"
            )
        return {"num_steps": 0}
    try:
        facts, index = read_facts(path), read_index(path)
    except UnreadableError as error:
        raise ValueError(f"checkpoint.restore={path}: {error}") from None
    except ValueError as error:
        raise no_checkpoint("checkpoint.restore", path, error) from None
    if allow_changes:
        return facts
    problem = feature_mismatch(index, facts["feature_spec"], spec, tables, grow=grow)
    if problem is None and Component.tables in components and not grow:
        problem = vocabulary_mismatch(facts, spec.metadata)
        if problem is not None:
            problem += (
                "; set data.path, or fitted of raw files, to the dataset it was trained on or one that mode=transform made "
                "with it, or checkpoint.allow_changes=true if the ids mean the same"
            )
    if problem is None and multi_hot is not None and multi_hot.hotness:
        seed = ((facts.get("config") or {}).get("data", {}).get("multi_hot") or {}).get("seed", 0)
        if seed != multi_hot.seed:
            problem = (
                f"was trained with data.multi_hot.seed={seed}, and {multi_hot.seed} draws other ids; set that one, or "
                "checkpoint.allow_changes=true"
            )
    if problem is not None:
        raise ValueError(f"checkpoint.restore={path} {problem}")
    return facts


def restore(
    path: Path,
    step: Trained,
    *,
    with_optimizer: bool,
    components: Collection[Component] = tuple(Component),
    grow: bool = False,
    is_own: bool = False,
    others: Mapping[str, str] | None = None,
) -> str | None:
    """Load a checkpoint, or one of the TF2 recipe, into a step, in place; call `check` first.

    With `grow` additional rows of tables keep their weights, without optimizer state. `others`: checkpoints of single tables, by
    table, which take the place of those in `path` (`check_other_tables`). Returns what the user should know about the
    dense component's average and layers (`match_options`), or None. Raises ValueError, on all ranks: the tensors are not those of
    this model or cannot be read.
    """
    named = str(path) if is_own else f"checkpoint.restore={path}"
    if others:
        named += f" with checkpoint.restore_tables={others}"
    tf2 = find_tf2_tables(path)
    if tf2 is None:
        # Rank 0 of another host may have renamed it a moment ago.
        wait_for(path / "run.json")
    stored_tensors = (tf2_index(tf2, step.table_names) if tf2 else read_index(path)).tensors
    tensors = {
        name: tensor
        for name, tensor in with_other_tables(stored_tensors, others or {}).items()
        if (component := component_of(name)) in components
        and (is_weight(name) or (with_optimizer and component not in step.frozen))
    }
    # Torch creates the state of Adam and others in the first step.
    lacks_state = (
        with_optimizer
        and tf2 is None
        and not any(name.startswith(DENSE_OPTIMIZER) for name in tensors)
        and read_facts(path).get("num_steps") == 0
    )
    if with_optimizer and not lacks_state:
        step.allocate_optimizer_state()
    wanted = step.state_dict(with_optimizer=with_optimizer)
    # `state_dict` lacks tables without a shard on this rank, but all ranks must raise the same errors.
    shapes = {
        name: size
        for name, size in step.state_shapes(with_optimizer=with_optimizer).items()
        if component_of(name) in components
        and not (lacks_state and name.startswith(DENSE_OPTIMIZER))
    }
    tensors, shapes, note = match_options(tensors, shapes)
    wanted = {name: value for name, value in wanted.items() if name in shapes}
    stored = {name: tensor.size for name, tensor in tensors.items()}
    differing = differences(stored, shapes, grow=grow)
    if differing:
        raise ValueError(
            f"{named} holds another model or optimizer: {first_of(differing)}; "
            + remedy(path, stored, shapes, grow=grow, is_own=is_own)
        )
    try:
        read_tensors(wanted, tensors, step.initial_rows)
    except ValueError as error:
        # The message about damaged bytes has the remedy already.
        advice = "" if REMEDY in str(error) else f"; {REMEDY}"
        raise ValueError(f"{named} cannot be read: {error}{advice}") from None
    step.load_state_dict(wanted)
    return None if note is None else f"{named} {note}"


def trainer_rows(path: Path) -> dict[str, Tensor]:
    """Return the logits, labels and, if rows have them, weights that the training loop has collected for its next record."""
    tensors = read_index(path).tensors
    names = [name for name in (*TRAINER_ROWS, TRAINER_WEIGHTS) if name in tensors]
    return {
        name.removeprefix(TRAINER): torch.from_numpy(tensors[name].array())
        for name in names
        if tensors[name].size[0]
    }
