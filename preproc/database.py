"""Connections to DuckDB; no other module opens one, so that no result depends on the machine's time zone."""

import duckdb

Settings = dict[str, str | bool | int | float | list[str]]


def connected(settings: Settings, path: str = ":memory:") -> duckdb.DuckDBPyConnection:
    """Return a connection whose queries, and those of its cursors, compute in UTC.

    DuckDB takes the zone of the machine: the hour of a TIMESTAMP WITH TIME ZONE would depend on the variable TZ.
    """
    connection = duckdb.connect(path, config=settings)
    # Not one of the settings: `connect` reads these before the extension is there that knows time zones.
    connection.execute("SET GLOBAL TimeZone = 'UTC'")
    return connection


def small_database() -> duckdb.DuckDBPyConnection:
    """Return a connection with one thread and 512 MB."""
    return connected({"threads": 1, "memory_limit": "512MB"})
