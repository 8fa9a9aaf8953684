"""Blocks of complete lines of a raw file, from any offset, and the mistake in a line."""

import gzip
import re
from collections.abc import Iterator
from typing import BinaryIO, cast

from isal import igzip, isal_zlib

from preproc.raw_files import RawFile, cut_short
from preproc.vocabulary_sql import COLUMNS, NUM_CATEGORICAL, NUM_NUMERICAL, NUMERICAL

LONGEST_LINE_BYTES = 1 << 26
# 18 digits always fit 64 bits.
INTEGER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
REMOVE = "correct or remove the line"
# The types of isal declare its exception as an instance.
GZIP_ERRORS = (gzip.BadGzipFile, cast("type[Exception]", isal_zlib.error))


def blocks(file: RawFile, offset: int, size: int = 1 << 19) -> Iterator[bytes]:
    """Yield the text of `file` from byte `offset` of the plain text, in complete lines; ValueError if it is damaged."""
    try:
        with _open(file) as stream:
            if file.compression == "zstd":
                while offset and (data := stream.read(min(offset, 1 << 20))):
                    offset -= len(data)
            else:
                stream.seek(offset)
            rest = b""
            while data := stream.read(size):
                end = data.rfind(b"\n") + 1
                if end:
                    yield b"".join((rest, memoryview(data)[:end]))
                    rest = data[end:]
                else:
                    rest += data
                if len(rest) > LONGEST_LINE_BYTES:
                    raise ValueError(
                        f"{file.path}: not tab-separated text: no line end within "
                        f"{LONGEST_LINE_BYTES >> 20} MiB; give text files"
                    )
            if rest:
                yield rest + b"\n"
    except EOFError:
        raise ValueError(cut_short(file.path)) from None
    except GZIP_ERRORS as error:
        raise ValueError(f"{file.path}: damaged gzip data ({error}); fetch it again") from None
    except OSError as error:
        if file.compression != "zstd" or error.errno is not None:
            raise
        raise ValueError(f"{file.path}: damaged Zstandard data ({error}); fetch it again") from None


def _open(file: RawFile) -> BinaryIO:
    if file.compression == "gzip":
        return igzip.open(file.path)
    if file.compression == "zstd":
        # 25 MB of memory that uncompressed input does not need.
        import pyarrow as pa

        return pa.CompressedInputStream(str(file.path), "zstd")
    return file.path.open("rb", buffering=0)


def mistake_in(line: bytes) -> str | None:
    """Return the mistake in a line and its remedy, or None for a good line."""
    try:
        text = line.decode()
    except UnicodeDecodeError:
        return f"not UTF-8 text; {REMOVE}"
    if "\r" in text:
        return f"not tab-separated text: a carriage return within the line; {REMOVE}"
    fields = text.split("\t")
    if len(fields) != len(COLUMNS):
        unlabelled = ", or give a file that has labels" if len(fields) == len(COLUMNS) - 1 else ""
        commas = text.count(",")
        if len(fields) == 1 and commas:
            return (
                f"{commas} comma{'s'[: commas > 1]} and no tab, wanted {len(COLUMNS)} columns separated by tabs; describe "
                "comma-separated files as a table (layout=table, docs/your_data.md)"
            )
        return (
            f"{len(fields)} columns, wanted {len(COLUMNS)} (label, {NUM_NUMERICAL} integers, "
            f"{NUM_CATEGORICAL} categories, separated by tabs); {REMOVE}{unlabelled}"
        )
    if fields[0] not in ("0", "1"):
        return f"column 1 (label) is {fields[0]!r}, wanted 0 or 1; {REMOVE}"
    for column, name in enumerate(NUMERICAL, start=1):
        if fields[column] and not INTEGER.fullmatch(fields[column]):
            return (
                f"column {column + 1} ({name}) is {fields[column]!r}, wanted an integer of at most "
                "18 digits; correct it or leave the field empty"
            )
    return None
