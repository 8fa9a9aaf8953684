"""`mode=describe`: write the description of a table, and say what to do next; the same for tables in memory."""

import re
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.messages import printable
from configs.options import require
from configs.preproc_schema import PreprocConfig
from dataloading.storage.object_store import is_remote
from preproc.describe.choices import choose, without_constant_indices
from preproc.describe.columns import count_columns
from preproc.describe.description import Description, describe_choices
from preproc.describe.formats import find_table

DIRECTORY = Path("mine/dataset")
"""Of the description, so that `--config-dir mine dataset=NAME` finds it."""
SMALL_ROWS = 100_000
"""Fewer rows train in smaller batches than the recipe's: of 256 rows, or of 32 at least where these would be few steps."""
FEWEST_STEPS = 16


def describe_source(source: Any, config: PreprocConfig, command: str = "") -> Description:
    """Return the description of the table in `source`; ValueError if it cannot be read."""
    source = source.rstrip("/") if isinstance(source, str) else source
    table = find_table(source)
    columns, table = without_constant_indices(count_columns(table.files, config), table)
    choices = choose(columns, table, config.label)
    return describe_choices(choices, table, source, command)


def run_describe(config: PreprocConfig, console: Console) -> None:
    """Write the yaml of `config.source`; ValueError if the source cannot be read, or the yaml exists already."""
    patterns = config.source if isinstance(config.source, list) else [config.source]
    stem = Path(patterns[0].rstrip("/*")).name.partition(".")[0]
    name = re.sub(r"\W+", "_", stem).strip("_") or "table"
    path = Path(config.output) if config.output is not None else DIRECTORY / f"{name}.yaml"
    require(
        path.suffix == ".yaml" and not is_remote(str(path)),
        f"output={path}: mode=describe writes a yaml file here; name it as {DIRECTORY}/{name}.yaml",
    )
    require(
        config.overwrite or not path.exists(),
        f"{path} exists already; set overwrite=true to replace it, or another output",
    )
    source = f"'{config.source}'" if set(str(config.source)) & set("*?[ ") else config.source
    found = path.resolve().parent
    directory = found.parent if found.name == "dataset" else found
    if directory.is_relative_to(Path.cwd()):
        directory = directory.relative_to(Path.cwd())
    group = "dataset=" if found.name == "dataset" else "--config-name="
    command = f"python -m preproc --config-dir {directory} {group}{path.stem} source={source} output=data/{name}"
    description = describe_source(config.source, config, f"Then: {printable(command)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(description.yaml, encoding="utf-8")
    description.print(console)
    rows = description.choices[0].column.rows
    batch = min(256, max(32, 2 ** ((rows // FEWEST_STEPS).bit_length() - 1)))
    small = f" train.batch_size={batch}" * (rows < SMALL_ROWS)
    console.print(f"wrote {path}: look at it, change it, and then", soft_wrap=True)
    console.print(f"  {command}", soft_wrap=True)
    console.print(f"  python dlrm.py data.path=data/{name}{small}", soft_wrap=True)
