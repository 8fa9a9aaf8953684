"""Statistics and vocabularies fitted on training rows, stored beside a dataset for `mode=transform` to apply again.

`preproc.json` holds the statistics and the description of their features. The folder `vocabulary/` holds the
vocabularies.
"""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.preproc_schema import PreprocConfig
from configs.table_schema import TableConfig
from dataloading.dataset.feature_spec import SPEC_NAME

FITTED = "preproc.json"


def features_of(table: TableConfig) -> dict[str, Any]:
    """Return the description of the features that a fitted state belongs to, as plain JSON."""
    whole = asdict(table)
    return json.loads(json.dumps({key: whole[key] for key in ("numerical", "categorical")}))


def save_fitted(directory: Path, table: TableConfig, statistics: dict[str, Any]) -> None:
    """Write preproc.json below `directory`."""
    saved = {"features": features_of(table), "statistics": statistics}
    (directory / FITTED).write_text(json.dumps(saved, indent=1) + "\n")


def load_fitted(config: PreprocConfig, table: TableConfig) -> dict[str, Any]:
    """Return `statistics` of an earlier run and its `directory`.

    Raises:
        ValueError: `fitted` holds no fitted state, or one of other features.
    """
    directory = Path(config.fitted or "")
    path = directory / FITTED
    if not config.fitted or not path.exists() or not (directory / SPEC_NAME).exists():
        raise ValueError(
            f"fitted={config.fitted}: no dataset with a {FITTED} there; set it to the output of a "
            "run with mode=fit"
        )
    saved = json.loads(path.read_text())
    if saved["features"] != features_of(table):
        raise ValueError(
            f"{path}: fitted on other features or transforms; use the configuration of that run"
        )
    return saved | {"directory": directory}


def copy_vocabulary(directory: Path, name: str, path: Path) -> None:
    """Copy the fitted vocabulary of feature `name` to the relation directory `path`."""
    path.mkdir(exist_ok=True)
    shutil.copyfile(directory / "vocabulary" / f"{name}.parquet", path / "0.parquet")
