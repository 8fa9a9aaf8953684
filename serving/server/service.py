"""The server: KServe's v2 endpoints over models and their versions."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import uuid4

from configs.messages import shown
from serving.inference.model_rows import Rows
from serving.inference.requests import InputError, takes_ids
from serving.inference.scores import why_not_finite
from serving.inference.versions import Version, Versions
from serving.model_names import require_names
from serving.server.batching import Batcher, BatchLimits
from serving.server.http_server import App, HttpLimits, HttpServer, Request, RequestError, Response
from serving.server.lane import Lane
from serving.server.metrics import CONTENT_TYPE, Gauges, Metrics
from serving.server.protocol import (
    Described,
    InferRequest,
    describe_infer,
    infer_response,
    json_length,
    json_response,
    read_inputs,
    refuse,
)
from serving.server.request_log import LoggedRequest, RequestLog

CANARY_KEY = "canary-key"
"""Header of requests that one version answers, such as those of one user."""
SMALL_BYTES = 4 << 10
"""Most bytes of JSON and texts that the event loop parses itself."""
LARGE_BYTES = 64 << 10
"""Most bytes of those for which others may wait."""
SWITCH_S = 0.5e-3
"""Time that larger ones keep the interpreter: a batch takes it back some hundred times."""


class Service:
    """A server of models of different names. Raises ValueError: two have one name."""

    def __init__(
        self,
        models: Sequence[Versions],
        batch_limits: BatchLimits,
        http_limits: HttpLimits,
        poll_s: float,
        log: Callable[[str], None],
        request_log: RequestLog | None = None,
    ) -> None:
        self._request_log = request_log
        self._models, self._poll_s, self._log = models, poll_s, log
        require_names([versions.name for versions in models])
        self._metrics = Metrics()
        # One batch at a time, which uses all threads of torch; versions are loaded beside it.
        self._batcher = Batcher(batch_limits, self._metrics.batch)
        self._small = Lane("reader of small requests", batch_limits.deadline_s)
        self._large = Lane("reader of large requests", batch_limits.deadline_s, SWITCH_S)
        self._threads = (self._small, self._large, self._batcher)
        self._loader = ThreadPoolExecutor(1, "loader")
        self._http = HttpServer(App(self._answer, http_limits, self._metrics.response, log))
        self._is_ready = False

    @property
    def title(self) -> str:
        serving = [
            f"model {of.name}, version {' and '.join(version.name for version in of.serving)}"
            for of in self._models
        ]
        return "; ".join(serving)

    async def start(self, host: str, port: int) -> int:
        """Serve until `stop`; return the port. Raises OSError: the address cannot be used."""
        found = await self._http.start(host, port)
        for thread in self._threads:
            thread.start()
        if self._request_log is not None:
            self._request_log.start(self._metrics)
        self._watching = asyncio.create_task(self._watch())
        self._is_ready = True
        return found

    async def stop(self, drain_s: float) -> None:
        """Answer the requests that have begun, for at most `drain_s`, and end."""
        self._is_ready = False
        await self._http.drain(drain_s)
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching
        for thread in self._threads:
            thread.stop()
        if self._request_log is not None:
            self._request_log.stop()
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._poll_s)
            for versions in self._models:
                try:
                    is_new = await loop.run_in_executor(self._loader, versions.update)
                except Exception as error:  # a fault of this program, which must not end the search
                    self._log(f"error while versions were read: {error!r}")
                    continue
                if is_new:
                    try:
                        require_names([of.name for of in self._models])
                    except ValueError as error:
                        self._log(f"{error}; until then they reach the first one")

    async def _answer(self, request: Request) -> Response:
        """Return the response of a request. Raises RequestError: it is refused."""
        parts = request.path.strip("/").split("/")
        match parts:
            case ["metrics"]:
                self._want(request, "GET")
                return Response(body=self._metrics_text(), content_type=CONTENT_TYPE)
            case ["v2"]:
                self._want(request, "GET")
                about = {"name": "hybrid-parallel-recsys", "version": "2"}
                return json_response(about | {"extensions": ["binary_tensor_data"]})
            case ["v2", "health", "live"]:
                self._want(request, "GET")
                return json_response({"live": True})
            case ["v2", "health", "ready"]:
                self._want(request, "GET")
                status = HTTPStatus.OK if self._is_ready else HTTPStatus.SERVICE_UNAVAILABLE
                return json_response({"ready": self._is_ready}, status)
            case ["v2", "models"] | ["v2", "repository", "index"]:
                self._want(request, "GET" if parts[1] == "models" else "POST")
                versions_of = ((of.name, of.current.name) for of in self._models)
                return json_response(
                    [{"name": n, "version": v, "state": "READY"} for n, v in versions_of]
                )
            case ["v2", "models", model, *rest]:
                versions = next((of for of in self._models if of.name == model), None)
                if versions is None:
                    names = " and ".join(shown(of.name) for of in self._models)
                    text = f"there is no model {shown(model)}, only {names}"
                    raise RequestError(HTTPStatus.NOT_FOUND, text)
                version = versions.current
                if rest[:1] == ["versions"] and len(rest) > 1:
                    version, rest = _version(versions, rest[1]), rest[2:]
                elif rest == ["infer"]:
                    version = versions.choose(request.headers.get(CANARY_KEY))
                return await self._model(request, versions, version, rest)
        raise RequestError(HTTPStatus.NOT_FOUND, f"there is no {shown(request.path)}")

    async def _model(
        self, request: Request, versions: Versions, version: Version, rest: list[str]
    ) -> Response:
        body = request.body
        match rest:
            case []:
                self._want(request, "GET")
                return json_response(_metadata(version, [of.name for of in versions.serving]))
            case ["ready"]:
                self._want(request, "GET")
                return json_response({"ready": True})
            case ["infer"]:
                self._want(request, "POST")
                return await self._infer(request, version)
            case ["labels"] if self._request_log is not None:
                self._want(request, "POST")
                parsed = await self._small.run(
                    lambda: read_inputs(describe_infer(body, request.headers), body)
                )
                self._request_log.label(parsed.id, parsed.inputs)
                return json_response({"id": parsed.id})
        raise RequestError(HTTPStatus.NOT_FOUND, f"there is no {shown(request.path)}")

    async def _infer(self, request: Request, version: Version) -> Response:
        started = time.monotonic()
        parsed, read = await self._read(request, version)
        logged = None
        if parsed.inputs:  # it was chosen for the log
            parsed = replace(parsed, id=uuid4().hex if parsed.id is None else parsed.id)
            logged = LoggedRequest(version, parsed, len(request.body), read)
            read = logged.keep_rows
        scores = await self._batcher.scores(version, parsed.num_rows, read)
        problem = why_not_finite(scores)
        if problem is not None:
            refuse(problem)
        manifest = version.model.manifest
        outputs = [(output.name, scores[:, index]) for index, output in enumerate(manifest.outputs)]
        response = infer_response(parsed, manifest.name, version.name, version.identity, outputs)
        if logged is not None and self._request_log is not None:
            logged.scores = scores
            self._request_log.put(logged)
        seconds = self._metrics.request_seconds.labels(manifest.name, version.name)
        seconds.observe(time.monotonic() - started)
        return response

    async def _read(
        self, request: Request, version: Version
    ) -> tuple[InferRequest, Callable[[], Rows]]:
        """Return a request without its inputs, unless it is to be logged, and what reads its rows.

        JSON and texts become Python objects, which takes far longer than to look at an array. A thread makes those of more
        than `SMALL_BYTES`, and another one those of more than `LARGE_BYTES`, for which the others need not wait. Raises
        RequestError: it is malformed, has more rows than may wait, or has waited too long.
        """
        described = None
        size = json_length(request.body, request.headers)
        if size <= SMALL_BYTES:
            described = describe_infer(request.body, request.headers)
            self._batcher.check(described.request.num_rows)
            size = described.object_bytes
        if size <= SMALL_BYTES:
            return self._parsed(request, version, described)
        lane = self._small if size <= LARGE_BYTES else self._large
        return await lane.run(partial(self._parsed, request, version, described, is_small=False))

    def _parsed(
        self,
        request: Request,
        version: Version,
        described: Described | None,
        *,
        is_small: bool = True,
    ) -> tuple[InferRequest, Callable[[], Rows]]:
        """Do as `_read`, in any thread; raw values become rows at once unless they are few."""
        if described is None:
            described = describe_infer(request.body, request.headers)
            # Before its values are looked at.
            self._batcher.check(described.request.num_rows)
        parsed = read_inputs(described, request.body)
        is_raw, read = self._reader(parsed, version)
        if self._request_log is None or not self._request_log.is_chosen():
            # Texts take far more memory than the rows, which may wait.
            parsed.inputs.clear()
        if is_raw and not is_small:
            rows = read()
            return parsed, lambda: rows
        return parsed, read

    def _reader(self, request: InferRequest, version: Version) -> tuple[bool, Callable[[], Rows]]:
        """Return whether the inputs of a request are raw values, and what reads its rows.

        Raises RequestError: an input is wrong; what reads the rows raises it too.
        """
        manifest, raw, num_rows = version.model.manifest, version.model.raw, request.num_rows
        if raw is not None and not takes_ids(manifest, request.inputs):
            columns = {name: tensor.values for name, tensor in request.inputs.items()}
            shapes = {name: tensor.shape for name, tensor in request.inputs.items()}
            return True, partial(_refusing, raw.rows, columns, shapes, num_rows)
        arrays = {}
        for tensor in request.inputs.values():
            if isinstance(tensor.values, list):
                refuse(f"input {shown(tensor.name)} is text; want numbers")
            arrays[tensor.name] = tensor.values
        return False, partial(_refusing, version.model.id_inputs.rows, arrays, num_rows)

    def _metrics_text(self) -> bytes:
        gauges: Gauges = {
            "serving_queued_rows": ("Rows that wait.", self._batcher.queued_rows),
            "serving_connections": ("Open connections.", self._http.num_connections),
            "serving_version_swaps_total": (
                "Changes of the version.",
                {of.name: of.swaps for of in self._models},
            ),
            "serving_versions_refused_total": (
                "Versions that were refused.",
                {of.name: of.refused for of in self._models},
            ),
            "serving_sampled_lookups_total": (
                "Sampled ids of tables with rows in host memory behind a GPU's.",
                {of.name: of.current.model.sampled.lookups for of in self._models},
            ),
            "serving_sampled_hits_total": (
                "Those whose row was on the GPU.",
                {of.name: of.current.model.sampled.hits for of in self._models},
            ),
        }
        shares = [share for of in self._models for share in of.shares()]
        return self._metrics.text(shares, gauges)

    def _want(self, request: Request, method: str) -> None:
        if request.method != method:
            raise RequestError(
                HTTPStatus.METHOD_NOT_ALLOWED, f"want {method}", headers={"Allow": method}
            )


def _version(versions: Versions, name: str) -> Version:
    serving = {version.name: version for version in versions.serving}
    if name not in serving:
        text = f"version {shown(name)} does not serve; what serves is {' and '.join(serving)}"
        raise RequestError(HTTPStatus.NOT_FOUND, text)
    return serving[name]


def _refusing(read: Callable[..., Rows], *args: Any) -> Rows:
    """Return the rows that are read; refuse the request if an input is wrong."""
    try:
        return read(*args)
    except InputError as error:
        message = str(error)
    # Not within: the refusal would hold that error, its frames, and so itself.
    raise RequestError(HTTPStatus.BAD_REQUEST, message)


def _metadata(version: Version, serving: list[str]) -> dict[str, Any]:
    manifest, raw = version.model.manifest, version.model.raw
    inputs = features = manifest.inputs
    # A client fills all inputs that are listed, so they are of one kind: raw values, if the model takes them.
    raw_inputs = {} if raw is None else {"raw": raw.describe_inputs()}
    if raw_inputs:
        inputs = raw_inputs["raw"]
        # Without other features a ragged one has the name of its column, and cannot be sent as ids.
        features = features if takes_ids(manifest, {entry["name"] for entry in features}) else []
    sequences = {"sequences": [*map(asdict, manifest.sequences)]} if manifest.sequences else {}
    return {
        "name": manifest.name,
        "versions": serving,
        "platform": "pytorch_export",
        "inputs": inputs,
        "outputs": [
            {"name": output.name, "datatype": "FP32", "shape": [-1]} for output in manifest.outputs
        ],
        "parameters": {
            "identity": version.identity,
            "model": manifest.model,
            "step": manifest.source.get("step"),
            "dtype": manifest.dtype,
            "features": features,
            "numerical": manifest.numerical,
            "ids": [
                feature.name for feature in manifest.fixed for _ in range(feature.hotness or 0)
            ],
            **sequences,
            **raw_inputs,
        },
    }
