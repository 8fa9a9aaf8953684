"""Tables that come from checkpoints of their own, beside the one that a run restores (`checkpoint.restore_tables`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from configs.schema import CheckpointConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.storage.local_copy import local_path
from nn.checkpoint.compatibility import differences, vocabulary_mismatch
from nn.checkpoint.directory import read_facts
from nn.checkpoint.tensor_index import StoredTensor, read_index

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig


def with_other_tables(
    stored: Mapping[str, StoredTensor], others: Mapping[str, str]
) -> dict[str, StoredTensor]:
    """Return `stored` with weights, optimizer state and keys of some tables, by name, from other checkpoints."""
    found = dict(stored)
    for table, path in others.items():
        owners = f"tables.{table}", f"keys.{table}"
        found = {name: of for name, of in found.items() if name.rpartition(".")[0] not in owners}
        for name, of in read_index(local_path(path)).tensors.items():
            if name.rpartition(".")[0] in owners:
                found[name] = of
    return found


def described_tables(parts: CheckpointConfig) -> str:
    """Return from where the tables of `restore_tables` come, to follow what a run restores."""
    return "".join(f"; {table} of {path}" for table, path in parts.restore_tables.items())


def check_other_tables(
    parts: CheckpointConfig,
    declared: Sequence[EmbeddingBagConfig],
    spec: FeatureSpec,
    *,
    is_resumed: bool,
) -> None:
    """Raise ValueError for a checkpoint of `restore_tables` whose table is not that of the run.

    `is_resumed`: whether the run takes the state that training alone needs.
    """
    tables = {table.name: table for table in declared}
    for name, path in parts.restore_tables.items():
        named, weight = f"checkpoint.restore_tables.{name}={path}", f"tables.{name}.weight"
        if name not in tables:
            raise ValueError(f"{named}: there is no such table; want one of {', '.join(tables)}")
        try:
            local = local_path(path)
            facts, stored = read_facts(local), read_index(local).tensors
        except ValueError as error:
            raise ValueError(f"{named}: {error}; name a checkpoint") from None
        own = {weight: stored[weight].size} if weight in stored else {}
        size = tables[name].num_embeddings, tables[name].embedding_dim
        if wrong := differences(own, {weight: size}, grow=parts.grow):
            remedy = "with this table, or, if it has fewer rows, set checkpoint.grow=true"
            raise ValueError(f"{named} has {wrong[0]}; name a checkpoint {remedy}")
        if is_resumed and any(key.startswith(f"keys.{name}.") for key in stored):
            remedy = "which count the steps of their own run; set checkpoint.parts=[dense,tables]"
            raise ValueError(f"{named} has raw keys, {remedy}")
        learnt = facts.get("vocabularies", {}).items()
        of_table = {key: crc32 for key, crc32 in learnt if key in tables[name].feature_names}
        problem = vocabulary_mismatch({"vocabularies": of_table}, spec.metadata)
        if problem is not None and not (parts.allow_changes or parts.grow):
            raise ValueError(
                f"{named} {problem}; checkpoint.allow_changes=true loads it all the same"
            )
