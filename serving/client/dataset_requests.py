"""Rows of a dataset as requests for scores with binary tensors, and the scores of responses."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataloading.dataset.documents import decode_json
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.source import Columns
from serving.client.connection import Reply, ServerError
from serving.manifest import IDS, NUMERICAL, PADDING

DTYPES = {"FP32": "<f4", "INT32": "<i4", "INT64": "<i8"}
DATATYPES = {dtype: datatype for datatype, dtype in DTYPES.items()}

# B: rows, N: numerical features, H: ids of a row in all features of fixed hotness


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    num_rows: int  # B
    body: bytes  # JSON, and binary tensors behind it
    header_length: int  # bytes of the JSON
    inputs: Mapping[str, np.ndarray]  # the tensors by name, for shared memory


def encoded(
    num_rows: int, inputs: Mapping[str, np.ndarray], datatypes: Mapping[str, str]
) -> EncodedRequest:
    """Return a request of these tensors, in the datatypes of their names; FP32 where there is none."""
    arrays, entries = {}, []
    for name, values in inputs.items():
        array = np.ascontiguousarray(values, DTYPES[datatypes.get(name, "FP32")])
        arrays[name] = array
        entries.append(input_entry(name, array, {"binary_data_size": array.nbytes}))
    document = {"inputs": entries, "parameters": {"binary_data_output": True}}
    head = json.dumps(document).encode()
    body = b"".join([head, *(array.tobytes() for array in arrays.values())])
    return EncodedRequest(num_rows, body, len(head), arrays)


def input_entry(name: str, array: np.ndarray, where: Mapping[str, object]) -> dict[str, object]:
    """Return what a request says of a tensor, `where` its bytes are too."""
    datatype, shape = DATATYPES[array.dtype.str], list(array.shape)
    return {"name": name, "datatype": datatype, "shape": shape, "parameters": where}


class RequestEncoder:
    """Encoder of rows for one model. Raises ValueError: the dataset has other features than the model."""

    def __init__(self, metadata: Mapping[str, Any], spec: FeatureSpec) -> None:
        self._spec = spec
        try:
            # Servers of earlier versions, and Triton, list features as inputs, and raw values, which are texts, beside them.
            listed = metadata.get("parameters", {}).get("features", metadata["inputs"])
            declared = {entry["name"]: entry for entry in listed if entry["datatype"] in DTYPES}
            self.outputs = [entry["name"] for entry in metadata["outputs"]]
            self._datatypes = {name: entry["datatype"] for name, entry in declared.items()}
            shapes = {name: entry["shape"] for name, entry in declared.items()}
        except (LookupError, TypeError):
            raise ServerError("the server's metadata of the model is malformed") from None
        columns = {NUMERICAL: len(spec.numerical)} if spec.numerical else {}
        fixed = sum(feature.hotness or 0 for feature in spec.categorical)
        columns |= {IDS: fixed} if fixed else {}
        ragged = [feature.name for feature in spec.categorical if feature.hotness is None]
        for name in [*columns, *ragged]:
            if name not in declared:
                raise ValueError(f"data_path={spec.root}: the served model has no input {name}")
        for name, count in columns.items():
            if shapes[name][-1] != count:
                raise ValueError(
                    f"data_path={spec.root} has {count} columns of {name}, and the served model {shapes[name][-1]}; name the "
                    "dataset that it was trained on"
                )
        known = metadata.get("parameters", {})
        if "numerical" in known and list(known["numerical"]) != list(spec.numerical):
            raise ValueError(
                f"data_path={spec.root} has other numerical features than the served model"
            )

    def encode(self, columns: Columns) -> EncodedRequest:
        inputs = self._inputs(columns)
        if columns.keep_rates is not None and self._spec.keep_rate is not None:
            inputs[self._spec.keep_rate.name] = columns.keep_rates
        return encoded(len(columns.labels), inputs, self._datatypes)

    def _inputs(self, columns: Columns) -> dict[str, np.ndarray]:
        size = len(columns.labels)
        inputs: dict[str, np.ndarray] = {}
        if self._spec.numerical:
            inputs[NUMERICAL] = columns.numerical
        fixed, lengths_of = [], {}
        for feature, ids, lengths in zip(
            self._spec.categorical, columns.ids, columns.lengths, strict=True
        ):
            if lengths is None:
                fixed.append(ids.reshape(size, -1))
                continue
            matrix = np.full((size, max(1, int(lengths.max(initial=0)))), PADDING, ids.dtype)
            matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = ids
            inputs[feature.name] = matrix
            lengths_of[feature.name] = lengths
        if fixed:
            inputs[IDS] = np.concatenate(fixed, axis=1)
        events = iter(columns.events)
        for group in self._spec.sequences:
            shape = inputs[group.features[0]].shape
            for column in group.numbers:
                numbers = np.zeros(shape, np.float32)
                is_event = np.arange(shape[1]) < lengths_of[group.features[0]][:, None]
                numbers[is_event] = next(events)
                if column.name in self._datatypes:  # a model that pools the ids takes none
                    inputs[column.name] = numbers
        return inputs


def scores_of(reply: Reply, num_rows: int) -> dict[str, np.ndarray]:
    """Return the scores of a response by output, float32 [B]. Raises ServerError: it is an error, or malformed."""
    if reply.status != 200:
        raise ServerError(f"the server answers {reply.status}, {reply.message}")
    try:
        length = int(reply.headers.get("inference-header-content-length", len(reply.body)))
        document, scores, offset = decode_json(reply.body[:length]), {}, length
        for entry in document["outputs"]:
            size = entry.get("parameters", {}).get("binary_data_size")
            if size is None:
                values = np.array(entry["data"], np.float32)
            else:
                values = np.frombuffer(reply.body[offset : offset + size], "<f4")
                offset += size
            scores[entry["name"]] = values.reshape(num_rows)
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(f"the response is malformed: {error}") from None
    return scores
