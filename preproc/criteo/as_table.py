"""Criteo logs as a table dataset: any engine writes the same dataset as `preproc/criteo/pipeline.py`."""

from configs.preproc_schema import PreprocConfig, Split
from configs.table_schema import Categorical, Label, Numerical, Source, SplitRule, TableConfig
from preproc.raw_files import find_files
from preproc.vocabulary_sql import CATEGORICAL, COLUMNS, LABEL, NUMERICAL


def criteo_table(config: PreprocConfig) -> TableConfig:
    """Return the description of the raw logs of `config` as a table."""
    files = [str(file.path) for file in find_files(config.source, "source")]
    split = SplitRule(by=config.split.name)
    if config.test_source:
        tests = [str(file.path) for file in find_files(config.test_source, "test_source")]
        split = SplitRule(
            by="column", expression=f"CASE WHEN file_ < {len(files)} THEN 'train' ELSE 'test' END"
        )
        files += tests
    assert config.split in (Split.fraction, Split.last_file)
    return TableConfig(
        sources={"logs": Source(files=files, format="tsv", header=False, columns=list(COLUMNS))},
        label=[Label(name=LABEL)],
        numerical=[
            Numerical(name=name, transforms=[{"log": 3}, {"fill": 0}]) for name in NUMERICAL
        ],
        categorical=[Categorical(name=name) for name in CATEGORICAL],
        split=split,
    )
