"""Criteo logs as a table dataset: any engine writes the same dataset as `preproc/criteo/pipeline.py`."""

from configs.preproc_schema import Mode, PreprocConfig
from configs.table_schema import Categorical, Label, Numerical, Source, TableConfig
from preproc.line_blocks import blocks
from preproc.raw_files import RawFile, find_files
from preproc.vocabulary_sql import CATEGORICAL, COLUMNS, LABEL, NUMERICAL


def criteo_table(config: PreprocConfig) -> TableConfig:
    """Return the description of the raw logs of `config` as a table; new rows may lack the label, the first column."""
    found = find_files(config.source, "source")
    columns = columns_of(found[0]) if config.mode is Mode.transform else list(COLUMNS)
    files = [str(file.path) for file in found]
    return TableConfig(
        sources={"logs": Source(files=files, format="tsv", header=False, columns=columns)},
        label=[Label(name=LABEL)],
        numerical=[
            Numerical(name=name, transforms=[{"log": 3}, {"fill": 0}]) for name in NUMERICAL
        ],
        categorical=[Categorical(name=name) for name in CATEGORICAL],
    )


def columns_of(file: RawFile) -> list[str]:
    """Return the columns of a file of new rows by its first line; the label, the first of them, may be missing."""
    num_columns = next(blocks(file, 0), b"").partition(b"\n")[0].count(b"\t") + 1
    return list(COLUMNS[1:] if num_columns == len(COLUMNS) - 1 else COLUMNS)
