"""Configurations and small runs, built as by the command line."""

import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from configs.command_line import register
from configs.schema import Config
from dataloading.dataset.source import Source
from dataloading.loader import Loader
from nn.build import (
    build_key_maps,
    build_plan,
    build_step,
    build_test_loader,
    build_train_loader,
    device_type,
    hardware_of,
    open_source,
)
from nn.distributed.process_group import Ranks, process_group, ranks_from_environment
from nn.embedding.declared_tables import table_of_feature
from nn.layers.initialization import fill_uniform_
from nn.models.registry import declared_tables, typed_config
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep
from tests.helpers.command import uncopied_schemas
from tests.helpers.forks import COMPOSED_VARIABLE

TINY = [
    "data.synthetic.train_rows=2048",
    "data.synthetic.test_rows=256",
    "data.synthetic.cardinalities=[500,40,7,300,1000]",
    "data.synthetic.num_numerical=3",
    "model.embedding_dim=8",
    "model.bottom_mlp=[16,8]",
    "model.top_mlp=[16,1]",
    "train.batch_size=64",
    "eval.batch_size=128",
    "device=cpu",
    # Drawing takes longer than such a run.
    "log.pictures=false",
]
# DCNv2 of the sizes of TINY: its default rank of 512 is over the widths, and rounds more.
DCNV2 = ["model.name=dcnv2", "model.cross.projection_dim=8"]
# Overrides that name a file of configs/.
GROUPS = ("experiment", "data")


def tiny(model: str) -> list[str]:
    """Return TINY with this model."""
    return [*TINY, *(DCNV2 if model == "dcnv2" else [f"model.name={model}"])]


def compose_with_hydra(*overrides: str, recipe: str = "dlrm") -> DictConfig:
    """Return Hydra's configuration of `<recipe>.py <overrides>`; it takes a tenth of a second."""
    register(Config, "schema")
    with uncopied_schemas(), initialize_config_module("configs", version_base="1.3"):
        return compose(recipe, list(overrides))


def compose_config(*overrides: str, recipe: str = "dlrm") -> Config:
    """Return the typed configuration of `<recipe>.py <overrides>`.

    Hydra composes the files of each choice once. Options are then set as Hydra sets them; tests/configs/test_yaml_files.py
    compares both ways.
    """
    return deepcopy(_typed(overrides, recipe))


@cache
def _typed(overrides: tuple[str, ...], recipe: str) -> Config:
    """Return what another process of this session has composed already, or compose."""
    if COMPOSED_VARIABLE not in os.environ:
        return _compose(overrides, recipe)
    name = sha256(repr((overrides, recipe)).encode()).hexdigest()
    stored = Path(os.environ[COMPOSED_VARIABLE]) / name
    if stored.exists():
        return pickle.loads(stored.read_bytes())
    config = _compose(overrides, recipe)
    with (
        suppress(pickle.PicklingError, AttributeError),
        NamedTemporaryFile(dir=stored.parent, delete=False) as file,
    ):
        file.write(pickle.dumps(config))
        file.flush()
        os.replace(file.name, stored)
    return config


def _compose(overrides: tuple[str, ...], recipe: str) -> Config:
    parsed = [_parse(text) for text in overrides]
    choices = [override.input_line for override in parsed if override.key_or_group in GROUPS]
    config = deepcopy(_compose_files(*choices, recipe=recipe))
    for override in parsed:
        if override.key_or_group not in GROUPS:
            OmegaConf.update(config, override.key_or_group, override.value())
    return typed_config(config)


_compose_files = cache(compose_with_hydra)


@cache
def _parse(override: str) -> Override:
    return OverridesParser.create().parse_override(override)


@dataclass(frozen=True, slots=True)
class Built:
    """The objects of a run."""

    config: Config
    ranks: Ranks
    source: Source
    step: TrainStep
    train_loader: Loader
    test_loader: Loader

    def prefetcher(self, start_step: int, num_steps: int) -> Prefetcher:
        """Return the training batches of `num_steps` steps from `start_step`."""
        batches = self.train_loader.batches(start_step, num_steps)
        return Prefetcher(batches, self.step.runner, self.ranks.device)

    def train(self, start_step: int, num_steps: int) -> list[float]:
        """Train `num_steps` steps from `start_step`; return their losses."""
        prefetcher = self.prefetcher(start_step, num_steps)
        return [self.step.train(start_step + index, prefetcher).loss for index in range(num_steps)]

    def score(self, num_batches: int) -> None:
        """Predict the first batches of the test split, then return to training mode."""
        self.step.set_training(False)
        batches = self.test_loader.batches(0, num_batches)
        prefetcher = Prefetcher(batches, self.step.runner, self.ranks.device)
        for batch, ids in prefetcher:
            self.step.predict(batch, ids)
            prefetcher.start_next()
        self.step.set_training(True)


def build(config: Config, source: Source | None = None) -> Built:
    """Build a run on `source` (default: the data of the configuration); needs a process group."""
    ranks = ranks_from_environment(device_type(config))
    source = source or open_source(config)
    hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
    plan, _ = ranks.run_on_rank0(lambda: build_plan(config, source, hardware))
    key_maps = build_key_maps(config, source.spec, ranks)
    step = build_step(config, source, plan, ranks, key_maps)
    return Built(
        config,
        ranks,
        source,
        step,
        build_train_loader(config, source, ranks, key_maps),
        build_test_loader(config, source, ranks, key_maps=key_maps),
    )


def table_map(config: Config) -> dict[str, str]:
    """Return the table of every feature of a run."""
    return table_of_feature(declared_tables(config.model, open_source(config).spec))


@contextmanager
def ranks_of_cpu() -> Iterator[Ranks]:
    """Open the process group of the launcher's ranks, or of a single rank."""
    ranks = ranks_from_environment("cpu")
    with process_group(ranks):
        yield ranks


def losses_of_cases(cases: list[list[str]], num_steps: int) -> list[list[float]]:
    """Return the losses of several configurations, trained in turn in one process group."""
    config = compose_config(*cases[0])
    with process_group(ranks_from_environment(device_type(config))):
        return [build(compose_config(*case)).train(0, num_steps) for case in cases]


def losses_and_changes_of_cases(
    cases: list[list[str]], num_steps: int
) -> list[tuple[list[float], dict[str, list[float]]]]:
    """Return losses and table changes (see `change_of_tables`) of several configurations."""
    config = compose_config(*cases[0])
    results = []
    with process_group(ranks_from_environment(device_type(config))):
        for case in cases:
            built = build(compose_config(*case))
            before = [shard.weight.clone() for shard in built.step.tables.shards()]
            losses = built.train(0, num_steps)
            results.append((losses, change_of_tables(built, before)))
            built.step.close()
    return results


def change_of_tables(built: Built, before: list[torch.Tensor]) -> dict[str, list[float]]:
    """Return the norm of each complete table's change, and its projections on two random directions.

    The numbers do not depend on the layout of the tables.
    """
    tables = built.step.tables
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in sorted(tables.names)}
    for shard, old in zip(tables.shards(), before, strict=True):
        change = shard.weight.double() - old.double()
        # The last number counts the weights: of a replicated table every rank has all.
        count = torch.tensor(float(change.numel()), dtype=torch.float64, device=change.device)
        numbers = [change.square().sum()]
        for seed in (101, 102):
            direction = torch.empty_like(shard.weight)
            fill_uniform_(
                direction,
                seed=seed,
                table=shard.table,
                row_offset=shard.row_offset,
                col_offset=shard.column_offset,
                bound=1.0,
            )
            numbers.append((change * direction.double()).sum())
        sums[shard.table] += torch.stack([*numbers, count]).cpu()
    for name, total in sums.items():
        total.copy_(built.ranks.all_reduce_sum(total.to(built.ranks.device)).cpu())
        rows, columns, _ = tables.described[name]
        total /= total[3] / (rows * columns)
    return {name: [total[0].sqrt().item(), *total[1:3].tolist()] for name, total in sums.items()}


def worst_difference(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """Return the largest difference of two changes of the same tables, relative to the norm of the change."""
    assert one.keys() == other.keys()
    return max(
        abs(a - b) / max(one[name][0], 1e-12)
        for name in one
        for a, b in zip(one[name], other[name], strict=True)
    )
