"""Layer norm (Ba et al., arXiv:1607.06450), which a GPU computes in the dtype of its input."""

from torch import Tensor, nn

from nn.ops.fused_linear import can_fuse


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last dimension; under autocast too, what it returns has the dtype of its input.

    Statistics are float32, or float64 if the input is.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., C] to the same shape and dtype."""
        if not can_fuse(x, self.weight):
            return super().forward(x).to(x.dtype)
        # Only CUDA builds of torch include Triton.
        from nn.ops.triton.layer_norm import layer_norm

        return layer_norm(x, self.weight, self.bias, self.eps)
