"""Errors of rows that cannot be read or stored, with their place, the value and what to do."""

import math

import numpy as np

from configs.messages import printable, shortened, shown
from configs.table_schema import Numerical, TableConfig
from preproc.table.expressions import quoted

MISSING_WORDS = (
    *("na", "n/a", "#n/a", "nan", "null", "none", "nil", "missing", "unknown"),
    *("-", "--", "?", ".", "\\n"),
)
"""Texts that often mean a missing value; only a description can say so."""
# Smallest numbers that round to infinity; `as_float` has made those of float32 infinite.
SMALLEST_OVERFLOW = {"float16": 65520.0, "float32": math.inf}


def bad_row(
    where: str, reason: str, table: TableConfig, *, is_fit: bool, may_skip: bool = True
) -> ValueError:
    """Return the error of a bad row.

    `is_fit`: whether the rows are fitted, and so need labels. `may_skip`: whether such rows can be left out.
    """
    remedy = "correct or remove it" + ", or set on_bad=quarantine" * may_skip
    value = reason.rpartition(",")[0].rpartition(" is ")[2]
    if value.lower() in MISSING_WORDS:
        remedy += f"; if {value!r} means a missing value, set table.missing: ['{value}']"
    elif reason == "the label is missing" and not is_fit:
        remedy += "; rows to be scored need no label: drop its column from the source"
    elif reason.startswith("the label is ") and value and table.label[0].kind == "binary":
        name = printable(quoted(table.label[0].name))
        remedy += (
            "; or map values to 0 and 1 by table.label.expression, such as "
            f"CASE {name} WHEN 'yes' THEN 1 WHEN 'no' THEN 0 END"
        )
    return ValueError(f"{where}: {shortened(printable(reason), 300)}; {remedy}")


def overflow(where: str, feature: Numerical, raw: object, stored: float, dtype: str) -> ValueError:
    most = float(np.finfo(dtype).max)
    remedy = "add a transform (clip, log or standardise) to it"
    if dtype != "float32":
        remedy += ", or set numerical_dtype=float32"
    after = f", {stored:g} after its transforms" if feature.transforms else ""
    return ValueError(
        f"{where}: numerical feature {shown(feature.name)} is {shown(raw)}{after}, want at most {most:g}, the largest "
        f"{dtype}; correct the value, or {remedy}"
    )
