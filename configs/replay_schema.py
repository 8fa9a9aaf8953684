"""Every option of `python -m nn.replay`, in the style of `configs/schema.py`."""

from dataclasses import dataclass

from configs.export_schema import ExportFormat
from configs.schema import option, require


@dataclass(kw_only=True, slots=True)
class ReplayConfig:
    """Export of a checkpoint that deltas lead to."""

    base: str | None = option(
        None,
        "checkpoint (step_N) of a run with checkpoint.delta_every, or an export of one, npy or safetensors (required)",
        path=True,
    )
    deltas: list[str] = option(
        [],
        "deltas (deltas/step_N) in order, or a run's deltas/ for all after the base (required)",
        path=True,
    )
    output: str | None = option(
        None, "directory to write, which must not exist yet (required)", path=True
    )
    format: ExportFormat = option(ExportFormat.npy, "npy, safetensors or tf2, as in nn.export")

    def __post_init__(self) -> None:
        require(bool(self.base), "no base: set base=DIR, a checkpoint or an export of one")
        require(
            bool(self.deltas),
            "no deltas: set deltas=[DIR,...], a run's deltas/ or some of its deltas/step_N",
        )
        require(bool(self.output), "no output: set output=DIR, a directory")
