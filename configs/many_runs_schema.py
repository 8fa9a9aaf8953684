"""Every option of `python -m compare` and `python -m sweep`, in the style of `configs/schema.py`."""

from dataclasses import dataclass
from enum import StrEnum

from configs.options import Section, option, refuse, require


@dataclass(kw_only=True, slots=True)
class CompareConfig:
    runs: list[str] = option(
        ["runs"], "run directories, or folders of some; also written without runs=", path=True
    )
    metric: str | None = option(
        None, "metric to sort by and to draw, such as log_loss or auc.click; null: the runs' own"
    )
    csv: str | None = option(
        None, "CSV file to write: a row per run, with all options that differ", path=True
    )
    json: str | None = option(
        None, "JSON file to write: an object per run with all options and metrics", path=True
    )
    picture: str | None = option(None, "PNG to write: the curves of all runs", path=True)

    def __post_init__(self) -> None:
        require(bool(self.runs), "runs names no directory; name at least one")
        refuse(
            self.picture is not None and not self.picture.lower().endswith(".png"),
            f"picture={self.picture}: the picture is a PNG; want a name that ends with .png",
        )


Sampler = StrEnum("Sampler", "tpe random grid qmc gp")
Pruner = StrEnum("Pruner", "none reach median asha hyperband")


@dataclass(kw_only=True, slots=True)
class SweepConfig(Section):
    recipe: str = option(
        "dlrm",
        "what the trials train: dlrm or dcnv2 (as dlrm.py, dcnv2.py), an experiment such as deepfm_criteo, or a model such "
        "as deepfm or package.module:Class",
    )
    space: str | None = option(
        None,
        "yaml file of the options to choose and their values, or the name of one in configs/sweep_spaces",
        path=True,
        required="FILE, a yaml file such as {optimizer.lr: {low: 0.001, high: 0.01, log: true}}",
    )
    overrides: list[str] = option(
        [], "options of all trials; also written without overrides=, as arguments: data.path=DIR"
    )
    trials: int = option(20, "trials, counting pruned and failed ones", most=100_000, gt=0)
    parallel: int = option(
        1, "trials that run at once; with GPUs at most one per GPU", most=1024, gt=0
    )
    sampler: Sampler = option(
        Sampler.gp,
        "gp (Gaussian process); tpe; random; grid (all combinations of choices and steps); qmc (quasi-random)",
    )
    pruner: Pruner = option(
        Pruner.reach,
        "what ends a trial after an evaluation: reach (it would not reach the best one if it gained as much as any other); "
        "median (worse than the median of the others); asha; hyperband; none",
    )
    sampler_seed: int = option(0, "seed of the sampler; `seed` is that of the trials", ge=0)
    metric: str | None = option(
        None, "metric to choose by, such as log_loss; null: eval.best_metric of the trials"
    )
    restarts: int = option(
        2, "restarts of a killed trial, from its latest checkpoint", most=1000, ge=0
    )
    keep_checkpoints: bool = option(
        False, "keep the checkpoints of all trials; false keeps those of the best one"
    )
    output: str | None = option(
        None, "directory of the sweep, to resume there; null: sweeps/<recipe>-<space>", path=True
    )
