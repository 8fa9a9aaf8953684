"""Checks of a dense component as it was built: training must train all of it, and checkpoints hold what it needs."""

from torch import Tensor, equal, float32, nn

from nn.layers.pass_state import PassLayer
from nn.models.model import Model

TORCHS_OWN = frozenset(vars(nn.Module()))


def check_built(where: str, dense: object) -> None:
    """Raise `ValueError` unless `build()` has returned a complete `Model`."""
    if not isinstance(dense, Model):
        raise ValueError(
            f"{where}: build() returns {type(dense).__name__}; want a nn.models.model.Model"
        )
    if "logged_losses" not in vars(dense):
        raise ValueError(
            f"{where}: its __init__ does not call super().__init__(); call it in the first line"
        )


def check_layers(where: str, dense: Model) -> None:
    """Raise `ValueError` for a part of a dense component that would not be trained or saved."""
    parameters: dict[int, str] = {}
    for name, parameter in dense.named_parameters(remove_duplicate=False):
        if (first := parameters.setdefault(id(parameter), name)) != name:
            raise ValueError(
                f"{where}: {first} and {name} are one parameter, and checkpoints hold it once; give it one name, which "
                "forward() may use twice"
            )
        if parameter.dtype is not float32 or not parameter.requires_grad:
            got = "requires_grad=False" if parameter.dtype is float32 else parameter.dtype
            raise ValueError(
                f"{where}: the parameter {name} has {got}; want float32, trained: what is not trained is a buffer "
                "(register_buffer with persistent=False), and train.freeze=[dense] keeps all weights"
            )
    for name in sorted(dense.saved_buffers()):
        if not isinstance(dense.get_submodule(name.rpartition(".")[0]), PassLayer):
            raise ValueError(
                f"{where} has a persistent buffer {name}, and only those of a PassLayer are trained and saved: use "
                "nn.layers.batch_norm.BatchNorm for batch normalization, derive the layer from "
                "nn.layers.pass_state.PassLayer, or register a constant with persistent=False"
            )
    registered = {*parameters, *map(id, dense.buffers()), *map(id, dense.modules())}
    for path, layer in dense.named_modules():
        for name in vars(layer).keys() - TORCHS_OWN:
            value = getattr(layer, name)
            values = value.values() if isinstance(value, dict) else value
            for of in values if isinstance(value, dict | list | tuple) else [value]:
                if isinstance(of, Tensor | nn.Module) and id(of) not in registered:
                    raise ValueError(
                        f"{where}: {f'{path}.{name}'.lstrip('.')} holds a {type(of).__name__} that torch does not know, so it "
                        "is neither trained nor saved; want layers in an nn.ModuleList or nn.ModuleDict, weights as "
                        "nn.Parameter, a constant by register_buffer(..., persistent=False)"
                    )


def check_constants(where: str, dense: Model, again: Model) -> None:
    """Raise `ValueError` unless a model has the same buffers when it is built again, as it is to evaluate and to serve."""
    others, saved = dict(again.named_buffers()), dense.saved_buffers()
    for name, buffer in dense.named_buffers():
        if name not in saved and not equal(buffer.nan_to_num(), others[name].nan_to_num()):
            raise ValueError(
                f"{where}: its buffer {name} is drawn anew each time, and no checkpoint holds it; draw it with "
                'generator=torch.Generator("cpu").manual_seed(0), device="cpu"'
            )
