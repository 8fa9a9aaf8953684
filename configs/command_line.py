"""Compose options from a command line, with one line per error; the same for every command."""

import gc
import inspect
import os
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, partial, wraps
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from configs.arguments import Choices, help_words, hydra_arguments
from configs.built_in import MODELS
from configs.exit_codes import INTERRUPTED_EXIT_CODE, USER_ERROR_EXIT_CODE
from configs.help import NO_SECTIONS, SectionClasses, Topics, register_option_help
from configs.messages import UNKNOWN_FILE, load_error_text, on_one_line, os_error_text, shown
from configs.options import open_sections
from configs.overrides import WrittenOption, one_line, options_text, texts_of, to_config
from configs.stop_signals import INTERRUPTED

PROJECT = "hybrid-parallel-recsys"
COMMANDS = ("dlrm", "dcnv2")
SAVED = "options_of_a_run"
"""Name under which the options of an earlier run are composed."""
SAVED_FLAG = f"--config-name={SAVED}"
RERUN = f"{INTERRUPTED}: rerun the same command"
NO_OUTPUT = f"{INTERRUPTED}: nothing was written to output; rerun the same command"
ReadSaved = Callable[[Path], Mapping[str, Any]]
"""Reads the file that the option `config` names."""


def register(schema: type, name: str) -> None:
    """Register a schema with Hydra under its name in the yaml files; call it before composing."""
    ConfigStore.instance().store(name=name, node=_node(schema))


@cache
def _node(schema: type) -> DictConfig:
    """Return the schema as Hydra stores it; each composition copies it."""
    node = OmegaConf.structured(schema)
    for section in open_sections(schema):
        OmegaConf.set_struct(node[section], False)
    return node


def composed_command(
    task: Callable[[DictConfig], None],
    schema: type,
    schema_name: str,
    config_name: str,
    groups: Sequence[str] = (),
    section_classes: SectionClasses = NO_SECTIONS,
    read_saved: ReadSaved | None = None,
) -> Callable[[], None]:
    """Return a function that composes `configs/<config_name>.yaml` with the command line and calls `task` with the result.

    It is Hydra's own function, wrapped to translate errors. A stack trace holds no function of this module between Hydra and
    `task`, which passes the composed options to `to_config`. `read_saved` is of a schema with the option `config`. Raises
    ValueError: from the returned function: an option does not exist, or has an invalid value.
    """

    @contextmanager
    def one_line_errors() -> Iterator[None]:
        # Without it Hydra prints the error itself, in several lines, and ends with exit code 1.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        likely = _options_of_yaml(config_name, open_sections(schema))
        configs = partial(_configs_with, schema_name)
        choices = Choices(schema, groups, likely, configs, read_saved is not None)
        words, arguments = help_words(sys.argv[1:], choices)
        sys.argv[1:] = hydra_arguments(arguments, choices)
        if words:
            sys.argv.append("hydra.help.template=${option_help:}")
        if "--version" in sys.argv[1:]:
            print(f"{PROJECT} {project_version()} (Hydra {hydra.__version__})")
            sys.exit()
        register(schema, schema_name)
        register_option_help(schema, section_classes, Topics(words, groups))
        if read_saved is not None and _names_saved(sys.argv[1:], groups, read_saved):
            sys.argv.insert(1, SAVED_FLAG)
        try:
            yield
        except Exception as error:
            # From the task they are its own errors, or bugs; before it only options and yaml files are read.
            code = inspect.unwrap(task).__code__
            frames = traceback.walk_tb(error.__traceback__)
            was_called = any(frame.f_code is code for frame, _ in frames)
            if was_called or isinstance(error, ImportError):
                raise
            if isinstance(error, BrokenPipeError):
                # Whoever reads has read enough, as `--help | head` does; Python would write the rest when it ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                sys.exit()
            raise ValueError(one_line(error)) from None

    with_hydra = hydra.main(
        version_base="1.3", config_path="pkg://configs", config_name=config_name
    )
    return one_line_errors()(with_hydra(task))


def compose_overrides(
    schema: type,
    schema_name: str,
    config_name: str,
    overrides: Sequence[str],
    groups: Sequence[str] = (),
    read_saved: ReadSaved | None = None,
) -> DictConfig:
    """Return the composed options of a command from Python; `composed_command` describes the arguments.

    Raises ValueError: an option does not exist or has an invalid value, or a flag is among the overrides.
    """
    flags = [text for text in overrides if text.startswith("-")]
    if flags:
        raise ValueError(f"{flags[0]} is a flag of the command line; want options as key=value")
    configs = _configs_with(schema_name)
    if config_name not in configs:
        raise ValueError(
            f"there is no recipe {shown(config_name)}; choose one of {', '.join(configs)}"
        )
    likely = _options_of_yaml(config_name, open_sections(schema))
    written = hydra_arguments(overrides, Choices(schema, groups, likely, lambda: configs))
    register(schema, schema_name)
    try:
        if read_saved is not None and _names_saved(written, groups, read_saved):
            config_name = SAVED
        with hydra.initialize_config_module("configs", version_base="1.3"):
            return hydra.compose(config_name, written)
    except Exception as error:
        raise ValueError(one_line(error)) from None


def command_of(recipe: str) -> tuple[str, list[str]]:
    """Return the command that a recipe stands for, such as dlrm, and the options that it begins with.

    Raises ValueError: there is no such recipe.
    """
    if recipe in COMMANDS:
        return recipe, []
    experiments = sorted(path.stem for path in Path(__file__).parent.glob("experiment/*.yaml"))
    if recipe in experiments:
        return "dlrm", [f"experiment={recipe}"]
    if recipe in MODELS:
        return "dlrm", [f"recipe={recipe}", f"model.name={recipe}"]
    module, colon, name = recipe.partition(":")
    if module and colon and name:
        return "dlrm", [f"recipe={name}", f"model.name={recipe}"]
    close = get_close_matches(recipe, [*COMMANDS, *MODELS, *experiments], n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(
        f"there is no recipe={recipe}; {hint}want {', '.join(COMMANDS)}, an experiment ({', '.join(experiments)}) or a model "
        f"({', '.join(MODELS)}, or package.module:Class of your own)"
    )


def written_options(
    overrides: Sequence[str], hydra: HydraConf | None = None
) -> list[WrittenOption]:
    """Return the options of the command line, of the user's own yaml files, and of the project's for the model that is trained.

    The latter are those from the last file on that chooses a model: what another one before it sets is meant for its own model.
    `hydra` is of a composed command; None if only the project's recipes can be composed.
    """
    typed = [WrittenOption(name) for name in _names_of(overrides)]
    found: list[WrittenOption] = []
    for options in ([] if hydra is None else [*_files_of(hydra)]) + [typed]:
        if any(option.name == "model.name" for option in options):
            found = [option for option in found if option.is_users]
        found += options
    return found


def _names_of(overrides: Sequence[str]) -> Iterator[str]:
    for text in overrides:
        name, _, value = text.lstrip("+").partition("=")
        if value.startswith("{"):
            yield from _dotted(OverridesParser.create().parse_override(text).value(), name)
        elif not name.startswith("~"):
            yield name


def _files_of(hydra: HydraConf) -> Iterator[list[WrittenOption]]:
    """Yield the options of each yaml file that was composed, in their order."""
    folders = [
        (Path(__file__).parent if source.schema == "pkg" else Path(source.path), source.schema)
        for source in hydra.runtime.config_sources
        if source.schema == "file" or source.path == "configs"
    ]
    overrides = [*texts_of(hydra.overrides.hydra), *texts_of(hydra.overrides.task)]
    loader = GlobalHydra.instance().config_loader()
    composed = loader.compute_defaults_list(hydra.job.config_name, overrides, RunMode.RUN)
    for item in composed.defaults:
        for folder, schema in folders:
            path = folder / f"{item.config_path}.yaml"
            if path.is_file():
                content = OmegaConf.load(path) if schema == "file" else _content(path)
                yield [
                    WrittenOption(name, f"{item.config_path}.yaml: ", schema == "file")
                    for name in _dotted(OmegaConf.to_container(content), item.package)
                ]
                break


def _names_saved(arguments: Sequence[str], groups: Sequence[str], read_saved: ReadSaved) -> bool:
    """Return whether arguments name the options of an earlier run, which Hydra may then compose instead of a recipe.

    Raises ValueError: the file holds no such options, or the arguments choose a recipe too.
    """
    overrides = [argument for argument in arguments if not argument.startswith("-")]
    if not any(text.lstrip("+~").startswith("config") for text in overrides):
        return False
    parsed = [OverridesParser.create().parse_override(text) for text in overrides]
    named = [override for override in parsed if override.key_or_group == "config"]
    if not named or named[-1].value() is None:
        return False
    if named[-1].is_sweep_override():
        raise ValueError("config names one file; got several values")
    path = str(named[-1].value())
    for override in parsed:
        if override.key_or_group in groups:
            raise ValueError(
                f"config={path} has all options of a run, and {override.input_line} chooses others; leave one of them out"
            )
    if any(argument.startswith("--config-name") for argument in arguments):
        raise ValueError(f"config={path} and --config-name exclude each other; write one of them")
    saved = dict(read_saved(Path(path).expanduser()))
    modes = [override.value() for override in parsed if override.key_or_group == "mode"]
    if modes and modes[-1] != saved.get("mode", modes[-1]):
        # The directory has the results of the other mode.
        saved["run_dir"] = None
        if any(override.key_or_group == "checkpoint.restore" for override in parsed):
            # These were of the checkpoint that the run itself began from.
            begun = {"parts", "restore_tables"}
            checkpoint = saved.get("checkpoint") or {}
            saved["checkpoint"] = {name: checkpoint[name] for name in checkpoint.keys() - begun}
    ConfigStore.instance().store(name=SAVED, node={"defaults": ["base", "_self_"], **saved})
    return True


def command(
    run: Callable[[Any], None],
    schema: type,
    name: str,
    names: Sequence[str] = ("output",),
    interrupted: str = RERUN,
    arguments: Callable[[list[str]], list[str]] = list,
) -> None:
    """Run `run` with the checked options of `configs/<name>.yaml`, whose schema is `<name>_schema`; as `checked`.

    `arguments`: returns those of the command line as they are composed.
    """
    task = checked(run, names, interrupted)
    try:
        sys.argv[1:] = arguments(sys.argv[1:])
        composed_command(task, schema, f"{name}_schema", name)()
    except ValueError as error:
        end_command(f"error: {error}")


def checked(
    run: Callable[[Any], None], names: Sequence[str] = ("output",), interrupted: str = RERUN
) -> Callable[[DictConfig], None]:
    """Return a function of composed options that runs `run` with the checked ones; an error ends the process with one line.

    `names`: options of what it reads or writes, for an error that names no file; `interrupted`: the message after Ctrl-C.
    """

    @wraps(run)
    def task(composed: DictConfig) -> None:
        with errors_end_command(options_text(composed, *names), interrupted=interrupted):
            run(to_config(composed))

    return task


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import torch without looking for garbage, again and again, among objects that stay; later collections leave them out."""
    if "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()


def project_version() -> str:
    """Return the version of the recipe: that of the checkout, or of the installed package."""
    checkout = Path(__file__).parents[1] / "pyproject.toml"
    if checkout.is_file():
        return tomllib.loads(checkout.read_text(encoding="utf-8"))["project"]["version"]
    return metadata.version(PROJECT)


def end_command(message: str, exit_code: int = USER_ERROR_EXIT_CODE) -> NoReturn:
    print(on_one_line(message), file=sys.stderr, flush=True)
    sys.exit(exit_code)


@contextmanager
def errors_end_command(
    where: str = UNKNOWN_FILE, more: str = "", interrupted: str = RERUN
) -> Iterator[None]:
    """End the process with one message after a user error, an error of the system, or Ctrl-C.

    `where` is what the command reads or writes, for an error of the system that names no file; `more` continues the remedy for a
    full disk; `interrupted` is the message after Ctrl-C.
    """
    try:
        yield
    except ValueError as error:
        end_command(f"error: {error}")
    except ImportError as error:
        text = load_error_text(error)
        if text is None:
            raise
        end_command(f"error: {text}")
    except OSError as error:
        end_command(f"error: {load_error_text(error) or os_error_text(error, where, more)}")
    except KeyboardInterrupt:
        end_command(interrupted, INTERRUPTED_EXIT_CODE)


def _options_of_yaml(config_name: str, sections: Sequence[str]) -> list[str]:
    content = OmegaConf.to_container(_content(Path(__file__).parent / f"{config_name}.yaml"))
    assert isinstance(content, dict)
    return [option for name in sections for option in _dotted(content.get(name), name)]


# Reading one takes some milliseconds.
@cache
def _content(path: Path) -> Any:
    """Return the content of a yaml file of `configs/`; do not change it."""
    return OmegaConf.load(path)


@cache
def _configs_with(schema_name: str) -> list[str]:
    """Return the yaml files of `configs/` whose defaults name a schema, directly or through another of them."""
    contents = {path.stem: _content(path) for path in Path(__file__).parent.glob("*.yaml")}
    found = {schema_name}
    while True:
        named = {
            name
            for name, content in contents.items()
            if any(isinstance(item, str) and item in found for item in content.get("defaults", []))
        }
        if named <= found:
            return sorted(found - {schema_name})
        found |= named


def _dotted(content: Any, prefix: str) -> Iterator[str]:
    if not isinstance(content, dict):
        yield prefix
        return
    for key, value in content.items():
        yield from _dotted(value, f"{prefix}.{key!s}" if prefix else str(key))
