"""Composed options to typed ones: unknown options and invalid values are refused with one line that names the option.

So are interpolations, values such as `${train.batch_size}` of other options, that do not resolve.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from hydra.errors import MissingConfigException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.messages import first_line, printable, shortened, shown
from configs.option_values import check_values, expand_home
from configs.options import open_sections, option_names, replaced_options, type_hints
from configs.schema import RENAMED

# Begin the names of options that have keys of the user's own.
OPEN_OPTIONS = (
    "table.",
    "tasks.",
    "sharding.tables.",
    "optimizer.embedding_options.",
    "checkpoint.restore_tables.",
)


class WrittenOption(NamedTuple):
    """An option that somebody, the user or the project, has written for the model that is trained.

    `where` is what a message about it begins with: `experiment/mine.yaml: `, or nothing for the command line.
    """

    name: str
    where: str = ""
    is_users: bool = True


def to_config(composed: DictConfig) -> Any:
    """Convert composed yaml to the schema's classes; every check of an option runs here.

    An open section becomes its common options; `to_section` converts all of them, once their class is known. Raises
    ValueError: an invalid value, or an option that does not exist: Hydra itself accepts `+key=value`.
    """
    schema = OmegaConf.get_type(composed)
    if schema is None or not is_dataclass(schema):
        raise ValueError(
            "this configuration has no schema; begin the list of its defaults with base"
        )
    composed = copy.deepcopy(composed)
    refuse_unresolved(composed)
    try:
        expand_home(composed, schema)
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(one_line(error)) from None
    for name in unknown_options(composed, schema):
        raise no_option(name, option_names(schema))
    assert isinstance(values, dict)
    check_values(values, schema)
    for name in open_sections(schema):
        common = {option.partition(".")[0] for option in option_names(type_hints(schema)[name])}
        for key in set(composed[name]) - common:
            del composed[name][key]
    try:
        return OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(one_line(error)) from None


def refuse_unresolved(composed: DictConfig) -> None:
    """Raise ValueError for the first option whose interpolation does not resolve; one line that names it."""
    problems = []
    for option, text, error in _unresolved(composed, OmegaConf.to_container(composed), ""):
        reason = re.sub("^While dereferencing .*?': ", "", first_line(error))
        named = re.search("'([^']*)'", reason)
        # An option that takes the value of the wrong one is not the mistake.
        is_mistake = named is not None and named[1] in text
        problems.append(
            (is_mistake, f"{option}: got {shown(text)}: {shortened(reason).rstrip('.:;')}")
        )
    if problems:
        _, message = max(problems, key=lambda problem: problem[0])
        raise ValueError(
            f"{printable(message)}; write a value, or, in single quotes, ${{KEY}} of an option or ${{oc.env:NAME,DEFAULT}}"
        )


def options_text(composed: DictConfig, *options: str) -> str:
    """Return options as `key=value`, for a message; an interpolation that does not resolve stays as it was written."""
    return " ".join(f"{option}={_value_or_text(composed, option)}" for option in options)


def texts_of(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a command, as Hydra holds them; one whose interpolation does not resolve stays as written."""
    return [str(_value_or_text(overrides, index)) for index in range(len(overrides))]


def _value_or_text(node: Any, key: Any) -> Any:
    try:
        return node[key]
    except OmegaConfBaseException:
        written: Any = OmegaConf.to_container(node)
        return written[key]


def _unresolved(
    node: DictConfig | ListConfig, values: Any, prefix: str
) -> Iterator[tuple[str, str, OmegaConfBaseException]]:
    """Yield names, texts and errors of all interpolations that do not resolve; `values` are those of `node` as written."""
    is_list = isinstance(values, list)
    for key, value in enumerate(values) if is_list else values.items():
        full = f"{prefix}[{key}]" if is_list else f"{prefix}.{key}" if prefix else str(key)
        if OmegaConf.is_interpolation(node, key):
            try:
                _ = node[key]
            except OmegaConfBaseException as error:
                yield full, str(value), error
        elif isinstance(value, dict | list):
            yield from _unresolved(node[key], value, full)


def drop_replaced(composed: DictConfig, overrides: Sequence[str], schema: type) -> None:
    """Let an option of the command line prevail over the one of a yaml file that would replace it, in place.

    `eval.per_epoch=2` takes effect although a recipe sets `eval.every`, which replaces it. Raises ValueError: the command line
    gives a value to both options of a pair.
    """
    named = {
        name.lstrip("+"): value for name, _, value in (text.partition("=") for text in overrides)
    }
    for replacing, replaced in replaced_options(schema):
        if named.get(replacing, "null") != "null" and replaced in named:
            raise ValueError(
                f"{replacing}={named[replacing]} and {replaced}={named[replaced]} exclude each other; write one of them"
            )
        if replaced in named:
            OmegaConf.update(composed, replacing, None)


def to_section(composed: DictConfig, schema: type, name: str) -> Any:
    """Convert an open section to `schema`, the class of all its options; their checks run here.

    Raises ValueError: an invalid value, or an option that does not exist.
    """
    for unknown in unknown_options(composed, schema, f"{name}."):
        raise no_option(unknown, option_names(schema, f"{name}."))
    try:
        values = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(values, dict)
        # Before the merge, whose own messages name no option, and after it, when texts are numbers.
        check_values(values, schema, f"{name}.")
        merged = OmegaConf.merge(OmegaConf.structured(schema), values)
        assert isinstance(merged, DictConfig)
        expand_home(merged, schema, f"{name}.")
        typed_values = OmegaConf.to_container(merged)
        assert isinstance(typed_values, dict)
        check_values(typed_values, schema, f"{name}.")
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        where = "" if error.full_key is None else f"{name}."
        raise ValueError(where + one_line(error)) from None


def no_option(name: str, options: Sequence[str]) -> ValueError:
    """Return the error of a mistyped option, with the one of `options` that was probably meant."""
    # An option of section `train` first if `name` names no section.
    names = {} if "." in name else {option: option.rpartition(".")[2] for option in options}
    close = get_close_matches(name, names.values(), n=1, cutoff=0.75)
    candidates = [option for option in options if option == RENAMED.get(name)]
    candidates = candidates or [option for option, last in names.items() if last in close]
    candidates = candidates or get_close_matches(name, options, n=1, cutoff=0.75)
    likely = max(candidates, key=lambda option: option.startswith("train."), default=None)
    hint = "" if likely is None else f"did you mean {likely}? "
    return ValueError(f"there is no option {printable(name)}; {hint}--help lists them all")


def one_line(error: Exception) -> str:
    """Describe an error of Hydra, OmegaConf or a yaml file in one line that begins with the option, if it names one."""
    if isinstance(error, RecursionError):
        return "an option or a yaml file is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"a yaml file of this command is not UTF-8 text: {error}"
    if isinstance(error, MissingConfigException) and error.options is not None:
        # The name is none of a group's, such as `experiment`.
        path = error.missing_cfg_file or ""
        group, _, name = path.rpartition("/") if path.startswith("hydra/") else path.partition("/")
        choices = sorted(error.options)
        close = get_close_matches(name, choices, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        choices_text = f"choose one of {', '.join(choices)}" if choices else "there are none"
        return f"there is no {group}={shown(name)[1:-1]}; {hint}{choices_text}"
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__ or error
    found = re.search(r"^ *full_key: (\S+)$", str(cause), re.MULTILINE)
    option = found[1] if found else getattr(cause, "full_key", None)
    text = _joined(str(cause if option else error).partition("Config search path")[0])
    text = re.sub(r"^In '[^']*': (\w+ raised while composing config; )?", "", text)
    text = re.sub(r"^field '[^']*' is not Optional$", "got null, want a value", text)
    text = re.sub(r"^Key '.*' (is )?not in .*$", "there is no such option", text)
    text = re.sub(r"^ValueError raised while resolving interpolation: ", "", text)
    if option in RENAMED and text == "there is no such option":
        text += f"; it is {RENAMED[option]} now"
    if option and option.startswith(OPEN_OPTIONS) and text == "there is no such option":
        text += f"; to add a key, write + before it, as +{option}"
    # OmegaConf's word for a list.
    text += "; a list is written as [a,b]" if "ListConfig" in text else ""
    file = re.match(r"In '([^']*)': ", str(error))
    if file and option and option == file[1].split("/")[0]:
        return printable(f"{file[1]}.yaml: want '# @package _global_' as its first line")
    start = f"{file[1]}.yaml: " if file else ""
    start += f"{option}: " if option and option != "hydra.help.template" else ""
    # The value of an enumeration that was probably meant.
    match = re.search(r"Invalid value '([^']*)', expected one of \[([^]]*)\]", text)
    close = get_close_matches(match[1], match[2].split(", "), n=1) if match else []
    meant = f"; did you mean {close[0]}?" if close else ""
    return printable(shortened(f"{start}{text}{meant}", 500))


def _joined(text: str) -> str:
    """Join the lines of a message to sentences, without the types that OmegaConf adds."""
    details = ("full_key:", "reference_type=", "object_type=", "See https:")
    lines = [line.strip() for line in text.splitlines()]
    return "; ".join(line.rstrip(".:;") for line in lines if line and not line.startswith(details))


def unknown_options(composed: DictConfig, schema: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names that `schema` lacks; open sections are left out."""
    types, opened = type_hints(schema), open_sections(schema)
    known = {declared.name: types[declared.name] for declared in fields(schema)}
    for name in composed:
        if name not in known:
            yield f"{prefix}{name!s}"
        elif is_dataclass(known[name]) and name not in opened and OmegaConf.is_dict(composed[name]):
            yield from unknown_options(composed[name], known[name], f"{prefix}{name}.")
