"""Model of Triton's Python backend; `python -m serving.triton` copies this file to `1/model.py` of every Python model.

Tensors are handed over by DLPack, since the backend's own conversion supports no numpy above 1.
"""

import json
import sys
from pathlib import Path

import triton_python_backend_utils as triton


class TritonPythonModel:
    """A part of a model directory, which lies beside this file."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        sys.path[:0] = [path for path in parameters["python_path"].split(":") if path]
        # Imported here: the path above has the packages.
        import torch

        from serving.triton.parts import load_part

        self._torch = torch
        self._part = load_part(Path(__file__).parent / "model", parameters)

    def execute(self, requests):
        """Answer a batch of requests; one that is refused does not fail the others."""
        inputs = [
            {
                tensor.name(): self._torch.utils.dlpack.from_dlpack(tensor.to_dlpack()).cpu()
                for tensor in request.inputs()
            }
            for request in requests
        ]
        return [
            triton.InferenceResponse([], triton.TritonError(answer, triton.TritonError.INVALID_ARG))
            if isinstance(answer, str)
            else triton.InferenceResponse(
                [
                    triton.Tensor.from_dlpack(name, self._torch.utils.dlpack.to_dlpack(tensor))
                    for name, tensor in answer.items()
                ]
            )
            for answer in self._part(inputs)
        ]
