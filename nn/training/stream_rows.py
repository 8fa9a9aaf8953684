"""Rows of a stream that come while a run trains: between two steps all ranks take the same part as the next one."""

import time
from collections.abc import Callable
from typing import Any

from configs.schema import Config
from dataloading.stream_source import Part, PartFinder, StreamSource
from nn.distributed.process_group import Ranks

LOOK_S = 1.0
"""Seconds between two looks for parts, and between exchanges of the ranks whether a signal has come."""


class StreamRows:
    """The rows of a stream as the loop sees them; `warn` prints a line about a part, on rank 0."""

    def __init__(
        self, source: StreamSource, config: Config, ranks: Ranks, warn: Callable[[str], object]
    ) -> None:
        self._source, self._ranks = source, ranks
        self._batch_size, self._idle_s = config.train.batch_size, config.data.watch_idle_s
        self._finder, self._parts_behind = PartFinder(source, warn), 0

    @property
    def steps(self) -> int:
        """Batches that the known rows fill."""
        return self._source.known_rows // self._batch_size

    def wait(self, steps: int, between_looks: Callable[[], object]) -> bool:
        """Wait until the rows fill another batch after `steps`; False if none came for `data.watch_idle_s`."""
        since = time.monotonic()

        def look() -> tuple[Part | None, int, bool]:
            waited = time.monotonic() - since
            return *self._finder.look(), self._idle_s is not None and waited >= self._idle_s

        while self.steps <= steps:
            part, self._parts_behind, is_over = self._ranks.run_on_rank0(look)
            if part is not None:
                self._source.append(part)
            elif is_over:
                return False
            else:
                between_looks()
                time.sleep(LOOK_S)
        return True

    def begun(self, steps: int) -> list[dict[str, Any]]:
        """Return the parts that the batches of `steps` are of, as a checkpoint holds them."""
        return self._source.begun(steps * self._batch_size)

    def behind(self, steps: int) -> dict[str, int]:
        """Return the entries of a record: rows that are known and not trained, and further parts."""
        rows = self._source.known_rows - steps * self._batch_size
        return {"rows_behind": rows, "parts_behind": self._parts_behind}
