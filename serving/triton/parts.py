"""Parts of a model directory in Triton: scores of features, embeddings of ids, scores of embeddings."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from serving.inference.dense import load_dense
from serving.inference.key_rows import load_key_rows
from serving.inference.model_rows import Rows
from serving.inference.requests import IdInputs, InputError, numbers
from serving.inference.scores import ScoreHead, why_not_finite
from serving.inference.tables import MappedTables
from serving.loading import model_loader
from serving.manifest import DENSE, NUMERICAL, Manifest

EMBEDDINGS = "embeddings"
"""Output of the sparse part and input of the dense one, float32 [B, T]."""

Inputs = Mapping[str, Tensor]
Answer = dict[str, Tensor] | str
Part = Callable[[Sequence[Inputs]], list[Answer]]
T = TypeVar("T")

# B: rows, T: columns of all embeddings


def load_part(directory: Path, parameters: Mapping[str, str]) -> Part:
    """Return a part: a function from the inputs of several requests to an answer of each, a text if it is refused."""
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
        return _finite(_answers(requests, partial(_rows, self._inputs), self._scores))

    def _scores(self, parts: Sequence[Rows]) -> dict[str, Tensor]:
        scores = self._model.scores(*parts)
        return {name: scores[:, i : i + 1] for i, name in enumerate(self._names)}


class _Embeddings:
    """Embeddings of ids: the tables."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._tables = MappedTables(directory, manifest)
        self._inputs = IdInputs(manifest, load_key_rows(directory, manifest), with_numerical=False)

    def __call__(self, requests: Sequence[Inputs]) -> list[Answer]:
        """Return the embeddings of requests, [B, T]."""
        return _answers(requests, partial(_rows, self._inputs), self._embeddings)

    def _embeddings(self, parts: Sequence[Rows]) -> dict[str, Tensor]:
        return {EMBEDDINGS: self._tables(Rows.joined(parts))}


class _Dense:
    """Scores of numerical features and embeddings: the dense component."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._dense, self._head = load_dense(directory / DENSE), ScoreHead(manifest)
        self._names = [output.name for output in manifest.outputs]
        self._numerical = manifest.numerical

    def __call__(self, requests: Sequence[Inputs]) -> list[Answer]:
        """Return the scores of requests, [B, 1] per output."""
        return _finite(_answers(requests, self._read, self._scores))

    def _read(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return the numbers [B, N], which are finite, and the embeddings [B, T]."""
        embeddings = inputs[EMBEDDINGS]
        shape = (len(embeddings), len(self._numerical))
        return numbers(NUMERICAL, inputs[NUMERICAL].numpy(), shape, self._numerical), embeddings

    def _scores(self, parts: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        numerical, embeddings = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        scores = self._head(self._dense(numerical, embeddings), None)
        return {name: scores[:, i : i + 1] for i, name in enumerate(self._names)}


def _rows(inputs: IdInputs, request: Inputs) -> Rows:
    arrays = {name: tensor.numpy() for name, tensor in request.items()}
    return inputs.rows(arrays, len(next(iter(request.values()))))


def _answers(
    requests: Sequence[Inputs],
    read: Callable[[Inputs], T],
    function: Callable[[Sequence[T]], dict[str, Tensor]],
) -> list[Answer]:
    """Apply a function to what is read of all requests, at once; return the answer of each, a text if it is refused."""
    answers: list[Answer] = [""] * len(requests)
    accepted: dict[int, T] = {}
    for index, request in enumerate(requests):
        try:
            accepted[index] = read(request)
        except InputError as error:
            answers[index] = str(error)
    if accepted:
        with torch.inference_mode():
            found = function(list(accepted.values()))
        sizes = [len(next(iter(requests[index].values()))) for index in accepted]
        for index, answer in zip(accepted, _split(found, sizes), strict=True):
            answers[index] = answer
    return answers


def _finite(answers: Sequence[Answer]) -> list[Answer]:
    """Refuse the requests that have a score which is not finite, as the embedded server does."""
    return [
        answer
        if isinstance(answer, str)
        else why_not_finite(torch.cat(list(answer.values()), dim=1).numpy()) or answer
        for answer in answers
    ]


def _split(found: Mapping[str, Tensor], sizes: Sequence[int]) -> Sequence[dict[str, Tensor]]:
    """Return the rows of each request, contiguous."""
    parts = {name: tensor.split(list(sizes)) for name, tensor in found.items()}
    return [
        {name: split[index].contiguous() for name, split in parts.items()}
        for index in range(len(sizes))
    ]
