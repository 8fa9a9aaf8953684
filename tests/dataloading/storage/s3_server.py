"""An S3 server on loopback, and the environment that makes pyarrow use it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch
from urllib.request import Request, urlopen

SECRET = "do-not-print-me"


@contextmanager
def s3_server(cache: Path) -> Iterator[str]:
    """Serve an empty bucket, with local copies below `cache`; yield the bucket's address."""
    from moto.server import ThreadedMotoServer
    from pyarrow.fs import FileSystem

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # All servers of a process have the same content, also that of one that was stopped.
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(cache),
    }
    try:
        with patch.dict(os.environ, environment):
            files, path = FileSystem.from_uri("s3://bucket?allow_bucket_creation=true")
            files.create_dir(path)
            yield "s3://bucket"
    finally:
        server.stop()
