"""Memory in which one rank of a node shows its indexes of raw keys to the others, and a message for each change."""

import io
import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing.connection import Connection, Listener
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np

from dataloading.dataset.durable_files import locked_among
from dataloading.keys.kernels.hash_index import DRAWN

LOST = "the rank that maps the raw keys of this node has ended (remote process exited)"


class SharedCells:
    """Cells of indexes, int64 [n, 2], in memory of several processes that needs no space in /dev/shm.

    `head` [2] counts the changes that began and ended, so it is odd during one and after one that ended midway; behind it is the
    random number that the indexes depend on.
    """

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        numbers = np.frombuffer(mmap.mmap(descriptor, 0), np.int64)
        self.head, self.cells = numbers[:2], numbers[2:].reshape(-1, 2)

    def locked(self, *, shared: bool) -> AbstractContextManager:
        """Hold the lock of the cells, with others that read them or alone."""
        return locked_among(self._file.fileno(), shared=shared)


class KeyServer(SharedCells):
    """The side of the rank that maps; the cells are zeros."""

    def __init__(self, num_cells: int) -> None:
        descriptor = os.memfd_create("keys")
        os.truncate(descriptor, 16 + 16 * num_cells)
        super().__init__(descriptor)
        self.head[1] = DRAWN
        self._peers: list[Connection] = []

    def listen(self) -> tuple[Any, bytes]:
        """Return the name of a socket, and the secret of who may connect."""
        secret = secrets.token_bytes()
        self._listener = Listener(f"\0keys-{secrets.token_hex()}", authkey=secret)
        return self._listener.address, secret

    def accept(self, number: int) -> None:
        with self._listener:
            for _ in range(number):
                self._peers.append(self._listener.accept())
                send_handle(self._peers[-1], self._file.fileno(), None)

    @contextmanager
    def changing(self, message: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """Change the indexes while nobody reads them, and then send a message."""
        with self.locked(shared=False):
            self.head[0] |= 1
            yield
            self.head[0] += 1
        if self._peers:
            # A file in memory, of which the socket has the number: nobody waits until a large message is read.
            with os.fdopen(os.memfd_create("message"), "wb") as file:
                np.savez(file, **message())
                file.flush()
                for peer in self._peers:
                    with suppress(ConnectionError):  # collectives notice a rank that has ended
                        send_handle(peer, file.fileno(), None)


def receive(link: Connection) -> dict[str, np.ndarray]:
    """Return the next message. Raises RuntimeError: the rank that maps has ended."""
    try:
        file = os.fdopen(recv_handle(link), "rb")
    except (EOFError, ConnectionError):
        raise RuntimeError(LOST) from None
    with file:
        # Receivers share the position in the file.
        message = io.BytesIO(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
        return dict(np.load(message, allow_pickle=False))
