"""What a checkpoint holds, and how it gets into both halves and out of them, through torch.distributed.checkpoint.

Names do not depend on the sharding: `tables.<table>.weight`, `tables.<table>.momentum1`, `dense.<parameter>`,
`dense_optimizer.<parameter>.<state>`. A table may therefore be split differently, or replicated, when it is read back.
`trainer.<name>` is the training loop's own.

There is no generator to save: initial weights, the order of rows and synthetic clicks are functions of the seed and of
counters, and the schedule is one of the step. The loader's position is the step.
"""

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from configs.schema import Config
from dataloading.feature_spec import FeatureSpec
from dataloading.file_states import file_samples, file_states
from nn.checkpoint_files import FORMAT_VERSION, commit, read_facts, unfinished, wait_for
from nn.distributed import HostChannel, Ranks
from nn.host_copy import State
from nn.step import Step
from nn.stored_tensors import blocks, read_index
from nn.tensor_reader import TensorReader
from nn.tensor_writer import TensorWriter

TRAINER = "trainer."


def state_of(step: Step) -> State:
    """Return this rank's part of what a checkpoint holds; the tensors are those that are trained."""
    return _weights(step) | _optimizer_state(step)


def facts_of(config: Config, spec: FeatureSpec, ranks: Ranks) -> dict[str, Any]:
    """Return what run.json says of a whole run.

    Args:
        config: the whole run.
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
            return {key: plain(each) for key, each in value.items()}
        if isinstance(value, list):
            return [plain(each) for each in value]
        return value.value if isinstance(value, Enum) else value

    return plain(asdict(config))


def write(directory: Path, num_steps: int, state: State, step: Step, channel: HostChannel) -> None:
    """Write the tensors of a checkpoint below its unfinished name; all ranks must call it.

    Raises:
        ValueError: on all ranks, when one could not write its part.
        RuntimeError: another rank has ended.
    """
    writer = TensorWriter(unfinished(directory, num_steps), step.tables.names)
    try:
        dcp.save(state, storage_writer=writer, process_group=channel.group)
    except dcp.CheckpointException as error:
        raise ValueError(_first_problem(error)) from None


def save(directory: Path, step: Step, num_steps: int, spec: FeatureSpec, ranks: Ranks) -> Path:
    """Write `directory/step_<num_steps>` while the caller waits, and return its path; of a run it knows the dataset only."""
    channel = HostChannel()
    write(directory, num_steps, state_of(step), step, channel)
    facts = {"format_version": FORMAT_VERSION, "feature_spec": spec.fingerprint()}
    if ranks.is_main:
        commit(directory, num_steps, facts | {"num_steps": num_steps})
    ranks.barrier()
    return directory / f"step_{num_steps}"


def check(path: Path, spec: FeatureSpec, *, allow_changes: bool = False) -> dict[str, Any]:
    """Return run.json of a checkpoint, after seeing that it belongs to this dataset.

    Raises:
        ValueError: when it is no checkpoint, is of a newer format, or was trained on other features.
    """
    try:
        facts = read_facts(path)
        fingerprint, _ = facts["feature_spec"], facts["num_steps"]
        read_index(path)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"checkpoint.restore={path} is not a checkpoint ({error}); name a step_N directory "
            "below a run's checkpoints/"
        ) from None
    if fingerprint != spec.fingerprint() and not allow_changes:
        raise ValueError(
            f"checkpoint.restore={path} was trained on other features than this dataset's (names, "
            "order, cardinalities or hotness differ); set data.path to the dataset it was trained on, or "
            "checkpoint.allow_changes=true if they mean the same"
        )
    return facts


def restore(path: Path, step: Step, *, with_optimizer: bool) -> None:
    """Load a checkpoint into both halves, in place; call `check` first.

    Args:
        path: a `step_N` directory.
        step: both halves, of any sharding and number of ranks.
        with_optimizer: also load the optimizers' state, which evaluation does not need.

    Raises:
        ValueError: on all ranks, when the checkpoint's tensors are not those of this model or cannot be read.
    """
    # Rank 0 of another host may have renamed it a moment ago.
    wait_for(path / "run.json")
    tensors = read_index(path).tensors
    stored = {
        name: torch.Size(each.size)
        for name, each in tensors.items()
        if not name.startswith(TRAINER)
    }
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
        dcp.load(wanted, storage_reader=TensorReader(tensors, shapes))
    except dcp.CheckpointException as error:
        raise ValueError(
            f"checkpoint.restore={path} cannot be read: {_first_problem(error)}; copy it again, or "
            "name another"
        ) from None


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


def _weights(step: Step) -> State:
    state = {f"tables.{name}": value for name, value in step.tables.weights().items()}
    state |= {f"dense.{name}": value.detach() for name, value in step.dense.named_parameters()}
    return state


def _optimizer_state(step: Step) -> State:
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
