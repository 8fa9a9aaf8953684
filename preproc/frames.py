"""Tables in memory, as of a notebook: described, and made into a dataset, with the checks of the command."""

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
from omegaconf import open_dict

from configs.command_line import compose_overrides
from configs.overrides import to_config
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
    named = [] if label is None else [f"label={label}"]
    with table_file(_checked(table)) as path:
        config = to_config(_composed("mode=describe", f"source={path}", *named))
        return describe_source(path, config)


def preprocess(table: Any, options: dict[str, Any], output: Path | str, *overrides: str) -> None:
    """Write the dataset of a pandas DataFrame or an Arrow table.

    `options`: `description.options`, or the content of a yaml like them. `overrides`: options of `python -m preproc` as
    `key=value`, which win, but for those that the other arguments give. Raises ValueError: an invalid option, or a bad row.
    """
    for override in overrides:
        name = re.split(r"[.={]", str(override).lstrip("+~"))[0]
        if name in ("source", "output", "table"):
            raise ValueError(f"{override}: {name} is another argument of preprocess; change that")
    written = [f"{key}={value}" for key, value in options.items() if key not in ("layout", "table")]
    with table_file(_checked(table)) as path:
        config = _composed(
            "dataset=any", f"source={path}", f"output={output}", *written, *overrides
        )
        with open_dict(config):
            config.table = options["table"]
        execute(to_config(config))


def _composed(*overrides: str) -> Any:
    return compose_overrides(PreprocConfig, "preproc_schema", "preproc", overrides, ("dataset",))


def _checked(table: Any) -> pa.Table:
    rows, _ = arrow_table(table)
    if not rows.num_rows or not rows.num_columns:
        raise ValueError(f"the table has shape {list(rows.shape)}; want rows and columns")
    return rows
