"""Choice of the reader of a dataset directory."""

from dataloading.dataset.binary import BinarySource
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.source import TimedSource


def open_dataset(spec: FeatureSpec) -> TimedSource:
    """Return the source of rows of `spec`. Raises ValueError: some splits are Parquet, and others are not."""
    in_parquet = [name for name, files in spec.splits.items() if files.parquet]
    if not in_parquet:
        return BinarySource(spec)
    if len(in_parquet) < len(spec.splits):
        raise ValueError(
            f"{spec.root}: {', '.join(in_parquet)} in Parquet and the other splits in split_binary; want one format"
        )
    # Imported here, since only Parquet needs pyarrow.
    from dataloading.dataset.parquet import ParquetSource

    return ParquetSource(spec)
