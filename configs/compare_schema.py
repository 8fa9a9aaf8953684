"""Every option of `python -m compare`, in the style of `configs/schema.py`."""

from dataclasses import dataclass

from configs.schema import option, require


@dataclass(kw_only=True, slots=True)
class CompareConfig:
    """Comparison of runs."""

    runs: list[str] = option(
        ["runs"],
        "run directories, or folders with run directories at any depth; also written without runs=, as arguments",
        path=True,
    )
    metric: str | None = option(
        None, "metric to sort by and to draw, such as log_loss or auc.click; null: the runs' own"
    )
    csv: str | None = option(
        None, "CSV file to write: a row per run, with all options that differ", path=True
    )
    json: str | None = option(
        None,
        "JSON file to write: an object per run, with all of its options and metrics",
        path=True,
    )
    picture: str | None = option(None, "PNG to write: the curves of all runs", path=True)

    def __post_init__(self) -> None:
        require(bool(self.runs), "runs names no directory; name at least one")
