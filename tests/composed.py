"""Configurations and small runs, as the command line would make them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from configs.help import register_option_help
from configs.schema import Config
from dataloading.columns import Source
from dataloading.loader import Loader
from nn.build import (
    build_plan,
    build_step,
    build_test_loader,
    build_train_loader,
    device_type,
    hardware_of,
    open_source,
)
from nn.distributed import Ranks, process_group, ranks_from_environment
from nn.feed import Feed
from nn.step import Step

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


def compose_config(*overrides: str, recipe: str = "dlrm") -> Config:
    """Return the typed configuration that `<recipe>.py <overrides>` would run."""
    ConfigStore.instance().store(name="schema", node=Config)
    register_option_help(Config)
    with initialize_config_module("configs", version_base="1.3"):
        return OmegaConf.to_object(compose(recipe, list(overrides)))


@dataclass(frozen=True, slots=True)
class Built:
    """The objects of a run."""

    config: Config
    ranks: Ranks
    source: Source
    step: Step
    train_loader: Loader
    test_loader: Loader

    def feed(self, start_step: int, num_steps: int) -> Feed:
        """Training batches of the steps from `start_step` on."""
        batches = self.train_loader.batches(start_step, num_steps)
        return Feed(batches, self.step.tables, self.ranks.device)

    def train(self, start_step: int, num_steps: int) -> list[float]:
        """Train the steps from `start_step` on and return their losses."""
        feed = self.feed(start_step, num_steps)
        return [self.step.train(start_step + index, feed).loss for index in range(num_steps)]


def build(config: Config, source: Source | None = None) -> Built:
    """Build a run, on the data of the configuration unless told otherwise; needs a process group."""
    ranks = ranks_from_environment(device_type(config))
    source = source or open_source(config)
    hardware = hardware_of(config, ranks.device.type, ranks.world_size, ranks.local_world_size)
    plan, _ = ranks.call_on_main(lambda: build_plan(config, source, hardware))
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
