"""Numbers of a training pass that layers need: the step, the rows of this rank in the global batch, sums over ranks.

They change from step to step, so they are in device memory, where each replay of a CUDA graph reads them. A Python number
would be captured once and repeated.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class PassState:
    """Numbers of the current training pass, in device memory.

    `all_reduce_sum`: sums a tensor over ranks in place and returns it; the identity for one rank. `step`: number of earlier
    updates, int64 [1], or the given int32 [1], which its owner writes. `first_row`: number of this rank's first row in the
    global batch, int64 [1]. `num_valid`: valid rows of this rank, which come first, int64 [1]. The others are padding.
    `global_valid`: valid rows over all ranks, int64 [1]. `global_rows`: number of each row in the global batch, int32 [rows];
    None if they are consecutive. `chunk`: number of the rows' part of the batch, if a step takes it in parts.
    """

    def __init__(
        self,
        seed: int,
        device: torch.device,
        rank: int = 0,
        all_reduce_sum: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        all_reduce_max: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        *,
        step: Tensor | None = None,
    ) -> None:
        self.seed = seed
        self.all_reduce_sum = all_reduce_sum
        self.all_reduce_max = all_reduce_max
        self._rank = rank
        numbers = torch.zeros(4, dtype=torch.int64, device=device)
        self._own_step, self.first_row, self.num_valid, self.global_valid = numbers.split(1)
        self.step: Tensor = self._own_step if step is None else step
        self._rows: tuple[int, int, int] | None = None
        self.global_rows: Tensor | None = None
        # By rows of the batch: a captured pass reads the same memory every time.
        self._global_rows: dict[int, Tensor] = {}
        self.chunk = 0

    def set(
        self,
        step: int,
        rows: int,
        num_valid: int,
        global_valid: int,
        global_rows: Tensor | None = None,
    ) -> None:
        """Queue the numbers of the next pass; single ones are passed as kernel arguments, without copies.

        `rows`: rows of this rank's batch, padding included; the same on all ranks. `global_rows` are on the device.
        """
        if self.step is self._own_step:
            self.step.fill_(step)
        self.global_rows = None
        if global_rows is not None:
            if rows not in self._global_rows:
                self._global_rows[rows] = torch.empty_like(global_rows)
            self.global_rows = self._global_rows[rows].copy_(global_rows)
        if self._rows != (rows, num_valid, global_valid):
            self._rows = (rows, num_valid, global_valid)
            self.first_row.fill_(self._rank * rows)
            self.num_valid.fill_(num_valid)
            self.global_valid.fill_(global_valid)

    def set_chunk(self, chunk: int, first_row: int, num_valid: int, global_valid: int) -> None:
        """Queue the numbers of a part of the batch, which begins at `first_row` of this rank's rows; see `set`.

        A pass that does so once does it in every step: the numbers of the complete batch are not restored.
        """
        rows, _, _ = self._rows or (0, 0, 0)
        self.chunk = chunk
        if self.global_rows is not None:
            self.global_rows = self._global_rows[rows][first_row:]
        self.first_row.fill_(self._rank * rows + first_row)
        self.num_valid.fill_(num_valid)
        self.global_valid.fill_(global_valid)


class PassLayer(nn.Module):
    """Layer whose training pass depends on a `PassState`; evaluation uses none.

    Its persistent buffers are part of checkpoints. Only `update` may change them: a pass may be repeated, or not be applied.

    `reduces_over_ranks`: whether a pass or `update` sums over ranks, or takes the largest value.
    """

    reduces_over_ranks = False

    def __init__(self) -> None:
        super().__init__()
        self._pass_state: PassState | None = None

    def attach(self, state: PassState, number: int) -> None:
        """Use `state` in training."""
        self._pass_state = state

    def update(self) -> None:
        """Queue the change of the layer's buffers by the latest pass, which is applied."""

    def training_state(self) -> dict[str, Tensor]:
        """Return further buffers of checkpoints by name: they are state of the training, which evaluation does not need."""
        return {}

    @property
    def pass_state(self) -> PassState:
        """The attached state.

        Raises RuntimeError: there is none.
        """
        if self._pass_state is None:
            raise RuntimeError(
                f"a {type(self).__name__} in training mode needs the step and the rows of the batch; call "
                "nn.layers.pass_state.attach(module, PassState(...)) once and PassState.set before every pass, or module.eval()"
            )
        return self._pass_state


def attach(module: nn.Module, state: PassState) -> list[PassLayer]:
    """Attach a state to all layers of a module that use one, numbered in the order of registration; return them."""
    layers = [layer for layer in module.modules() if isinstance(layer, PassLayer)]
    for number, layer in enumerate(layers):
        layer.attach(state, number)
    return layers
