"""Model directories of small runs, and servers of them in this process."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.serving_schema import ModelExportConfig, ServerConfig
from nn.checkpoint.directory import commit
from nn.checkpoint.state import facts_of, write
from nn.distributed.process_group import HostChannel
from nn.training.prefetch import Prefetcher
from serving.exporting.proof import proof_batches, rows_of
from serving.exporting.run import export_model, open_trained
from serving.inference.model import ServedModel
from serving.manifest import Manifest
from serving.run import open_service
from serving.server.service import Service
from serving.token_file import read_token
from tests.helpers.composed import Built, build, compose_config


def save_run(directory: Path, overrides: list[str], num_steps: int = 2) -> tuple[Path, np.ndarray]:
    """Train a run and save its checkpoint; return its path and the logits of its test split; needs a process group."""
    built = build(compose_config(*overrides))
    built.train(0, num_steps)
    write(directory, num_steps, built.step.state_dict(), built.step, HostChannel())
    facts = facts_of(built.config, built.source.spec, built.ranks) | {"num_steps": num_steps}
    if built.ranks.is_rank0:
        commit(directory, num_steps, facts)
    built.ranks.barrier()
    return directory / f"step_{num_steps}", test_logits(built)


def test_logits(built: Built) -> np.ndarray:
    """Return the logits of this rank's rows of the test split, by the step that trains."""
    built.step.set_training(False)
    batches = built.test_loader.batches(0, built.test_loader.steps_per_epoch)
    prefetcher = Prefetcher(batches, built.step.runner, built.ranks.device)
    logits = []
    for batch, ids in prefetcher:
        logits.append(built.step.predict(batch, ids)[: batch.num_valid].clone())
        prefetcher.start_next()
    return torch.cat(logits).numpy()


def export(checkpoint: Path, output: Path, **options: Any) -> Manifest:
    """Export a checkpoint with the defaults of the command."""
    return export_model(
        ModelExportConfig(checkpoint=str(checkpoint), output=str(output), **options)
    )


def served_scores(directory: Path, checkpoint: Path) -> np.ndarray:
    """Return the scores of a model directory for the test split of a run, [rows, outputs]."""
    served = ServedModel.load(directory)
    source = open_trained(checkpoint, None).source
    batches = proof_batches(source, "test", source.num_rows("test"))
    return np.concatenate([served.scores(rows_of(batch, served)).numpy() for batch in batches])


@contextmanager
def serving(model: Path, **options: Any) -> Iterator["Client"]:
    """Serve a model directory on a free port until the block ends."""
    config = ServerConfig(model=str(model), port=0, threads=1, **options)
    service = open_service(config, read_token(config.token_file))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port = _call(loop, service.start("127.0.0.1", 0))
        yield Client(port, service, loop)
    finally:
        _call(loop, _end(service))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(service: Service) -> None:
    await service.stop(5.0)
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


def _call(loop: asyncio.AbstractEventLoop, coroutine: Any) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)


class Client:
    """A client of one server."""

    def __init__(self, port: int, service: Service, loop: asyncio.AbstractEventLoop) -> None:
        self.port, self.service, self.loop = port, service, loop

    def call(
        self, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return status and body of GET, or of POST if there is a body."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET" if body is None else "POST", path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def infer(
        self, inputs: list[dict[str, Any]], model: str = "dlrm"
    ) -> tuple[int, dict[str, Any]]:
        """Return status and JSON of a request for scores."""
        status, body = self.call(
            f"/v2/models/{model}/infer", json.dumps({"inputs": inputs}).encode()
        )
        return status, json.loads(body)

    def stop(self, drain_s: float) -> None:
        """Drain the server."""
        _call(self.loop, self.service.stop(drain_s))


def tensor(name: str, datatype: str, values: Any, shape: list[int] | None = None) -> dict[str, Any]:
    """Return an input in JSON."""
    array = np.asarray(values, dtype=object)
    flat = array.reshape(-1).tolist()
    return {"name": name, "datatype": datatype, "shape": shape or list(array.shape), "data": flat}
