"""Compose options from a command line, with one line per error; the same for every command."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.exit_codes import USER_ERROR_EXIT_CODE
from configs.help import register_option_help
from configs.overrides import check_overrides


def register(schema: type, name: str) -> None:
    """Register a schema with Hydra under its name in the yaml files, and its help; call it before composing."""
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
        task: function to call with the composed options.
        schema: typed options.
        schema_name: name of the schema in the yaml files.
        config_name: name of the yaml file to compose.
        groups: config groups, that is, folders of yaml files to choose from.

    Raises:
        ValueError: an option does not exist, or has an invalid value.
    """
    # Without it Hydra prints the error itself, in several lines, and ends with exit code 1.
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
        except OmegaConfBaseException as error:  # an interpolation refers to a missing key
            problem = error
            return
        task(composed)

    try:
        compose_and_call()
    except (HydraException, OmegaConfBaseException) as error:
        if is_composed:  # a bug, not an error of the user
            raise
        problem = error
    if problem is not None:
        raise ValueError(_one_line(problem)) from None


def end_command(message: str, exit_code: int = USER_ERROR_EXIT_CODE) -> NoReturn:
    """Print one message to stderr and end the process with `exit_code`."""
    print(message, file=sys.stderr, flush=True)
    sys.exit(exit_code)


def _one_line(error: Exception) -> str:
    """Join Hydra's error and its cause to one line, without the search path."""
    texts = [
        str(cause).partition("Config search path")[0] for cause in (error, error.__cause__) if cause
    ]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    details = ("full_key:", "reference_type=", "object_type=", "See https:")
    text = " ".join(line for line in lines if line and not line.startswith(details))
    return text + ("; a list is written as [a,b]" if "ListConfig" in text else "")
