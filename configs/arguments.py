"""Arguments of a command: each is refused with its reason, or written as Hydra's grammar reads it.

Hydra's own messages name neither the option nor the remedy, and advise to add a mistyped option with a plus sign. Its grammar
refuses or alters texts that are ordinary paths: `~/x`, `a,b`, `a=b`, `1e3`, most characters beyond ASCII.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException

from configs.messages import printable, shown
from configs.option_values import FLOAT32_MAX, hints, takes, wanted
from configs.options import open_sections, option_names
from configs.overrides import no_option
from configs.schema import RENAMED
from configs.tf2_flags import is_tf2_flag, translated

# Those of Hydra that commands take; with a value -> the values, empty if any is allowed.
FLAGS = ("--help", "--version", "--multirun")
FLAGS_WITH_VALUE: dict[str, tuple[str, ...]] = {
    "--cfg": ("job", "hydra", "all"),
    "--config-name": (),
    "--config-dir": (),
}
SHORT_FLAGS = {
    **{"-h": "--help", "-m": "--multirun", "-c": "--cfg"},
    **{"-cn": "--config-name", "-cd": "--config-dir"},
}
ONE_RUN = "only --multirun of a training makes a run of each"


@dataclass(frozen=True, slots=True)
class Choices:
    """Names that the arguments of one command may have.

    `likely` are options of open sections, to which a mistyped one may be close; --config-name may name one of those that
    `configs` returns, or any if it returns none; with `has_jobs`, as only trainings have, --multirun makes a job of each value.
    """

    schema: type
    groups: Sequence[str] = ()
    likely: Sequence[str] = ()
    configs: Callable[[], Sequence[str]] = tuple
    has_jobs: bool = True


def hydra_arguments(arguments: Sequence[str], choices: Choices) -> list[str]:
    """Return the arguments for Hydra: flags first, then overrides, with texts quoted where its grammar requires it.

    Raises ValueError: an option, a flag or a value is invalid; the message names it.
    """
    flags, overrides = _parted(arguments, choices)
    name = flags.get("--config-name")
    configs = choices.configs() if name and "--config-dir" not in flags else ()
    if name and configs and name.removesuffix(".yaml") not in configs:
        raise ValueError(
            f"--config-name={printable(name)}: this command has no such config; choose one of "
            f"{', '.join(configs)}, or name the directory of your own with --config-dir"
        )
    options = hints(choices.schema)
    may_sweep = "--multirun" in flags or "hydra.mode=MULTIRUN" in overrides
    if may_sweep and not choices.has_jobs:
        raise ValueError(
            "--multirun makes runs of a training, and this command is none; start it once for each value"
        )
    written = [flag if value is None else f"{flag}={value}" for flag, value in flags.items()]
    for argument in overrides:
        override = _override(argument, options, choices, may_sweep)
        option, _, value = override.partition("=")
        if options.get(option) is Any and value.startswith("{"):
            # A mapping such as `tasks={..}` replaces that of a yaml file: Hydra would merge the two.
            written.append(f"{option}=null")
        written.append(override)
    return written


def as_written(arguments: Sequence[str]) -> list[str]:
    """Return arguments for Hydra without those that let others replace a mapping."""
    return [
        argument
        for index, argument in enumerate(arguments)
        # Of a process that another one starts, there are several.
        if not (
            argument.endswith("=null")
            and any(later.startswith(f"{argument[:-4]}{{") for later in arguments[index:])
        )
    ]


def help_words(arguments: Sequence[str], choices: Choices) -> tuple[list[str], list[str]]:
    """Part the words after --help, such as `optimizer`, from the other arguments. Raises ValueError: a flag is invalid."""
    flags, overrides = _parted(arguments, choices)
    if "--help" not in flags:
        return [], list(arguments)
    words = [word for word in overrides if word and "=" not in word and not word.startswith("~")]
    return words, [argument for argument in arguments if argument not in words]


def _parted(arguments: Sequence[str], choices: Choices) -> tuple[dict[str, str | None], list[str]]:
    """Return flags with their values, by their long names, and overrides.

    Services that tune hyperparameters write an option as `--optimizer.lr=0.01`.
    """
    example = f"{option_names(choices.schema)[0]}=..."
    flags: dict[str, str | None] = {}
    overrides = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        written, equals, value = argument.partition("=")
        flag = SHORT_FLAGS.get(written, written)
        if flag in FLAGS and not equals:
            flags[flag] = None
        elif flag in FLAGS_WITH_VALUE:
            value = value if equals else rest.pop(0) if rest else ""
            wanted = FLAGS_WITH_VALUE[flag]
            if not value or (wanted and value not in wanted):
                want = f"one of {', '.join(wanted)}" if wanted else "a value"
                raise ValueError(f"{flag}: got {shown(value) if value else 'nothing'}, want {want}")
            flags[flag] = value
        elif equals and written.startswith("--") and _is_option(written[2:], choices):
            overrides.append(argument[2:])
        elif is_tf2_flag(argument) and "train.batch_size" in option_names(choices.schema):
            program = Path(sys.argv[0])
            command = f"python {program.name} {translated(program.stem, arguments)}"
            raise ValueError(
                f"{printable(written)} is a flag of NVIDIA's TF2 recipe; here the command is: {printable(command)}; "
                "docs/tf2_flags.md has remarks on every flag"
            )
        else:
            close = get_close_matches(flag, [*FLAGS, *FLAGS_WITH_VALUE], n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(
                f"there is no flag {printable(written)}; {hint}options are written key=value, as {example}, and "
                "--help lists them (docs/tf2_flags.md has the flags of NVIDIA's TF2 recipe)"
            )
    return flags, overrides


def _is_option(option: str, choices: Choices) -> bool:
    """Return whether a dotted name is an option, or was one, or lies in an open section."""
    known = {*option_names(choices.schema), *choices.groups}
    is_known = option in known or RENAMED.get(option) in known
    return is_known or any(is_below(option, opened) for opened in _below(choices.schema))


def _override(argument: str, options: Mapping[str, Any], choices: Choices, may_sweep: bool) -> str:
    """Return one override for Hydra, after the checks that need no yaml file."""
    name, equals, value = argument.partition("=")
    match = re.match(r"(~|\+{1,2})?(.*)", name, re.DOTALL)
    assert match is not None
    sign, option = match[1] or "", match[2]
    if option not in options and RENAMED.get(option) in options:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"warning: {option} is now {RENAMED[option]}; 0.4.0 will refuse {option}",
                file=sys.stderr,
            )
        option = RENAMED[option]
    group = option.partition("@")[0]
    if not option:
        what = "is empty, perhaps from an unset shell variable" if not argument else "has no name"
        raise ValueError(f"the argument {shown(argument)} {what}; options are written key=value")
    # Hydra takes a plus sign for an option whose value is null.
    may_be_null = option in options and (options[option] is Any or takes(options[option], NoneType))
    if sign == "+" and option in options and not may_be_null:
        raise ValueError(
            f"+{option}: {option} exists already; write {option}=..., without the plus sign"
        )
    if sign == "~" and option in options:
        kind = "section" if is_dataclass(options[option]) else "option"
        raise ValueError(
            f"~{option}: the {kind} {option} cannot be removed; set its values instead"
        )
    is_known = (
        option in options or group in choices.groups or option.startswith(("hydra.", "hydra/"))
    )
    if not is_known and not any(is_below(option, opened) for opened in _below(choices.schema)):
        raise no_option(printable(option), [*option_names(choices.schema), *choices.likely])
    if not (equals or sign == "~"):
        raise ValueError(f"{shown(option)} has no value; write {option}=VALUE")
    if not equals:
        return argument
    hint = str if group in choices.groups else options.get(option)
    # A choice replaces the default one, and a value a null, with or without a plus sign.
    is_set = (option in choices.groups and "+" in sign) or (option in options and sign == "+")
    start = f"{option}=" if is_set else f"{sign}{option}="
    parsed = _parsed(start, value)
    if may_sweep and parsed is not None and parsed.is_sweep_override():
        return argument
    return f"{start}{_value(start, value, parsed, hint)}"


def _value(start: str, text: str, parsed: Override | None, hint: Any) -> str:
    """Return the value of an override as Hydra's grammar reads it; `start` is what stands before it."""
    is_sweep = parsed is not None and parsed.is_sweep_override()
    if text.strip(" '\"") == "???":  # a missing value, in OmegaConf's words
        raise ValueError(f"{start[:-1]}: got {shown(text)}; want {wanted(hint)}")
    if takes(hint, str):
        # A number or a truth value would be written in another form: 1e3 as 1000.0.
        is_kept = parsed is not None and isinstance(parsed.value(), str | list | dict | NoneType)
        if is_kept and not is_sweep and not re.match(r"\w+\(", text):
            return text
        flat = takes(hint, list) and re.fullmatch(r"\[([^][{}'\"]*)\]", text)
        if flat:
            return f"[{','.join(quoted(item.strip()) for item in flat[1].split(','))}]"
        return quoted(text)
    if parsed is None or is_sweep:
        got = f"{shown(text)}, which Hydra's grammar cannot read"
        got = f"several values, and {ONE_RUN}" if is_sweep else got
        is_free = takes(hint, list) or hint is Any or hint is None
        remedy = f"; a list is written {start}[a,b], and a text in quotes" if is_free else ""
        raise ValueError(f"{printable(start[:-1])}: got {got}; want {wanted(hint)}{remedy}")
    value = parsed.value()
    if (
        isinstance(value, int)
        and abs(value) > FLOAT32_MAX
        and (takes(hint, int) or takes(hint, float))
    ):
        raise ValueError(f"{start[:-1]}: got {shown(value)}; want {wanted(hint)} below {2**63:,}")
    is_bool = hint in (bool, bool | None) and value is not None
    if is_bool and not isinstance(value, bool | str) and value not in (0, 1):
        raise ValueError(f"{start[:-1]}: got {shown(value)}; want true or false")
    if is_dataclass(hint) and not isinstance(value, dict):
        first = f"{start[:-1]}.{fields(hint)[0].name}"
        raise ValueError(
            f"{start[:-1]} is a section, got {shown(value)}; set its options, as {first}=..."
        )
    return text


def _parsed(start: str, text: str) -> Override | None:
    """Return what Hydra's parser makes of an override, or None if it cannot read it."""
    try:
        return OverridesParser.create().parse_override(f"{start}{text}")
    except (HydraException, ValueError, RecursionError):  # ValueError: thousands of digits
        return None


def quoted(text: str) -> str:
    """Return a text in the quotes of Hydra's grammar."""
    return QuotedString(text=text, quote=Quote.single).with_quotes()


def _below(schema: type) -> list[str]:
    untyped = [option for option, hint in hints(schema).items() if hint is Any]
    return [*open_sections(schema), *untyped]


def is_below(option: str, section: str) -> bool:
    return f"{option}.".startswith(f"{section}.")
