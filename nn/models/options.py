"""Options of the project's own models, apart from the models: `--help` and the checks of a command need no torch.

The options of any other model are in the module of the model.
"""

from dataclasses import dataclass, field
from enum import Enum

from configs.schema import ModelConfig, option, require, require_rate, require_widths

MOST_WIDTH = 2**20


@dataclass(kw_only=True, slots=True)
class _TwoMLPOptions(ModelConfig):
    """Options of a model with a bottom and a top MLP."""

    bottom_mlp: list[int] = option(
        [512, 256, 128], "widths of the bottom MLP's layers", most=MOST_WIDTH
    )
    top_mlp: list[int] = option(
        [1024, 1024, 512, 256, 1], "widths of the top MLP's layers", most=MOST_WIDTH
    )
    dropout: float = option(
        0.0, "rate of the dropout after each hidden layer of the top MLP, in training; 0 for none"
    )

    batch_norm: bool = option(
        False,
        "normalize the outputs of the top MLP's hidden layers over the global batch, before ReLU",
    )

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        require_widths("model.bottom_mlp", self.bottom_mlp)
        require_widths("model.top_mlp", self.top_mlp)
        require(
            self.top_mlp[-1] == 1,
            f"model.top_mlp must end in 1 (the logit), got {self.top_mlp}",
        )
        require_rate("model.dropout", self.dropout)


@dataclass(kw_only=True, slots=True)
class DLRMOptions(_TwoMLPOptions):
    """Options of DLRM."""

    def __post_init__(self) -> None:
        _TwoMLPOptions.__post_init__(self)
        require(
            self.bottom_mlp[-1] == self.embedding_dim,
            f"model.bottom_mlp must end in model.embedding_dim={self.embedding_dim} for dlrm (the "
            f"dot interaction needs equal widths), got {self.bottom_mlp}",
        )


class CrossStructure(Enum):
    """Composition of DCNv2's cross and deep networks (DCNv2 paper, figure 1)."""

    stacked = "stacked"
    parallel = "parallel"


@dataclass(kw_only=True, slots=True)
class CrossConfig:
    """The cross network of DCNv2."""

    num_layers: int = option(3, "cross layers", most=1024)
    projection_dim: int | None = option(
        512, "rank of each cross layer's weight; null is full rank", most=MOST_WIDTH
    )
    structure: CrossStructure = option(
        CrossStructure.stacked,
        "stacked: cross, then top MLP; parallel: side by side, then one layer",
    )

    def __post_init__(self) -> None:
        require(
            self.num_layers > 0,
            f"model.cross.num_layers must be positive, got {self.num_layers}",
        )
        require(
            self.projection_dim is None or self.projection_dim > 0,
            f"model.cross.projection_dim must be positive or null, got {self.projection_dim}",
        )


@dataclass(kw_only=True, slots=True)
class DCNv2Options(_TwoMLPOptions):
    """Options of DCNv2."""

    cross: CrossConfig = field(default_factory=CrossConfig)
