"""The dense component of a checkpoint, and its export with a dynamic batch: torch.export; ONNX and AOTInductor on request."""

import logging
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.passes import move_to_device_pass

from configs.messages import first_line
from configs.schema import Config
from configs.serving_schema import Device
from dataloading.dataset.feature_spec import FeatureSpec
from nn.checkpoint.saved import SavedModel
from nn.models.model import Model
from nn.models.registry import build_dense
from serving.exporting.from_rows import FromRows
from serving.manifest import AOTI, DENSE, MOST_ROWS, ONNX

EXAMPLE_ROWS = 3
"""torch.export makes a constant of a dimension of 0 or 1."""
Forward = Callable[..., Tensor]
"""Maps numericals [B, N], embeddings [B, columns], and what `FromRows` takes behind them, to logits."""


def load_dense(config: Config, spec: FeatureSpec, saved: SavedModel) -> Model:
    """Return the dense component with the weights that an evaluation uses: their average, if the run has one.

    Raises ValueError: the checkpoint has other weights than the model.
    """
    dense = build_dense(config.model, spec)
    saved.fill({f"dense.{name}": value for name, value in dense.state_dict().items()})
    return dense.eval().requires_grad_(False)


def export_dense(directory: Path, dense: nn.Module, num_numerical: int, columns: int) -> None:
    """Write `dense.pt2`: forward(numerical [B, N], embeddings [B, T], ...) -> logits.

    Raises ValueError: torch.export cannot trace the model.
    """
    remedy = "its forward must be plain tensor operations of a dynamic number of rows"
    with _tracing("torch.export cannot export the dense component", remedy):
        program = _program(dense, _example(dense, num_numerical, columns))
        save_program(program, directory / DENSE)


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program without what a server would refuse."""
    # They would be a pickle in the archive, which nothing needs.
    program.example_inputs = None
    # A comparison of the numbers of rows, as code; the server makes both inputs.
    program._guards_code = []
    torch.export.save(program, path)


def export_onnx(directory: Path, dense: nn.Module, num_numerical: int, columns: int) -> None:
    """Write `dense.onnx` with the inputs `numerical` and `embeddings` and the output `logits`.

    Raises ValueError: an operation has no form in ONNX.
    """
    example = _example(dense, num_numerical, columns)
    with _tracing("onnx=true: the dense component cannot be exported", "leave onnx out"):
        torch.onnx.export(
            dense,
            example,
            str(directory / ONNX),
            input_names=["numerical", "embeddings"],
            output_names=["logits"],
            dynamic_shapes=_shapes(example),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def load_onnx(directory: Path) -> Forward:
    """Return the forward of `dense.onnx` in ONNX Runtime. Raises ValueError: ONNX Runtime refuses it."""
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(
            str(directory / ONNX), providers=["CPUExecutionProvider"]
        )
    except Exception as error:
        raise ValueError(
            f"onnx=true: ONNX Runtime {onnxruntime.__version__} cannot load the dense component: {first_line(error)}; its "
            "forward does what has no form in ONNX, so leave onnx out"
        ) from error

    # Constant columns are no input of the graph.
    known = {node.name for node in session.get_inputs()}

    def forward(numerical: Tensor, embeddings: Tensor) -> Tensor:
        columns = {"numerical": numerical, "embeddings": embeddings}
        feed = {name: values.numpy() for name, values in columns.items() if name in known}
        return torch.from_numpy(session.run(["logits"], feed)[0])

    return forward


def export_aoti(
    directory: Path, dense: nn.Module, num_numerical: int, columns: int, device: Device
) -> None:
    """Write `dense.aoti.pt2`: the forward as machine code of a device, for `torch._inductor.aoti_load_package` and C++.

    Raises ValueError: the compiler is missing or fails.
    """
    example = _example(dense, num_numerical, columns)
    remedy = "AOTInductor needs a C++ compiler (g++), or leave aoti out"
    with _tracing(f"aoti={device.value}: the dense component cannot be compiled", remedy):
        # Traced on the CPU: on a GPU the layers would call kernels of their own, which cannot be traced.
        # With its index, as tensors have it: the compiler compares them.
        target = "cuda:0" if device is Device.cuda else "cpu"
        program = move_to_device_pass(_program(deepcopy(dense), example), target)
        program.example_inputs = (tuple(tensor.to(target) for tensor in example), {})
        torch._inductor.aoti_compile_and_package(program, package_path=str(directory / AOTI))


def load_aoti(directory: Path, device: Device) -> Forward:
    """Return the forward of `dense.aoti.pt2`, from CPU to CPU; it runs machine code, so only of an export of this process.

    Raises ValueError: torch cannot load it.
    """
    path = str(directory / AOTI)
    # First in a process of its own: code for a GPU may end the process, which would leave its files.
    program = "import sys, torch; torch._inductor.aoti_load_package(sys.argv[1])"
    tried = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True)
    if tried.returncode:
        lines = [line.strip() for line in tried.stderr.splitlines() if line.strip()]
        cause = f"signal {-tried.returncode}" if tried.returncode < 0 else "".join(lines[-1:])
        raise ValueError(
            f"aoti={device.value}: torch {torch.__version__} cannot load what its compiler has written "
            f"({cause}); leave aoti out, or export with another version"
        )
    code = torch._inductor.aoti_load_package(path)

    def forward(*inputs: Tensor) -> Tensor:
        return code(*(tensor.to(device.value) for tensor in inputs)).cpu()

    return forward


def check_aoti(device: Device) -> None:
    """Raise ValueError unless this machine has the device that AOTInductor compiles for."""
    if device is Device.cuda and not torch.cuda.is_available():
        raise ValueError(
            "aoti=cuda: no GPU was found; export on a machine with the GPU that serves, or set aoti=cpu"
        )


def _example(dense: nn.Module, num_numerical: int, columns: int) -> tuple[Tensor, ...]:
    more = dense.example(EXAMPLE_ROWS) if isinstance(dense, FromRows) else []
    return torch.zeros(EXAMPLE_ROWS, num_numerical), torch.zeros(EXAMPLE_ROWS, columns), *more


def _program(dense: nn.Module, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    """Trace the forward with a dynamic number of rows, and of their events."""
    return torch.export.export(dense, example, dynamic_shapes=_shapes(example), strict=False)


def _shapes(example: tuple[Tensor, ...]) -> tuple[Any, ...]:
    batch = torch.export.Dim("batch", min=1, max=MOST_ROWS)
    if len(example) == 2:
        return {0: batch}, {0: batch}
    each = {0: torch.export.Dim.DYNAMIC}  # torch finds which of them are equal
    return each, each, tuple(each for _ in example[2:])


@contextmanager
def _tracing(problem: str, remedy: str) -> Iterator[None]:
    """Leave out what torch warns and logs about its own internals, and say on one line that it cannot trace."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{problem}: {first_line(error)}; {remedy}") from error
    finally:
        logging.disable(before)
