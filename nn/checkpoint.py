"""Save and restore a run's state through torch.distributed.checkpoint.

A checkpoint is a directory `step_N`: the shards, and `run.json`, which says what they belong to. It is written beside
its final name and renamed once every rank is done, so a directory called `step_N` is complete.

Names in it do not depend on the sharding: `tables.<table>.weight`, `tables.<table>.momentum1`, `dense.<parameter>`,
`dense_optimizer.<parameter>.<state>`. A table may therefore be split differently, or replicated, when it is read back.
"""

import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from configs.schema import Half
from dataloading.feature_spec import FeatureSpec
from nn.checkpoint_contents import (
    chosen,
    differences,
    half_of,
    open_index,
    tables_of,
    why_other_features,
)
from nn.distributed import Ranks
from nn.step import Step
from nn.stored_tensors import read_index
from nn.tensor_reader import TensorReader
from nn.tensor_writer import TensorWriter
from nn.tf2_tables import find_tf2_tables

RUN_FILE = "run.json"


def save(directory: Path, step: Step, num_steps: int, spec: FeatureSpec, ranks: Ranks) -> Path:
    """Write `directory/step_<num_steps>` and return its path.

    Args:
        directory: where checkpoints lie; made if missing.
        step: both halves and their optimizers.
        num_steps: updates made so far.
        spec: the dataset, whose fingerprint the checkpoint carries.
        ranks: this process.
    """
    path = directory / f"step_{num_steps}"
    unfinished = directory / f".step_{num_steps}.unfinished"
    if ranks.is_main:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    ranks.barrier()
    try:
        dcp.save(
            _weights(step) | _optimizer_state(step),
            storage_writer=TensorWriter(unfinished, tables_of(spec)),
        )
    except dcp.CheckpointException as error:
        problem, _ = next(iter(error.failures.values()))
        raise ValueError(
            f"the checkpoint could not be written below {directory}: {problem}; the run's other results "
            "are there. Make room and train again, or set checkpoint.save=false"
        ) from None
    if ranks.is_main:
        facts = {"num_steps": num_steps, "feature_spec": spec.fingerprint()}
        (unfinished / RUN_FILE).write_text(json.dumps(facts, indent=2) + "\n")
        shutil.rmtree(path, ignore_errors=True)
        os.replace(unfinished, path)
    ranks.barrier()
    return path


def check(
    path: Path,
    spec: FeatureSpec,
    *,
    halves: Collection[Half] = tuple(Half),
    grow: bool = False,
) -> int:
    """Return the number of steps behind a checkpoint, after seeing that it belongs to this dataset.

    Args:
        path: a `step_N` directory, or a checkpoint of the TF2 recipe, which has no steps.
        spec: this dataset.
        halves: whose weights are to be taken from it.
        grow: allow tables to have more rows than are stored.

    Raises:
        ValueError: when it is no checkpoint, or was trained on other features.
    """
    if find_tf2_tables(path) is not None:
        if set(halves) != {Half.tables}:
            raise ValueError(
                f"checkpoint.restore={path} is of the TF2 recipe, of which the tables can be loaded; set "
                "checkpoint.parts=[tables]"
            )
        return 0
    try:
        facts = json.loads((path / RUN_FILE).read_text())
        fingerprint, num_steps = facts["feature_spec"], facts["num_steps"]
        index = read_index(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"checkpoint.restore={path} is not a checkpoint ({error}); name a step_N directory "
            "below a run's checkpoints/"
        ) from None
    problem = why_other_features(index, fingerprint, spec, grow=grow)
    if problem is not None:
        raise ValueError(f"checkpoint.restore={path} {problem}")
    return num_steps


def restore(
    path: Path,
    step: Step,
    *,
    with_optimizer: bool,
    halves: Collection[Half] = tuple(Half),
    grow: bool = False,
) -> None:
    """Load a checkpoint into a step, in place; call `check` first.

    Args:
        path: a `step_N` directory, or a checkpoint of the TF2 recipe.
        step: both halves, of any sharding and number of ranks.
        with_optimizer: also load the optimizers' state, which evaluation does not need, nor a frozen half.
        halves: to load; the other keeps its weights.
        grow: let tables have more rows than are stored; those keep their weights, without optimizer state.

    Raises:
        ValueError: on all ranks, when the checkpoint's tensors are not those of this model or cannot be read.
    """
    index = open_index(path, step.tables.names)
    tensors = chosen(index, halves, with_optimizer=with_optimizer, frozen=step.frozen)
    wanted = _weights(step)
    # A rank sees no state of tables that it has no part of, but must come to the same end as all the others.
    shapes = {name: value.shape for name, value in wanted.items()}
    if with_optimizer:
        _allocate_dense_state(step)
        state = _optimizer_state(step)
        shapes |= {f"tables.{name}": size for name, size in step.tables.optimizer_shapes().items()}
        shapes |= {name: value.shape for name, value in state.items() if name not in shapes}
        wanted |= state
    wanted = {name: value for name, value in wanted.items() if half_of(name) in halves}
    shapes = {name: size for name, size in shapes.items() if half_of(name) in halves}
    stored = {name: tensor.size for name, tensor in tensors.items()}
    found = differences(stored, shapes, grow=grow)
    if found:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise ValueError(
            f"checkpoint.restore={path} holds another model or optimizer: {', '.join(found[:4])}{more}; "
            "use the model, embedding_dim and optimizer that it was trained with, or take the weights "
            "that fit: checkpoint.parts=[dense,tables] or one of the two"
        )
    try:
        dcp.load(
            wanted,
            storage_reader=TensorReader(tensors, shapes),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
        )
    except dcp.CheckpointException as error:
        problem, _ = next(iter(error.failures.values()))
        raise ValueError(
            f"checkpoint.restore={path} cannot be read: {problem}; copy it again, or name another"
        ) from None


def _weights(step: Step) -> dict[str, Any]:
    state = {f"tables.{name}": value for name, value in step.tables.weights().items()}
    state |= {f"dense.{name}": value.detach() for name, value in step.dense.named_parameters()}
    return state


def _optimizer_state(step: Step) -> dict[str, Any]:
    state = {f"tables.{name}": value for name, value in step.tables.optimizer_state().items()}
    for name, parameter in step.dense.named_parameters():
        for key, value in step.dense_optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                state[f"dense_optimizer.{name}.{key}"] = value
    return state


def _allocate_dense_state(step: Step) -> None:
    """Let the dense optimizer make its state, which torch does in the first step: here one that changes nothing."""
    step.dense_optimizer.zero_grad(set_to_none=False)
    for group in step.dense_optimizer.param_groups:
        group["lr"] = 0.0
    step.dense_optimizer.step()
