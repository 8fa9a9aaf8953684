"""Content of a checkpoint, and its restore into both components and their optimizers under any sharding.

Names do not depend on the sharding: `tables.<table>.weight`, `tables.<table>.momentum1`, `dense.<parameter>`,
`dense_optimizer.<parameter>.<state>`. A table may therefore be split differently, or replicated, when it is read back.
`trainer.<name>` is the training loop's own.

There is no generator to save: initial weights, the order of rows and synthetic clicks are functions of the seed and of
counters, and the schedule is one of the step. The loader's position is the step.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from configs.schema import Component, Config
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.file_states import file_samples, file_states
from nn.checkpoint.compatibility import (
    chosen,
    component_of,
    differences,
    feature_mismatch,
    open_index,
    remedy,
)
from nn.checkpoint.dcp_storage import DcpReader, DcpWriter
from nn.checkpoint.directory import FORMAT_VERSION, commit, read_facts, unfinished, wait_for
from nn.checkpoint.staging import State
from nn.checkpoint.tensor_index import REMEDY, blocks, read_index
from nn.checkpoint.tf2 import find_tf2_tables
from nn.distributed.process_group import HostChannel, Ranks

TRAINER = "trainer."


class Trained(Protocol):
    """The model and optimizers whose state a checkpoint holds, in the style of torch.distributed.checkpoint's `Stateful`.

    Attributes:
        frozen: components that keep their weights.
    """

    frozen: frozenset[Component]

    @property
    def table_names(self) -> list[str]:
        """Names of the tables, in the order of the features."""

    def state_dict(self, *, with_optimizer: bool = True) -> State:
        """Return this rank's shards of the state; the tensors are those that are trained."""

    def load_state_dict(self, state: State) -> None:
        """Take over the values of a state of the same names and shapes."""

    def state_shapes(self, *, with_optimizer: bool = True) -> dict[str, torch.Size]:
        """Return the complete shapes of the state, of tables that lie on other ranks only too."""

    def allocate_optimizer_state(self) -> None:
        """Make the optimizer state that is otherwise made in the first step."""


def facts_of(config: Config, spec: FeatureSpec, ranks: Ranks) -> dict[str, Any]:
    """Return the content of run.json for a run.

    Args:
        config: options of the run.
        spec: the dataset as the model sees it.
        ranks: this process.
    """
    return {
        "format_version": FORMAT_VERSION,
        "seed": config.seed,
        "world_size": ranks.world_size,
        "torch": torch.__version__,
        "feature_spec": spec.fingerprint(),
        "data_files": file_states(spec),
        "data_samples": file_samples(spec),
        "config": plain_config(config),
    }


def plain_config(config: Config) -> dict[str, Any]:
    """Return a configuration as JSON would hold it."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return value.value if isinstance(value, Enum) else value

    return plain(asdict(config))


def write(
    directory: Path, num_steps: int, state: State, tables: Sequence[str], channel: HostChannel
) -> None:
    """Write the tensors of a checkpoint below its unfinished name; all ranks must call it.

    Args:
        directory: of the run's checkpoints.
        num_steps: updates made so far.
        state: this rank's shards.
        tables: their names, in the order of the features.
        channel: between the hosts.

    Raises:
        ValueError: on all ranks, when one could not write its part.
        RuntimeError: another rank has ended.
    """
    writer = DcpWriter(unfinished(directory, num_steps), tables)
    try:
        dcp.save(state, storage_writer=writer, process_group=channel.group)
    except dcp.CheckpointException as error:
        raise ValueError(_first_problem(error)) from None


def missing_parts(directory: Path, state: State) -> list[str]:
    """Return the names of a state's tensors that the written files do not hold in full."""
    tensors = read_index(directory).tensors
    held = {
        name: sum(math.prod(chunk.sizes) for chunk in each.chunks) for name, each in tensors.items()
    }
    sizes = {
        name: value.metadata().size if isinstance(value, ShardedTensor) else value.shape
        for name, value in state.items()
    }
    return [name for name, size in sizes.items() if held.get(name) != math.prod(size)]


def save(directory: Path, step: Trained, num_steps: int, spec: FeatureSpec, ranks: Ranks) -> Path:
    """Write `directory/step_<num_steps>` while the caller waits, and return its path; of a run it knows the dataset only."""
    channel = HostChannel()
    write(directory, num_steps, step.state_dict(), step.table_names, channel)
    facts = {"format_version": FORMAT_VERSION, "feature_spec": spec.fingerprint()}
    if ranks.is_rank0:
        commit(directory, num_steps, facts | {"num_steps": num_steps})
    ranks.barrier()
    return directory / f"step_{num_steps}"


def check(
    path: Path,
    spec: FeatureSpec,
    tables: Mapping[str, str],
    *,
    components: Collection[Component] = tuple(Component),
    grow: bool = False,
    allow_changes: bool = False,
) -> dict[str, Any]:
    """Return run.json of a checkpoint, after seeing that it belongs to this dataset.

    Args:
        path: a `step_N` directory, or a checkpoint of the TF2 recipe, which has no steps.
        spec: this dataset.
        tables: feature -> its table.
        components: whose weights are to be taken from it.
        grow: allow tables to have more rows than are stored.
        allow_changes: take it although the features differ in more.

    Raises:
        ValueError: when it is no checkpoint, is of a newer format, or was trained on other features.
    """
    if find_tf2_tables(path) is not None:
        if set(components) != {Component.tables}:
            raise ValueError(
                f"checkpoint.restore={path} is of the TF2 recipe, of which the tables can be loaded; set "
                "checkpoint.parts=[tables]"
            )
        return {"num_steps": 0}
    try:
        facts = read_facts(path)
        fingerprint, _ = facts["feature_spec"], facts["num_steps"]
        index = read_index(path)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"checkpoint.restore={path} is not a checkpoint ({error}); name a step_N directory "
            "below a run's checkpoints/"
        ) from None
    problem = feature_mismatch(index, fingerprint, spec, tables, grow=grow)
    if problem is not None and not allow_changes:
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
) -> None:
    """Load a checkpoint into a step, in place; call `check` first.

    Args:
        path: a `step_N` directory, or a checkpoint of the TF2 recipe.
        step: both halves, of any sharding and number of ranks.
        with_optimizer: also load the optimizers' state, which evaluation does not need, nor a frozen half.
        components: to load; the other keeps its weights.
        grow: let tables have more rows than are stored; those keep their weights, without optimizer state.
        is_own: it is the run's own, which no option names.

    Raises:
        ValueError: on all ranks, when the checkpoint's tensors are not those of this model or cannot be read.
    """
    named = str(path) if is_own else f"checkpoint.restore={path}"
    if find_tf2_tables(path) is None:
        # Rank 0 of another host may have renamed it a moment ago.
        wait_for(path / "run.json")
    index = open_index(path, step.table_names)
    tensors = chosen(index, components, with_optimizer=with_optimizer, frozen=step.frozen)
    if with_optimizer:
        step.allocate_optimizer_state()
    wanted = step.state_dict(with_optimizer=with_optimizer)
    # A rank sees no state of tables that it has no part of, but must come to the same end as all the others.
    shapes = step.state_shapes(with_optimizer=with_optimizer)
    wanted = {name: value for name, value in wanted.items() if component_of(name) in components}
    shapes = {name: size for name, size in shapes.items() if component_of(name) in components}
    stored = {name: tensor.size for name, tensor in tensors.items()}
    found = differences(stored, shapes, grow=grow)
    if found:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise ValueError(
            f"{named} holds another model or optimizer: {', '.join(found[:4])}{more}; "
            + remedy(path, stored, shapes, grow=grow, is_own=is_own)
        )
    try:
        dcp.load(
            wanted,
            storage_reader=DcpReader(tensors, shapes),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
        )
    except dcp.CheckpointException as error:
        problem = _first_problem(error)
        # Where its bytes are not what they were, the text says so already.
        advice = "" if REMEDY in problem else f"; {REMEDY}"
        raise ValueError(f"{named} cannot be read: {problem}{advice}") from None
    step.load_state_dict(wanted)


def trainer_rows(path: Path) -> tuple[Tensor, Tensor] | None:
    """Return the logits and labels that the training loop had kept for its next record, if any."""
    tensors = read_index(path).tensors
    names = [f"{TRAINER}{name}" for name in ("logits", "labels")]
    if names[0] not in tensors:
        return None
    logits, labels = (np.concatenate(list(blocks(tensors[name]))) for name in names)
    return torch.from_numpy(logits), torch.from_numpy(labels)


def _first_problem(error: dcp.CheckpointException) -> str:
    """The error of the lowest rank that has one, and which that is if it is not the first."""
    rank, (problem, _) = min(error.failures.items(), key=lambda each: each[0])
    return f"rank {rank}: {problem}" if rank else str(problem)
