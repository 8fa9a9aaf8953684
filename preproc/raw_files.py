"""Raw files of a run: their order, and a check that each is complete."""

import glob
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
ENDS_BYTES = 1 << 16
FOREIGN = {b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PAR1": "Parquet"}


@dataclass(frozen=True, slots=True)
class RawFile:
    """One raw file; `compression` (none, gzip or zstd) is detected from its first bytes, not its name."""

    path: Path
    compression: str


def find_files(source: str | Sequence[str], option: str, parquet: bool = False) -> list[RawFile]:
    """Return the files of `source`, with every check that needs no full read.

    Args:
        source: a path, a glob, or several of them. Matches of one glob are in natural order (day_2
            before day_10); several patterns keep the order of `source`.
        option: name of the option that `source` came from, for messages.
        parquet: require Parquet files, not text.

    Raises:
        ValueError: a path or glob matches nothing, a path is a directory, a file is named twice, is empty,
            has an unsupported type, or is a truncated .zst file.
    """
    paths: list[Path] = []
    for pattern in [source] if isinstance(source, str) else source:
        # An existing path is taken literally, even with a bracket or a star in it.
        matches = [pattern] if Path(pattern).exists() else glob.glob(pattern, recursive=True)
        if not matches:
            kind = "no file matches" if set(pattern) & set("*?[") else "no such file"
            raise ValueError(f"{pattern}: {kind}; set {option} to the raw logs")
        paths.extend(sorted(map(Path, matches), key=_natural))
    twice = [str(path) for path, times in Counter(paths).items() if times > 1]
    if twice:
        raise ValueError(f"{option} names {twice[0]} twice; its rows would count twice")
    return [_open(path, option, parquet) for path in paths]


def refuse_copies(files: Sequence[RawFile]) -> None:
    """Raise ValueError if two files have the same length, the same start and the same end."""
    seen: dict[tuple[int, bytes, bytes], Path] = {}
    for file in files:
        size = file.path.stat().st_size
        with file.path.open("rb") as stream:
            head = stream.read(ENDS_BYTES)
            stream.seek(max(0, size - ENDS_BYTES))
            key = (size, head, stream.read(ENDS_BYTES))
        if key in seen:
            raise ValueError(
                f"{file.path} is a copy of {seen[key]}; its rows would count twice, so drop one"
            )
        seen[key] = file.path


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


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key that reads runs of digits as numbers."""
    parts = re.split(r"(\d+)", str(path))
    return [(int(part), "") if i % 2 else (-1, part) for i, part in enumerate(parts)]


def _open(path: Path, option: str, parquet: bool) -> RawFile:
    if path.is_dir():
        raise ValueError(
            f"{path}: a directory; set {option} to the files in it, such as '{path}/*.gz'"
        )
    with path.open("rb") as stream:
        head = stream.read(6)
    if not head:
        raise ValueError(f"{path}: the file is empty; drop it from {option}, or fetch it again")
    if parquet:
        if not head.startswith(b"PAR1"):
            raise ValueError(f"{path}: no Parquet file; set the source's format to csv or tsv")
        return RawFile(path, "none")
    for magic, kind in FOREIGN.items():
        if head.startswith(magic):
            raise ValueError(
                f"{path}: a {kind} file; only plain text, .gz and .zst can be read, so unpack it "
                "first"
            )
    compression = next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "none")
    if compression == "zstd" and not zstd_is_complete(path):
        raise ValueError(cut_short(path))
    return RawFile(path, compression)


def cut_short(path: Path) -> str:
    """Return the message for a truncated compressed file."""
    return (
        f"{path}: the compressed data ends before its end marker, so the file was cut short; "
        "fetch it again"
    )


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
