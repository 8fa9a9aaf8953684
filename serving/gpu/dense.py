"""The dense component of a model directory on a GPU, in float32 or bfloat16."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from serving.gpu.fused_interaction import fuse_dot_interactions


def dense_on(
    program: ExportedProgram, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return forward(numerical [B, N], embeddings [B, T]) -> logits on a device.

    `dtype`: of matrix products; with bfloat16 autocast decides about other operations, as in training with `train.amp=bf16`.
    """
    module = move_to_device_pass(program, device).module()
    _drop_checks(module)
    fuse_dot_interactions(module, device)
    if dtype is torch.float32:
        return module
    _cast_weights(module, dtype)

    def forward(numerical: Tensor, embeddings: Tensor) -> Tensor:
        # Casts would be kept from one call to the next, outside of the memory of a captured graph.
        with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
            return module(numerical, embeddings)

    return forward


def _drop_checks(module: torch.fx.GraphModule) -> None:
    """Drop the checks of dtypes, which hold for float32 only."""
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
    module.recompile()


def _cast_weights(module: torch.fx.GraphModule, dtype: torch.dtype) -> None:
    """Cast the weights of linear layers once, instead of in each call; normalizations keep theirs in float32."""
    weights: set[str] = set()
    others: set[str] = set()
    for node in module.graph.nodes:
        uses = weights if node.target is torch.ops.aten.linear.default else others
        uses.update(str(x.target) for x in node.all_input_nodes if x.op == "get_attr")
    parameters = dict(module.named_parameters())
    for name in weights - others:
        parameters[name].data = parameters[name].data.to(dtype)
