"""The output of `mode=predict`: complete or absent, with a directory beside it while it is written."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from logging import Logger
from pathlib import Path
from typing import Any

from dataloading.dataset.durable_files import exclusive, replace_file, sync_directory, sync_file
from dataloading.storage.object_store import ObjectStore, shown_address
from nn.scores.kept_scores import KeptScores
from nn.scores.named_rows import NamedRows
from nn.scores.score_file import open_score_file, score_schema
from nn.scores.score_writer import ScoreWriter


def work_directory(path: Path) -> Path:
    """Return the directory beside the output `path` that holds the scores so far."""
    return path.with_name(f".{path.name}.unfinished")


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The output while it is written, on rank 0.

    `address`: where the file is uploaded instead; None: it stays.
    """

    path: Path
    writer: ScoreWriter
    address: str | None = None

    def finish(self) -> int:
        """Complete the file, sync and rename it, and remove what was kept for another start; return its bytes.

        Raises ValueError: it cannot be uploaded; the scores are still kept for another start.
        """
        self.writer.finish()
        work = work_directory(self.path)
        if self.address is not None:
            num_bytes = (work / self.path.name).stat().st_size
            # A store shows a file when all of its bytes have arrived.
            ObjectStore(self.address).upload(work / self.path.name, "")
            shutil.rmtree(work, ignore_errors=True)
            return num_bytes
        sync_file(work / self.path.name)
        replace_file(work / self.path.name, self.path)
        sync_directory(self.path.parent)
        shutil.rmtree(work, ignore_errors=True)
        return self.path.stat().st_size


@contextmanager
def open_output(
    path: Path,
    named: NamedRows,
    tasks: Sequence[str],
    origin: Mapping[str, str],
    facts: dict[str, Any],
    logger: Logger,
    address: str | None = None,
) -> Iterator[ScoreOutput]:
    """Open the output at `path`, with the scores that an earlier start of the same command left; only rank 0 may call it.

    `facts`: model and data; scores of others are not used. `address`: of an object store, that the complete file is uploaded
    to instead; then `path` is in the cache. Raises ValueError: another process writes the output, or two columns have one
    name. Raises OSError: the files cannot be written.
    """
    schema = score_schema(named.fields, tasks, origin, path)
    with exclusive(
        path, f"is writing output={path if address is None else shown_address(address)}"
    ):
        work = work_directory(path)
        work.mkdir(exist_ok=True)
        kept = KeptScores(work, facts, len(tasks))
        if kept.is_other:
            logger.info(
                f"note: {work} held scores of another checkpoint, of other data or other settings; all rows are scored again"
            )
        file = open_score_file(work / path.name, schema, len(tasks))
        output = ScoreOutput(path, ScoreWriter(file, schema, named, kept), address)
        if output.writer.num_rows:
            logger.info(f"resumes after row {output.writer.num_rows:,}, as {work} has the scores")
        try:
            yield output
        finally:
            output.writer.abandon()
            if not output.writer.num_written:
                shutil.rmtree(work, ignore_errors=True)
