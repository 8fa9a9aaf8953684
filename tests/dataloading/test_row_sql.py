"""SQL that is not of one row, refused in a line however deep it is; `tests/serving/inference/test_raw_values.py` has the rest."""

import pytest

from dataloading.row_sql import columns_of


@pytest.mark.parametrize("sql", ["+".join(["a"] * 3000), "(" * 5000 + "a" + ")" * 5000, "a \ud800"])
def test_deep_or_broken_sql_is_refused(sql):
    with pytest.raises(ValueError, match=r"no SQL of one expression|nested too deeply"):
        columns_of(sql)
