"""Checkpoints of a step without a run."""

from pathlib import Path

from dataloading.dataset.feature_spec import FeatureSpec
from nn.checkpoint.directory import FORMAT_VERSION, commit
from nn.checkpoint.state import Trained, write
from nn.distributed.process_group import HostChannel, Ranks


def save(directory: Path, step: Trained, num_steps: int, spec: FeatureSpec, ranks: Ranks) -> Path:
    """Write `directory/step_<num_steps>` synchronously, without facts of a run but the dataset's; return its path."""
    channel = HostChannel()
    write(directory, num_steps, step.state_dict(), step, channel)
    facts = {"format_version": FORMAT_VERSION, "feature_spec": spec.fingerprint()}
    if ranks.is_rank0:
        commit(directory, num_steps, facts | {"num_steps": num_steps})
    ranks.barrier()
    return directory / f"step_{num_steps}"
