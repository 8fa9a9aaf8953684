"""Requests of the v2 protocol: JSON and binary tensors hold the same, and texts may be missing."""

import json

import numpy as np
import pytest

from serving.server.http_server import RequestError
from serving.server.protocol import InferRequest, describe_infer, infer_response, read_inputs


def parse_infer(body: bytes, headers: dict[str, str]) -> InferRequest:
    return read_inputs(describe_infer(body, headers), body)


def request(entries: list[dict], *blobs: bytes, **more) -> tuple[bytes, dict[str, str]]:
    """Return body and headers."""
    head = json.dumps({"inputs": entries, **more}).encode()
    return head + b"".join(blobs), {"inference-header-content-length": str(len(head))}


def entry(name: str, kind: str, shape: list[int], blob: bytes) -> dict:
    parameters = {"binary_data_size": len(blob)}
    return {"name": name, "datatype": kind, "shape": shape, "parameters": parameters}


def test_binary_tensors_hold_what_json_does():
    ids = np.arange(6, dtype="<i4").tobytes()
    texts = b"".join(len(t).to_bytes(4, "little") + t for t in (b"a", b"", "é".encode()))
    entries = [entry("ids", "INT32", [3, 2], ids), entry("city", "BYTES", [3], texts)]
    found = parse_infer(*request(entries, ids, texts, id="7"))
    in_json = [
        {"name": "ids", "datatype": "INT32", "shape": [3, 2], "data": [[0, 1], [2, 3], [4, 5]]},
        {"name": "city", "datatype": "BYTES", "shape": [3], "data": ["a", None, "é"]},
    ]
    wanted = parse_infer(json.dumps({"inputs": in_json}).encode(), {})
    assert (found.num_rows, found.id, wanted.id) == (3, "7", None)
    np.testing.assert_array_equal(found.inputs["ids"].values, wanted.inputs["ids"].values)
    assert found.inputs["city"].values == ["a", "", "é"]
    assert wanted.inputs["city"].values == ["a", None, "é"]


@pytest.mark.filterwarnings("error")
def test_null_is_missing_and_a_large_number_infinite():
    def parsed(kind: str, data: list) -> np.ndarray:
        tensor = {"name": "age", "datatype": kind, "shape": [len(data)], "data": data}
        return parse_infer(json.dumps({"inputs": [tensor]}).encode(), {}).inputs["age"].values

    np.testing.assert_array_equal(parsed("FP32", [1.5, None, 1e300]), [1.5, np.nan, np.inf])
    with pytest.raises(RequestError, match="has the value null, which is no INT64"):
        parsed("INT64", [1, None])


@pytest.mark.parametrize(
    ("shape", "blob", "message"),
    [
        ([1], b"\5\0\0\0a", "ends within a text"),
        ([1], b"\1\0\0\0\xff", "not UTF-8"),
        ([1], b"\1\0\0\0ab", "1 bytes after its last text"),
        ([9], b"\0\0\0\0", "too few for 9 texts"),
        ([1], bytes(9 << 20), "JSON and texts of more than 8,388,608 bytes"),
    ],
    ids=range(5),
)
def test_broken_texts_are_refused(shape, blob, message):
    with pytest.raises(RequestError, match=message):
        parse_infer(*request([entry("city", "BYTES", shape, blob)], blob))


def test_booleans_are_read_in_both_forms():
    in_json = {"name": "a", "datatype": "BOOL", "shape": [2], "data": [True, False]}
    parsed = parse_infer(*request([in_json, entry("b", "BOOL", [2], b"\1\0")], b"\1\0"))
    for tensor in parsed.inputs.values():
        assert (tensor.values.dtype, tensor.values.tolist()) == (np.bool_, [True, False])


def test_what_is_no_boolean_is_refused():
    with pytest.raises(RequestError, match="a byte that is neither 0 nor 1, which is no BOOL"):
        parse_infer(*request([entry("new", "BOOL", [2], b"\1\2")], b"\1\2"))
    with pytest.raises(RequestError, match="the value 1, which is no BOOL"):
        parse_infer(*request([{"name": "a", "datatype": "BOOL", "shape": [1], "data": [1]}]))


@pytest.mark.parametrize(
    "text",
    [
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [31], "data": [77]}]}',
        b'{"inputs": [], "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [31]}]}',
    ],
)
def test_a_key_that_is_there_twice_is_refused(text):
    with pytest.raises(RequestError, match=r"has the key '(data|inputs)' twice"):
        parse_infer(text, {})


def test_a_client_chooses_outputs_and_their_form():
    blob = b"\0" * 4
    wanted = [{"name": "buy", "parameters": {"binary_data": True}}]
    parsed = parse_infer(*request([entry("x", "FP32", [1], blob)], blob, outputs=wanted))
    outputs = [("click", np.float32([0.5])), ("buy", np.float32([0.25]))]
    response = infer_response(parsed, "m", "3", "ab12", outputs)
    length = int(response.headers["Inference-Header-Content-Length"])
    document = json.loads(response.body[:length])
    assert (document["model_version"], [o["name"] for o in document["outputs"]]) == ("3", ["buy"])
    assert document["parameters"] == {"identity": "ab12"}
    assert np.frombuffer(response.body[length:], "<f4").tolist() == [0.25]
    with pytest.raises(RequestError, match="no output 'buy'; the model has click"):
        infer_response(parsed, "m", "3", "ab12", outputs[:1])
