"""Command lines: overrides of every option with every kind of value, and texts that are no overrides."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints
from unittest.mock import patch

from hypothesis import strategies as st

from configs.command_line import checked, composed_command, end_command
from configs.export_schema import ExportConfig
from configs.preproc_schema import PreprocConfig
from configs.schema import Config, Mode
from main import command
from nn.build import build_loaders, open_source
from nn.checks import check_run
from nn.distributed.process_group import ranks_from_environment
from nn.export import __main__ as export_command
from nn.models.dcnv2 import DCNv2Options
from nn.models.dlrm import DLRMOptions
from nn.modes.plan import show_plan
from nn.resume import ResumePoint
from preproc import __main__ as preproc_command
from tests.fuzz.harness import Fuzzer
from tests.fuzz.mutations import FLOATS, HOSTILE_TEXTS, INTEGERS
from tests.fuzz.runs import OPTIONS

VALUES = (
    *(
        "0",
        "-1",
        "1",
        "2",
        "3",
        "1.5",
        "1e9",
        "1e30",
        "1e-30",
        "9223372036854775807",
        "99999999999",
    ),
    *("9223372036854775808", "inf", "-inf", "nan", "true", "null", "''", "' '", "abc", "[]", "[1]"),
    *(
        "[0]",
        "[-1,2]",
        "[1.5]",
        "[a]",
        "[null]",
        "[[1]]",
        "{}",
        "{a:1}",
        "{a:{b:c}}",
        "[1,2,3,4,5,6]",
    ),
    *(
        "~/x",
        "../x",
        "/dev/null/nope",
        "/dev/null",
        "a:b",
        "a.b:C",
        "os:system",
        "json:loads",
        "1,2",
        "a b",
    ),
    *(
        "'a\\nb'",
        '"\\x1b[31m"',
        "${seed}",
        "${nope}",
        "${oc.env:HOME}",
        "${a",
        "???",
        "'???'",
        "0x1F",
    ),
    *(
        "1_000",
        "--",
        "=",
        "==",
        "dlrm",
        "dcnv2",
        "adam",
        "sgd",
        "fp16",
        "bf16",
        "table_wise",
        "cpu",
    ),
    *(
        "[row_wise]",
        "{cat_0:row_wise}",
        "{cat_0:column_wise,nope:x}",
        "[dense]",
        "[tables,optimizer]",
    ),
    *("x" * 5000, "[" * 200, "[" * 60 + "1" + "]" * 60, "[50,7]", "[50,7,9]", "[1000000000000]"),
)
GARBAGE = (
    *(
        "~train",
        "~nope",
        "~model.name",
        "+new=1",
        "++train.epochs=2",
        "+train.nope=1",
        "+experiment=x",
    ),
    *(
        "experiment=nope",
        "experiment=",
        "data=nope",
        "data@x=y",
        "hydra.verbose=x",
        "hydra/launcher=x",
    ),
    *(
        "train",
        "train=",
        "train=1",
        "train={}",
        "train={epochs:x}",
        "=1",
        "==",
        "",
        " ",
        "a=b=c",
        ".",
    ),
    *("train.", ".train=1", "train..epochs=1", "train.epochs.x=1", "model=1", "model={name:dcnv2}"),
    *(
        "data=null",
        "data={path:/nope}",
        "--nope",
        "-x",
        "--cfg=nope",
        "\x1b[31m=1",
        "a\nb=1",
        "é=1",
    ),
    *("train.epochs=\n", "train.epochs=1\n", "'train.epochs'=1", "train[0]=1", "optimizer@a=b"),
)


def overrides(schemas: Sequence[tuple[type, str]]) -> st.SearchStrategy[list[str]]:
    """Return a strategy of command lines for the options of some classes, each with its prefix."""
    options = [option for schema, prefix in schemas for option in _typed_options(schema, prefix)]
    value = st.one_of(
        st.sampled_from(VALUES),
        st.sampled_from(HOSTILE_TEXTS),
        st.floats().map(str),
        st.text(max_size=8),
    )

    def of_type(option: tuple[str, Any]) -> st.SearchStrategy[str]:
        key, kind = option
        return _values_of(kind).map(lambda text: f"{key}={text}")

    pair = st.builds("{}={}".format, st.sampled_from([key for key, _ in options]), value)
    typed = st.sampled_from(options).flatmap(of_type)
    override = st.one_of(typed, typed, typed, pair, pair, st.sampled_from(GARBAGE))
    return st.one_of(override.map(lambda text: [text]), st.lists(override, min_size=1, max_size=3))


def _typed_options(schema: type, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, type) of every option."""
    types = get_type_hints(schema)
    for declared in fields(schema):
        kind = types[declared.name]
        if is_dataclass(kind):
            yield from _typed_options(kind, f"{prefix}{declared.name}.")
        else:
            yield f"{prefix}{declared.name}", kind


def _values_of(kind: Any) -> st.SearchStrategy[str]:
    """Return a strategy of values of a type, as text."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from([member.name for member in kind])
    if kind is bool:
        return st.sampled_from(["true", "false"])
    if kind is int:
        return INTEGERS.map(str)
    if kind is float:
        return st.one_of(FLOATS.map(str), st.sampled_from(["1e-9", "0.1", "2", "1e9", "-1e-9"]))
    if get_origin(kind) is list:
        return st.lists(_values_of(get_args(kind)[0]), max_size=3).map(
            lambda items: f"[{','.join(items)}]"
        )
    if get_origin(kind) in (Union, UnionType):
        return st.one_of(*map(_values_of, get_args(kind)))
    return st.sampled_from(
        ["null", "dlrm", "dcnv2", "adam", "test", "x", "/dev/null/nope", "{cat_0:row_wise}"]
    )


def _checked(config: Config, config_yaml: str) -> None:
    """Do what a training does before it has a process group, on the built-in clicks; or plan."""
    if config.mode is Mode.plan:
        show_plan(config, config_yaml)
        return
    source = open_source(config)
    ranks = ranks_from_environment("cpu")
    with build_loaders(config, source, ranks) as loaders:
        check_run(config, source, ranks, loaders, ResumePoint())


def _recipe(_: None, mutation: tuple[list[str], bool], room: Path) -> None:
    overridden, plan = mutation
    arguments = [*OPTIONS, *(["mode=plan"] if plan else []), *overridden]
    with (
        patch.object(sys, "argv", ["dlrm.py", *arguments]),
        patch("nn.run.MODES", dict.fromkeys(Mode, _checked)),
        patch("main.SILENT_RANK_WAIT_S", 0),
    ):
        command("dlrm")()


def _preproc(_: None, overridden: list[str], room: Path) -> None:
    """Compose and check; run nothing."""
    arguments = [f"output={room / 'out'}", "source=nothing.tsv", *overridden]
    with patch("preproc.__main__.execute", lambda config: None):
        _command(preproc_command.run, PreprocConfig, "preproc", arguments, ("dataset",))


def _export(_: None, overridden: list[str], room: Path) -> None:
    arguments = ["checkpoint=nothing", f"output={room / 'out'}", *overridden]
    with patch("nn.export.__main__.export_tables", lambda *paths, **options: {"tables": {}}):
        _command(checked(export_command.run), ExportConfig, "export", arguments, ())


def _command(
    task: Callable, schema: type, name: str, arguments: list[str], groups: Sequence[str]
) -> None:
    """Run a command as the end of its module does."""
    with patch.object(sys, "argv", [name, *arguments]):
        try:
            composed_command(task, schema, f"{name}_schema", name, groups=groups)()
        except ValueError as error:
            end_command(f"error: {error}")


def _no_artifact(_: Path) -> None:
    return None


FUZZERS = [
    Fuzzer(
        "options: recipe",
        _no_artifact,
        lambda _: st.tuples(
            overrides([(Config, ""), (DLRMOptions, "model."), (DCNv2Options, "model.")]),
            st.booleans(),
        ),
        _recipe,
        12,
    ),
    Fuzzer(
        "options: preproc", _no_artifact, lambda _: overrides([(PreprocConfig, "")]), _preproc, 10
    ),
    Fuzzer("options: export", _no_artifact, lambda _: overrides([(ExportConfig, "")]), _export, 10),
]
