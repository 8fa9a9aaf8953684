"""Values that no option may have, tried on every option of every command: one line with the key, or a reason to accept."""

import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, List, Optional, get_args, get_origin  # noqa: UP035

import pytest
from hydra import compose, initialize_config_module
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.arguments import Choices, hints, hydra_arguments
from configs.command_line import register
from configs.export_schema import ExportConfig
from configs.options import option
from configs.overrides import one_line, to_config, to_section
from configs.preproc_schema import PreprocConfig
from configs.schema import Config, ModelConfig
from nn.models.options import DCNv2Options
from nn.models.registry import typed_config

# Each of some 1,400 values is checked with all options: long lists of other options take half of the time.
FEW_TABLES = "data.synthetic.cardinalities=[3]"
COMMANDS = {
    "dcnv2": (Choices(Config, ("experiment", "data")), "schema", typed_config, (FEW_TABLES,)),
    "preproc": (
        Choices(PreprocConfig, ("dataset",)),
        "preproc_schema",
        to_config,
        ("dataset=synthetic", "output=x", FEW_TABLES),
    ),
    "export": (Choices(ExportConfig), "export_schema", to_config, ("checkpoint=x", "output=y")),
}
PARSER = OverridesParser.create()
BEYOND_INT64 = str(2**63)
# Refused for the type alone, so tried on the first option of each type of a command.
OF_TYPE = {
    *("true", "x", "[1]", "{a:1}", "'1,5'", "0x10", "1,2", "[true]", "{a:true}", "true,false"),
    *("[a]", "a,b", "[null]", "[[1]]", "[{a:1}]", "[x]"),
}  # fmt: skip
NUMBERS = ["true", "x", "", "[1]", "{a:1}", "'1,5'", "???", "0x10", "nan", "inf", "-inf", "1,2"]
WRONG: dict[Any, list[str]] = {
    int: [*NUMBERS, "1.5", "1.0", "1e3", "-1", BEYOND_INT64, f"-{BEYOND_INT64}", "9" * 5000],
    float: [*NUMBERS, "-1", "1e308", "1e-300", "1e39", "-1e39", "9" * 400],
    bool: ["5", "-1", "x", "", "[true]", "{a:true}", "1.5", "nan", "???", "true,false"],
    str: ["[a]", "{a:1}", "'\udc80'", "???"],
    list: ["3", "x", "", "{a:1}", "1.5", "???", "[null]", "[[1]]", "[{a:1}]", "a,b"],
}
# Zero means something, as the meaning of the option says.
MAY_BE_ZERO = {
    *("data.synthetic.num_numerical", "data.synthetic.exponent", "data.multi_hot.seed", "seed"),
    *("data.shuffle_block", "optimizer.beta1", "optimizer.beta2", "scheduler.warmup_steps"),
    *("scheduler.first_step", "eval.first_step"),
    *("scheduler.decay_steps", "inference.warmup_steps", "sharding.reserve", "model.dropout"),
    *("profile.steps", "frequency_limit", "optimizer.momentum", "optimizer.weight_decay"),
    *("optimizer.embedding_l2", "optimizer.ftrl_l1", "optimizer.ftrl_l2"),
}  # fmt: skip


@cache
def composed(command: str) -> DictConfig:
    """Return the options of a command; `dcnv2` has all options of a model."""
    choices, schema_name, _, overrides = COMMANDS[command]
    register(choices.schema, schema_name)
    with initialize_config_module("configs", version_base="1.3"):
        return compose(command, list(overrides))


def refusal(command: str, argument: str) -> str | None:
    """Return the message with which a command refuses an argument, or None."""
    choices, _, check, _ = COMMANDS[command]
    before = composed(command)
    key = argument.partition("=")[0]
    section, _, name = key.rpartition(".")
    parent = OmegaConf.select(before, section) if section else before
    was_set, old = name in parent, deepcopy(parent.get(name))
    try:
        [written] = hydra_arguments([argument], choices)
        value = PARSER.parse_override(written).value()
        OmegaConf.update(before, key, value)
        check(before)
    except (HydraException, OmegaConfBaseException) as error:
        return one_line(error)
    except ValueError as error:
        return str(error)
    finally:
        if was_set:
            parent[name] = old
        else:
            parent.pop(name, None)
    return None


def options(command: str) -> Iterator[tuple[str, Any]]:
    """Yield key and type of every option."""
    found = dict(hints(COMMANDS[command][0].schema))
    if command == "dcnv2":
        found |= hints(DCNv2Options, "model.")
    yield from ((key, hint) for key, hint in found.items() if not is_dataclass(hint))


def members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def wrong_values(key: str, hint: Any) -> list[str]:
    """Return values of which none is one of the option."""
    kinds = [get_origin(member) or member for member in members(hint)]
    first = kinds[0]
    if isinstance(first, type) and issubclass(first, Enum):
        values = ["x", "", "[a]", "{a:1}", "1.5", "-1", "???", "a,b"]
    else:
        values = list(WRONG.get(first, []))
    if first in (int, float) and key not in MAY_BE_ZERO:
        values.append("0")
    if first is list:
        [element] = get_args(members(hint)[0])
        nested = WRONG.get(element, ["x", "1.5"]) if element is not str else ["[a]", "{a:1}"]
        values += [f"[{value}]" for value in nested if "," not in value and value]
    if list in kinds and first is str:
        return ["{a:1}", "[{a:1}]", "[[a]]"]
    if NoneType not in kinds and first is not Any:
        values.append("null")
    return values


ALL = [(command, key, hint) for command in COMMANDS for key, hint in options(command)]


@pytest.mark.parametrize(("command", "key", "hint"), ALL, ids=[f"{c}:{k}" for c, k, _ in ALL])
def test_an_option_refuses_what_it_cannot_be_in_one_line_with_its_key(command, key, hint):
    accepted = []
    is_first = (command, key, hint) == next(case for case in ALL if case[::2] == (command, hint))
    for value in wrong_values(key, hint):
        if value in OF_TYPE and not is_first:
            continue
        message = refusal(command, f"{key}={value}")
        if message is None:
            accepted.append(value)
            continue
        assert key.rpartition(".")[2] in message, (value, message)
        assert "\n" not in message
        assert len(message) < 700, message
    assert accepted == []


def test_the_untouched_options_are_accepted():
    for command in COMMANDS:
        assert COMMANDS[command][2](composed(command)) is not None


@dataclass(kw_only=True)
class UserOptions:
    """Options as a model of the user may declare them."""

    cap: Optional[int] = option(None, "the older way to write int | None")  # noqa: UP045
    caps: Optional[List[int]] = option([3], "likewise")  # noqa: UP006, UP045
    towers: list[list[int]] = option([[8, 4], [4]], "widths per tower", most=99)
    widths: dict[str, int] = option({"a": 3}, "widths by name")
    pair: tuple[int, int] = option((1, 2), "two numbers")


def test_a_model_of_the_user_may_have_lists_of_lists_mappings_and_optional_values():
    options = to_section(OmegaConf.create({"towers": [[1], [2, 3]]}), UserOptions, "model")
    assert options.towers == [[1], [2, 3]]
    assert options.widths == {"a": 3}
    assert options.cap is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"towers": [[1], [100]]},
        {"towers": [1]},
        {"towers": [[None]]},
        {"widths": [1]},
        {"widths": {"a": None}},
        {"widths": {"a": 2**70}},
        {"cap": [1]},
    ],
    ids=str,
)
def test_nested_options_of_a_model_of_the_user_are_checked(wrong):
    with pytest.raises(ValueError, match=rf"^model\.{next(iter(wrong))}"):
        to_section(OmegaConf.create(wrong), UserOptions, "model")


def test_every_kind_of_option_is_tried():
    kinds = {members(hint)[0] for _, _, hint in ALL}
    assert {int, float, bool, str} <= kinds
    assert any(get_origin(kind) is list for kind in kinds)
    assert len(ALL) > 90
    assert issubclass(DCNv2Options, ModelConfig)
    assert re.fullmatch(r"\d+", BEYOND_INT64)
