"""SQL that is not of one row, refused in a line however deep it is; `tests/serving/inference/test_raw_values.py` has the rest."""

import pytest

from dataloading.row_sql import columns_of, of_utc, reads_other_rows


@pytest.mark.parametrize("sql", ["+".join(["a"] * 3000), "(" * 5000 + "a" + ")" * 5000, "a \ud800"])
def test_deep_or_broken_sql_is_refused(sql):
    with pytest.raises(ValueError, match=r"no SQL of one expression|nested too deeply"):
        columns_of(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "(WITH q AS (SELECT a AS x) SELECT x FROM q)",
        "(WITH q AS MATERIALIZED (SELECT a AS x), r AS (SELECT x FROM Q) SELECT (SELECT x FROM r))",
        "(WITH RECURSIVE q AS (SELECT a AS x UNION ALL SELECT x + 1 FROM q WHERE x < 3) SELECT max(x) FROM q)",
    ],
)
def test_a_query_named_in_the_expression_is_no_table(sql):
    assert not reads_other_rows(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "(WITH q AS (SELECT x FROM q) SELECT x FROM q)",
        "(WITH r AS (SELECT x FROM q), q AS (SELECT 1 AS x) SELECT x FROM r)",
        "(WITH q AS (SELECT 1 AS x) SELECT x FROM q) + (SELECT max(x) FROM q)",
        "(WITH q AS (SELECT 1 AS x) SELECT x FROM main.q)",
        "(WITH q AS (SELECT * FROM read_text('/proc/version')) SELECT count(*) FROM q)",
        "(WITH q AS (SELECT count(*) OVER () AS x) SELECT x FROM q)",
    ],
)
def test_a_table_beside_a_query_of_its_name_is_one(sql):
    assert reads_other_rows(sql)


@pytest.mark.parametrize(
    ("sql", "wanted"),
    [
        ("CAST(Time AS timestamp) < CAST(day AS TIMESTAMP)", "Time < CAST(day AS TIMESTAMPTZ)"),
        ('cast( "time" AS DATETIME )', '"time"'),
        # A smaller unit; the field of a struct; a part of a query or a lambda, where the name may be another's.
        *(
            (sql, sql.replace("TIMESTAMP_S", "TIMESTAMP").replace("TIMESTAMP", "TIMESTAMPTZ"))
            for sql in (
                "CAST(time AS TIMESTAMP_S)",
                "CAST(of.time AS TIMESTAMP)",
                "(SELECT max(CAST(time AS TIMESTAMP)) FROM t)",
                "list_max(list_transform(days, lambda time: CAST(time AS TIMESTAMP)))",
            )
        ),
    ],
)
def test_a_time_without_a_zone_is_not_cast_to_one_with_a_zone(sql, wanted):
    assert of_utc(sql, {"time"}) == wanted
