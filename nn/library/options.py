"""Options of a run from Python, as on the command line."""

from configs.command_line import command_of, compose_overrides, written_options
from configs.overrides import drop_replaced
from configs.schema import Config
from nn.build import global_batch_size
from nn.models.registry import typed_config
from nn.saved_config import read_saved_config


def options(recipe: str, *overrides: str) -> Config:
    """Return the checked options of `<recipe>.py <overrides>`; a recipe is a command, an experiment or a model.

    Raises ValueError: an option does not exist, or has an invalid value.
    """
    command, named = command_of(recipe)
    overrides = (*named, *overrides)
    groups = ("experiment", "data")
    composed = compose_overrides(Config, "schema", command, overrides, groups, read_saved_config)
    drop_replaced(composed, overrides, Config)
    config = typed_config(composed, written_options(overrides))
    config.train.batch_size = global_batch_size(config)
    return config
