"""Dot interactions of an exported program by the kernel of training: it neither concatenates vectors nor gathers products."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from nn.ops.embedding_layout import EmbeddingLayout
from nn.ops.triton.dot_interaction import fused_dot_interaction

aten = torch.ops.aten
MOST_VECTORS, MOST_COLUMNS = 64, 256
"""That the kernel keeps in registers."""

# F: embeddings, D: columns of a vector, V: vectors that interact, F + 1


def fuse_dot_interactions(module: GraphModule, device: torch.device) -> None:
    """Replace the operations of `nn.layers.dot_interaction` with a bottom vector."""
    for node in list(module.graph.nodes):
        found = _match(module, node)
        if found is None:
            continue
        bottom, embeddings, num_embeddings, columns, num_outputs = found
        layout = EmbeddingLayout.dense((columns,) * num_embeddings, device)
        fused = _function(layout, num_outputs)
        with module.graph.inserting_before(node):
            new = module.graph.call_function(fused, (bottom, embeddings))
        node.replace_all_uses_with(new)
    module.graph.eliminate_dead_code()
    module.recompile()


def _function(layout: EmbeddingLayout, num_outputs: int) -> Callable[[Tensor, Tensor], Tensor]:
    def fused(bottom: Tensor, embeddings: Tensor) -> Tensor:
        return fused_dot_interaction(bottom, embeddings, layout, num_outputs)

    return fused


def _match(module: GraphModule, node: Node) -> tuple[Node, Node, int, int, int] | None:
    """Return bottom vector, embeddings, F, D and the columns of the result, if a node concatenates an interaction."""
    parts = _arguments(node, aten.cat.default)
    if parts is None or parts[1:] != (1,) or len(parts[0]) not in (2, 3):
        return None
    bottom, products, *padding = parts[0]
    vectors, pairs = _self_products(products)
    joined = _arguments(vectors, aten.cat.default)
    if joined is None or joined[1:] != (1,) or len(joined[0]) != 2:
        return None
    first, rest = joined[0]
    cast = _arguments(rest, aten.to.dtype)
    split = _arguments(rest if cast is None else cast[0], aten.unflatten.int)
    if _arguments(first, aten.unsqueeze.default) != (bottom, 1) or split is None:
        return None
    embeddings, num_embeddings = split[0], split[2][0]
    columns = bottom.meta["val"].shape[1]
    num_vectors = num_embeddings + 1
    rows = torch.tril_indices(num_vectors, num_vectors, offset=-1)
    constant = module.get_buffer(str(pairs.target)).cpu()
    if num_vectors > MOST_VECTORS or columns > MOST_COLUMNS:
        return None
    if not constant.equal(rows[0] * num_vectors + rows[1]):
        return None
    zeros = _arguments(padding[0], aten.new_zeros.default) if padding else (None, [0, 0])
    if zeros is None:
        return None
    return bottom, embeddings, num_embeddings, columns, columns + len(constant) + zeros[1][1]


def _self_products(node: Any) -> tuple[Any, Any]:
    """Return the vectors [B, V, D] whose products a node selects, and the constant that selects them."""
    selected = _arguments(node, aten.index_select.default)
    flat = None if selected is None else _arguments(selected[0], aten.flatten.using_ints)
    product = None if flat is None else _arguments(flat[0], aten.bmm.default)
    if selected is None or product is None:
        return None, None
    if _arguments(product[1], aten.transpose.int) != (product[0], 1, 2):
        return None, None
    return product[0], selected[2]


def _arguments(node: Any, target: Any) -> tuple | None:
    """Return the arguments of a call of `target`; None if it is another node."""
    return node.args if isinstance(node, Node) and node.target is target else None
