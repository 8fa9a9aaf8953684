"""Addresses of object stores (`s3://bucket/folder`, `gs://`, ...) through pyarrow's file systems.

Credentials, regions and endpoints are the business of those libraries: their environment variables and files count, as
`AWS_ACCESS_KEY_ID` and `AWS_ENDPOINT_URL`. An address may hold credentials itself, so messages show it without them.
"""

import fnmatch
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyarrow import NativeFile

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs")
# Long enough for a large file's part, short enough to see a wrong endpoint.
CHUNK_BYTES = 8 * 2**20


def is_remote(path: str) -> bool:
    """Return whether `path` is the address of an object store."""
    return path.partition("://")[0] in SCHEMES and "://" in path


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of an object store.

    Attributes:
        path: in its file system, with the bucket.
        size: bytes.
        mtime_ns: time of its last change, nanoseconds since 1970.
    """

    path: str
    size: int
    mtime_ns: int


class ObjectStore:
    """A folder or file of an object store.

    Args:
        address: as `s3://bucket/folder`.

    Raises:
        ValueError: the address names no bucket, or its library is missing.
    """

    def __init__(self, address: str) -> None:
        from pyarrow.fs import FileSystem

        self.address = shown_address(address).removesuffix("/")
        with _errors_of(self.address):
            self.files, path = FileSystem.from_uri(address.replace("gcs://", "gs://", 1))
        self.path = path.rstrip("/")
        if not self.path:
            raise ValueError(f"{address} names no bucket; write it as s3://BUCKET/FOLDER")

    def list_files(self) -> dict[str, StoredFile]:
        """Return the files below the folder by their relative paths; a file itself has the path "".

        Raises:
            ValueError: there is nothing at the address, or it cannot be read.
        """
        from pyarrow.fs import FileSelector, FileType

        with _errors_of(self.address):
            info = self.files.get_file_info(self.path)
            if info.type is FileType.File:
                return {"": StoredFile(info.path, info.size, info.mtime_ns)}
            selector = FileSelector(self.path, recursive=True, allow_not_found=True)
            found = self.files.get_file_info(selector)
        files = {
            info.path.removeprefix(f"{self.path}/"): StoredFile(info.path, info.size, info.mtime_ns)
            for info in found
            if info.type is FileType.File
        }
        if not files:
            raise ValueError(
                f"{self.address}: there is no such bucket, file or folder; check the address, and the endpoint and the region of "
                "the environment"
            )
        for name in files:
            if ".." in PurePosixPath(name).parts or name.startswith("/"):
                raise ValueError(
                    f"{self.address} has a file named {name!r}, which no folder here may have"
                )
        return files

    def has(self, name: str) -> bool:
        """Return whether the folder has the file `name`; with an empty name, whether the address is that of a file."""
        from pyarrow.fs import FileType

        with _errors_of(self.address):
            return self.files.get_file_info(self._at(name)).type is FileType.File

    def folders(self, name: str) -> list[str]:
        """Return the names of the folders in the folder `name`; none if there is no such folder."""
        from pyarrow.fs import FileSelector, FileType

        with _errors_of(self.address):
            found = self.files.get_file_info(FileSelector(self._at(name), allow_not_found=True))
        return [info.base_name for info in found if info.type is FileType.Directory]

    def download(self, file: StoredFile, target: Path) -> None:
        """Copy a file of the store to `target`, whose folder exists."""
        with _errors_of(self.address):
            stream = self.files.open_input_stream(file.path)
        # An error of the local disk is not one of the store.
        with stream, target.open("wb") as out:
            while chunk := self._read(stream):
                out.write(chunk)

    def read(self, name: str) -> bytes:
        """Return the content of a small file of the folder."""
        with _errors_of(self.address), self.files.open_input_stream(self._at(name)) as stream:
            return stream.read()

    def _read(self, stream: "NativeFile") -> bytes:
        with _errors_of(self.address):
            return stream.read(CHUNK_BYTES)

    def upload(self, source: Path, name: str) -> None:
        """Copy the file `source` to `name` in the folder; an empty name is the address itself.

        Raises:
            FileNotFoundError: there is no such file, or no longer.
        """
        from pyarrow.fs import LocalFileSystem, copy_files

        target = self._at(name)
        try:
            with _errors_of(self.address):
                self.files.create_dir(str(PurePosixPath(target).parent), recursive=True)
                copy_files(
                    str(source.absolute()),
                    target,
                    source_filesystem=LocalFileSystem(),
                    destination_filesystem=self.files,
                )
        except ValueError:
            source.stat()
            raise

    def remove(self, name: str) -> None:
        """Remove a file of the folder, if it is there."""
        if self.has(name):
            with _errors_of(self.address):
                self.files.delete_file(self._at(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder of the folder."""
        with _errors_of(self.address):
            self.files.delete_dir(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path


def matching_addresses(pattern: str) -> list[str]:
    """Return the addresses of the files that a pattern with `*`, `?` or `[` matches; of others, the pattern itself.

    Raises:
        ValueError: nothing matches, or the store cannot be read.
    """
    scheme, _, rest = pattern.partition("://")
    parts = rest.split("/")
    is_magic = [bool(re.search(r"[*?\[]", part)) for part in parts]
    if not any(is_magic):
        return [pattern]
    first = is_magic.index(True)
    base = f"{scheme}://{'/'.join(parts[:first])}"
    wanted = "/".join(parts[first:])
    names = ObjectStore(base).list_files()
    found = [
        f"{base}/{name}"
        for name in names
        if name.count("/") == wanted.count("/") and fnmatch.fnmatchcase(name, wanted)
    ]
    if not found:
        raise ValueError(f"{shown_address(pattern)}: no file matches")
    return found


def shown_address(address: str) -> str:
    """Return an address without the credentials and the parameters that it may hold."""
    scheme, _, rest = address.partition("://")
    bucket, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{bucket.rpartition('@')[2]}{slash}{path}"


@contextmanager
def _errors_of(address: str) -> Iterator[None]:
    """Convert pyarrow's errors to one line that names the address.

    Raises:
        ValueError: with the text of the library, without the number of its request.
    """
    try:
        yield
    except (OSError, NotImplementedError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            raise  # a local file
        text = re.sub(r" \(Request ID:.*?\)", "", str(error)).partition("\n")[0]
        raise ValueError(
            f"{address}: {text}; check the address, the credentials and the region of the environment"
        ) from None
