"""Every option of `python -m nn.export` and `python -m nn.replay`, in the style of `configs/schema.py`."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from configs.options import Section, option
from configs.schema import Component

ExportFormat = StrEnum("ExportFormat", "npy safetensors tf2")


@dataclass(kw_only=True, slots=True)
class ExportConfig(Section):
    """Export of a checkpoint's tables and of its dense component."""

    checkpoint: str | None = option(
        None, "step_N to read", path=True, required="DIR, a run's checkpoints/step_N"
    )
    output: str | None = option(
        None, "directory to write, which must not exist yet", path=True, required="DIR, a directory"
    )
    tables: list[str] = option([], "names of the tables, as in plan.json; empty means all")
    format: ExportFormat = option(
        ExportFormat.npy,
        "npy: one file of ids, one of weights and one per optimizer state; safetensors: one file per "
        "table; tf2: sparse/feature_<i>.npy, as NVIDIA's TF2 recipe loads them",
    )
    parts: list[Component] = option(
        [Component.tables],
        "what to write: tables, dense or both; dense.safetensors and dense_optimizer.safetensors hold the dense component",
    )
    optimizer: bool = option(True, "write optimizer state too; tf2 has none")
    fitted: str | None = option(
        None,
        "dataset that the model was trained on, whose vocabularies give the raw value of every row: <table>.value.parquet",
        path=True,
    )

    def check_relations(self) -> Iterator[str]:
        if not self.parts:
            yield "parts=[] writes nothing; name tables, dense or both"
        is_tf2 = self.format is ExportFormat.tf2
        if is_tf2 and self.parts != [Component.tables]:
            yield (
                "format=tf2 writes tables only, since the dense component of that recipe is a TensorFlow checkpoint; leave "
                "parts out"
            )
        if (self.tables or self.fitted) and Component.tables not in self.parts:
            yield "tables and fitted are of tables, and parts leaves them out; name tables in parts"
        if is_tf2 and self.tables:
            yield "format=tf2 names tables by the position of their feature, so it needs all of them: leave tables out"


@dataclass(kw_only=True, slots=True)
class ReplayConfig(Section):
    """Export of a checkpoint that deltas lead to."""

    base: str | None = option(
        None,
        "checkpoint (step_N) of a run with checkpoint.delta_every, or an export of one, npy or safetensors",
        path=True,
        required="DIR, a checkpoint or an export of one",
    )
    deltas: list[str] = option(
        [],
        "deltas (deltas/step_N) in order, or a run's deltas/ for all after the base",
        path=True,
        required="[DIR,...], a run's deltas/ or some of its deltas/step_N",
    )
    output: str | None = option(
        None, "directory to write, which must not exist yet", path=True, required="DIR, a directory"
    )
    format: ExportFormat = option(ExportFormat.npy, "npy, safetensors or tf2, as in nn.export")
