"""Rows to score that are transformed from raw files while they are scored."""

import glob
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from configs.schema import Config
from dataloading.arrow_table import SPLIT, features_source
from dataloading.batch import Batch
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.source import Source
from dataloading.loader import Loader, LoaderSettings
from nn.build import loader_of_rank
from nn.distributed.errors import SharedError
from nn.distributed.process_group import Ranks
from nn.scores.named_rows import ROW_NUMBERS, NamedRows
from nn.scores.unknown_values import UnknownValues

if TYPE_CHECKING:
    # Numba is imported only where there are keys.
    from dataloading.keys.key_maps import KeyMaps


class RawRows(Protocol):
    """Rows of raw files, transformed in their order (`preproc/transformed_rows.py`)."""

    spec: FeatureSpec
    kept_schema: pa.Schema

    def __iter__(self) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Yield the features and the raw columns of consecutive rows."""

    def close(self) -> None:
        """Release what the rows are read from."""


class StreamedRows:
    """Rows of raw files; every rank transforms all of them and scores its own.

    A thread transforms the next rows beside the scoring of others. `unknown`: features of which no row so far has a known
    value. Raises ValueError: one of the first rows is invalid.
    """

    def __init__(
        self, config: Config, raw: RawRows, ranks: Ranks, key_maps: "KeyMaps | None" = None
    ) -> None:
        self._key_maps = key_maps
        self.title = str(config.source)
        self.opened = closing(raw)
        self._ranks = ranks
        self._settings = LoaderSettings(
            batch_size=config.eval.batch_size,
            prefetch=config.data.prefetch,
            workers=config.data.workers,
            only_scores=True,
        )
        self._parts = iter(raw)
        self.unknown = UnknownValues(raw.spec)
        # Rows that were transformed: first row and features of those to score, and columns that are not written yet.
        self._features: deque[tuple[int, pa.Table]] = deque()
        has_names = bool(config.predict.columns) and ranks.is_rank0
        self._kept: deque[pa.Table] | None = deque() if has_names else None
        self._num_read = self._num_taken = 0
        self._pull()
        first = self._features[0][1]
        self._spec = raw.spec.with_event_weights(config.model.event_weights)
        self.missing_rate: str | None = None
        rate = raw.spec.keep_rate
        if rate is not None and rate.name not in first.column_names:
            self._spec = replace(self._spec, keep_rate=None)
            self.missing_rate = rate.name
        self.source: Source = features_source(first, self._spec, self.title)
        self.named = ROW_NUMBERS
        if self._kept is not None:
            self.named = NamedRows(tuple(raw.kept_schema), self._take_kept)
        self.num_rows = None  # not known before the end
        self.facts: dict[str, Any] = {
            "source": _states([str(config.source)]),
            "fitted": _states(
                [f"{glob.escape(str(config.fitted))}/{name}" for name in ("*", "*/*")]
            ),
        }

    def start(self, num_done: int) -> tuple[Iterator[Batch], int]:
        """Return this rank's batches behind the first `num_done` rows, and 0: as `SplitRows.start`."""
        self._skip(num_done)
        while self._num_read <= num_done and self._pull():
            self._skip(num_done)
        return self._batches(), 0

    def _take_kept(self, start: int, stop: int) -> list[pa.ChunkedArray]:
        """Return the raw columns of the next rows; before `self.start`, those of rows that another start has scored are read."""
        assert self._kept is not None
        pieces: list[pa.Table] = []
        num_rows = stop - start
        self._num_taken += num_rows
        while num_rows:
            if not self._kept:
                if not self._pull():
                    raise ValueError(
                        f"{self.title} has fewer rows than an earlier start has scored"
                    )
                self._skip(self._num_taken)
            piece = self._kept.popleft()
            if len(piece) > num_rows:
                self._kept.appendleft(piece.slice(num_rows))
                piece = piece.slice(0, num_rows)
            pieces.append(piece)
            num_rows -= len(piece)
        return pa.concat_tables(pieces).columns

    def _pull(self) -> bool:
        """Transform the next rows, and return whether there were any."""
        part = next(self._parts, None)
        if part is None:
            return False
        features, kept = part
        self.unknown.add(features)
        self._features.append((self._num_read, pa.Table.from_batches([features])))
        if self._kept is not None:
            self._kept.append(pa.Table.from_batches([kept]))
        self._num_read += features.num_rows
        return True

    def _skip(self, num_done: int) -> None:
        while self._features and self._features[0][0] < num_done:
            first, table = self._features.popleft()
            rest = table.slice(num_done - first)
            if len(rest):
                self._features.appendleft((num_done, rest))

    def _batches(self) -> Iterator[Batch]:
        """Yield all batches, complete ones up to the last."""
        with ThreadPoolExecutor(1, thread_name_prefix="transform") as pool:
            parts = self._complete_parts()
            transformed = pool.submit(self._next_loader, parts)
            while (loader := transformed.result()) is not None:
                transformed = pool.submit(self._next_loader, parts)
                yield from loader.batches(0, loader.steps_per_epoch)

    def _next_loader(self, parts: Iterator[pa.Table]) -> Loader | None:
        try:
            part = next(parts, None)
            if part is None:
                return None
            source = features_source(part, self._spec, self.title)
        except ValueError as error:
            raise SharedError(str(error)) from error
        return loader_of_rank(source, SPLIT, self._settings, self._ranks, self._key_maps)

    def _complete_parts(self) -> Iterator[pa.Table]:
        """Yield the features of consecutive rows, in multiples of a batch up to the last."""
        batch_size = self._settings.batch_size
        rest: list[pa.Table] = []
        while self._features or self._pull():
            rest.append(self._features.popleft()[1])
            num_rows = sum(map(len, rest))
            num_complete = num_rows - num_rows % batch_size
            if num_complete:
                joined = pa.concat_tables(rest)
                yield joined.slice(0, num_complete)
                rest = [joined.slice(num_complete)] if num_rows > num_complete else []
        if rest:
            yield pa.concat_tables(rest)


def _states(patterns: Iterable[str]) -> dict[str, list[int]]:
    paths = [path for pattern in patterns for path in sorted(glob.glob(pattern))]
    return {
        path: [state.st_size, state.st_mtime_ns]
        for path, state in ((path, os.stat(path)) for path in paths)
    }
