"""What divides the rows of a table: `table.split`, or one of the options `split` and `test_source`."""

from dataclasses import replace
from typing import Any

from configs.messages import shown
from configs.preproc_schema import Layout, PreprocConfig
from configs.schema import require
from configs.table_schema import Source, SplitRule, TableConfig
from preproc.fitted_state import SOURCE, with_place
from preproc.raw_files import RawFile, refuse_shared
from preproc.table.source_files import find_source

Sources = dict[str, tuple[Source, list[RawFile]]]


def find_sources(config: PreprocConfig, table: TableConfig) -> tuple[TableConfig, Sources]:
    """Return the description with the rule that divides its rows, and its sources; files of `test_source` follow the others.

    Raises:
        ValueError: a file is missing or of another format; several options or keys divide the rows; it is not clear which
            source has the files of `test_source`.
    """
    sources = {name: find_source(name, source) for name, source in table.sources.items()}
    if config.one_split is not None:
        return table, sources
    table = replace(table, split=_rule(config, table))
    if config.test_source is None:
        return table, sources
    name, patterns = _test_files(config, table)
    source, files = sources[name]
    _, tests = find_source(name, replace(source, files=patterns), "test_source")
    refuse_shared(files, tests)
    sources[name] = (source, files + tests)
    return replace(table, split=SplitRule.of_test_files(len(files))), sources


def _rule(config: PreprocConfig, table: TableConfig) -> SplitRule:
    """Return the rule of `table.split`, or of the option `split`; ValueError unless one of all divides the rows."""
    by = config.split.name if config.split is not None else None
    if config.layout is Layout.criteo and config.test_source is not None:
        by = None  # the split that dataset=criteo_1tb sets
    given = {
        "test_source": config.test_source and shown(config.test_source),
        "split": by,
        "table.split": f"{{by: {table.split.by}}}"
        if table.split != SplitRule() and table.split.by != by
        else None,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if len(given) > 1:
        *_, last = given
        each = " and ".join(f"{key}={value}" for key, value in given.items())
        raise ValueError(
            f"{each} each divide the rows; keep one, and unset the other as by {last}=null"
        )
    return SplitRule(by=by) if by is not None and table.split == SplitRule() else table.split


def _test_files(config: PreprocConfig, table: TableConfig) -> tuple[str, list[str]]:
    """Return the name of the source that has the files of `test_source`, and these as it names those of `source`."""
    tests = config.test_source if isinstance(config.test_source, list) else [config.test_source]
    found = {
        name: _in_place(source.files, config.source, tests)
        for name, source in table.sources.items()
    }
    having = [name for name, files in found.items() if files]
    if len(table.sources) == 1:
        (name,) = table.sources
        return name, found[name] or tests
    require(
        len(having) == 1,
        f"test_source={shown(config.test_source)} wants one source whose files are those of the option source, got "
        f"{', '.join(map(shown, having)) or 'none'}; name the files of the others in table.sources, or divide by table.split",
    )
    return having[0], found[having[0]]


def _in_place(files: Any, source: Any, tests: list[str]) -> list[str]:
    """Return `tests` where the files of a source are, or begin with, the option `source`; other files are no tests."""
    found = []
    for part in files if isinstance(files, list) and files != source else [files]:
        placed = with_place(part, source)
        if isinstance(placed, str) and placed.startswith(SOURCE):
            found += [test + placed[len(SOURCE) :] for test in tests]
    return found
