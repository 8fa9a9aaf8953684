"""Command `python -m serving.run`: serve a model directory on a CPU or a GPU, over HTTP in KServe's v2 protocol."""

import asyncio
import resource
import signal
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from configs.command_line import command, lasting_imports
from configs.messages import on_one_line
from configs.serving_schema import Device, ServerConfig
from configs.stop_signals import INTERRUPTED
from serving.http_address import authority
from serving.loading import COPYING_THREADS, model_loader
from serving.manifest import MANIFEST
from serving.model_names import name_of, require_names
from serving.token_file import read_token
from serving.versions import list_versions

if TYPE_CHECKING:
    from serving.server.service import Service

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MIB = 2**20
STARTED = time.perf_counter()
SPARE_FILES = 64
"""Open files beside connections."""


def run(config: ServerConfig) -> None:
    token = read_token(config.token_file)
    check_model("model", Path(config.model or ""))
    for path in config.others:
        check_model("others", Path(path))
    names = [name_of(Path(path)) for path in (config.model or "", *config.others)]
    require_names([name for name in names if name is not None])
    with lasting_imports():
        # Here: torch takes seconds, and errors of options need none.
        from serving.server import service  # noqa: F401

        if config.device is Device.cuda:
            from serving.inference.dense import import_loader

            import_loader()
    started = time.perf_counter()
    asyncio.run(serve(open_service(config, token), config, started))


def check_model(option: str, path: Path) -> None:
    """Check that there is a manifest or a version, before torch is imported. Raises ValueError: there is neither."""
    if not (path / MANIFEST).exists() and not list_versions(path):
        raise ValueError(
            f"{option}={path} is no model directory and has no versions; write one with python -m serving.export output={path}/1"
        )


def open_service(config: ServerConfig, token: str | None) -> "Service":
    """Load the models and return their server, which does not listen yet. Raises ValueError: one has no version to serve."""
    import torch

    from serving.inference.versions import Versions
    from serving.server.batching import BatchLimits
    from serving.server.http_server import HttpLimits
    from serving.server.request_log import RequestLog
    from serving.server.service import Service

    threads = config.threads
    if threads is None and config.device is Device.cuda:
        threads = min(torch.get_num_threads(), COPYING_THREADS)
    if threads is not None:
        torch.set_num_threads(threads)
    assert config.model is not None, "checked by the options"
    request_log = None
    if config.log_requests is not None:
        folder, most_bytes = Path(config.log_requests), config.log_mib * MIB
        request_log = RequestLog(folder, config.log_share, most_bytes, say)
    load = model_loader(
        config.device.name, config.max_batch, config.dense_dtype.name, config.table_gib
    )
    return Service(
        [
            Versions(
                Path(path),
                partial(say, path) if config.others else say,
                load=load,
                verify=config.verify,
                canary_share=config.canary_share,
            )
            for path in (config.model, *config.others)
        ],
        BatchLimits(
            max_batch=config.max_batch,
            max_queue=config.max_queue,
            delay_s=config.batch_delay_ms / 1000,
            deadline_s=config.deadline_ms / 1000,
        ),
        HttpLimits(
            max_body=config.max_body_mib * MIB,
            max_memory=config.max_memory_mib * MIB,
            max_connections=config.max_connections,
            timeout_s=config.timeout_s,
            token=token,
        ),
        config.poll_s,
        say,
        request_log,
    )


async def serve(service: "Service", config: ServerConfig, started: float) -> None:
    """Serve until SIGTERM or SIGINT, then answer what has begun."""
    # Raise the limit of open files, if it may be: refused connections are open until they have read why.
    count = 2 * config.max_connections + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        with suppress(ValueError, OSError):
            most = count if hard == resource.RLIM_INFINITY else min(count, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    port = await service.start(config.host, config.port)
    try:
        now = time.perf_counter()
        say(
            f"ready after {now - STARTED:.1f} s, {started - STARTED:.1f} s of them imports: {service.title} on "
            f"http://{authority(config.host, port)}"
        )
        if config.host not in LOOPBACK and config.token_file is None:
            say(
                f"anybody who reaches {config.host} can ask this server; set token_file, or host=127.0.0.1"
            )
        await stop.wait()
        say("draining: accepted requests are answered")
    finally:
        # Also after an error: the thread that scores would keep the process.
        await service.stop(config.drain_s)
    say("ended")


def say(*parts: str) -> None:
    """Print one line to stderr, if anybody reads it."""
    with suppress(OSError):
        print(on_one_line(": ".join(parts)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    command(
        run,
        ServerConfig,
        "serving_run",
        ("host", "port"),
        f"{INTERRUPTED} before the server was ready",
    )
