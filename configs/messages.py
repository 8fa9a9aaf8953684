"""Values and texts as a message or a terminal may show them: on one line, short, without control characters."""

import errno
import reprlib
import unicodedata
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import Any

MAX_SHOWN_CHARS = 160
MAX_PATH_CHARS = 400
MAX_LINE_CHARS = 4000
# Categories of Unicode: control, format (as those that reverse the direction), surrogate, line and paragraph separator.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


class _Short(reprlib.Repr):
    """Representations whose cost and length do not grow with the value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = self.maxlong = MAX_SHOWN_CHARS

    def repr1(self, x: Any, level: int) -> str:
        """Represent a value by what it is, not by the name of its class: a subclass may hold as much."""
        if isinstance(x, Enum):
            return repr(x)
        if isinstance(x, int):
            return self.repr_int(x, level)
        if isinstance(x, str):
            return self.repr_str(x, level)
        if isinstance(x, bytes | bytearray):
            return repr(bytes(x[:MAX_SHOWN_CHARS]))
        if isinstance(x, Mapping):
            return self.repr_dict(x, level)  # type: ignore[arg-type]
        if isinstance(x, tuple):
            return self.repr_tuple(x, level)
        if isinstance(x, Set):
            return self.repr_set(x, level)  # type: ignore[arg-type]
        if isinstance(x, Sequence):
            return self.repr_list(x, level)  # type: ignore[arg-type]
        return self.repr_instance(x, level)

    def repr_int(self, x: int, level: int) -> str:
        """Show an integer whose digits Python refuses to write (over 4,300) by its size."""
        bits = x.bit_length()
        return repr(x) if bits <= 256 else f"<an integer of {bits:,} bits>"


_SHORT = _Short()


def shown(value: Any) -> str:
    """Return a value as a message shows it: like `repr`, on one line, with at most `MAX_SHOWN_CHARS` characters.

    Values come from files: a yaml of 2 kB may hold, by nested aliases, a value whose `repr` fills the memory.
    """
    return shortened(printable(_SHORT.repr(value)))


def shortened(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """Return `text`, or its first and last part around `...` if it has more than `max_chars` characters."""
    if len(text) <= max_chars:
        return text
    tail = max_chars // 4
    return f"{text[: max_chars - tail - 3]}...{text[-tail:]}"


def printable(text: str) -> str:
    r"""Return `text` with control characters as escapes, as `\n` or `\x1b`; a name may hold any character."""
    if text.isprintable():
        return text
    return "".join(
        repr(char)[1:-1] if unicodedata.category(char) in _HIDDEN else char for char in text
    )


def on_one_line(text: str) -> str:
    """Return a message as it leaves the process: one line of at most `MAX_LINE_CHARS` characters that hides nothing."""
    return shortened(printable(shortened(text, MAX_LINE_CHARS)), MAX_LINE_CHARS)


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EFBIG), "free some space"),
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: "choose a directory that can be written",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "change its permissions or choose another path"),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO, errno.ETIMEDOUT),
        "check the disk or the network file system",
    ),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
}


UNKNOWN_PLACE = "while a file of the run was read or written"


def os_error_text(error: OSError, place: str = UNKNOWN_PLACE, more: str = "") -> str:
    """Describe an error of the system in one line: reason, path and remedy.

    Args:
        error: the error.
        place: what was read or written, for an error that names no file.
        more: continues the remedy for a full disk.
    """
    # A name that a damaged file holds may have any length.
    files = [
        shortened(printable(str(file)), MAX_PATH_CHARS)
        for file in (error.filename, error.filename2)
        if file is not None
    ]
    remedy = _REMEDIES.get(error.errno or 0)
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    then = f"; {remedy} and rerun the same command{more if is_full else ''}" if remedy else ""
    what = error.strerror or str(error) or type(error).__name__
    return f"{what}: {' -> '.join(files) or place}{then}"
