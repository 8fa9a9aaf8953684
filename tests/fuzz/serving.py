"""Requests to a server, as bytes from a socket, and model directories: a score, or one line that says what is wrong."""

import asyncio
import copy
import json
import shutil
import sys
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from hypothesis import strategies as st

from serving.inference.model import ServedModel
from serving.inference.requests import IdInputs, InputError
from serving.inference.versions import load_version
from serving.manifest import MANIFEST, Manifest
from serving.server.http_server import App, HttpLimits, Request, RequestError, Response
from serving.server.protocol import describe_infer, infer_response, read_inputs
from serving.versions import Deciding
from tests.fuzz.harness import Fuzzer
from tests.fuzz.mutations import (
    JSON_LITERALS,
    apply_bytes,
    apply_edits,
    as_json,
    bytes_edits,
    document_edits,
)
from tests.serving.handmade_model import some_rows, write_model

HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nAuthorization: Bearer a\r\n%s\r\n"


@dataclass(frozen=True)
class _Served:
    """A model directory, its inputs, and a valid request."""

    path: Path
    model: ServedModel
    inputs: IdInputs
    document: dict[str, Any]
    tensors: bytes

    def answer(self, head: bytes, body: bytes) -> None:
        """Answer a request as the server does, without its queue; end as a command does."""
        try:
            request = _received(head, body)
            parsed = read_inputs(describe_infer(request.body, request.headers), request.body)
            arrays = {}
            for tensor in parsed.inputs.values():
                if isinstance(tensor.values, list):
                    raise InputError("want numbers")
                arrays[tensor.name] = tensor.values
            rows = self.inputs.rows(arrays, parsed.num_rows)
            scores = self.model.scores(rows).numpy()
            assert scores.shape == (parsed.num_rows, 2)
            # A keep rate of almost 0 may end at the edge of what a probability can be.
            assert np.isfinite(scores).all()
            infer_response(
                parsed, "m", "1", "0", [("click", scores[:, 0]), ("price", scores[:, 1])]
            )
        except (RequestError, InputError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)


def _received(head: bytes, body: bytes) -> Request:
    """Return a request as the app hands it on, after uvicorn's parser."""
    scope: dict[str, Any] = {"type": "http", "headers": [], "path": "", "method": ""}
    parser = HttpRequestParser(_Parsed(scope))
    try:
        parser.feed_data(head)
    except HttpParserError as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, str(error)) from error
    except HttpParserUpgrade:
        pass
    if scope["path"] == "":
        raise RequestError(HTTPStatus.BAD_REQUEST, "half a head")
    scope |= {"method": parser.get_method().decode(), "http_version": parser.get_http_version()}
    size = int(dict(scope["headers"]).get(b"content-length", 0))
    if size > len(body):
        raise RequestError(HTTPStatus.REQUEST_TIMEOUT, "the body did not arrive")
    found: list[Request] = []
    errors: list[RequestError] = []

    async def handler(request: Request) -> Response:
        found.append(request)
        return Response()

    def refuse(error: RequestError) -> Response:
        errors.append(error)
        return Response(error.status)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body[:size]}

    async def send(message: dict[str, Any]) -> None:
        pass

    app = App(handler, refuse, HttpLimits(1 << 20, 1 << 20, 1, 1.0), print)
    asyncio.run(app(scope, receive, send))
    if errors:
        raise errors[0]
    return found[0]


class _Parsed:
    """Receiver of the parser's calls."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self._scope = scope

    def on_header(self, name: bytes, value: bytes) -> None:
        self._scope["headers"].append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._scope["path"] = "/"


def _make(directory: Path) -> _Served:
    path = write_model(directory / "1", "fp32")
    rows = some_rows(2, 2, 1)
    ragged = {name: np.full((2, 3), -1, np.int64) for name in rows.ragged}
    inputs = {"numerical": rows.numerical.numpy(), "ids": rows.ids.numpy(), **ragged}
    entries, blobs = [], []
    for name, array in inputs.items():
        kind = "FP32" if array.dtype == np.float32 else "INT64"
        entry = {"name": name, "datatype": kind, "shape": list(array.shape)}
        if name == "ids":
            entry["data"] = array.flatten().tolist()
        else:
            blobs.append(array.tobytes())
            entry["parameters"] = {"binary_data_size": array.nbytes}
        entries.append(entry)
    rate = {"name": "rate", "datatype": "FP64", "shape": [2], "data": [0.5, 1.0]}
    outputs = [{"name": "price", "parameters": {"binary_data": True}}, {"name": "click"}]
    document = {"id": "1", "inputs": [*entries, rate], "outputs": outputs}
    manifest = Manifest.read(path)
    model = ServedModel.load(path, manifest)
    return _Served(path, model, IdInputs(manifest), document, b"".join(blobs))


def _head(body: bytes, length: int) -> bytes:
    return HEAD % (len(body), b"Inference-Header-Content-Length: %d\r\n" % length)


def _changed_document(served: _Served, edits: Any, _: Path) -> None:
    text = as_json(apply_edits(served.document, edits)).encode("utf-8", "surrogatepass")
    body = text + served.tensors
    served.answer(_head(body, len(text)), body)


def _changed_bytes(served: _Served, mutation: Any, _: Path) -> None:
    of_head, edits = mutation
    text = json.dumps(served.document).encode()
    body = text + served.tensors
    head = _head(body, len(text))
    if of_head:
        served.answer(apply_bytes(head, edits), body)
    else:
        served.answer(head, apply_bytes(body, edits))


def _changed_manifest(served: _Served, edits: Any, room: Path) -> None:
    target = room / "1"
    shutil.copytree(served.path, target)
    document = json.loads((target / MANIFEST).read_text())
    text = as_json(apply_edits(copy.deepcopy(document), edits))
    (target / MANIFEST).write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load_version(target, "1", Deciding("0", served.path, served.model.manifest))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _manifest_edits(served: _Served) -> st.SearchStrategy:
    return document_edits(json.loads((served.path / MANIFEST).read_text()), JSON_LITERALS)


FUZZERS = [
    Fuzzer(
        "serving: documents of requests",
        _make,
        lambda served: document_edits(served.document, JSON_LITERALS),
        _changed_document,
        60,
    ),
    Fuzzer(
        "serving: bytes of requests",
        _make,
        lambda _: st.tuples(st.booleans(), bytes_edits()),
        _changed_bytes,
        60,
    ),
    Fuzzer("serving: manifests", _make, _manifest_edits, _changed_manifest, 20),
]
