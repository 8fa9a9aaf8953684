"""Commands and options that the pages name, each checked in this process as its command would, without torch and without data.

A page's fenced blocks, tables and prose are read alike. A command's module and flags must exist, its options are composed through
its schema with all checks of values, and the paths of its tests and scripts must exist.
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.arguments import Choices, help_words, hydra_arguments
from configs.built_in import MODELS
from configs.command_line import register, written_options
from configs.export_schema import ExportConfig, ReplayConfig
from configs.many_runs_schema import CompareConfig, SweepConfig
from configs.options import describe
from configs.overrides import drop_replaced, to_config
from configs.preproc_schema import PreprocConfig
from configs.schema import Config, TaskConfig
from configs.serving_schema import (
    AccuracyConfig,
    ApplyConfig,
    ForgetConfig,
    LatencyConfig,
    ModelExportConfig,
    RollbackConfig,
    ServerConfig,
    TritonConfig,
)
from nn.models.registry import find_options, typed_config
from tests.helpers.command import uncopied_schemas
from tests.project.layout import is_ours

OPTIONS = {name: find_options(name) for name in MODELS}

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        ROOT / "benchmarks/README.md",
    ]
    if is_ours(path)
}


class Command(NamedTuple):
    """A command with options `key=value`."""

    schema: type
    schema_name: str
    config_name: str
    groups: tuple[str, ...] = ()


TRAINING = {
    name: Command(Config, "schema", config, ("experiment", "data"))
    for name, config in (("dlrm.py", "dlrm"), ("dcnv2.py", "dcnv2"), ("main.py", "dlrm"))
}
PREPROC = Command(PreprocConfig, "preproc_schema", "preproc", ("dataset",))
COMMANDS = TRAINING | {
    "preproc": PREPROC,
    "preproc/__main__.py": PREPROC,
    "nn.export": Command(ExportConfig, "export_schema", "export"),
    "nn.replay": Command(ReplayConfig, "replay_schema", "replay"),
    "compare": Command(CompareConfig, "compare_schema", "compare"),
    "sweep": Command(SweepConfig, "sweep_schema", "sweep"),
    "serving.export": Command(ModelExportConfig, "serving_export_schema", "serving_export"),
    "serving.apply": Command(ApplyConfig, "serving_apply_schema", "serving_apply"),
    "serving.run": Command(ServerConfig, "serving_run_schema", "serving_run"),
    "serving.rollback": Command(RollbackConfig, "serving_rollback_schema", "serving_rollback"),
    "serving.forget": Command(ForgetConfig, "serving_forget_schema", "serving_forget"),
    "serving.triton": Command(TritonConfig, "serving_triton_schema", "serving_triton"),
    "serving.evaluate_accuracy": Command(
        AccuracyConfig, "serving_accuracy_schema", "serving_accuracy"
    ),
    "serving.evaluate_latency": Command(LatencyConfig, "serving_latency_schema", "serving_latency"),
}
STAND_INS = {
    **{
        name: "some/path"
        for name in (
            "DIR",
            "DATA",
            "DATASET",
            "FILE",
            "FILES",
            "GROWN",
            "NEW",
            "OUT",
            "RUN",
            "MODEL",
            "MODELS",
        )
    },
    **{name: "some/path" for name in ("LOGS", "NEXT", "NEXT_DIR", "REPOSITORY", "TF2_CHECKPOINT")},
    **{name: "3" for name in ("N", "S", "n", "JOB")},
    **{
        "NAME": "dcnv2",
        "FEATURE": "cat_0",
        "HOST": "localhost",
        "ORG": "org",
        "PLATFORM": "platform",
    },
}
"""Values for the words that stand for a reader's own."""
ELSEWHERE = {
    "break": "shell",
    "apt-get": "installs packages of the system",
    "cat": "shell",
    "cd": "shell",
    "cp": "shell",
    "curl": "a request to a server; tests/serving/server sends such ones",
    "dd": "shell",
    "done": "shell",
    "echo": "shell",
    "head": "shell",
    "mkdir": "shell",
    "tests.crash": "of an earlier commit; the page names what has replaced it",
    "mlperf_logging.compliance_checker": "of mlperf-logging; tests/nn/observability/test_mlperf_log.py runs it",
    "mlperf_logging.package_checker": "of mlperf-logging",
    "mlperf_logging.rcp_checker": "of mlperf-logging",
    "mlperf_logging.system_desc_checker": "of mlperf-logging",
    "pip": "installs packages; tests/project/test_packaging.py reads the extras",
    "split": "shell",
    "uv": "installs packages",
    "sync": "shell",
    "tail": "shell",
    "tritonserver": "of Triton; tests/serving/triton runs it",
}
"""Programs whose arguments are not checked here, and why."""
LAUNCHER_FLAGS = {
    "torchrun": [
        "nproc-per-node",
        "max-restarts",
        "nnodes",
        "node-rank",
        "master-addr",
        "numa-binding",
    ],
    "sbatch": ["N", "gpus-per-node", "time", "signal", "exclude", "array", "no-requeue"],
    "spark-submit": ["master", "jars", "conf"],
    "nsys": ["trace", "cuda-graph-trace", "capture-range", "capture-range-end", "output"],
}
OWN_WORDS = "..."
"""Stands for values that a page leaves out."""
PROGRAMS = r"(?:[\w./]*/)?python|torchrun|sbatch|[\w./]*pytest|spark-submit|nsys|uv run|(?:dlrm|dcnv2|main)\.py (?=[\w.]+=|-)"
VARIABLE = re.compile(r'^(\w+)="([^"]*)"$', re.MULTILINE)
# What prose leaves out: in one of these, options are meant.
AROUND: dict[str, list[list[str]]] = {
    "dlrm.py": [
        [],
        *([f"model.name={name}"] for name in OPTIONS),
        ["experiment=dlrm_criteo_t15"],
        ["experiment=dcnv2_criteo_t15"],
        ["optimizer.name=adam"],
        ["source=new.csv", "fitted=data", "checkpoint.restore=run"],
    ],
    "preproc": [
        ["dataset=criteo_kaggle", "source=a", "output=b"],
        ["path=a"],
        ["path=a", "output=b"],
        ["source=a", "output=b", "fitted=c"],
    ],
    "nn.export": [["checkpoint=a", "output=b"]],
    "nn.replay": [["base=a", "deltas=[b]", "output=c"]],
    "compare": [[]],
    "sweep": [["recipe=dlrm", "space=space.yaml"]],
    "serving.export": [["checkpoint=a", "output=b"]],
    "serving.apply": [["model=a", "deltas=[b]"]],
    "serving.run": [["model=a"]],
    "serving.rollback": [["model=a"]],
    "serving.forget": [["feature=a", "keys=b", "directories=[c]"]],
    "serving.triton": [["model=a", "output=b"]],
    "serving.evaluate_accuracy": [["model=a", "data_path=b"]],
    "serving.evaluate_latency": [["model=a", "data_path=b"]],
}


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return language and text of the fenced blocks of a page."""
    return re.findall(r"^ *```(\w*)\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL)


def spans_of(page: str) -> list[str]:
    """Return the code spans of a page, those in tables too, each on one line."""
    rest = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()).replace("\\|", "|") for span in re.findall(r"`([^`]+)`", rest)]


def commands_in(text: str, page: str) -> Iterator[list[str]]:
    """Yield the words of every command in a block or a span of a page, launchers and variables included."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        for name, value in VARIABLE.findall(page):
            line = re.sub(rf"\${name}\b", " ".join(value.split()), line)
        line = re.sub(r"\$\(\(.*?\)\)|\$\([^()]*\)|\$\w+", "1", line)
        if re.match(rf"\s*(?:[A-Z_]+=\S+ |for .*; do )*(?:{PROGRAMS})\b", line):
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            for is_end, words in groupby(lexer, lambda word: word in (";", "&&", "||", "|", "do")):
                if not is_end:
                    yield list(words)


def check_command(words: Sequence[str], page: str, *, is_whole: bool) -> None:
    """Check a command and what it starts; ValueError says what is wrong.

    Args:
        words: of the command.
        page: text that has it.
        is_whole: whether it has all options that it needs; prose names some.
    """
    # /co is a checkout in another folder.
    words = [word.removeprefix("/co/") for word in words if not re.match(r"[A-Z_]+=", word)]
    if words[:2] == ["uv", "run"]:
        words = words[2:]
        while words[:1] in (["--extra"], ["--group"]):
            _require(words[1] in _packages(words[0]), f"there is no {words[0]} {words[1]}")
            words = words[2:]
    if not words or words[0] in ELSEWHERE:
        return
    program, *rest = words
    program = program.rpartition("/")[2] if program.endswith(("python", "pytest")) else program
    if program == "python" and rest and rest[0] != "-c":
        program, *rest = rest[1:] if rest[0] == "-m" else rest
        if program.startswith("hybrid_parallel_recsys."):  # as an installed copy has it
            name = program.partition(".")[2]
            program = f"{name}.py" if f"{name}.py" in COMMANDS else name
    if program in LAUNCHER_FLAGS:
        _check_launched(program, rest, page, is_whole)
    elif program == "pytest":
        _check_pytest(rest)
    elif program in COMMANDS:
        check_arguments(program, rest, page, is_whole=is_whole)
    elif program not in ("python", *ELSEWHERE):
        _check_module(program, rest)


def _check_launched(program: str, words: list[str], page: str, is_whole: bool) -> None:
    """Check the flags of a launcher, and the command behind them."""
    while words and words[0] != OWN_WORDS:
        word = words.pop(0)
        if word == "-m":
            check_command(["python", "-m", *words], page, is_whole=is_whole)
            return
        if word.startswith("-"):
            flag, equals, _ = word.lstrip("-").partition("=")
            _require(flag in LAUNCHER_FLAGS[program], f"{program} has no flag {word} in this list")
            if words and not equals:
                words.pop(0)
        elif word.endswith(".sh"):
            _require((ROOT / word).is_file(), f"there is no {word}")
        elif word != "profile":
            python = [] if word in LAUNCHER_FLAGS else ["python"]
            check_command([*python, word, *words], page, is_whole=is_whole)
            return


def _check_pytest(words: list[str]) -> None:
    known = re.findall(r'^    "(\w+): ', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for before, word in zip(["", *words], words, strict=False):
        if before == "-m":
            _require(word in known, f"there is no mark {word}")
        elif not word.startswith("-") and before != "-k":
            _require((ROOT / word).exists(), f"there is no {word}")


def _check_module(name: str, words: list[str]) -> None:
    """Check that a module of the project or a script of a page exists, and that its source names the flags and keys."""
    path = ROOT / name if name.endswith((".py", ".sh")) else ROOT / name.replace(".", "/")
    files = [
        file for file in (path, path.with_suffix(".py"), path / "__main__.py") if file.is_file()
    ]
    is_of_page = any(f"# {name}\n" in page for page in PAGES.values())
    _require(bool(files) or is_of_page, f"there is no {name}")
    recipe = next((index for index, word in enumerate(words) if word in ("dlrm", "dcnv2")), None)
    if recipe is not None and any("=" in word for word in words[recipe + 1 :]):
        check_arguments(f"{words[recipe]}.py", words[recipe + 1 :])
        words = words[:recipe]
    if is_of_page or not files:
        return
    source = "".join(file.read_text() for file in files[0].parent.glob("*.py"))
    for imported in re.findall(r"from (benchmarks[\w.]*) import", files[0].read_text()):
        file = ROOT / f"{imported.replace('.', '/')}.py"
        source += file.read_text() if file.is_file() else ""
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            _require(f'"{name}"' in source, f"there is no flag {name}")
        elif name.startswith("preproc."):
            check_options([f"{name.removeprefix('preproc.')}={value}"], ["preproc"], is_whole=False)
        elif equals and re.fullmatch(r"\w+", name):
            known = re.search(rf'"{name}"|\b{name}: ', source) or name in _keys(PREPROC)
            _require(bool(known), f"there is no option {name}")


def check_arguments(
    program: str, words: Sequence[str], page: str = "", *, is_whole: bool = True
) -> None:
    """Check flags and options of one of `COMMANDS`."""
    words = [word for word in words if word not in (OWN_WORDS, "OPTIONS")]
    if program == "compare":
        words = [word for word in words if "=" in word]  # the others are run directories
    if "--help" in words or not words:
        words, is_whole = [word for word in words if "=" in word], False
    if program == "sweep" and any("=" in word for word in words):
        own = [word for word in words if word.partition("=")[0] in _keys(COMMANDS[program])]
        _check_sweep(
            dict(word.split("=", 1) for word in own), [word for word in words if word not in own]
        )
        words = own
    if any(word.startswith("config=") for word in words):
        words = [*words, "data.path=of/the/run"]
    table = None
    if words[:1] == ["--config-dir"]:
        (name,) = (word.partition("=")[2] for word in words if word.startswith("dataset="))
        path = ROOT / words[1] / f"dataset/{name}.yaml"
        written = [path.read_text()] if path.is_file() else tables_in(page)
        _require(bool(written), f"there is no {words[1]}/dataset/{name}.yaml")
        table = written[0]
        words = [word for word in words[2:] if not word.startswith("dataset=")]
    check_options(words, [program], is_whole=is_whole, table=table)


def tables_in(page: str) -> list[str]:
    """Return the descriptions of tables that a page has the reader write."""
    return [text for _, text in blocks_of(page) if text.startswith("# @package _global_")]


def _check_sweep(named: dict[str, str], trials: list[str]) -> None:
    recipe, space = named["recipe"], named["space"]
    is_experiment = (ROOT / f"configs/experiment/{recipe}.yaml").is_file()
    check_arguments("dlrm.py", [*trials, *([f"experiment={recipe}"] if is_experiment else [])])
    is_there = (ROOT / f"configs/sweep_spaces/{space}.yaml").is_file()
    _require(space.endswith(".yaml") or is_there, f"there is no space {space}")


def check_space(text: str) -> None:
    """Check the options of the space of a sweep, with their choices or the ends of their ranges."""
    for key, values in yaml.safe_load(text).items():
        ends = [values["low"], values["high"]] if isinstance(values, dict) else values
        for value in ends:
            _check_value(COMMANDS["dlrm.py"], key, str(value).replace(" ", ""))


def check_options(
    words: Sequence[str], programs: Sequence[str], *, is_whole: bool, table: str | None = None
) -> None:
    """Check options against one of some commands, with what a page leaves out unless `is_whole`.

    Raises:
        ValueError: that of the first attempt.
    """
    _check_once(tuple(map(_with_stand_ins, words)), tuple(programs), is_whole, table)


@cache
def _check_once(
    words: tuple[str, ...], programs: tuple[str, ...], is_whole: bool, table: str | None
) -> None:
    problems = []
    for program in programs:
        for around in [[]] if is_whole else AROUND.get(program, AROUND["dlrm.py"]):
            try:
                return _check(COMMANDS[program], [*around, *words], table)
            except ValueError as error:
                problems.append(str(error))
    raise ValueError(problems[0] if problems else f"no command has {' '.join(words)}")


def _check(command: Command, words: list[str], table: str | None) -> None:
    choices = Choices(command.schema, command.groups, tuple(_keys(command)))
    key_only = [word for word in words if OWN_WORDS in word.partition("=")[2] or word.endswith("=")]
    for word in key_only:
        key = word.partition("=")[0].lstrip("+'")
        _require(key in _keys(command), f"there is no option {key}")
    words = [word for word in words if word not in key_only]
    _, arguments = help_words(words, choices)
    sweeps = "--multirun" in arguments
    overrides = [word for word in hydra_arguments(arguments, choices) if not word.startswith("-")]
    for one in _each(overrides) if sweeps else [overrides]:
        composed = _composed(command, tuple(one), table)
        if command.schema is Config:
            drop_replaced(composed, one, Config)
            if ":" not in str(composed.model.name):  # A model of the reader has options of its own.
                typed_config(composed, written_options(one))
        else:
            to_config(composed)


def _each(overrides: list[str]) -> Iterator[list[str]]:
    """Yield the overrides with each value of those that have several."""
    parsed = [OverridesParser.create().parse_override(text) for text in overrides]
    values = [
        [f"{one.key_or_group}={value}" for value in one.sweep_string_iterator()]
        if one.is_sweep_override()
        else [text]
        for one, text in zip(parsed, overrides, strict=True)
    ]
    for index in range(max(map(len, values))):
        yield [of[min(index, len(of) - 1)] for of in values]


def _composed(command: Command, overrides: tuple[str, ...], table: str | None) -> DictConfig:
    """Return composed options; files are read once per choice of them."""
    try:
        parsed = [OverridesParser.create().parse_override(text) for text in overrides]
        files = tuple(o.input_line for o in parsed if o.key_or_group in command.groups)
        composed = deepcopy(_composed_files(command, files))
        if table is not None:
            composed.merge_with(OmegaConf.create(table))
        for override in parsed:
            if override.key_or_group not in command.groups:
                merge = command.schema is not Config
                OmegaConf.update(
                    composed, override.key_or_group, override.value(), merge=merge, force_add=True
                )
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{' '.join(overrides)}: {error}") from None
    return composed


@cache
def _composed_files(command: Command, choices: tuple[str, ...]) -> DictConfig:
    register(command.schema, command.schema_name)
    with uncopied_schemas(), hydra.initialize_config_module("configs", version_base="1.3"):
        return hydra.compose(command.config_name, list(choices))


@cache
def _keys(command: Command) -> frozenset[str]:
    keys = {key for key, _ in describe(command.schema)} | set(command.groups)
    if command.schema is Config:
        for options in OPTIONS.values():
            keys |= {key for key, _ in describe(Config, sections={"model": options})}
    return frozenset(keys)


@cache
def _packages(flag: str) -> frozenset[str]:
    """Return the names that a flag of `uv run` may have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    return frozenset(extras if flag == "--extra" else project["dependency-groups"])


def _with_stand_ins(word: str) -> str:
    """Replace the words of a page's own in an option's value, and take the first of alternatives `a|b`."""
    key, equals, value = word.partition("=")
    value = re.sub(
        r"(?<![\w.])[A-Za-z0-9_]+(?![\w])", lambda found: STAND_INS.get(found[0], found[0]), value
    )
    return f"{key}{equals}{value}"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


FILES = (
    "py",
    "json",
    "yaml",
    "jsonl",
    "bin",
    "parquet",
    "png",
    "csv",
    "txt",
    "log",
    "tsv",
    "pt2",
    "safetensors",
)
NO_OPTIONS = {
    "key=value": "the form of an option",
    "model.items": "an option of the model that the page adds",
    "dtype=str": "an argument of pandas",
    'lengths={"history": [1, 2]}': "an argument of a split's append",
    "run_dir=runs/dlrm/job_JOB": "the default under SLURM",
}
"""Spans that look like options and are none, and why."""


def check_span(span: str) -> None:
    """Check a code span, if it names options: there is a command that has all of them, with these values."""
    try:
        # A mapping has blanks, and prose leaves its quotes out.
        is_mapping = re.fullmatch(r"[a-z_][\w.]*=\{.*\}", span)
        words = [span] if is_mapping else shlex.split(span)
    except ValueError:
        return
    if span in NO_OPTIONS:
        return
    section, _, name = span.partition(".")
    is_section = section in {
        key.partition(".")[0] for key in _keys(COMMANDS["dlrm.py"]) if "." in key
    }
    if is_section and re.fullmatch(r"[a-z_0-9.]*[a-z_0-9]", name) and not name.endswith(FILES):
        known = any(f"{key}.".startswith(f"{span}.") for key in _keys(COMMANDS["dlrm.py"]))
        _require(known, f"there is no option {span}")
    is_option = [re.match(r"\+?[a-z_][\w.]*=", word) is not None for word in words]
    is_python = re.search(r'="|=True|=False|=\[?\w+\(', span)
    if not words or not all(is_option) or is_python:
        return
    problems = []
    for command in dict.fromkeys(COMMANDS.values()):
        try:
            for word in map(_with_section, words):
                for one in _alternatives(_with_stand_ins(word)):
                    _check_value(command, *one.removeprefix("preproc.").lstrip("+").split("=", 1))
        except ValueError as error:
            problems.append(str(error))
        else:
            return
    raise ValueError("; ".join(dict.fromkeys(problems)))


def _check_value(command: Command, key: str, text: str) -> None:
    """Check a value by the section of its option, with what it needs beside it."""
    if key in command.groups:
        return _require(
            (ROOT / f"configs/{key}/{text}.yaml").is_file(), f"there is no {key}={text}"
        )
    if OWN_WORDS in text or not text:
        return _require(key in _keys(command), f"there is no option {key}")
    *_, name = key.split(".")
    try:
        value = OverridesParser.create().parse_override(f"{name}={text}").value()
    except HydraException:
        value = text
    problem = f"there is no option {key}"
    for schema in _sections(command, key.split(".")[:-1]):
        if schema is Any:
            return None
        if name not in {item.name for item in fields(schema)}:
            continue
        try:
            node = OmegaConf.structured(_alone(schema, name) if _has_sections(schema) else schema)
            for other, needed in NEEDED.get(name, {}).items():
                if other in node and value is not None:
                    OmegaConf.update(node, other, needed)
            OmegaConf.update(node, name, value, merge=False)
            OmegaConf.to_object(node)
        except (ValueError, OmegaConfBaseException) as error:
            problem = f"{key}: {error}"
        else:
            return None
    raise ValueError(problem)


NEEDED: dict[str, dict[str, Any]] = {
    "fp8": {"amp": "bf16"},
    "embedding_dim": {"bottom_mlp": [128]},
    "weight_decay": {"name": "adam"},
    "hotness": {"cardinalities": [9, 9]},
    "ftrl_beta": {"embedding_name": "ftrl"},
    "ftrl_l2": {"embedding_name": "ftrl"},
    "decay_start_step": {"decay_steps": 1},
    "decay_steps": {"decay_start_step": 1},
}
"""What the check of an option's section wants beside it."""


def _sections(command: Command, names: list[str]) -> list[Any]:
    """Return the classes that the section of these names may have; `Any` of one whose keys are the user's."""
    if command.schema is Config and names[:1] == ["model"]:
        classes: list[Any] = list(OPTIONS.values())
        names = names[1:]
    else:
        classes = [command.schema]
    for name in names:
        hints = [get_type_hints(schema).get(name) for schema in classes if schema is not Any]
        if Any in hints:
            return [Any]
        classes = [hint for hint in hints if is_dataclass(hint)]
    return classes


def _has_sections(schema: type) -> bool:
    """Return whether a class cannot be built alone, since others have to fill it."""
    return any(is_dataclass(hint) for hint in get_type_hints(schema).values()) or schema in (
        *(command.schema for command in COMMANDS.values()),
    )


@cache
def _alone(schema: type, name: str) -> type:
    """Return a class of one option: the checks of a whole command want others too."""
    (declared,) = (item for item in fields(schema) if item.name == name)
    hint = get_type_hints(schema)[name]
    default = (
        field(default_factory=declared.default_factory)
        if declared.default is MISSING
        else declared.default
    )
    return make_dataclass("Alone", [(name, hint, default)])


def _alternatives(word: str) -> list[str]:
    """Return `a=x` and `a=y` of `a=x|y`."""
    key, equals, value = word.partition("=")
    return [f"{key}{equals}{each}" for each in value.split("|")]


def _with_section(word: str) -> str:
    """Write an option that a page names without its section, such as `embedding_l2=0.01`, with it."""
    key, _, value = word.partition("=")
    if any(key in _keys(command) for command in COMMANDS.values()) or "." in key:
        return word
    if key in get_type_hints(TaskConfig):
        return f"tasks={{label: {{{key}: {value}}}}}"
    full = [known for known in sorted(_keys(COMMANDS["dlrm.py"])) if known.endswith(f".{key}")]
    return f"{full[0]}={value}" if full else word
