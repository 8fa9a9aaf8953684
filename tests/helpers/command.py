"""Calls of the recipe's command line, in this process (which takes tenths of a second) or in a new one."""

import io
import os
import pickle
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig

from configs.command_line import SAVED
from tests.helpers.forks import python

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code and output of a command."""

    exit_code: int
    out: str
    err: str


@contextmanager
def kept_signals() -> Iterator[None]:
    """Restore the handlers of signals, which a command replaces for its process."""
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {signum: signal.getsignal(signum) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_command(*arguments: str, recipe: str = "dlrm") -> Ended:
    """Run `<recipe>.py <arguments>` in this process, without the wait of a silent rank for its launcher."""
    path = str(ROOT / f"{recipe}.py")
    with patch("main.SILENT_RANK_WAIT_S", 0):
        return _run(partial(runpy.run_path, path), f"{recipe}.py", *arguments)


def run_module(module: str, *arguments: str) -> Ended:
    """Run `python -m <module> <arguments>` in this process."""
    return _run(partial(runpy.run_module, module), module, *arguments)


def _run(run: Callable[..., object], *words: str) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    exit_code = 0
    with (
        kept_signals(),
        hydra_that_parses_once(),
        redirect_stdout(out),
        redirect_stderr(err),
        patch.object(sys, "argv", [*words]),
        patch.dict(os.environ, COLUMNS="200"),
        hydra_that_reads_once(),
    ):
        try:
            run(run_name="__main__")
        except SystemExit as end:
            exit_code = end.code
    return Ended(exit_code, out.getvalue(), err.getvalue())


@contextmanager
def hydra_that_reads_once() -> Iterator[None]:
    """Let Hydra read and compose the files of each choice once; it takes a tenth of a second each time."""
    with (
        patch.object(Hydra, "get_mode", _mode_without_files),
        patch.object(config_loader_impl, "create_defaults_list", _defaults_list),
        patch.object(ConfigLoaderImpl, "_compose_config_from_defaults_list", _composed_files),
        patch.object(DictConfig, "__deepcopy__", _copied),
        uncopied_schemas(),
    ):
        yield


def uncopied_schemas() -> AbstractContextManager[Any]:
    """Let Hydra read its store of schemas itself: it copies it for each group of options, and again whatever it reads of it."""
    return patch.object(ConfigStore, "__deepcopy__", lambda store, memo: store, create=True)


def _copied(config: DictConfig, memo: dict[int, Any]) -> DictConfig:
    """Return a copy; of complete configurations in a fifth of the time."""
    is_complete = config._get_parent() is None
    return pickle.loads(pickle.dumps(config)) if is_complete else _copy(config, memo)


_copy = DictConfig.__deepcopy__


def _defaults_list(*, repo: Any, overrides_list: list[Override], **of_call: Any) -> Any:
    """Return what Hydra returns; options that choose no file change nothing of the list of files."""
    chosen = [override for override in overrides_list if repo.group_exists(override.key_or_group)]
    others = [override for override in overrides_list if override not in chosen]
    is_plain = all(
        override.type is OverrideType.CHANGE
        and override.package is None
        and not override.is_sweep_override()
        and isinstance(override.value(), str) >= (override in chosen)
        for override in overrides_list
    )
    if not is_plain or not _is_known(repo, of_call["config_name"]):
        return _create_defaults_list(repo=repo, overrides_list=overrides_list, **of_call)
    key = str(([override.input_line for override in chosen], sorted(of_call.items())))
    if key not in _lists:
        _lists[key] = _create_defaults_list(repo=repo, overrides_list=chosen, **of_call)
    return replace(_lists[key], config_overrides=others)


def _composed_files(loader: ConfigLoaderImpl, defaults: list[ResultDefault], repo: Any) -> Any:
    """Return what Hydra composes of the files, which takes a tenth of a second the first time."""
    if not _is_known(repo, str(defaults)):
        return _compose_files(loader, defaults, repo)
    key = str(defaults)
    if key not in _files:
        _files[key] = _compose_files(loader, defaults, repo)
    return deepcopy(_files[key])


def _is_known(repo: Any, names: str | None) -> bool:
    """Return whether all files are the project's, whose contents stay."""
    return SAVED not in (names or SAVED) and not any(
        source.scheme() == "file" for source in repo.get_sources()
    )


_lists: dict[str, Any] = {}
_files: dict[str, Any] = {}
_create_defaults_list = config_loader_impl.create_defaults_list
_compose_files = ConfigLoaderImpl._compose_config_from_defaults_list


def _mode_without_files(hydra: Hydra, config_name: str | None, overrides: list[str]) -> Any:
    """Return what Hydra returns for a command line and files without hydra.mode; it would compose all options to find out."""
    if any("hydra" in text for text in overrides):
        return _get_mode(hydra, config_name, overrides)
    return None


_get_mode = Hydra.get_mode


@contextmanager
def hydra_that_parses_once() -> Iterator[None]:
    """Let Hydra parse each override once, which takes milliseconds, and look for a search path only where there may be one."""
    with (
        patch.object(OverridesParser, "parse_rule", _parsed_rule),
        patch.object(ConfigLoaderImpl, "_process_config_searchpath", _process_searchpath),
    ):
        yield


def _parsed_rule(parser: OverridesParser, text: str, rule: str) -> Any:
    if (text, rule) not in _parsed:
        _parsed[text, rule] = _parse_rule(parser, text, rule)
    # Who asks changes it: it gets its parser's loader, and some of its lists are composed.
    return deepcopy(_parsed[text, rule])


def _process_searchpath(
    loader: ConfigLoaderImpl, name: str | None, parsed: list[Override], repo: Any
) -> None:
    """Do what Hydra does; none of the project's files has a search path."""
    if not _is_known(repo, name) or any("searchpath" in each.key_or_group for each in parsed):
        _process_config_searchpath(loader, name, parsed, repo)


_parsed: dict[tuple[str, str], Any] = {}
_parse_rule = OverridesParser.parse_rule
_process_config_searchpath = ConfigLoaderImpl._process_config_searchpath


def start_command(*command: str, directory: Path, program: str | None = None) -> Ended:
    """Run `python <command>` in `directory`, as a shell would.

    `program` is `sys.executable` where a test asks what a command imports; else a fork of a process that has imported torch.
    """
    environment = os.environ | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [program or python(), *command],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Ended(done.returncode, done.stdout, done.stderr)
