"""KServe's v2 protocol: JSON, and the extension of binary tensors. Tensors in, tensors out; nothing about models."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from http import HTTPStatus
from types import NoneType
from typing import Any, NoReturn

import numpy as np

from configs.messages import shown
from dataloading.dataset.documents import DoubleKeyError, decode_json
from serving.server.http_server import HEADER_LENGTH, RequestError, Response

JSON_BYTES = 8 << 20
"""Most bytes of JSON and texts: their objects take about twenty times as much memory."""
DTYPES = {
    "BOOL": np.bool_,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
}
BYTES_DTYPES = {name: np.dtype(dtype).newbyteorder("<") for name, dtype in DTYPES.items()}
"""Of binary data."""
TEXT = "BYTES"
MOST_INPUTS = 4096
REMEMBERED = 64
"""JSON documents whose meaning is remembered: a client of binary tensors sends the same one again and again."""
REMEMBERED_BYTES = 4096
"""Longest of them."""


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    datatype: str  # a key of `DTYPES`, or `TEXT`
    shape: tuple[int, ...]
    values: Any  # array of this shape; of `TEXT`, a flat list of texts, None where one is missing


@dataclass(frozen=True, slots=True)
class InferRequest:
    inputs: dict[str, Tensor]  # by name; all have the same first number in their shape
    num_rows: int
    id: str | None = None  # of the client, which the response repeats
    # whether each wanted output is binary; empty for all
    outputs: Mapping[str, bool] = field(default_factory=dict)
    is_binary: bool = False  # whether outputs are binary where they do not say


def refuse(message: str) -> NoReturn:
    raise RequestError(HTTPStatus.BAD_REQUEST, message)


def json_length(body: bytes | memoryview, headers: Mapping[str, str]) -> int:
    """Return the bytes of JSON at the beginning of a body.

    Raises RequestError: they are too many, or the header that says so is malformed.
    """
    text = headers.get(HEADER_LENGTH)
    if text is not None and not (text.isdecimal() and len(text) < 12 and int(text) <= len(body)):
        refuse(f"{HEADER_LENGTH} is not the length of the JSON in the body")
    length = len(body) if text is None else int(text)
    if length > JSON_BYTES:
        raise RequestError(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"{length:,} bytes of JSON, want at most {JSON_BYTES:,}; send binary tensors, or fewer rows",
        )
    return length


def describe_infer(body: bytes | memoryview, headers: Mapping[str, str]) -> "Described":
    """Return what the JSON of a body says; its tensors are not read.

    Raises RequestError: it is malformed; the message names the input.
    """
    length = json_length(body, headers)
    document = bytes(body[:length])
    is_remembered = HEADER_LENGTH in headers and length <= REMEMBERED_BYTES
    return _remembered(document) if is_remembered else _describe(document)


def read_inputs(described: "Described", body: bytes | memoryview) -> InferRequest:
    """Return the request of a body, with its tensors; RequestError: a tensor is malformed; the message names the input."""
    inputs: dict[str, Tensor] = {}
    rest = memoryview(body)[described.length :]
    room = JSON_BYTES - described.length
    for entry in described.entries:
        if entry.size is None:
            values = _from_json(entry)
        else:
            values, rest = _from_bytes(entry, entry.size, rest, room)
            if entry.datatype == TEXT:
                room -= entry.size
        inputs[entry.name] = Tensor(entry.name, entry.datatype, entry.shape, values)
    if rest:
        refuse(f"{len(rest):,} bytes follow the last binary tensor")
    return replace(described.request, inputs=inputs)


@dataclass(frozen=True, slots=True)
class _Entry(Tensor):
    """An input whose `values` are those in the JSON."""

    size: int | None  # bytes of its binary data; None without any

    @property
    def where(self) -> str:
        return f"input {shown(self.name)}"


@dataclass(frozen=True, slots=True)
class Described:
    entries: tuple[_Entry, ...]
    length: int  # bytes of the JSON
    request: InferRequest  # without inputs

    @property
    def object_bytes(self) -> int:
        """Bytes of JSON and texts, whose values become Python objects; those of arrays do not."""
        return self.length + sum(
            entry.size for entry in self.entries if entry.size and entry.datatype == TEXT
        )


def _describe(text: bytes) -> Described:
    try:
        content = decode_json(text)
    except DoubleKeyError as error:
        refuse(f"the body: {error}")
    except (ValueError, RecursionError):
        refuse("the body is not JSON")
    document = _mapping(content, "the body")
    inputs = document.get("inputs")
    if not isinstance(inputs, list) or not 0 < len(inputs) <= MOST_INPUTS:
        refuse("want a list of inputs")
    entries = tuple(_entry(_mapping(entry, "an input")) for entry in inputs)
    names = Counter(entry.name for entry in entries)
    for name, count in names.items():
        if count > 1:
            refuse(f"input {shown(name)} is there twice")
    rows = {entry.shape[0] for entry in entries}
    if len(rows) > 1:
        refuse(f"inputs have {', '.join(map(str, sorted(rows)))} rows; want the same number")
    if 0 in rows:
        refuse("the inputs have no rows")
    parameters = _parameters(document, "parameters")
    identity = document.get("id")
    # No log of requests could be read that has half of a surrogate pair.
    is_text = isinstance(identity, str) and identity == identity.encode(errors="ignore").decode()
    if identity is not None and not is_text:
        refuse("want a text in UTF-8 as id")
    is_binary = _flag(parameters, "binary_data_output", default=False)
    outputs = _outputs(document.get("outputs"), is_binary)
    request = InferRequest({}, rows.pop(), identity, outputs, is_binary)
    return Described(entries, len(text), request)


_remembered = lru_cache(REMEMBERED)(_describe)


def _outputs(entries: Any, is_binary: bool) -> dict[str, bool]:
    outputs = {}
    if entries is not None and not isinstance(entries, list):
        refuse("want a list of outputs")
    for entry in entries or []:
        entry = _mapping(entry, "an output")
        parameters = _parameters(entry, "the parameters of an output")
        outputs[_name(entry)] = _flag(parameters, "binary_data", default=is_binary)
    return outputs


def _entry(entry: Mapping[str, Any]) -> _Entry:
    name = _name(entry)
    where = f"input {shown(name)}"
    datatype, shape = entry.get("datatype"), entry.get("shape")
    if not isinstance(datatype, str) or (datatype != TEXT and datatype not in DTYPES):
        refuse(f"{where} has datatype {shown(datatype)}; want one of {', '.join(DTYPES)}, {TEXT}")
    if (
        not isinstance(shape, list)
        or not 1 <= len(shape) <= 2
        or not all(type(size) is int and 0 <= size < 2**31 for size in shape)
    ):
        refuse(f"{where} has shape {shown(shape)}; want [rows] or [rows, columns]")
    size = _parameters(entry, f"the parameters of {where}").get("binary_data_size")
    if size is not None and (type(size) is not int or size < 0):
        refuse(f"{where} has binary_data_size {shown(size)}; want a number of bytes")
    return _Entry(name, datatype, tuple(shape), entry.get("data"), size)


def _from_bytes(entry: _Entry, size: int, rest: memoryview, room: int) -> tuple[Any, memoryview]:
    """Return the values of an input and the binary data after its own; a text may have `room` bytes."""
    if size > len(rest):
        refuse(
            f"{entry.where} has binary_data_size {shown(size)}, and {len(rest):,} bytes are left"
        )
    data, rest = rest[:size], rest[size:]
    count = math.prod(entry.shape)
    if entry.datatype == TEXT:
        if size > room:
            raise RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"JSON and texts of more than {JSON_BYTES:,} bytes with {entry.where}; send fewer rows",
            )
        return _texts(entry.where, data, count), rest
    dtype = BYTES_DTYPES[entry.datatype]
    if size != count * dtype.itemsize:
        refuse(
            f"{entry.where} has {size:,} bytes, and {entry.datatype} {list(entry.shape)} needs {count * dtype.itemsize:,}"
        )
    if entry.datatype == "BOOL" and (np.frombuffer(data, np.uint8) > 1).any():
        refuse(f"{entry.where} has a byte that is neither 0 nor 1, which is no BOOL")
    return np.frombuffer(data, dtype).reshape(entry.shape), rest


def _from_json(entry: _Entry) -> Any:
    where, datatype, shape, data = entry.where, entry.datatype, list(entry.shape), entry.values
    if not isinstance(data, list):
        refuse(f"{where} has no list as data")
    lengths = None
    if data and isinstance(data[0], list):
        if not all(isinstance(row, list) for row in data):
            refuse(f"{where} mixes lists and values")
        lengths = [len(row) for row in data]
        data = [value for row in data for value in row]
    if len(data) != math.prod(shape):
        refuse(f"{where} has {len(data):,} values, and shape {shape} needs {math.prod(shape):,}")
    if lengths is not None and (len(shape) != 2 or lengths != [shape[1]] * shape[0]):
        refuse(
            f"{where} has {len(lengths):,} lists of {min(lengths):,} to {max(lengths):,} values, which do not form shape {shape}"
        )
    if datatype == TEXT:
        if not all(value is None or isinstance(value, str) for value in data):
            refuse(f"{where} has a value that is no text; {TEXT} takes texts and null")
        try:
            "".join(value or "" for value in data).encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            refuse(f"{where} has a text that is not UTF-8")
        return data
    is_float = datatype.startswith("FP")
    # A float of None is NaN, which is missing.
    kinds = (int, float, NoneType) if is_float else (bool,) if datatype == "BOOL" else (int,)
    for value in data:
        if type(value) not in kinds:
            got = "null" if value is None else shown(value)
            refuse(f"{where} has the value {got}, which is no {datatype}")
    try:
        array = np.array(data, dtype=np.float64 if is_float else np.int64)
        with np.errstate(over="ignore"):  # infinity, which nothing takes
            narrow: np.ndarray = array.astype(DTYPES[datatype])
    except OverflowError:
        refuse(f"{where} has a value beyond {datatype}")
    if not is_float and (narrow != array).any():
        refuse(f"{where} has a value beyond {datatype}")
    return narrow.reshape(shape)


def _texts(where: str, data: memoryview, count: int) -> list[str | None]:
    """Return the texts of a binary tensor, each after its length in 4 bytes."""
    texts: list[str | None] = []
    offset, end = 0, len(data)
    if count * 4 > end:
        refuse(f"{where} has {end:,} bytes, too few for {count:,} texts")
    for _ in range(count):
        first = offset + 4
        offset = first + int.from_bytes(data[offset:first], "little")
        if offset > end:
            refuse(f"{where} ends within a text")
        try:
            texts.append(str(data[first:offset], "utf-8"))
        except UnicodeDecodeError:
            refuse(f"{where} has a text that is not UTF-8")
    if offset != end:
        refuse(f"{where} has {end - offset:,} bytes after its last text")
    return texts


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        refuse(f"{where} is {shown(value)}; want an object")
    return value


def _parameters(entry: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    value = entry.get("parameters")
    return {} if value is None else _mapping(value, where)


def _flag(parameters: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        refuse(f"{name} is {shown(value)}; want true or false")
    return value


def _name(entry: Mapping[str, Any]) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"an input or output has the name {shown(name)}; want a text")
    return name


def infer_response(
    request: InferRequest,
    model: str,
    version: str,
    model_identity: str,
    outputs: Sequence[tuple[str, np.ndarray]],
) -> Response:
    """Return the response with these outputs, float32 [B] each.

    `model_identity`: of that version's content, since its number may be used again. Raises RequestError: the request wants
    an output that there is not.
    """
    names = [name for name, _ in outputs]
    for name in request.outputs:
        if name not in names:
            refuse(f"there is no output {shown(name)}; the model has {', '.join(names)}")
    entries: list[tuple[str, int, list[float] | None]] = []
    blobs: list[bytes] = []
    for name, values in outputs:
        if request.outputs and name not in request.outputs:
            continue
        if request.outputs.get(name, request.is_binary):
            blobs.append(np.asarray(values, "<f4").tobytes())
            entries.append((name, len(values), None))
        else:
            entries.append((name, len(values), values.tolist()))
    is_remembered = len(blobs) == len(entries) and request.id is None
    write = _remembered_head if is_remembered else _response_head
    head = write(model, version, model_identity, request.id, tuple(entries))
    if not blobs:
        return Response(body=head)
    return Response(
        body=b"".join([head, *blobs]),
        content_type="application/octet-stream",
        headers={"Inference-Header-Content-Length": str(len(head))},
    )


def _response_head(
    model: str,
    version: str,
    model_identity: str,
    identity: str | None,
    entries: tuple[tuple[str, int, list[float] | None], ...],
) -> bytes:
    """Return the JSON; `entries`: name, rows and values of each output, None where they are binary."""
    outputs = []
    for name, rows, values in entries:
        entry: dict[str, Any] = {"name": name, "datatype": "FP32", "shape": [rows]}
        if values is None:
            entry["parameters"] = {"binary_data_size": 4 * rows}
        else:
            entry["data"] = values
        outputs.append(entry)
    document: dict[str, Any] = {
        "model_name": model,
        "model_version": version,
        "parameters": {"identity": model_identity},
        "outputs": outputs,
    }
    if identity is not None:
        document["id"] = identity
    return json.dumps(document).encode()


_remembered_head = lru_cache(REMEMBERED)(_response_head)


def json_response(document: Any, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(status, json.dumps(document).encode())
