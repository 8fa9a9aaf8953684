"""A new file whose bytes and CRC-32 are counted while it is written."""

import zlib
from io import RawIOBase
from pathlib import Path
from typing import Any

from dataloading.dataset.durable_files import sync_stream


class CountedFile(RawIOBase):
    """A file that does not exist yet; `close` does not sync it."""

    checksum = staticmethod(zlib.crc32)

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_bytes = self._crc32 = 0
        self._file = path.open("xb")

    @property
    def record(self) -> dict[str, Any]:
        return {"bytes": self._num_bytes, "crc32": f"{self._crc32:08x}"}

    def writable(self) -> bool:
        return True  # as Arrow asks

    def write(self, data: Any) -> int:
        data = memoryview(data).cast("B")
        self._crc32 = self.checksum(data, self._crc32)
        self._num_bytes += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self._num_bytes

    def sync(self) -> None:
        """Make the bytes survive a power cut."""
        sync_stream(self._file)

    def close(self) -> None:
        self._file.close()
        super().close()
