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
    """Return a part: a function from the inputs of several requests to an answer of each, a text if it is refused.

    Scores of features, and those of numbers and embeddings, are [B, 1] per output; embeddings of ids [B, T].
    """
    torch.set_num_threads(int(parameters["threads"]))
    manifest = Manifest.read(directory)

    def named(scores: Tensor) -> dict[str, Tensor]:
        return {o.name: scores[:, i : i + 1] for i, o in enumerate(manifest.outputs)}

    match parameters["part"]:
        case "scores":
            load = model_loader(
                parameters["device"],
                int(parameters["max_batch"]),
                parameters["dense_dtype"],
                float(parameters["table_gib"]) if parameters["table_gib"] else None,
            )
            model = load(directory, manifest)
            read = partial(_rows, model.id_inputs)
            return lambda requests: _finite(
                _answers(requests, read, lambda parts: named(model.scores(*parts)))
            )
        case "embeddings":
            tables = MappedTables(directory, manifest)
            keys = load_key_rows(directory, manifest)
            read = partial(_rows, IdInputs(manifest, keys, with_numerical=False))
            return lambda requests: _answers(
                requests, read, lambda parts: {EMBEDDINGS: tables(Rows.joined(parts))[0]}
            )
        case "dense":
            dense, head = load_dense(directory / DENSE), ScoreHead(manifest)

            def read_dense(inputs: Inputs) -> tuple[Tensor, Tensor]:
                embeddings, names = inputs[EMBEDDINGS], manifest.numerical
                shape = (len(embeddings), len(names))
                return numbers(NUMERICAL, inputs[NUMERICAL].numpy(), shape, names), embeddings

            def scores(parts: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
                numerical, embeddings = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
                return named(head(dense(numerical, embeddings), None))

            return lambda requests: _finite(_answers(requests, read_dense, scores))
    raise ValueError(f"there is no part {parameters['part']}")


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
        parts = {name: tensor.split(sizes) for name, tensor in found.items()}
        for place, index in enumerate(accepted):
            answers[index] = {name: part[place].contiguous() for name, part in parts.items()}
    return answers


def _finite(answers: Sequence[Answer]) -> list[Answer]:
    """Refuse the requests that have a score which is not finite, as the embedded server does."""
    return [
        answer
        if isinstance(answer, str)
        else why_not_finite(torch.cat(list(answer.values()), dim=1).numpy()) or answer
        for answer in answers
    ]
