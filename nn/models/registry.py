"""Models by name."""

from collections.abc import Callable

from torch import nn

from configs.schema import ModelConfig, ModelName
from dataloading.feature_spec import FeatureSpec
from nn.models.dcnv2 import build_dcnv2
from nn.models.dlrm import build_dlrm

BUILDERS: dict[ModelName, Callable[[ModelConfig, FeatureSpec], nn.Module]] = {
    ModelName.dlrm: build_dlrm,
    ModelName.dcnv2: build_dcnv2,
}


def build_dense(config: ModelConfig, spec: FeatureSpec) -> nn.Module:
    """Build the dense half: forward(numerical [B, N], embeddings) -> logits [B]."""
    return BUILDERS[config.name](config, spec)
