"""Options of the project's own models, apart from the models: `--help` and the checks of a command need no torch.

The options of any other model are in the module of the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from configs.options import MOST_COLUMNS, Section, option
from configs.schema import SUGGESTED, ModelConfig, NumericalEncoding

MOST_WIDTH = 2**20
# Measured (benchmarks/history.md): with 1/sqrt(rows) the vectors of small tables give first logits far from 0.
SMALL_INIT = 0.01


def widths(default: list[int], meaning: str, *, filled: bool = False) -> Any:
    return option(default, meaning, most=MOST_WIDTH, gt=0, filled=filled)


def columns(default: int, meaning: str) -> Any:
    return option(default, meaning, most=MOST_COLUMNS, gt=0)


def count(default: int, meaning: str, *, most: int = 1024) -> Any:
    return option(default, meaning, most=most, gt=0)


def rate(default: float, meaning: str) -> Any:
    return option(default, meaning, ge=0, lt=1)


@dataclass(kw_only=True, slots=True)
class _TwoMLPOptions(ModelConfig):
    bottom_mlp: list[int] = widths(
        [512, 256, 128], "widths of the bottom MLP's layers", filled=True
    )
    top_mlp: list[int] = widths(
        [1024, 1024, 512, 256, 1], "widths of the top MLP's layers", filled=True
    )
    dropout: float = rate(
        0.0, "rate of the dropout after each hidden layer of the top MLP, in training; 0 for none"
    )

    batch_norm: bool = option(
        False,
        "normalize the outputs of the top MLP's hidden layers over the global batch, before ReLU",
    )

    def check_relations(self) -> Iterator[str]:
        if self.top_mlp[-1] != 1:
            yield f"model.top_mlp must end in 1 (the logit), got {self.top_mlp}"


@dataclass(kw_only=True, slots=True)
class DLRMOptions(_TwoMLPOptions):
    def check_relations(self) -> Iterator[str]:
        if self.bottom_mlp[-1] != self.embedding_dim:
            yield (
                f"model.bottom_mlp must end in model.embedding_dim={self.embedding_dim} for dlrm (the "
                f"dot interaction needs equal widths), got {self.bottom_mlp}"
            )


CrossStructure = StrEnum("CrossStructure", "stacked parallel")
"""Composition of DCNv2's cross and deep networks (DCNv2 paper, figure 1)."""


@dataclass(kw_only=True, slots=True)
class CrossConfig(Section):
    """The cross network of DCNv2."""

    section = "model.cross"

    num_layers: int = count(3, "cross layers")
    projection_dim: int | None = option(
        512, "rank of each cross layer's weight; null is full rank", most=MOST_WIDTH, gt=0
    )
    structure: CrossStructure = option(
        CrossStructure.stacked,
        "stacked: cross, then top MLP; parallel: side by side, then one layer",
    )


@dataclass(kw_only=True, slots=True)
class DCNv2Options(_TwoMLPOptions):
    cross: CrossConfig = field(default_factory=CrossConfig)


@dataclass(kw_only=True, slots=True)
class _TowerOptions(ModelConfig):
    """Options of `nn.models.features.rates`, beside tables of few columns."""

    embedding_dim: int = columns(16, "columns of every table")
    dropout: float = rate(0.0, "rate of the dropout after every hidden layer")
    batch_norm: bool = option(
        False, "normalise hidden layers over the rows of the global batch, before their activation"
    )


@dataclass(kw_only=True, slots=True)
class _DeepOptions(_TowerOptions):
    hidden: list[int] = widths([400, 400, 400], "widths of the MLP's hidden layers")


@dataclass(kw_only=True, slots=True)
class WideDeepOptions(_DeepOptions):
    """Options of Wide & Deep."""

    embedding_dim: int = columns(16, "columns of every deep table")
    hidden: list[int] = widths([1024, 1024], "widths of the MLP's hidden layers")
    dropout: float = rate(0.5, "rate of the dropout after every hidden layer")
    wide_features: list[str] | None = option(
        None, "features of the linear part, such as crosses: [C1_C2, C3_C4]; null: all"
    )
    deep_features: list[str] | None = option(
        None, "features of the MLP; null: those that wide_features leaves, or all"
    )
    wide_numerical: bool = option(False, "whether the linear part reads the numerical features too")


@dataclass(kw_only=True, slots=True)
class DeepFMOptions(_DeepOptions):
    embedding_dim: int = columns(10, "columns of every feature's vector; its weight is one more")
    embedding_init: float | None = option(
        SMALL_INIT, "bound of the tables' initial weights; null: 1/sqrt(rows) of each table"
    )
    dropout: float = rate(0.5, "rate of the dropout after every hidden layer")


Pooling = StrEnum("Pooling", "sum mean none")


@dataclass(kw_only=True, slots=True)
class EmbeddingMLPOptions(_DeepOptions):
    """Options of the MLP over embeddings."""

    embedding_dim: int = columns(16, "columns of the tables that embedding_dims does not name")
    hidden: list[int] = widths([128, 128], "widths of the MLP's hidden layers")
    pooling: Pooling = option(
        Pooling.sum, "sum or mean of the embeddings of a feature's ids, or none: side by side"
    )


@dataclass(kw_only=True, slots=True)
class FinalMLPOptions(ModelConfig):
    embedding_dim: int = columns(10, "columns of every feature's vector")
    hidden_1: list[int] = widths([400, 400, 400], "widths of the first stream", filled=True)
    hidden_2: list[int] = widths([800], "widths of the second stream", filled=True)
    gate_hidden: list[int] = widths([800], "widths of a gate's hidden layers")
    gate_features_1: list[str] = option(
        [], "features that control the gate of the first stream; []: a learned constant"
    )
    gate_features_2: list[str] = option([], "the same for the second stream")
    heads: int = option(10, "heads of the fusion; they divide both streams' last widths", most=1024)
    dropout: float = rate(0.0, "rate of the dropout after every layer of the streams")
    batch_norm: bool = option(False, "normalise the streams' layers over the global batch")

    def check_relations(self) -> Iterator[str]:
        last = self.hidden_1[-1], self.hidden_2[-1]
        if self.heads <= 0 or any(width % self.heads for width in last):
            yield f"model.heads must divide the last widths of both streams, {last[0]} and {last[1]}, got {self.heads}"


MaskStructure = StrEnum("MaskStructure", "serial parallel")
"""Order of MaskNet's blocks (figure 3)."""


@dataclass(kw_only=True, slots=True)
class MaskNetOptions(_TowerOptions):
    embedding_dim: int = columns(10, "columns of every feature's vector")
    structure: MaskStructure = option(
        MaskStructure.serial, "serial: block after block; parallel: side by side, then an MLP"
    )
    blocks: list[int] = widths([400, 400, 400], "width of every mask block", filled=True)
    reduction_ratio: float = option(
        2.0, "columns of a mask's first layer, as a multiple of its second's", most=1024
    )
    hidden: list[int] = widths([400, 400], "widths of the hidden layers after parallel blocks")
    dropout: float = rate(
        0.0, "rate of the dropout after every serial block, or after those hidden layers"
    )

    def check_relations(self) -> Iterator[str]:
        if self.reduction_ratio <= 0 or round(min(self.blocks) * self.reduction_ratio) <= 0:
            yield f"model.reduction_ratio must leave at least one column of every block's width, got {self.reduction_ratio}"


@dataclass(kw_only=True, slots=True)
class WuKongOptions(_TowerOptions):
    layers: int = count(2, "interaction layers, the paper's l")
    fm_vectors: int = count(8, "vectors of a factorization machine block, n_F", most=MOST_COLUMNS)
    linear_vectors: int = count(8, "vectors of a linear compression block, n_L", most=MOST_COLUMNS)
    compression: int = columns(8, "columns of the compressed products, k")
    fm_hidden: list[int] = widths(
        [256], "widths of the hidden layers of a factorization machine block"
    )
    numerical_hidden: list[int] = widths(
        [256], "widths of the hidden layers before the vector of the numericals"
    )
    hidden: list[int] = widths([256], "widths of the last MLP's hidden layers")


AdaptiveActivation = StrEnum("AdaptiveActivation", "prelu dice")
"""Learned activations of DIN's MLP (section 5.2)."""


class AttentionPooling(Enum):
    """Normalization of DIN's attention weights."""

    sum = "sum"
    mean = "mean"
    softmax = "softmax"


@dataclass(kw_only=True, slots=True)
class DINOptions(_TowerOptions):
    sequence: str | None = option(
        None,
        "sequence group with the history, whose features pair with item_features in order and share their tables; "
        "null: history_features, or else the only group",
    )
    item_features: list[str] = option([], "features of the candidate item, such as [movieId]")
    history_features: list[str] = option(
        [], "their histories, in the same order; each shares its item's table"
    )
    history_length: str | None = option(
        "history_length",
        "numerical feature with the number of items in the history; the positions behind are padding; "
        "null: all histories are full",
        numerical=True,
    )
    history_positions: int | None = option(
        None,
        "positions of the history to attend to, the first ones; null: all",
        most=MOST_COLUMNS,
        gt=0,
    )
    attention_hidden: list[int] = widths([80, 40], "widths of the attention's hidden layers")
    attention_pooling: AttentionPooling = option(
        AttentionPooling.sum,
        "sum: weights as they are, the paper's; mean: divided by the number of items; softmax: over the items",
    )
    hidden: list[int] = widths([200, 80], "widths of the MLP's hidden layers")
    activation: AdaptiveActivation = option(
        AdaptiveActivation.prelu,
        "activation of the MLP: prelu, or dice, whose step lies at the mean of the global batch",
    )


OF_GROUP = "sequence group with the events; null: the only one"


@dataclass(kw_only=True, slots=True)
class _SequenceOptions(_DeepOptions):
    sequence: str | None = option(None, OF_GROUP)
    item_features: list[str] = option(
        [], "features of the candidate; each shares its table with a feature of the group, in order"
    )
    hidden: list[int] = widths([200, 80], "widths of the MLP's hidden layers")


Residual = StrEnum("Residual", "post_norm pre_norm gated")


@dataclass(kw_only=True, slots=True)
class _TransformerOptions(_SequenceOptions):
    blocks: int = count(1, "transformer blocks")
    heads: int = count(2, "heads of the attention")
    expansion: int = count(1, "hidden columns of a block, per column of a token")
    residual: Residual = option(
        Residual.post_norm,
        "of a block's layers F: post_norm LN(x + F(x)), pre_norm x + F(LN(x)), gated x + sigmoid(W x) F(LN(x)) as in LiGR",
    )
    relative_bias: bool = option(
        False, "add a learned bias to scores, by the distance of two events and the time between"
    )
    block_dropout: float = rate(0.0, "rate of the dropout of events and of a block's layers")


@dataclass(kw_only=True, slots=True)
class SASRecOptions(_TransformerOptions):
    """Options of SASRec as a ranker."""

    blocks: int = count(2, "transformer blocks")
    heads: int = count(1, "heads of the attention")
    residual: Residual = option(
        Residual.pre_norm, "of a block's layers F: post_norm, pre_norm, or gated as in LiGR"
    )


OutputPooling = StrEnum("OutputPooling", "last mean")


@dataclass(kw_only=True, slots=True)
class BSTOptions(_TransformerOptions):
    pooling: OutputPooling = option(
        OutputPooling.last,
        "what the MLP reads of the blocks' outputs: last, the candidate's; or mean, that of all",
    )


@dataclass(kw_only=True, slots=True)
class TransActOptions(_TransformerOptions):
    recent: int = count(100, "latest events that the transformer reads", most=MOST_COLUMNS)
    outputs: int = count(10, "latest events whose outputs the MLP reads")


@dataclass(kw_only=True, slots=True)
class OneTransOptions(_SequenceOptions):
    tokens: int = count(16, "tokens of candidate and other features", most=MOST_COLUMNS)
    token_dim: int = count(64, "columns of a token; a multiple of heads", most=MOST_WIDTH)
    blocks: int = count(2, "transformer blocks")
    heads: int = count(4, "heads of the attention")
    expansion: int = count(4, "hidden columns of a block, per column of a token")
    block_dropout: float = rate(0.0, "rate of the dropout of events and of a block's layers")


Search = StrEnum("Search", "product hash")


@dataclass(kw_only=True, slots=True)
class SIMOptions(_SequenceOptions):
    """Options of SIM and ETA."""

    search: Search = option(
        Search.product,
        "likeness to the candidate: product of vectors (SIM), or equal signs of random projections (ETA)",
    )
    found: int = count(50, "events that the attention reads", most=MOST_COLUMNS)
    recent: int = option(20, "latest events that DIN's unit reads", most=MOST_COLUMNS, ge=0)
    heads: int = count(2, "heads of the attention")
    hash_bits: int = count(64, "random projections of model.search=hash", most=4096)


@dataclass(kw_only=True, slots=True)
class _TaskOptions(_TowerOptions):
    tower_hidden: list[int] = widths([64], "widths of the hidden layers of every task's tower")


@dataclass(kw_only=True, slots=True)
class SharedBottomOptions(_TaskOptions):
    """Options of the shared-bottom model."""

    hidden: list[int] = widths([256, 128], "widths of the shared layers", filled=True)


@dataclass(kw_only=True, slots=True)
class MMoEOptions(_TaskOptions):
    experts: int = count(8, "number of experts")
    expert_hidden: list[int] = widths([256, 128], "widths of every expert's layers", filled=True)


@dataclass(kw_only=True, slots=True)
class PLEOptions(_TaskOptions):
    levels: int = count(2, "levels of extraction; 1 is CGC")
    task_experts: int = count(4, "experts of every task in a level")
    shared_experts: int = count(4, "experts in a level that all tasks share")
    expert_hidden: list[int] = widths([256, 128], "widths of every expert's layers", filled=True)


@dataclass(kw_only=True, slots=True)
class RankMixerOptions(_TaskOptions):
    tokens: int = count(16, "tokens, and heads of a token, the paper's T", most=MOST_COLUMNS)
    token_dim: int = count(64, "columns of a token, D; a multiple of tokens", most=MOST_WIDTH)
    layers: int = count(2, "blocks, L")
    expansion: int = count(4, "hidden columns of a token's network, as a multiple of token_dim, k")
    experts: int = count(1, "networks of a token in every block, joined by ReLU routing")
    active_experts: float = option(
        0.25, "share of the experts that the routing of evaluation is driven to", gt=0, lt=1
    )
    feature_order: list[str] = option(
        [], "features in the order of their semantic groups, cut into tokens; the others follow"
    )

    def check_relations(self) -> Iterator[str]:
        if self.token_dim % self.tokens != 0:
            yield f"model.token_dim must be a multiple of model.tokens={self.tokens}, got {self.token_dim}"


@dataclass(kw_only=True, slots=True)
class FCNOptions(ModelConfig):
    """Options of FCN (DCNv3)."""

    embedding_dim: int = columns(16, "columns of every feature's vector; even")
    deep_layers: int = count(4, "layers of the exponential cross network")
    shallow_layers: int = count(4, "layers of the linear cross network")
    deep_dropout: float = rate(
        0.1, "rate of the dropout after every layer of the exponential network"
    )
    shallow_dropout: float = rate(0.3, "the same in the linear network")
    batch_norm: bool = option(
        False, "normalise a layer's product over the rows of the global batch, before its mask"
    )

    def check_relations(self) -> Iterator[str]:
        if self.embedding_dim % 2 != 0:
            yield f"model.embedding_dim must be even for fcn, which halves vectors, got {self.embedding_dim}"


@dataclass(kw_only=True, slots=True)
class AutoIntOptions(_DeepOptions):
    """Options of AutoInt+."""

    layers: int = count(3, "interacting layers")
    heads: int = count(2, "heads of every interacting layer")
    head_dim: int = columns(16, "columns of a head")
    hidden: list[int] = widths([400, 400], "widths of the MLP's hidden layers")


@dataclass(kw_only=True, slots=True)
class XDeepFMOptions(DeepFMOptions):
    """Options of xDeepFM."""

    dropout: float = rate(0.0, "rate of the dropout after every hidden layer")
    cross_layers: list[int] = option(
        [16, 16, 16],
        "vectors of every layer of compressed interactions",
        most=MOST_COLUMNS,
        gt=0,
        filled=True,
    )


@dataclass(kw_only=True, slots=True)
class ESMMOptions(_TaskOptions):
    embedding_dim: int = columns(18, "columns of every table")
    tower_hidden: list[int] = widths([360, 200, 80], "widths of the hidden layers of both towers")


@dataclass(kw_only=True, slots=True)
class PEPNetOptions(_TowerOptions):
    domain_features: list[str] = option([], "features of the domain, which gate all embeddings")
    prior_features: list[str] = option(
        [], "features of user, item and author, which gate the towers' hidden layers"
    )
    tower_hidden: list[int] = widths(
        [100, 64], "widths of the hidden layers of every task's tower", filled=True
    )


@dataclass(kw_only=True, slots=True)
class STAROptions(_TowerOptions):
    domain: str | None = option(
        None,
        "numerical feature with the number of a row's domain, from 0 to domains - 1",
        numerical=True,
    )
    domains: int = count(2, "number of domains, each with a network of its own")
    hidden: list[int] = widths([256, 128, 64], "widths of the hidden layers of every domain")
    auxiliary_hidden: list[int] = widths([64], "widths of the auxiliary network's hidden layers")


ItemMLPs = StrEnum("ItemMLPs", "row item")
"""Inputs of the MLPs of HSTU's items."""
AttentionNorm = StrEnum("AttentionNorm", "batch_max capacity length")
"""Divisor of HSTU's attention."""
QueryTime = StrEnum("QueryTime", "last_event sample")
"""Moment from which the times of HSTU's events count back."""


@dataclass(kw_only=True, slots=True)
class HSTUOptions(ModelConfig):
    """Options of HSTU; experiment=hstu_mlperf has those of MLPerf's dlrm_v4."""

    embedding_dim: int = columns(16, "columns of every table")
    sequence: str | None = option(None, OF_GROUP)
    item_features: list[str] = option(
        [],
        "features of the candidates: the item, then what belongs to it; each shares its table with a feature of the group, "
        "in order, and has an id per candidate",
    )
    action: str | None = option(
        None, "number of the events whose bits tell what the user did; null: nothing does"
    )
    action_bits: list[int] = option(
        [1, 2, 4], "bits of the action that have vectors", gt=0, filled=True
    )
    action_dim: int = columns(8, "columns of the vector of a bit")
    hour: str | None = option(
        None,
        "numerical feature with the query's time in hours, for the hour of its day and its day of the week; null: none",
        numerical=True,
    )
    query_time: QueryTime = option(
        QueryTime.last_event,
        "moment from which the events' times count back: that of the last event, or of the sample",
    )
    item_mlps: ItemMLPs = option(
        ItemMLPs.row,
        "where the items' MLPs are computed: row, the item's once per distinct row; or item, both once per item, whose other "
        "features must follow from it",
    )
    input_hidden: int = count(64, "hidden columns of the MLPs of the input", most=MOST_WIDTH)
    width: int = count(64, "columns of a position", most=MOST_WIDTH)
    layers: int = count(2, "STU layers")
    heads: int = count(2, "heads of every layer")
    head_dim: int = columns(32, "columns of a head")
    positions: int = count(
        1024, "rows of the table of positions; earlier events share the last", most=2**24
    )
    time_buckets: int = count(2048, "last bucket of a time, the root of its minutes", most=2**24)
    input_dropout: float = rate(0.2, "rate of the dropout before the first layer")
    dropout: float = rate(0.1, "rate of the dropout before the output of every layer")
    attention_norm: AttentionNorm = option(
        AttentionNorm.length,
        "divisor of the attention: the longest sample of this rank's batch, as in the reference, so that a score depends on "
        "the rows beside it; the longest possible; or the sample's own length",
    )
    silu_all: bool = option(False, "SiLU on values, queries and keys too, as in the paper")
    concat: bool = option(True, "u and the attention beside their product; false as in the paper")
    relative_bias: bool = option(
        False, "add biases by distance and time to the scores, as in the paper; no kernel has them"
    )

    def check_relations(self) -> Iterator[str]:
        if len(self.action_bits) > 8:
            yield f"model.action_bits may be 8, whose combinations are computed, got {len(self.action_bits)}; leave some out"


def without_effect(options: ModelConfig) -> dict[str, str]:
    """Return the options of a model that others of it leave without an effect, each with the reason."""
    found = {}
    hidden: Sequence[int] = [1]
    if isinstance(options, MaskNetOptions) and options.structure is MaskStructure.serial:
        for name in ("hidden", "batch_norm"):
            found[name] = "the hidden layers are those of model.structure=parallel"
    elif isinstance(options, WuKongOptions):
        hidden = [*options.fm_hidden, *options.hidden]
    elif isinstance(options, PEPNetOptions):
        hidden = options.tower_hidden
    elif isinstance(options, STAROptions):
        hidden = [*options.hidden, *options.auxiliary_hidden]
    elif isinstance(options, _TwoMLPOptions):
        hidden = options.top_mlp[:-1]
    elif isinstance(options, _DeepOptions | MaskNetOptions | DINOptions):
        hidden = options.hidden
    if isinstance(options, DINOptions) and not (options.history_features and not options.sequence):
        for name in ("history_features", "history_length", "history_positions"):
            found[name] = "the history is that of a sequence group"
    if isinstance(options, SIMOptions) and options.search is not Search.hash:
        found["hash_bits"] = "only model.search=hash hashes"
    if isinstance(options, RankMixerOptions) and options.experts == 1:
        found["active_experts"] = "model.experts=1 needs no routing"
    if isinstance(options, EmbeddingMLPOptions) and options.embedding_dims == SUGGESTED:
        found["embedding_dim"] = f"model.embedding_dims={SUGGESTED} chooses all columns"
    if options.numerical_encoding is not NumericalEncoding.periodic:
        found["numerical_sigma"] = "only model.numerical_encoding=periodic has frequencies"
    if options.numerical_encoding is NumericalEncoding.plain:
        found["numerical_size"] = "model.numerical_encoding=plain encodes no number"
    for rate in ("dropout", "batch_norm"):
        if not hidden and getattr(options, rate, False):
            found[rate] = "the model has no hidden layer"
    return found
