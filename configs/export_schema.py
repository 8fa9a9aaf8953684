"""Every option of `python -m nn.export`, in the style of `configs/schema.py`."""

from dataclasses import dataclass
from enum import Enum

from configs.schema import option, require


class ExportFormat(Enum):
    """File formats of exported tables."""

    npy = "npy"
    safetensors = "safetensors"
    tf2 = "tf2"


@dataclass(kw_only=True, slots=True)
class ExportConfig:
    """Export of a checkpoint's tables."""

    checkpoint: str | None = option(
        None, "checkpoint directory (step_N) to read (required)", path=True
    )
    output: str | None = option(
        None, "directory to write, which must not exist yet (required)", path=True
    )
    tables: list[str] = option([], "names of the tables, as in plan.json; empty means all")
    format: ExportFormat = option(
        ExportFormat.npy,
        "npy: one file of ids, one of weights and one per optimizer state; safetensors: one file per "
        "table; tf2: sparse/feature_<i>.npy, as NVIDIA's TF2 recipe loads them",
    )
    optimizer: bool = option(True, "write optimizer state too; tf2 has none")

    def __post_init__(self) -> None:
        for name, meaning in (
            ("checkpoint", "a run's checkpoints/step_N"),
            ("output", "a directory"),
        ):
            require(bool(getattr(self, name)), f"no {name}: set {name}=DIR, {meaning}")
        require(
            self.format is not ExportFormat.tf2 or not self.tables,
            "format=tf2 names tables by the position of their feature, so it needs all of them: leave tables out",
        )
