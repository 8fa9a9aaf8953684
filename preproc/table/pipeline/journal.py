"""The journal of a run: its phases are functions over it, and each relation that they write is recorded once."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from configs.preproc_schema import Mode, PreprocConfig
from configs.table_schema import TableConfig
from preproc.fitted_state import FittedState
from preproc.report.console import Progress
from preproc.table.duckdb_engine import Engine
from preproc.table.source_files import Sources
from preproc.work_directory import Work


@dataclass(slots=True)
class Journal:
    """Inputs of a run, and the relations that it has written; a killed run resumes after the last recorded one.

    A thread syncs and records relations, in the order in which they were written, while the next ones are computed.
    """

    config: PreprocConfig
    table: TableConfig
    engine: Engine
    work: Work
    progress: Progress
    sources: Sources
    fitted: FittedState | None  # an earlier fit that is applied or extended
    _recorder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _records: list[Future[None]] = field(default_factory=list)

    def once(self, name: str, write: Callable[[Path], object]) -> None:
        """Write relation `name` unless it is recorded, then make it visible to queries; it is named like its directory."""
        path = self.work.directory / name
        if name not in self.work.state.get("relations", []):
            write(path)
            self._records.append(self._recorder.submit(self._record, name, path))
            self._raise_failed()
        self.engine.view(name, path)

    def _record(self, name: str, path: Path) -> None:
        self._raise_failed()
        state = self.work.state
        # Only staged rows have files of these names.
        records = self.work.synced_records(path, self.engine.staged)
        state["checked"] |= records
        state.setdefault("relations", []).append(name)
        self.work.save()

    def close(self) -> None:
        """Wait until all relations are recorded; OSError: one cannot be synced."""
        self._recorder.shutdown()
        self._raise_failed()

    def _raise_failed(self) -> None:
        for record in self._records:
            if record.done():
                record.result()

    def query(self, name: str, query: str) -> None:
        """Write relation `name` with the rows of a query, once."""
        self.once(name, lambda path: self.engine.write(query, path))

    def number(self, name: str, query: str, order_by: list[str]) -> None:
        """Write relation `name` with the rows of a query, numbered in this order, once."""
        self.once(name, lambda path: self.engine.number(query, order_by, path))

    def refuse(self, error: ValueError) -> NoReturn:
        """Raise an error of the sources, with which no run can resume."""
        self._recorder.shutdown()
        self.work.forget()
        raise error

    @property
    def extended(self) -> FittedState | None:
        """The fit of the day before, with `mode=extend`."""
        return self.fitted if self.config.mode is Mode.extend else None
