"""From a command line to composed options: the same for every command, and one line where something is wrong with it."""

import os
import sys
from collections.abc import Callable, Sequence

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.help import register_option_help
from configs.overrides import check_overrides


def register(schema: type, name: str) -> None:
    """Make a schema known to Hydra under the name that the yaml files give it, and its help; before anything is composed."""
    ConfigStore.instance().store(name=name, node=schema)
    register_option_help(schema)


def call_composed(
    task: Callable[[DictConfig], None],
    schema: type,
    schema_name: str,
    config_name: str,
    groups: Sequence[str] = (),
) -> None:
    """Compose `configs/<config_name>.yaml` with the overrides of the command line, and call `task` with the result.

    Args:
        task: what the command does.
        schema: typed options.
        schema_name: what the yaml files call it.
        config_name: yaml to begin with.
        groups: directories of yaml files to choose one of.

    Raises:
        ValueError: an option that does not exist, or a value that it cannot have.
    """
    # Otherwise Hydra prints half a dozen lines itself, and ends with 1.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    check_overrides(sys.argv[1:], schema, groups=groups)
    register(schema, schema_name)
    is_composed, problem = False, None

    @hydra.main(version_base="1.3", config_path="pkg://configs", config_name=config_name)
    def compose_and_call(composed: DictConfig) -> None:
        nonlocal is_composed, problem
        is_composed = True
        try:
            OmegaConf.to_container(composed, resolve=True)
        except OmegaConfBaseException as error:  # a value refers to what is not there
            problem = error
            return
        task(composed)

    try:
        compose_and_call()
    except (HydraException, OmegaConfBaseException) as error:
        if is_composed:  # a mistake of ours
            raise
        problem = error
    if problem is not None:
        raise ValueError(_one_line(problem)) from None


def _one_line(error: Exception) -> str:
    """What Hydra says of the command line, and why, without its search path."""
    told = [
        str(each).partition("Config search path")[0] for each in (error, error.__cause__) if each
    ]
    lines = [line.strip() for each in told for line in each.splitlines()]
    known = ("full_key:", "reference_type=", "object_type=", "See https:")
    text = " ".join(line for line in lines if line and not line.startswith(known))
    return text + ("; a list is written as [a,b]" if "ListConfig" in text else "")
