"""Tables in memory, as of a notebook: described, and made into a dataset, with the checks of the command."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import open_dict

from configs.command_line import compose_overrides
from configs.messages import shortened
from configs.overrides import to_config
from configs.preproc_schema import PreprocConfig
from dataloading.arrow_table import arrow_table
from preproc.__main__ import execute
from preproc.describe.command import describe_source
from preproc.describe.description import Description


def describe(table: Any, *, label: str | None = None) -> Description:
    """Return the description of a pandas DataFrame or an Arrow table, which `mode=describe` would write.

    `print(description)` shows its yaml, and `description.options` holds it as plain values, to be changed and given to
    `preprocess`.

    Args:
        table: the rows.
        label: the column of the label; None: the likeliest one.

    Raises:
        ValueError: no such column, or a column of a type that Parquet lacks.
    """
    named = [] if label is None else [f"label={label}"]
    with _as_file(table) as path:
        config = _composed("mode=describe", f"source={path}", *named)
        try:
            return describe_source(path, to_config(config))
        except ValueError as error:
            raise ValueError(str(error).replace(path, "the table")) from None


def preprocess(table: Any, options: dict[str, Any], output: Path | str, *overrides: str) -> None:
    """Write the dataset of a pandas DataFrame or an Arrow table.

    Args:
        table: the rows.
        options: `description.options`, or the content of a yaml like them.
        output: dataset directory.
        overrides: options of `python -m preproc` as `key=value`, which win.

    Raises:
        ValueError: an invalid option, or a bad row.
    """
    with _as_file(table) as path:
        written = [
            f"{key}={value}" for key, value in options.items() if key not in ("layout", "table")
        ]
        config = _composed(
            "dataset=any", f"source={path}", f"output={output}", *written, *overrides
        )
        with open_dict(config):
            config.table = options["table"]
        try:
            execute(to_config(config))
        except ValueError as error:
            raise ValueError(str(error).replace(path, "the table")) from None


def _composed(*overrides: str) -> Any:
    return compose_overrides(PreprocConfig, "preproc_schema", "preproc", overrides, ("dataset",))


@contextmanager
def _as_file(table: Any) -> Iterator[str]:
    """Write a table as Parquet for a moment."""
    rows, _ = arrow_table(table)
    if not rows.num_rows or not rows.num_columns:
        raise ValueError(f"the table has shape {list(rows.shape)}; want rows and columns")
    with TemporaryDirectory(prefix="table-") as directory:
        path = str(Path(directory) / "table.parquet")
        try:
            pq.write_table(rows, path)
        except pa.ArrowException as error:
            reason = shortened(" ".join(str(error).split()))
            raise ValueError(f"the table: {reason}; convert its columns") from None
        yield path
