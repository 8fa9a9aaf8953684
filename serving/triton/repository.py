"""A model repository for Triton, written from a model directory; it is complete or absent.

    monolithic                       ensemble
    REPOSITORY/NAME/config.pbtxt     REPOSITORY/NAME/config.pbtxt            sparse, then dense
    REPOSITORY/NAME/1/model.py       REPOSITORY/NAME_sparse/1/model.py       ids to embeddings
    REPOSITORY/NAME/1/model/         REPOSITORY/NAME_sparse/1/model/         the tables
                                     REPOSITORY/NAME_dense/1/model.onnx      numbers and embeddings to scores

`model/` is the model directory, or the files of it that the model reads.
"""

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from configs.messages import shown
from configs.serving_schema import DenseFormat, Device, Layout, TritonConfig, require_model_name
from dataloading.dataset.durable_files import new_output, write_synced
from serving.manifest import DENSE, MANIFEST, Manifest
from serving.triton.onnx_scores import write_onnx_scores
from serving.triton.text_proto import Word, entries, text_proto

EMBEDDINGS = "embeddings"
CONFIG = "config.pbtxt"
VERSION = "1"
IDENTITY = "identity"
"""Parameter of a model: the content of what it scores with, which a name or a number does not tell."""
LOOPBACK = " ".join(f"--{kind}-address 127.0.0.1" for kind in ("http", "grpc", "metrics"))
"""Options of tritonserver, which else listens on every interface."""


def write_repository(config: TritonConfig) -> list[str]:
    """Write a model repository; return the names of its models.

    Raises ValueError: the model cannot be served so, or the output exists.
    """
    assert config.model is not None, "checked by the options"
    assert config.output is not None, "likewise"
    directory, output = Path(config.model), Path(config.output)
    manifest = Manifest.read(directory)
    name = config.name or manifest.name
    require_model_name(name)
    if manifest.handed_out and (config.layout is Layout.ensemble or config.device is Device.cuda):
        raise ValueError(
            f"{directory} takes rows of table {shown(manifest.handed_out[0][0].name)} itself, such as those of events; use "
            "layout=monolithic device=cpu"
        )
    with new_output(output) as unfinished:
        manifest.verify(directory)
        if config.layout is Layout.monolithic:
            return [_write_monolithic(unfinished, directory, manifest, config, name)]
        return _write_ensemble(unfinished, directory, manifest, config, name)


def _write_monolithic(
    root: Path, directory: Path, manifest: Manifest, config: TritonConfig, name: str
) -> str:
    inputs = _features(manifest)
    if manifest.keep_rate is not None:
        inputs.append(_tensor(manifest.keep_rate, "TYPE_FP32", [1]) | {"optional": True})
    parameters = _parameters(config, "scores", manifest) | {
        "device": config.device.name,
        "max_batch": str(config.max_batch),
        "dense_dtype": config.dense_dtype.name,
        "table_gib": "" if config.table_gib is None else str(config.table_gib),
    }
    on_gpu = config.device is Device.cuda
    message = _model(config, name, inputs, _scores(manifest), on_gpu=on_gpu) | _python(parameters)
    if manifest.sequences:
        del message["model_warmup"]  # of zeros, and an age of 0 is refused
    _write_model(root / name, message, directory, manifest.files)
    return name


def _write_ensemble(
    root: Path, directory: Path, manifest: Manifest, config: TritonConfig, name: str
) -> list[str]:
    if not manifest.numerical:
        raise ValueError(
            f"layout=ensemble: {directory} has no numerical features, which the dense model takes; use layout=monolithic"
        )
    numerical, *ids = _features(manifest)
    sparse, dense = f"{name}_sparse", f"{name}_dense"
    embeddings = _tensor(EMBEDDINGS, "TYPE_FP32", [manifest.num_columns])
    passed = [of["name"] for of in (numerical, *ids, embeddings, *_scores(manifest))]
    if len({*passed}) < len(passed):
        raise ValueError(
            f"layout=ensemble: two of its tensors have one name ({', '.join(map(shown, passed))}); use layout=monolithic"
        )
    message = _model(config, sparse, ids, [embeddings])
    message |= _python(_parameters(config, "embeddings", manifest))
    read = [file for file in manifest.files if file.startswith(("tables/", "keys/"))]
    _write_model(root / sparse, message, directory, read)
    inputs = [numerical, embeddings]
    message = _model(config, dense, inputs, _scores(manifest), on_gpu=config.device is Device.cuda)
    if config.dense_format is DenseFormat.onnx:
        message = {"backend": "onnxruntime", **message}
        (root / dense / VERSION).mkdir(parents=True)
        write_onnx_scores(directory, manifest, root / dense / VERSION / "model.onnx")
        write_synced(root / dense / CONFIG, text_proto(message))
    else:
        message |= _python(_parameters(config, "dense", manifest))
        _write_model(root / dense, message, directory, [DENSE])
    steps = [_step(sparse, ids, [embeddings]), _step(dense, inputs, _scores(manifest))]
    joined = {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": config.max_batch,
        "input": [numerical, *ids],
        "output": _scores(manifest),
        "parameters": entries({IDENTITY: {"string_value": manifest.identity}}),
        "ensemble_scheduling": {"step": steps},
    }
    # Triton wants the folder of a version, which is empty here.
    (root / name / VERSION).mkdir(parents=True)
    write_synced(root / name / CONFIG, text_proto(joined))
    return [name, sparse, dense]


def _write_model(
    path: Path, message: Mapping[str, Any], directory: Path, files: Iterable[str]
) -> None:
    """Write a Python model with the files of the model directory that it reads."""
    target = path / VERSION / "model"
    target.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("model_file.py"), path / VERSION / "model.py")
    for file in (MANIFEST, *files):
        (target / file).parent.mkdir(exist_ok=True)
        # Linked, as nothing ever changes it, or copied to another file system.
        try:
            os.link((directory / file).resolve(), target / file)
        except OSError:
            shutil.copyfile(directory / file, target / file)
    write_synced(path / CONFIG, text_proto(message))


def _model(
    config: TritonConfig,
    name: str,
    inputs: list[dict[str, Any]],
    outputs: list[dict[str, Any]],
    *,
    on_gpu: bool = False,
) -> dict[str, Any]:
    """Return the message of a model that batches what arrives together."""
    warm = {
        tensor["name"]: {
            "data_type": tensor["data_type"],
            "dims": [max(size, 1) for size in tensor["dims"]],
            "zero_data": True,
        }
        for tensor in inputs
        if "optional" not in tensor
    }
    kind = Word("KIND_GPU" if on_gpu else "KIND_CPU")
    return {
        "name": name,
        "max_batch_size": config.max_batch,
        "input": inputs,
        "output": outputs,
        "dynamic_batching": {"max_queue_delay_microseconds": int(config.batch_delay_ms * 1000)},
        "instance_group": [{"count": config.instances, "kind": kind}],
        "model_warmup": [{"name": "one row", "batch_size": 1, "inputs": entries(warm)}],
    }


def _python(parameters: Mapping[str, str]) -> dict[str, Any]:
    values = {name: {"string_value": value} for name, value in parameters.items()}
    # Rows are checked on the host first.
    values["FORCE_CPU_ONLY_INPUT_TENSORS"] = {"string_value": "yes"}
    return {"backend": "python", "parameters": entries(values)}


def _parameters(config: TritonConfig, part: str, manifest: Manifest) -> dict[str, str]:
    path = config.python_path
    if path is None:
        # The project and the packages of this environment.
        project = str(Path(__file__).resolve().parents[2])
        path = ":".join(dict.fromkeys([project, *(p for p in sys.path if "site-packages" in p)]))
    facts = {"part": part, "python_path": path, "threads": str(config.threads)}
    return facts | {IDENTITY: manifest.identity}


def _features(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        _tensor(of["name"], f"TYPE_{of['datatype']}", of["shape"][1:]) for of in manifest.inputs
    ]


def _scores(manifest: Manifest) -> list[dict[str, Any]]:
    return [_tensor(output.name, "TYPE_FP32", [1]) for output in manifest.outputs]


def _tensor(name: str, kind: str, dims: list[int]) -> dict[str, Any]:
    return {"name": name, "data_type": Word(kind), "dims": dims}


def _step(
    model: str, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "model_name": model,
        "model_version": -1,
        "input_map": [{"key": tensor["name"], "value": tensor["name"]} for tensor in inputs],
        "output_map": [{"key": tensor["name"], "value": tensor["name"]} for tensor in outputs],
    }
