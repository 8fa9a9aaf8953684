"""The owner of a batch's rows: its ids where they are looked up, from their exchange until its pass has read everything."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from nn.ops.host_copy import HostCopy
from nn.sharding.local_ids import LocalIds
from nn.tiers.live_batches import Hold


class BatchRows:
    """Holds a batch's ids and its rows of tables in host memory; `with rows.used(...)` releases the rows at its end.

    `overflows` says whether any rank has more ids than fit, int32 [1]; None if it cannot have. `release` lets
    the memory of the ids be reused, behind the current stream; None if they have a memory of their own. `turn`: that in which
    their memory and the batch's are used, the same on all ranks; None where one of them is of this batch alone.
    """

    def __init__(
        self,
        ids: LocalIds,
        overflows: Tensor | None = None,
        release: Callable[[], None] | None = None,
        turn: int | None = None,
    ) -> None:
        self.ids = ids
        self.turn = turn
        self._hold: Hold | None = None
        self._release = release
        self._has_own_memory = release is None
        self._is_trained = False
        # The host reads it when it uses the rows, one batch later.
        self._overflows = None if overflows is None else HostCopy(overflows)

    def keep(self, hold: Hold | None) -> None:
        """Take over rows of tables in host memory, which the ids need."""
        self._hold = hold

    def record_stream(self) -> None:
        """Keep memory that is not reused from being freed before the current stream is done with it."""
        if self._has_own_memory:
            for tensor in self.ids.tensors:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def overflow(self) -> bool:
        """Return whether the ids are not valid, since they do not fit; the host waits for their exchange."""
        return self._overflows is not None and bool(self._overflows.read().item())

    def used(self, *, is_trained: bool) -> Self:
        """Return this as the context of a pass; `is_trained` says that it changes the rows."""
        self._is_trained = is_trained
        return self

    def __enter__(self) -> Self:
        """Make sure that all rows have slots; the host waits for their mapping.

        Raises RankError: the batches at work need more rows than there is room for.
        """
        if self._hold is not None:
            self._hold.check()
        return self

    def arrive(self) -> None:
        """Let the current stream wait for rows of tables in host memory, before it looks the ids up."""
        if self._hold is not None:
            self._hold.arrive()

    def ids_are_read(self) -> None:
        """Let the next exchange overwrite the ids, once the current stream has reached this point."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the rows leave the device, once the current stream has reached this point; after an error they leave with this."""
        if error is None and self._hold is not None:
            self._hold.release(is_trained=self._is_trained)
