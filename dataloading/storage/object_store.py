"""Addresses of object stores (`s3://bucket/folder`, `gs://`, ...) through pyarrow's file systems.

Credentials, regions and endpoints are the business of those libraries: their environment variables and files count, as
`AWS_ACCESS_KEY_ID` and `AWS_ENDPOINT_URL`. An address may hold credentials itself, so messages show it without them.
"""

import fnmatch
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import Any

from configs.messages import first_line

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs")
# Long enough for a large file's part, short enough to see a wrong endpoint.
CHUNK_BYTES = 8 * 2**20
# A server that restarts is away for a few seconds; one that is away for longer is an error.
SAY_AFTER_S = 5.0
REPEAT_FOR_S = 12.0
GIVE_UP_AFTER_S = 25.0
# Of S3's requests; reading and writing file contents have no other limits. A stream may be slow, but not silent.
TIMEOUTS_S = {"connect_timeout": 4.0, "request_timeout": 4.0}
ATTEMPTS = 3


def is_remote(path: str) -> bool:
    return path.partition("://")[0] in SCHEMES and "://" in path


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: str  # in its file system, with the bucket
    size: int  # bytes
    mtime_ns: int  # time of its last change, nanoseconds since 1970


class ObjectStore:
    """A folder or file of an object store; ValueError: the address names no bucket, or its library is missing."""

    def __init__(self, address: str) -> None:
        self.address = shown_address(address).removesuffix("/")
        with _errors_of(self.address):
            self.files, path = _file_system(address)
        self.path = path.rstrip("/")
        self._is_silent = False
        if not self.path:
            raise ValueError(f"{address} names no bucket; write it as s3://BUCKET/FOLDER")

    def list_files(self) -> dict[str, StoredFile]:
        """Return the files below the folder by their relative paths, a file itself as ""; ValueError if there is nothing."""
        from pyarrow.fs import FileSelector, FileType

        info = self._ask(self.files.get_file_info, self.path)
        if info.type is FileType.File:
            return {"": StoredFile(info.path, info.size, info.mtime_ns)}
        selector = FileSelector(self.path, recursive=True, allow_not_found=True)
        with _errors_of(self.address):  # a request for every thousand files
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

        return self._ask(self.files.get_file_info, self._at(name)).type is FileType.File

    def folders(self, name: str) -> list[str]:
        """Return the names of the folders in the folder `name`; none if there is no such folder."""
        from pyarrow.fs import FileSelector, FileType

        selector = FileSelector(self._at(name), allow_not_found=True)
        found = self._ask(self.files.get_file_info, selector)
        return [info.base_name for info in found if info.type is FileType.Directory]

    def download(self, file: StoredFile, target: Path) -> None:
        """Copy a file of the store to `target`, whose folder exists."""
        stream = self._ask(self.files.open_input_stream, file.path)

        def read() -> bytes:
            with _errors_of(self.address):
                return stream.read(CHUNK_BYTES)

        # An error of the local disk is not one of the store.
        with stream, target.open("wb") as out:
            while chunk := read():
                out.write(chunk)

    def read(self, name: str) -> bytes:
        stream = self._ask(self.files.open_input_stream, self._at(name))
        with _errors_of(self.address), stream:
            return stream.read()

    def upload(self, source: Path, name: str) -> None:
        """Copy a file to `name` in the folder; an empty name is the address itself. FileNotFoundError: it was removed."""
        from pyarrow.fs import LocalFileSystem, copy_files

        target = self._at(name)
        try:
            self._ask(self.files.create_dir, str(PurePosixPath(target).parent))
            with _errors_of(self.address):
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
        if self.has(name):
            self._ask(self.files.delete_file, self._at(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder of the folder; an empty one may be left."""
        from pyarrow.fs import FileSelector, FileType

        try:
            with _errors_of(self.address):
                self.files.delete_dir(self._at(name))
        except ValueError:
            # Servers other than AWS may lack the request that removes many files.
            selector = FileSelector(self._at(name), recursive=True)
            for info in self._ask(self.files.get_file_info, selector):
                if info.type is FileType.File:
                    self._ask(self.files.delete_file, info.path)

    def _ask(self, request: Callable[[Any], Any], of: Any) -> Any:
        """Return the answer to a small request, for which a thread waits; repeat it while the server is away, and say so."""
        answers: list[Any] = []
        began = time.monotonic()

        def ask() -> None:
            while not answers:
                try:
                    answers.append(request(of))
                except Exception as error:
                    is_late = time.monotonic() - began > REPEAT_FOR_S
                    if "NETWORK_CONNECTION" not in str(error) or is_late:
                        answers.append(error)
                    else:
                        time.sleep(1)

        thread = Thread(target=ask, daemon=True)
        thread.start()
        thread.join(SAY_AFTER_S)
        if not answers and not self._is_silent:
            self._is_silent = True  # once, not for each of the threads that copy
            if os.environ.get("LOCAL_RANK", "0") == "0":
                text = f"{self.address}: no answer yet; waiting {GIVE_UP_AFTER_S:.0f} s at most"
                print(text, file=sys.stderr, flush=True)
        thread.join(GIVE_UP_AFTER_S - SAY_AFTER_S)
        with _errors_of(self.address):
            if not answers:
                raise OSError(f"no answer within {GIVE_UP_AFTER_S:.0f} s")
            if isinstance(answers[0], Exception):
                raise answers[0]
        self._is_silent = False
        return answers[0]

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}" if name else self.path


def _file_system(address: str) -> tuple[Any, str]:
    """Return pyarrow's file system of an address, whose requests do not wait for minutes, and the path in it."""
    from pyarrow.fs import AwsStandardS3RetryStrategy, FileSystem

    scheme = address.partition("://")[0]
    if scheme in ("gs", "gcs"):
        sign = "&" if "?" in address else "?"
        address = f"gs{address.removeprefix(scheme)}{sign}retry_limit_seconds=10"
    if "endpoint_override=" in address or any(
        name.startswith("AWS_ENDPOINT_URL") for name in os.environ
    ):
        # Servers other than AWS may not know the checksums that AWS' library sends with every file by default.
        os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    files, path = FileSystem.from_uri(address)
    if files.type_name == "s3":
        # Addresses have no parameters for these.
        make, (options,) = files.__reduce__()
        strategy = AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS)
        files = make(options | TIMEOUTS_S | {"retry_strategy": strategy})
    return files, path


def matching_addresses(pattern: str) -> list[str]:
    """Return the addresses of the files that a pattern matches, of others the pattern itself; ValueError if nothing matches."""
    scheme, _, rest = pattern.partition("://")
    parts = rest.split("/")
    is_magic = [bool(re.search(r"[*?\[]", part)) for part in parts]
    if not any(is_magic):
        return [pattern]
    first = is_magic.index(True)
    base = f"{scheme}://{'/'.join(parts[:first])}"
    wanted = "/".join(parts[first:])
    depth = wanted.count("/")
    names = [name for name in ObjectStore(base).list_files() if name.count("/") == depth]
    found = [f"{base}/{name}" for name in names if fnmatch.fnmatchcase(name, wanted)]
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
    """Convert pyarrow's errors to a ValueError of one line, with the address and without the number of the request."""
    try:
        yield
    except (OSError, NotImplementedError, ValueError) as error:
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            raise  # a local file
        text = re.sub(r" \(Request ID:.*?\)", "", first_line(error))
        raise ValueError(
            f"{address}: {text}; check the address, the credentials, the endpoint and the region of the environment"
        ) from None
