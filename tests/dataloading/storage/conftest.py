"""A bucket on an S3 server for the tests of a file."""

from collections.abc import Iterator

import pytest

from dataloading.storage import local_copy
from tests.dataloading.storage.s3_server import s3_server


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("cache")) as address:
        yield address


@pytest.fixture(autouse=True)
def forgotten() -> None:
    """Forget what this process has copied, as a new one has."""
    local_copy._local_copy.cache_clear()
