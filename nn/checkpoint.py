"""Save and restore a run's state through torch.distributed.checkpoint.

A checkpoint is a directory `step_N`: the shards, and `run.json`, which says what they belong to. It is written beside
its final name and renamed once every rank is done, so a directory called `step_N` is complete.

Names in it do not depend on the sharding: `tables.<table>.weight`, `tables.<table>.momentum1`, `dense.<parameter>`,
`dense_optimizer.<parameter>.<state>`. A table may therefore be split differently, or replicated, when it is read back.
"""

import json
import os
import shutil
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor

from dataloading.feature_spec import FeatureSpec
from nn.distributed import Ranks
from nn.step import Step

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
        dcp.save(_weights(step) | _optimizer_state(step), checkpoint_id=unfinished)
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


def check(path: Path, spec: FeatureSpec) -> int:
    """Return the number of steps behind a checkpoint, after seeing that it belongs to this dataset.

    Raises:
        ValueError: when it is no checkpoint, or was trained on other features.
    """
    try:
        facts = json.loads((path / RUN_FILE).read_text())
        fingerprint, num_steps = facts["feature_spec"], facts["num_steps"]
        dcp.FileSystemReader(path).read_metadata()
    except (OSError, ValueError, KeyError, EOFError, UnpicklingError) as error:
        raise ValueError(
            f"checkpoint.restore={path} is not a checkpoint ({error}); name a step_N directory "
            "below a run's checkpoints/"
        ) from None
    if fingerprint != spec.fingerprint():
        raise ValueError(
            f"checkpoint.restore={path} was trained on other features than this dataset's (names, "
            "order, cardinalities or hotness differ); set data.path to the dataset it was trained on"
        )
    return num_steps


def restore(path: Path, step: Step, *, with_optimizer: bool) -> None:
    """Load a checkpoint into both halves, in place; call `check` first.

    Args:
        path: a `step_N` directory.
        step: both halves, of any sharding and number of ranks.
        with_optimizer: also load the optimizers' state, which evaluation does not need.

    Raises:
        ValueError: on all ranks, when the checkpoint's tensors are not those of this model or cannot be read.
    """
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    stored = {name: each.size for name, each in metadata.items()}
    wanted = _weights(step)
    # A rank sees no state of tables that it has no part of, but must come to the same end as all the others.
    shapes = {name: value.shape for name, value in wanted.items()}
    if with_optimizer:
        _allocate_dense_state(step)
        state = _optimizer_state(step)
        shapes |= {f"tables.{name}": size for name, size in step.tables.optimizer_shapes().items()}
        shapes |= {name: value.shape for name, value in state.items() if name not in shapes}
        wanted |= state
    else:
        stored = {name: size for name, size in stored.items() if _is_weight(name)}
    differences = [
        *(
            f"{name} {tuple(stored[name])} instead of {tuple(size)}"
            for name, size in shapes.items()
            if name in stored and stored[name] != size
        ),
        *(f"no {name}" for name in shapes if name not in stored),
        *(f"{name}, which is not wanted" for name in stored if name not in shapes),
    ]
    if differences:
        more = f" and {len(differences) - 4} more" if len(differences) > 4 else ""
        raise ValueError(
            f"checkpoint.restore={path} holds another model or optimizer: "
            f"{', '.join(differences[:4])}{more}; use the model, embedding_dim and optimizer that it "
            "was trained with"
        )
    try:
        dcp.load(wanted, checkpoint_id=path)
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


def _is_weight(name: str) -> bool:
    return name.startswith("dense.") or name.endswith(".weight")


def _allocate_dense_state(step: Step) -> None:
    """Let the dense optimizer make its state, which torch does in the first step: here one that changes nothing."""
    step.dense_optimizer.zero_grad(set_to_none=False)
    for group in step.dense_optimizer.param_groups:
        group["lr"] = 0.0
    step.dense_optimizer.step()
