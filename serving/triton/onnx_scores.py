"""`dense.onnx` with the model's scores in place of its logits, for Triton's ONNX Runtime backend."""

from pathlib import Path

import numpy as np

from configs.messages import require_package
from serving.manifest import ONNX, Manifest, ModelError

LOGITS = "logits"


def write_onnx_scores(directory: Path, manifest: Manifest, path: Path) -> None:
    """Write an ONNX model with an output [B, 1] per task: a probability, or a number.

    Raises ModelError: the model directory has no `dense.onnx`, or another one than an export writes. Raises ValueError: the
    package onnx is missing.
    """
    if ONNX not in manifest.files:
        raise ModelError(
            f"{directory} has no {ONNX}; export it with onnx=true, or use dense_format=pytorch"
        )
    require_package("onnx", "dense_format=onnx")
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(directory / ONNX)
    graph = model.graph
    if [output.name for output in graph.output] != [LOGITS]:
        raise ModelError(f"{directory / ONNX} has no single output {LOGITS}")
    count = len(manifest.outputs)
    shifts = np.array([[output.shift for output in manifest.outputs]], np.float32)
    graph.initializer.extend(
        [
            numpy_helper.from_array(np.array([-1, count]), "served_shape"),
            numpy_helper.from_array(shifts, "served_shifts"),
        ]
    )
    nodes = [
        helper.make_node("Reshape", [LOGITS, "served_shape"], ["served_logits"]),
        helper.make_node("Add", ["served_logits", "served_shifts"], ["served_shifted"]),
    ]
    del graph.output[:]
    for index, output in enumerate(manifest.outputs):
        position, column = f"served_place_{index}", f"served_column_{index}"
        graph.initializer.append(numpy_helper.from_array(np.array([index]), position))
        nodes.append(helper.make_node("Gather", ["served_shifted", position], [column], axis=1))
        kind = "Sigmoid" if output.is_binary else "Identity"
        nodes.append(helper.make_node(kind, [column], [output.name]))
        graph.output.append(
            helper.make_tensor_value_info(output.name, TensorProto.FLOAT, ["batch", 1])
        )
    graph.node.extend(nodes)
    onnx.checker.check_model(model)
    onnx.save(model, path)
