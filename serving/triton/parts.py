"""Parts of a model directory in Triton: scores of features, embeddings of ids, scores of embeddings."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from serving.inference.dense import load_dense
from serving.inference.key_rows import load_key_rows
from serving.inference.model_rows import Rows
from serving.inference.requests import IdInputs, InputError
from serving.inference.scores import ScoreHead
from serving.inference.tables import MappedTables
from serving.loading import model_loader
from serving.manifest import DENSE, NUMERICAL, Manifest

EMBEDDINGS = "embeddings"
"""Output of the sparse part and input of the dense one, float32 [B, T]."""

Inputs = Mapping[str, Tensor]
Answer = dict[str, Tensor] | str
Part = Callable[[Sequence[Inputs]], list[Answer]]

# B: rows, T: columns of all embeddings


def load_part(directory: Path, parameters: Mapping[str, str]) -> Part:
    """Return a part: a function from the inputs of several requests to an answer of each, a text if it is refused.

    Args:
        directory: of the model.
        parameters: of `config.pbtxt`.
    """
    torch.set_num_threads(int(parameters["threads"]))
    manifest = Manifest.read(directory)
    match parameters["part"]:
        case "scores":
            return _Scores(directory, manifest, parameters)
        case "embeddings":
            return _Embeddings(directory, manifest)
        case "dense":
            return _Dense(directory, manifest)
    raise ValueError(f"there is no part {parameters['part']}")


class _Scores:
    """Scores of features: the complete model."""

    def __init__(self, directory: Path, manifest: Manifest, parameters: Mapping[str, str]) -> None:
        load = model_loader(
            parameters["device"],
            int(parameters["max_batch"]),
            parameters["dense_dtype"],
            float(parameters["table_gib"]) if parameters["table_gib"] else None,
        )
        self._model = load(directory, manifest)
        self._names = [output.name for output in manifest.outputs]
        self._inputs = IdInputs(manifest, self._model.keys)

    def __call__(self, requests: Sequence[Inputs]) -> list[Answer]:
        """Return the scores of requests, [B, 1] per output."""
        return _of_rows(self._inputs, requests, self._scores)

    def _scores(self, rows: Rows) -> dict[str, Tensor]:
        scores = self._model.scores(rows)
        return {name: scores[:, i : i + 1] for i, name in enumerate(self._names)}


class _Embeddings:
    """Embeddings of ids: the tables."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._tables = MappedTables(directory, manifest)
        self._inputs = IdInputs(manifest, load_key_rows(directory, manifest), with_numerical=False)

    def __call__(self, requests: Sequence[Inputs]) -> list[Answer]:
        """Return the embeddings of requests, [B, T]."""
        return _of_rows(self._inputs, requests, lambda rows: {EMBEDDINGS: self._tables(rows)})


class _Dense:
    """Scores of numerical features and embeddings: the dense component."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._dense, self._head = load_dense(directory / DENSE), ScoreHead(manifest)
        self._names = [output.name for output in manifest.outputs]

    def __call__(self, requests: Sequence[Inputs]) -> list[Answer]:
        """Return the scores of requests, [B, 1] per output."""
        sizes = [len(inputs[EMBEDDINGS]) for inputs in requests]
        numerical = torch.cat([inputs[NUMERICAL] for inputs in requests])
        embeddings = torch.cat([inputs[EMBEDDINGS] for inputs in requests])
        with torch.inference_mode():
            scores = self._head(self._dense(numerical, embeddings), None)
        found = {name: scores[:, i : i + 1] for i, name in enumerate(self._names)}
        return list(_split(found, sizes))


def _of_rows(
    inputs: IdInputs,
    requests: Sequence[Inputs],
    function: Callable[[Rows], dict[str, Tensor]],
) -> list[Answer]:
    """Apply a function to the rows of all requests at once; return the answer of each."""
    answers: list[Answer] = [""] * len(requests)
    accepted: dict[int, Rows] = {}
    for index, request in enumerate(requests):
        num_rows = len(next(iter(request.values())))
        arrays = {name: tensor.numpy() for name, tensor in request.items()}
        try:
            accepted[index] = inputs.rows(arrays, num_rows)
        except InputError as error:
            answers[index] = str(error)
    if accepted:
        with torch.inference_mode():
            found = function(Rows.joined(list(accepted.values())))
        split = _split(found, [len(rows) for rows in accepted.values()])
        for index, answer in zip(accepted, split, strict=True):
            answers[index] = answer
    return answers


def _split(found: Mapping[str, Tensor], sizes: Sequence[int]) -> Sequence[dict[str, Tensor]]:
    """Return the rows of each request, contiguous."""
    parts = {name: tensor.split(list(sizes)) for name, tensor in found.items()}
    return [
        {name: split[index].contiguous() for name, split in parts.items()}
        for index in range(len(sizes))
    ]
