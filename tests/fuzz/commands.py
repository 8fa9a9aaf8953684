"""Calls of the commands' functions, which end as the commands end: exit code and one line."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from unittest.mock import patch

import torch.distributed as dist
from omegaconf import DictConfig

from configs.command_line import checked, register
from configs.export_schema import ExportConfig, ReplayConfig
from main import _exit_codes
from nn import replay as replay_command
from nn.export import __main__ as export_command
from preproc import __main__ as preproc_command
from tests.helpers.composed import compose_with_hydra
from tests.helpers.preproc_command import compose_preproc


def as_recipe(function: Callable[[], object]) -> None:
    """Call a function inside what `dlrm.py` catches."""
    try:
        with patch("main.SILENT_RANK_WAIT_S", 0), _exit_codes(_composed()):
            function()
    finally:
        # An example that was stopped, or failed, would leave it to the next one.
        if dist.is_initialized():
            dist.destroy_process_group()


# Where an error of the system names no file, the message names those of the options.
_composed = cache(compose_with_hydra)


def as_preproc(*overrides: str, **values: object) -> None:
    """Run `python -m preproc`; `values` are set as they are, which no command line could write."""
    composed = compose_preproc("plot=false", "threads=1", *overrides)
    for key, value in values.items():
        composed[key] = value
    preproc_command.run(composed)


def as_export(**values: object) -> None:
    """Run `python -m nn.export`."""
    checked(export_command.run)(_with_values(ExportConfig, "export", values))


def as_replay(**values: object) -> None:
    """Run `python -m nn.replay`."""
    checked(replay_command.run)(_with_values(ReplayConfig, "replay", values))


def _with_values(options: type, name: str, values: dict[str, object]) -> DictConfig:
    composed = deepcopy(_composed_command(options, name))
    for key, value in values.items():
        composed[key] = value
    return composed


@cache
def _composed_command(options: type, name: str) -> DictConfig:
    from hydra import compose, initialize_config_module

    register(options, f"{name}_schema")
    with initialize_config_module("configs", version_base="1.3"):
        return compose(name)
