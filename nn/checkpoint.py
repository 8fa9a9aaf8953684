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
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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
    dcp.save(_weights(step) | _optimizer_state(step), checkpoint_id=unfinished)
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
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(
            f"checkpoint.restore={path} is not a checkpoint ({error}); name a step_N directory "
            "below a run's checkpoints/"
        ) from None
    if facts["feature_spec"] != spec.fingerprint():
        raise ValueError(
            f"checkpoint.restore={path} was trained on other features than this dataset's (names, "
            "order, cardinalities or hotness differ); set data.path to the dataset it was trained on"
        )
    return facts["num_steps"]


def restore(path: Path, step: Step, *, with_optimizer: bool) -> None:
    """Load a checkpoint into both halves, in place; call `check` first.

    Args:
        path: a `step_N` directory.
        step: both halves, of any sharding and number of ranks.
        with_optimizer: also load the optimizers' state, which evaluation does not need.

    Raises:
        ValueError: when the checkpoint's tensors are not those of this model.
    """
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    wanted = _weights(step)
    if with_optimizer:
        _allocate_dense_state(step, stored)
        wanted |= _optimizer_state(step)
    missing = sorted(set(wanted) - set(stored))
    differing = [
        f"{name} {tuple(stored[name].size)} instead of {tuple(value.shape)}"
        for name, value in wanted.items()
        if isinstance(stored.get(name), TensorStorageMetadata) and stored[name].size != value.shape
    ]
    if missing or differing:
        shown = ", ".join([*(f"no {name}" for name in missing), *differing][:5])
        raise ValueError(
            f"checkpoint.restore={path} holds another model or optimizer: {shown}; use the model, "
            "embedding_dim and optimizer that it was trained with"
        )
    dcp.load(wanted, checkpoint_id=path)


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


def _allocate_dense_state(step: Step, stored: dict[str, Any]) -> None:
    """Make room for the dense optimizer's state, which torch allocates in the first step only."""
    for name, parameter in step.dense.named_parameters():
        prefix = f"dense_optimizer.{name}."
        for key, metadata in stored.items():
            if key.startswith(prefix):
                step.dense_optimizer.state[parameter][key.removeprefix(prefix)] = torch.empty(
                    metadata.size, dtype=metadata.properties.dtype, device=parameter.device
                )
