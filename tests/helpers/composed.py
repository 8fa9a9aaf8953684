"""Configurations and small runs, as the command line would make them."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache

import torch
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from configs.command_line import register
from configs.schema import Config
from dataloading.loader import Loader
from dataloading.source import Source
from nn.build import (
    build_plan,
    build_step,
    build_test_loader,
    build_train_loader,
    device_type,
    hardware_of,
    open_source,
)
from nn.distributed.process_group import Ranks, process_group, ranks_from_environment
from nn.layers.initialization import fill_uniform_
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep

TINY = [
    "data.synthetic.train_rows=2048",
    "data.synthetic.test_rows=256",
    "data.synthetic.cardinalities=[500,40,7,300,1000]",
    "data.synthetic.num_numerical=3",
    "model.embedding_dim=8",
    "model.bottom_mlp=[16,8]",
    "model.top_mlp=[16,1]",
    "model.cross.projection_dim=8",
    "train.batch_size=64",
    "eval.batch_size=128",
    "device=cpu",
]
# Overrides that name a file of configs/.
GROUPS = ("experiment", "data")


def compose_with_hydra(*overrides: str, recipe: str = "dlrm") -> DictConfig:
    """Return what Hydra makes of `<recipe>.py <overrides>`; it takes a tenth of a second."""
    register(Config, "schema")
    with initialize_config_module("configs", version_base="1.3"):
        return compose(recipe, list(overrides))


def compose_config(*overrides: str, recipe: str = "dlrm") -> Config:
    """Return the typed configuration that `<recipe>.py <overrides>` would run.

    Hydra puts the same files together once; options are then set as it sets them (tests/configs/test_yaml_files.py compares).
    """
    parsed = [_parse(each) for each in overrides]
    choices = [each.input_line for each in parsed if each.key_or_group in GROUPS]
    config = deepcopy(_compose_files(*choices, recipe=recipe))
    for each in parsed:
        if each.key_or_group not in GROUPS:
            OmegaConf.update(config, each.key_or_group, each.value())
    return OmegaConf.to_object(config)


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
        """Training batches of the steps from `start_step` on."""
        batches = self.train_loader.batches(start_step, num_steps)
        return Prefetcher(batches, self.step.path, self.ranks.device)

    def train(self, start_step: int, num_steps: int) -> list[float]:
        """Train the steps from `start_step` on and return their losses."""
        prefetcher = self.prefetcher(start_step, num_steps)
        return [self.step.train(start_step + index, prefetcher).loss for index in range(num_steps)]

    def score(self, num_batches: int) -> None:
        """Predict the first batches of the test split, and go on training."""
        self.step.set_training(False)
        batches = self.test_loader.batches(0, num_batches)
        prefetcher = Prefetcher(batches, self.step.path, self.ranks.device)
        for batch, ids in prefetcher:
            self.step.predict(batch, ids)
            prefetcher.start_next()
        self.step.set_training(True)


def build(config: Config, source: Source | None = None) -> Built:
    """Build a run, on the data of the configuration unless told otherwise; needs a process group."""
    ranks = ranks_from_environment(device_type(config))
    source = source or open_source(config)
    hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
    plan, _ = ranks.run_on_rank0(lambda: build_plan(config, source, hardware))
    step = build_step(config, source, plan, ranks)
    return Built(
        config,
        ranks,
        source,
        step,
        build_train_loader(config, source, ranks),
        build_test_loader(config, source, ranks),
    )


@contextmanager
def ranks_of_cpu() -> Iterator[Ranks]:
    """The launcher's ranks, or one alone, with their process group open."""
    ranks = ranks_from_environment("cpu")
    with process_group(ranks):
        yield ranks


def losses_of_cases(cases: list[list[str]], num_steps: int) -> list[list[float]]:
    """Losses of several configurations, one after the other in one process group."""
    config = compose_config(*cases[0])
    with process_group(ranks_from_environment(device_type(config))):
        return [build(compose_config(*case)).train(0, num_steps) for case in cases]


def learnt_in_cases(
    cases: list[list[str]], num_steps: int
) -> list[tuple[list[float], dict[str, list[float]]]]:
    """Losses of several configurations, and what each table learnt: see `change_of_tables`."""
    config = compose_config(*cases[0])
    results = []
    with process_group(ranks_from_environment(device_type(config))):
        for each in cases:
            built = build(compose_config(*each))
            before = [shard.weight.clone() for shard in built.step.tables.shards()]
            losses = built.train(0, num_steps)
            results.append((losses, change_of_tables(built, before)))
            built.step.close()
    return results


def change_of_tables(built: Built, before: list[torch.Tensor]) -> dict[str, list[float]]:
    """Of each whole table, whatever its layout: the length of its change, and that change along two random directions."""
    tables = built.step.tables
    sums = {name: torch.zeros(3, dtype=torch.float64) for name in sorted(tables.names)}
    copies = set(tables.placement.replicated_tables) if tables.static_blocker is None else set()
    for shard, old in zip(tables.shards(), before, strict=True):
        change = shard.weight.double() - old.double()
        found = [change.square().sum()]
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
            found.append((change * direction.double()).sum())
        share = 1 / built.ranks.world_size if shard.table in copies else 1.0
        sums[shard.table] += torch.stack(found).cpu() * share
    for each in sums.values():
        each.copy_(built.ranks.all_reduce_sum(each.to(built.ranks.device)).cpu())
    return {name: [each[0].sqrt().item(), *each[1:].tolist()] for name, each in sums.items()}


def worst_difference(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    """Of two changes of the same tables: the largest difference of a number, in lengths of the change."""
    assert one.keys() == other.keys()
    return max(
        abs(a - b) / max(one[name][0], 1e-12)
        for name in one
        for a, b in zip(one[name], other[name], strict=True)
    )
