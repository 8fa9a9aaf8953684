"""Raw files of a run: their order, and a check that each is complete."""

import glob
import re
import stat
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

from configs.messages import printable, shortened
from dataloading.dataset.documents import is_file_list, read_file_list
from dataloading.storage.local_copy import local_paths
from dataloading.storage.object_store import is_remote

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
PACKED = (".gz", ".zst")
ENDS_BYTES = 1 << 16
PARQUET = b"PAR1"
PACKED_OTHERWISE = {
    b"PK\x03\x04": "a zip file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ": "an xz file",
    b"\x04\x22\x4d\x18": "an lz4 file",
}
# Tables in other binary formats: first bytes, and the name.
OTHER_TABLES = {
    b"ARROW1\0\0": "an Arrow or Feather file",
    b"Obj\x01": "an Avro file",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy file",
    b"SQLite format 3\0": "an SQLite file",
    b"\xff\xfe": "text in UTF-16",
    b"\xfe\xff": "text in UTF-16",
}


@dataclass(frozen=True, slots=True)
class RawFile:
    """One raw file; its kind is detected from its first bytes, not its name."""

    path: Path  # the file
    compression: str  # of text: none, gzip or zstd
    is_parquet: bool = False  # whether it is Parquet instead of text

    @property
    def plain_bytes(self) -> int:
        """Size of its text; compressed logs are estimated at three times their size."""
        return self.path.stat().st_size * (1 if self.compression == "none" else 3)

    @property
    def identity(self) -> list[Any]:
        """Path, size and time of change, by which a run that resumes knows the file again."""
        status = self.path.stat()
        return [str(self.path.resolve()), status.st_size, status.st_mtime_ns]


def find_files(source: str | Sequence[str], option: str, tables: bool = False) -> list[RawFile]:
    """Return the files of `source`, a path, a glob, a file list, or several of them, with every check that needs no full read.

    Matches of one glob are in natural order (day_2 before day_10); several patterns and the files of a list keep their order.
    Raises ValueError: a path or glob matches nothing, a path is no regular file, a file is named twice, is empty, has an
    unsupported type, or is truncated.
    """
    paths: list[Path] = []
    for pattern in [source] if isinstance(source, str) else source:
        if is_remote(pattern):
            paths.extend(sorted(local_paths(pattern), key=natural_order))
            continue
        if is_file_list(pattern) and Path(pattern).is_file():
            listed = [Path(pattern).parent / name for name in read_file_list(Path(pattern))]
            for path in listed:
                if not path.exists():
                    raise ValueError(
                        f"{_name(path)}: no such file, which {_name(pattern)} lists; fetch it, or correct the list"
                    )
            paths.extend(listed)
            continue
        # An existing path is taken literally, even with a bracket or a star in it.
        try:
            matches = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)
        except OSError as error:
            raise ValueError(f"{_name(pattern)}: {error.strerror}; correct {option}") from None
        if not matches:
            kind = "no file matches" if set(pattern) & set("*?[") else "no such file"
            raise ValueError(f"{_name(pattern)}: {kind}; set {option} to the raw logs")
        paths.extend(sorted(map(Path, matches), key=natural_order))
    twice = [str(path) for path, times in Counter(paths).items() if times > 1]
    if twice:
        raise ValueError(f"{option} names {twice[0]} twice; its rows would count twice")
    for path in paths:
        if path.suffix in PACKED and path.with_suffix("") in paths:
            raise ValueError(
                f"{path} and {path.with_suffix('')} are one file, packed and unpacked; its rows would count twice, so name or "
                "keep one of them"
            )
    return [_open(path, option, tables) for path in paths]


def refuse_shared(files: Sequence[RawFile], tests: Sequence[RawFile]) -> None:
    """Raise ValueError if a file is one of the options `source` and `test_source`."""
    shared = {file.path.resolve() for file in files} & {file.path.resolve() for file in tests}
    if shared:
        raise ValueError(f"source and test_source both name {min(shared)}; test on other rows")


def refuse_copies(files: Sequence[RawFile]) -> None:
    """Raise ValueError if two files have the same length, the same start and the same end."""
    seen: dict[str, Path] = {}
    for file in files:
        key = fingerprint(file)
        if key in seen:
            raise ValueError(
                f"{file.path} is a copy of {seen[key]}; its rows would count twice, so drop one"
            )
        seen[key] = file.path


def fingerprint(file: RawFile) -> str:
    """Return a hash of the length, the start and the end of a file; copies have equal ones."""
    size = file.path.stat().st_size
    with file.path.open("rb") as stream:
        head = stream.read(ENDS_BYTES)
        stream.seek(max(0, size - ENDS_BYTES))
        return sha256(b"%d\n" % size + head + stream.read(ENDS_BYTES)).hexdigest()


def find_gap(files: Sequence[RawFile]) -> str | None:
    """Return a message if files that differ only in one number skip a number, else None."""
    numbers: dict[tuple[str, str], list[int]] = {}
    for file in files:
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", file.path.name)
        if match:
            numbers.setdefault((match[1], match[3]), []).append(int(match[2]))
    for (before, after), present in numbers.items():
        present.sort()
        gaps = [low + 1 for low, high in pairwise(present) if high > low + 1]
        if gaps:
            return (
                f"{before}{gaps[0]}{after} is missing between {before}{min(present)}{after} and "
                f"{before}{max(present)}{after}; fetch it, or give the files one by one"
            )
    return None


def natural_order(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Sort key that reads runs of digits as numbers; day_1 and day_01 do not lie in the order of the directory."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)], str(path)


def _name(path: str | Path) -> str:
    return shortened(printable(str(path)), 300)


def _open(path: Path, option: str, tables: bool) -> RawFile:
    name = _name(path)
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise ValueError(
            f"{name}: a directory; set {option} to the files in it, such as '{name}/*.gz'"
        )
    if not stat.S_ISREG(mode):
        # Opening a FIFO would wait for a writer, and several passes read each file.
        raise ValueError(
            f"{name}: a FIFO, a device or a socket; write it to a regular file, and set {option} to that"
        )
    with path.open("rb") as stream:
        head = stream.read(16)
    if not head:
        raise ValueError(f"{name}: the file is empty; drop it from {option}, or fetch it again")
    if head.startswith(PARQUET):
        if not tables:
            raise ValueError(
                f"{name}: a Parquet file, but raw Criteo logs are text; describe the table in a yaml "
                "file as docs/your_data.md does"
            )
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - 4))
            if path.stat().st_size < 12 or stream.read() != PARQUET:
                raise ValueError(
                    f"{name}: the Parquet data has no end marker, so the file was cut short; fetch or write it again"
                )
        return RawFile(path, "none", is_parquet=True)
    for kinds, remedy in (
        (PACKED_OTHERWISE, "only plain text, .gz and .zst can be read, so unpack it first"),
        (OTHER_TABLES, "write it as UTF-8 text or as Parquet"),
    ):
        found = next((kind for magic, kind in kinds.items() if head.startswith(magic)), None)
        if found:
            raise ValueError(f"{name}: {found}; {remedy}")
    compression = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "none")
    if compression == "zstd" and not zstd_is_complete(path):
        raise ValueError(cut_short(path))
    text = head[:8]
    if compression == "gzip":
        with path.open("rb") as stream, suppress(zlib.error):  # its reader reports damage
            reader = zlib.decompressobj(zlib.MAX_WBITS | 16)
            text = b""
            text = reader.decompress(stream.read(ENDS_BYTES), 8)
    # The length of a record in 8 bytes; no text has null characters.
    if text[:4].strip(b"\0") and text[4:] == b"\0\0\0\0":
        raise ValueError(
            f"{name}: a TFRecord file, whose columns only its writer knows; write its records as Parquet "
            "(docs/your_data.md#tfrecord)"
        )
    if compression == "gzip" and text.startswith((PARQUET, *MAGIC)):
        raise ValueError(
            f"{name}: gzip data that holds Parquet or compressed data again; unpack it first"
        )
    return RawFile(path, compression)


def cut_short(path: Path) -> str:
    return f"{_name(path)}: the compressed data ends before its end marker, so the file was cut short; fetch it again"


def zstd_is_complete(path: Path) -> bool:
    """Return whether `path` ends where its last Zstandard frame does (RFC 8878, section 3.1).

    Decompressors treat the end of the file as the end of the data. This check walks over the block headers:
    one seek per 128 KiB of text, without decompression.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        try:
            while stream.tell() < size:
                _skip_frame(stream)
        except EOFError:
            return False
        return stream.tell() == size


def _skip_frame(stream: BinaryIO) -> None:
    """Seek past one frame; EOFError if one of its fields is missing, or if it is no frame."""

    def number(width: int) -> int:
        data = stream.read(width)
        if len(data) < width:
            raise EOFError
        return int.from_bytes(data, "little")

    magic = number(4)
    if 0x184D2A50 <= magic <= 0x184D2A5F:  # a skippable frame: its size, then as many bytes
        length = number(4)
        stream.seek(length, 1)
        return
    if magic != 0xFD2FB528:
        raise EOFError
    descriptor = number(1)
    single_segment = descriptor >> 5 & 1
    window = 1 - single_segment
    dictionary = (0, 1, 2, 4)[descriptor & 3]
    content_size = (single_segment, 2, 4, 8)[descriptor >> 6]
    stream.seek(window + dictionary + content_size, 1)
    last = False
    while not last:
        block = number(3)
        last = bool(block & 1)
        repeated = (block >> 1 & 3) == 1  # one byte, repeated over the block
        stream.seek(1 if repeated else block >> 3, 1)
    stream.seek(4 * (descriptor >> 2 & 1), 1)  # the checksum, if there is one
