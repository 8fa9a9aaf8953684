"""The journal of a run: its phases are functions over it, and each relation that they write is recorded once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from configs.preproc_schema import Mode, PreprocConfig
from configs.table_schema import TableConfig
from dataloading.lineage import Lineage
from preproc.fitted_state import FittedState
from preproc.report.console import Progress
from preproc.table.duckdb_engine import Engine
from preproc.table.source_files import Sources
from preproc.work_directory import Work


@dataclass(slots=True)
class Journal:
    """Inputs of a run, and the relations that it has written; a killed run resumes after the last recorded one."""

    config: PreprocConfig
    table: TableConfig
    engine: Engine
    work: Work
    progress: Progress
    sources: Sources
    fitted: FittedState | None  # an earlier fit that is applied or extended
    recording: Lock = field(default_factory=Lock)

    def once(self, name: str, write: Callable[[Path], object]) -> None:
        """Write relation `name` unless it is recorded, then make it visible to queries; it is named like its directory."""
        done = self.work.state.setdefault("relations", [])
        path = self.work.directory / name
        if name not in done:
            write(path)
            records = self.work.synced_records(path)
            with self.recording:
                self.work.state["checked"] |= records
                done.append(name)
                self.work.save()
        self.engine.view(name, path)

    def query(self, name: str, query: str) -> None:
        """Write relation `name` with the rows of a query, once."""
        self.once(name, lambda path: self.engine.write(query, path))

    @property
    def held(self) -> TableConfig:
        """The description without the labels, the weight and the keep rate that new rows lack, once they are staged."""
        return self.table.without(self.work.state["absent"])

    @property
    def absent(self) -> frozenset[str]:
        """Names of the labels, the weight and the keep rate that new rows lack."""
        held = self.held.row_numbers
        every = self.table.row_numbers
        return frozenset(number.name for name, (_, number) in every.items() if name not in held)

    @property
    def lineage(self) -> Lineage:
        """The day of the dataset, and the fit that it extends."""
        if self.config.mode is not Mode.extend:
            return Lineage()
        assert self.fitted is not None
        before = self.fitted.lineage
        return Lineage(before.day + 1, None, before.identity)
