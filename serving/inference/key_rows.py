"""Rows of raw keys in a model directory: sorted keys, and the row of each, in one mapped file."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

import numpy as np

from serving.manifest import KEY_BYTES, KeyFile, Manifest, ModelError


def write_key_rows(directory: Path, table: str, keys: np.ndarray) -> KeyFile:
    """Write the rows of a table's keys to `keys/` of a model directory.

    `keys`: of each row, int64 [rows]; 0 of rows without a key.
    """
    rows = np.flatnonzero(keys)
    rows = rows[np.argsort(keys[rows])]
    (directory / "keys").mkdir(exist_ok=True)
    name = f"keys/{quote(table, safe='')}.bin"
    with (directory / name).open("xb") as stream:
        stream.write(np.ascontiguousarray(keys[rows], "<i8").data)
        stream.write(rows.astype("<i4").data)
    return KeyFile(name, len(rows))


class KeyRows:
    """Rows of the keys of one table.

    `num_rows`: of the table; None if its rows are not looked up. Raises ModelError: the file has not the size of so many
    keys, its keys do not ascend, or a row is beyond the table.
    """

    def __init__(self, path: Path, count: int, num_rows: int | None = None) -> None:
        size = path.stat().st_size
        if size != count * KEY_BYTES:
            raise ModelError(f"{path} has {size} bytes, want {count * KEY_BYTES}")
        self._keys = np.zeros(0, np.int64)
        self._rows = np.zeros(0, np.int32)
        if count:
            self._keys = np.memmap(path, "<i8", "r", shape=count)
            self._rows = np.memmap(path, "<i4", "r", 8 * count, count)
        if num_rows is None or not count:
            return
        # Checksums prove no intent: such a row would be an error at a request, and a read outside a GPU's table.
        least, most = int(self._rows.min()), int(self._rows.max())
        if least < 0 or most >= num_rows:
            raise ModelError(
                f"{path} has the rows {least} to {most}, and the table 0 to {num_rows - 1}"
            )
        if (self._keys[1:] <= self._keys[:-1]).any():
            raise ModelError(f"{path} has keys that do not ascend")

    def rows(self, keys: np.ndarray) -> np.ndarray:
        """Return the row of every key, int64 in the shape of `keys`; 0 of missing and unknown ones."""
        if not len(self._keys):
            return np.zeros(keys.shape, np.int64)
        positions = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[positions] == keys, self._rows[positions], 0).astype(np.int64)

    def by_row(self, num_rows: int) -> np.ndarray:
        """Return the key of each row, int64 [num_rows]; 0 of rows without one."""
        keys = np.zeros(num_rows, np.int64)
        keys[self._rows] = self._keys
        return keys


def load_key_rows(directory: Path, manifest: Manifest) -> Mapping[str, KeyRows]:
    """Map the keys of a model directory, by feature.

    Raises ModelError: a file is damaged, or has a row beyond the table of a feature.
    """
    rows: dict[KeyFile, int] = {}
    for feature in manifest.categorical:
        if feature.name in manifest.keys:
            file = manifest.keys[feature.name]
            rows[file] = min(feature.cardinality, rows.get(file, feature.cardinality))
    files = {file.name: KeyRows(directory / file.name, file.count, rows[file]) for file in rows}
    return {feature: files[file.name] for feature, file in manifest.keys.items()}
