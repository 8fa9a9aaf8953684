"""Configurations and small runs, as the command line would make them."""

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from configs.help import register_option_help
from configs.schema import Config
from nn.build import build_loaders, build_plan, build_step, device_type, hardware_of, open_source
from nn.distributed import process_group, ranks_from_environment
from nn.feed import Feed

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


def train_losses(config: Config, num_steps: int) -> list[float]:
    """Train some steps and return their losses; needs a process group, see `with_group`."""
    ranks = ranks_from_environment(device_type(config))
    source = open_source(config)
    hardware = hardware_of(config, ranks.world_size, ranks.local_world_size)
    plan, _ = ranks.call_on_main(lambda: build_plan(config, source, hardware))
    step = build_step(config, source, plan, ranks)
    loader, _ = build_loaders(config, source, ranks)
    feed = Feed(loader.batches(0, num_steps), step.tables, ranks.device)
    return [step.train(index, feed).loss for index in range(num_steps)]


def losses_of_cases(cases: list[list[str]], num_steps: int) -> list[list[float]]:
    """Losses of several configurations, one after the other in one process group."""
    config = compose_config(*cases[0])
    with process_group(ranks_from_environment(device_type(config))):
        return [train_losses(compose_config(*case), num_steps) for case in cases]
