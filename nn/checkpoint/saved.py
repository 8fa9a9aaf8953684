"""A checkpoint as everything except training opens it: scores of the library, exports of tables and of served models."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from configs.messages import shortened
from nn.checkpoint.compatibility import AVERAGE, differences
from nn.checkpoint.directory import no_checkpoint, read_facts
from nn.checkpoint.tensor_index import StoredTensor, TensorIndex, UnreadableError, read_index

if TYPE_CHECKING:
    from torch import Tensor

DENSE = "dense."


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A checkpoint whose files are indexed and not yet read. `facts`: its run.json."""

    path: Path
    facts: dict[str, Any]
    index: TensorIndex

    @classmethod
    def open(cls, path: Path, option: str) -> Self:
        """Open a checkpoint or an export named by an option; ValueError if it is none, UnreadableError if nobody knows."""
        try:
            return cls(path, read_facts(path), read_index(path))
        except UnreadableError:
            raise
        except ValueError as error:
            raise no_checkpoint(option, path, error) from None

    def fill(self, weights: "Mapping[str, Tensor]") -> None:
        """Copy the weights of evaluation, averages where there are some, into `tables.<table>` and `dense.<name>`."""
        import torch  # which an export of tables does without

        stored = {name: tensor for name in weights if (tensor := self._stored(name)) is not None}
        differing = differences(
            {name: tensor.size for name, tensor in stored.items()},
            {name: tuple(tensor.shape) for name, tensor in weights.items()},
            grow=False,
        )
        if differing:
            raise ValueError(
                f"{self.path} is of another model than its run's options name: {shortened(', '.join(differing[:4]))}; copy the "
                "run again"
            )
        try:
            for name, tensor in stored.items():
                at, target = 0, weights[name]
                flat = target.reshape(1) if target.dim() == 0 else target
                for block in tensor.blocks():
                    values = torch.from_numpy(block)
                    if tensor.dtype == "bfloat16":
                        values = values.view(torch.bfloat16)
                    flat[at : at + len(block)].copy_(values)
                    at += len(block)
        except ValueError as error:
            raise ValueError(f"{self.path} cannot be loaded: {error}") from None

    def _stored(self, name: str) -> StoredTensor | None:
        tensors = self.index.tensors
        if not name.startswith(DENSE):
            return tensors.get(f"{name}.weight")
        return tensors.get(AVERAGE + name.removeprefix(DENSE)) or tensors.get(name)
