"""Calls of `python -m preproc` in this process, on rows written by hand."""

import gzip
import io
from collections.abc import Sequence
from contextlib import redirect_stderr
from copy import deepcopy
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.command_line import register
from configs.preproc_schema import PreprocConfig
from preproc.__main__ import run
from tests.helpers.command import uncopied_schemas

NUM_COLUMNS = 40


class Refused(Exception):
    """The one message of a command that has ended with `exit_code`."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


def preproc(*overrides: str) -> None:
    """Run the command with these overrides; a message to stderr is raised as `Refused`."""
    composed = compose_preproc("plot=false", *overrides)
    stderr = io.StringIO()
    try:
        with redirect_stderr(stderr):
            run(composed)
    except SystemExit as end:
        if not stderr.getvalue():
            raise
        raise Refused(stderr.getvalue().removesuffix("\n"), end.code) from None


def compose_preproc(*overrides: str) -> DictConfig:
    """Return what Hydra composes; Hydra reads the files of a dataset once, since that takes a tenth of a second.

    Options are then set as Hydra sets them; tests/configs/test_yaml_files.py compares both ways.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        files = [override.input_line for override in parsed if override.key_or_group == "dataset"]
        composed = deepcopy(_compose_files(*files))
        for override in parsed:
            if override.is_delete():
                return compose_preproc_with_hydra(*overrides)
            if override.key_or_group != "dataset":
                OmegaConf.update(composed, override.key_or_group, override.value(), merge=True)
    except (HydraException, OmegaConfBaseException):
        return compose_preproc_with_hydra(*overrides)  # which says what is wrong
    return composed


def compose_preproc_with_hydra(*overrides: str) -> DictConfig:
    """Return Hydra's configuration of `python -m preproc <overrides>`."""
    register(PreprocConfig, "preproc_schema")
    with uncopied_schemas(), initialize_config_module("configs", version_base="1.3"):
        return compose("preproc", overrides=list(overrides))


_compose_files = cache(compose_preproc_with_hydra)


def raw_line(label: object = 0, **fields: object) -> str:
    """Return a raw line: `i2=5` is its second integer, `c1="ab"` its first category."""
    columns = [str(label)] + [""] * (NUM_COLUMNS - 1)
    for name, value in fields.items():
        columns[int(name[1:]) + (13 if name[0] == "c" else 0)] = str(value)
    return "\t".join(columns)


def write_lines(path: Path, lines: Sequence[str], compress: bool = False) -> Path:
    """Write lines to `path`, gzip-compressed if `compress`."""
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if compress else text)
    return path


def data_files(output: Path) -> dict[str, bytes]:
    """Return the bytes of every .bin file below `output`, by its relative path."""
    return {str(path.relative_to(output)): path.read_bytes() for path in output.rglob("*.bin")}
