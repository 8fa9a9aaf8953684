"""Output and split of `mode=predict`, checked before torch is imported."""

import os
from pathlib import Path

from configs.schema import SCORE_ENDINGS, Config
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.held_out_source import VALIDATION
from dataloading.storage.object_store import ObjectStore, is_remote, shown_address
from dataloading.storage.upload import path_before_upload

DEFAULT_SPLIT = "test"


def output_path(config: Config) -> Path:
    """Return the file to write; of an address, the one in the cache that is uploaded.

    Raises ValueError: it exists, or its directory does not or cannot be written, or the address cannot be read.
    """
    assert config.output is not None, "Config refuses mode=predict without an output"
    if is_remote(config.output):
        if ObjectStore(config.output).has(""):
            raise ValueError(
                f"output={shown_output(config)} exists; move or delete it, or set another output"
            )
        return path_before_upload(config.output)
    path = Path(config.output)
    if os.path.lexists(path):
        raise ValueError(f"output={path} exists; move or delete it, or set another output")
    if not path.parent.is_dir():
        raise ValueError(
            f"output={path}: there is no directory {path.parent}; make it, or set another output"
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"output={path}: {path.parent.resolve()} cannot be written by this user; set another output"
        )
    return path


def shown_output(config: Config) -> str:
    """Return the output as the command names it, an address without credentials."""
    assert config.output is not None
    return shown_address(config.output) if is_remote(config.output) else config.output


def is_csv(path: Path) -> bool:
    assert path.name.endswith(SCORE_ENDINGS)
    return path.name.endswith(".csv")


def is_held_out(config: Config) -> bool:
    """Return whether the rows to score are those that `data.validation_fraction` has held out from training."""
    return config.data.validation_fraction is not None and config.predict.split == VALIDATION


def split_to_score(config: Config, spec: FeatureSpec) -> str:
    """Return the split whose rows are scored: `predict.split`, else `test`, or the only split of a dataset.

    Raises ValueError: there is no such split, or several and none called `test`.
    """
    named = config.predict.split
    if is_held_out(config):
        return VALIDATION
    if named is None and len(spec.splits) == 1:
        named = next(iter(spec.splits))
    if named is None and DEFAULT_SPLIT not in spec.splits and spec.splits:
        raise ValueError(
            f"{spec.root}: there is no split '{DEFAULT_SPLIT}'; choose with predict.split, one of {', '.join(spec.splits)}"
        )
    split = named or DEFAULT_SPLIT
    spec.rows_of(split)
    return split
