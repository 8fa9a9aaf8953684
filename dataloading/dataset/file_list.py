"""File lists: the files of a data set in order, as HugeCTR reads and NVTabular writes them.

_file_list.txt
2                   the number of files
part_0.parquet      one path per line, relative to the list
part_1.parquet
"""

import re
from collections import Counter
from collections.abc import Sequence
from os.path import normpath
from pathlib import Path, PurePosixPath

from configs.messages import shown
from dataloading.dataset.documents import read_text
from dataloading.dataset.durable_files import write_synced

FILE_LIST = "_file_list.txt"


def is_file_list(path: Path | str) -> bool:
    """Return whether a path has a name of HugeCTR's file lists: `_file_list.txt`, `file_list.txt`, `file_list_test.txt`."""
    return re.fullmatch(r"_?file_list[^/]*\.txt", PurePosixPath(path).name) is not None


def read_file_list(path: Path) -> list[str]:
    """Return the paths of a file list in order, as they are written.

    Raises:
        ValueError: the first line is no number, there are more or fewer paths, or a path is listed twice.
        OSError: the file cannot be read.
    """
    first, *names = [line.strip() for line in read_text(path).splitlines() if line.strip()] or [""]
    if not re.fullmatch("[0-9]{1,9}", first) or int(first) == 0:
        raise ValueError(
            f"{path}, line 1: got {shown(first)}, want the number of files, then one path per line"
        )
    if len(names) != int(first):
        raise ValueError(
            f"{path}: its first line says {int(first)} files, and {len(names)} follow; correct the list"
        )
    refuse_doubled(path, names)
    return names


def refuse_doubled(path: Path, names: Sequence[str]) -> None:
    """Raise ValueError if two paths of the list `path` are the same."""
    doubled = [name for name, times in Counter(map(normpath, names)).items() if times > 1]
    if doubled:
        raise ValueError(
            f"{path}: lists {shown(doubled[0])} twice; its rows would count twice, so drop one"
        )


def write_file_list(path: Path, names: Sequence[str]) -> bytes:
    """Write a list of files by their paths relative to it, synced; return its bytes."""
    text = "\n".join([str(len(names)), *names]) + "\n"
    write_synced(path, text)
    return text.encode()
