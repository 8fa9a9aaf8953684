"""Tables in memory, as of a notebook: described, and made into a dataset, with the checks of the command."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException

from configs.command_line import compose_overrides
from configs.messages import shown
from configs.overrides import one_line, to_config
from configs.preproc_schema import PreprocConfig
from dataloading.arrow_table import arrow_table
from preproc.__main__ import execute
from preproc.describe.command import describe_source
from preproc.describe.description import Description
from preproc.raw_tables import table_file


def describe(table: Any, *, label: str | None = None) -> Description:
    """Return the description of a pandas DataFrame or an Arrow table, which `mode=describe` would write.

    `print(description)` shows its yaml, and `description.options` holds it as plain values, to be changed and given to
    `preprocess`. `label`: the column of the label; None: the likeliest one. Raises ValueError: no such column, or a column
    of a type that Parquet lacks.
    """
    with table_file(_checked(table)) as path:
        composed = _composed({"source": path, "label": label}, "mode=describe")
        return describe_source(path, to_config(composed))


def preprocess(table: Any, options: dict[str, Any], output: Path | str, *overrides: str) -> None:
    """Write the dataset of a pandas DataFrame or an Arrow table.

    `options`: `description.options`, or the content of a yaml like them. `overrides`: options of `python -m preproc` as
    `key=value`, which win, but for those that the other arguments give. Raises ValueError: an invalid option, or a bad row.
    """
    for override in overrides:
        name = re.split(r"[.={]", str(override).lstrip("+~"))[0]
        if name in ("source", "output", "table"):
            raise ValueError(f"{override}: {name} is another argument of preprocess; change that")
    if options.get("layout", "table") != "table" or "table" not in options:
        raise ValueError(
            f"options: got {shown(options)}; want layout and table as describe() has them"
        )
    written = [f"{key}={value}" for key, value in options.items() if key not in ("layout", "table")]
    with table_file(_checked(table)) as path:
        given = {"source": path, "output": str(output), "table": options["table"]}
        execute(to_config(_composed(given, "dataset=any", *written, *overrides)))


def _composed(given: dict[str, Any], *overrides: str) -> Any:
    """Return the composed options with values of the caller as they are, which the grammar of overrides would read."""
    config = compose_overrides(PreprocConfig, "preproc_schema", "preproc", overrides, ("dataset",))
    try:
        with open_dict(config):
            config.update(given)
    except OmegaConfBaseException as error:
        raise ValueError(f"{one_line(error)}; want values of Python, not NumPy") from None
    return config


def _checked(table: Any) -> pa.Table:
    rows, _ = arrow_table(table)
    if not rows.num_rows or not rows.num_columns:
        raise ValueError(f"the table has shape {list(rows.shape)}; want rows and columns")
    return rows
