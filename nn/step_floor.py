"""Lower bounds of the time of a training step on an H200 or an H100, whatever the code.

A step computes its matrix products, moves its bytes through the GPU's memory, and sends embeddings and gradients between
GPUs. Each amount is divided by the best rate measured for it on that card. The largest of the three times is the floor, since
the three may overlap completely. Work that a better program could avoid is not counted; each function lists it.

There are two floors. The burst floor takes the rate of products on a GPU that was idle before. Within 0.2 s the GPU reaches its
power limit of 700 W and lowers its clock: the sustained floor takes the rate of products from then on. A training whose time
is mostly products can only come near the second one.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.schema import Amp, Config, Fp8, TableDtype
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.declared_tables import embedding_columns, hands_out_rows, ids_per_sample
from nn.embedding.optimizer import table_rule
from nn.models.registry import build_meta, declared_tables
from nn.tiers.traffic import IdShare, expected_distinct, power_law_share
from nn.training.dense_optimizer import dense_rule

# Measured on an H200 SXM: a large bf16 matrix product, a copy in HBM (bytes read plus bytes written), an all-to-all of
# 256 MiB per rank on four GPUs (bytes that leave a rank). Not measured: TF32, which is taken as half of bf16 as in the data
# sheet (495 and 989 TFLOP/s), plain fp32, which is the data sheet's number, and fp8, which is twice bf16 there.
BF16_FLOPS_PER_S = 788e12
# The same products for four seconds, from 0.2 s on: 565 to 590 TFLOP/s in bf16 at 1,425 to 1,500 MHz, 970 to 1,035 in fp8. The
# larger ones, since this is a lower bound. Not measured: TF32, of which the same share is taken, and plain fp32, which keeps its
# rate.
SUSTAINED_SHARE = 590 / 788
SUSTAINED_FP8_SPEEDUP = 1035 / 590
TF32_FLOPS_PER_S = BF16_FLOPS_PER_S / 2
FP32_FLOPS_PER_S = 67e12
FP8_SPEEDUP = 2
FP8, LINEAR = "products in fp8", "MLPs and cross"
"""Terms of the products of `train.fp8`, and of linear layers."""
HBM_BYTES_PER_S = {"H200": 4.3e12, "H100": 3.0e12}
"""A copy, bytes read plus bytes written. The processor and the links of the two are the same."""
ALL_TO_ALL_BYTES_PER_S = 394e9

ID_BYTES = 4  # the largest table has fewer than 2^31 rows
LABEL_BYTES = 4
NUMERICAL_BYTES = 4
FP32_BYTES = 4

ShareOf = Callable[[Sequence[str], int], IdShare]
"""Returns how often the stored ids of a table occur, by its features and the number of their ids."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bound of the time of a step, and its terms. All counts are means over ranks."""

    flops: dict[str, float]
    hbm: dict[str, float]
    all_to_all: dict[str, float]
    flops_per_s: float  # of the matrix products, on a GPU that was idle before
    global_batch_size: int
    sustained_share: float = SUSTAINED_SHARE  # of that rate at the power limit
    hbm_bytes_per_s: float = HBM_BYTES_PER_S["H200"]

    @property
    def times_ms(self) -> dict[str, float]:
        return self._times_ms(self.flops_per_s, FP8_SPEEDUP)

    @property
    def sustained_times_ms(self) -> dict[str, float]:
        """Lower bound per resource at the power limit."""
        return self._times_ms(self.flops_per_s * self.sustained_share, SUSTAINED_FP8_SPEEDUP)

    def _times_ms(self, flops_per_s: float, fp8_speedup: float) -> dict[str, float]:
        in_fp8 = self.flops.get(FP8, 0)
        flops = sum(self.flops.values()) - in_fp8 * (1 - 1 / fp8_speedup)
        return {
            "FLOPs": flops / flops_per_s * 1e3,
            "HBM": sum(self.hbm.values()) / self.hbm_bytes_per_s * 1e3,
            "all-to-all": sum(self.all_to_all.values()) / ALL_TO_ALL_BYTES_PER_S * 1e3,
        }

    @property
    def bound(self) -> str:
        return max(self.times_ms, key=self.times_ms.__getitem__)

    @property
    def ms(self) -> float:
        return self.times_ms[self.bound]

    @property
    def sustained_ms(self) -> float:
        return max(self.sustained_times_ms.values())


def floor_of(
    config: Config,
    spec: FeatureSpec,
    world_size: int,
    share_of: ShareOf,
    replicated: Collection[str] = (),
    gpu: str = "",
) -> Floor:
    """Count a training step on a card, by its name as torch gives it; one that is not known counts as an H200.

    Tables that are not replicated, and their lookups, count as spread evenly; rows of replicated ones count as those of the
    others, which is less than a replica's work.
    """
    card = next((name for name in HBM_BYTES_PER_S if name in gpu), "H200")
    expands = config.data.multi_hot.hotness is not None
    batch = config.train.batch_size / world_size
    tables = declared_tables(config.model, spec)
    ids = ids_per_sample(tables, spec)
    # Different ids of a table: the most that one of its features has.
    of_feature = {feature.name: feature.cardinality for feature in spec.categorical}
    cardinality = {table.name: max(of_feature[f] for f in table.feature_names) for table in tables}
    shares = {
        table.name: share_of(table.feature_names, cardinality[table.name]) for table in tables
    }

    def distinct(rows: float) -> dict[str, float]:
        """Return the distinct rows of each table that so many samples look up."""
        return {
            name: unique_rows(cardinality[name], rows, ids[name], shares[name], expands=expands)
            for name in ids
        }

    is_plain = config.train.amp is Amp.off and not config.train.tf32
    flops_per_s = TF32_FLOPS_PER_S if config.train.amp is Amp.off else BF16_FLOPS_PER_S
    flops_per_s = FP32_FLOPS_PER_S if is_plain else flops_per_s
    unique = {name: rows / world_size for name, rows in distinct(config.train.batch_size).items()}
    own = unique if world_size == 1 else distinct(batch)
    sent = sent_elements(tables, spec, batch, world_size, own, replicated)
    handed_out = sum(
        own[table.name] * table.embedding_dim for table in tables if hands_out_rows(table, spec)
    )
    return Floor(
        flops=count_flops(config, spec, batch),
        hbm=count_hbm(config, spec, batch, unique, sent, handed_out, expands=expands),
        all_to_all=count_all_to_all(config, spec, batch, sent, own, world_size, expands=expands),
        flops_per_s=flops_per_s,
        global_batch_size=config.train.batch_size,
        sustained_share=1 if is_plain else SUSTAINED_SHARE,
        hbm_bytes_per_s=HBM_BYTES_PER_S[card],
    )


def sent_elements(
    tables: Sequence[EmbeddingBagConfig],
    spec: FeatureSpec,
    batch: float,
    world_size: int,
    own: Mapping[str, float],
    replicated: Collection[str] = (),
) -> dict[str, float]:
    """Return the elements of each table that a rank must be sent: the vectors of its samples, or their distinct rows.

    Rows are sent if they are fewer, or if the dense component takes them.
    """
    remote_share = (world_size - 1) / world_size
    if not remote_share:
        return {}
    return {
        table.name: remote_share
        * min(
            math.inf if hands_out_rows(table, spec) else batch * embedding_columns([table], spec),
            own[table.name] * table.embedding_dim,
        )
        for table in tables
        if table.name not in replicated
    }


def count_flops(config: Config, spec: FeatureSpec, batch: float) -> dict[str, float]:
    """Count floating-point operations of matrix products and of the dot interaction.

    A multiplication and an addition are two operations. A linear layer of n inputs and m outputs takes 2nm forward, 2nm for
    the gradient of its weight and 2nm for the gradient of its input. The first layer of the bottom MLP needs no gradient of
    its input. The product of two vectors of D columns takes 2D forward and 4D backward (2D per vector). Each pair of vectors
    counts once, although tensor cores compute both halves of the symmetric matrix.

    Not counted: activations, biases, elementwise work of cross layers, loss, optimizer.
    """
    model = build_meta(config.model, spec)
    layers = model.linear_layers()
    counted = {LINEAR: batch * sum(6 * before * after for before, after in layers)}
    if spec.numerical and layers:
        before, after = layers[0]
        counted[LINEAR] -= batch * 2 * before * after
    products = model.activations().products
    counted |= {name: batch * 3 * flops for name, flops in products.items()}
    for layer in () if config.train.fp8 is Fp8.off else model.fp8_layers():
        # Forward, gradients of inputs, and of weights.
        passes = 3 if config.train.fp8 is Fp8.full else 2
        sizes = sum(inputs * outputs for _, inputs, outputs in layer.fp8_products())
        counted[FP8] = counted.get(FP8, 0) + batch * 2 * passes * sizes
        counted[getattr(layer, "fp8_term", LINEAR)] -= batch * 2 * passes * sizes
    return counted


def count_hbm(
    config: Config,
    spec: FeatureSpec,
    batch: float,
    unique: Mapping[str, float],
    sent: Mapping[str, float],
    handed_out: float = 0,
    *,
    expands: bool = False,
) -> dict[str, float]:
    """Count the bytes that must pass through the memory of one rank.

    `unique`: table -> distinct rows that the global batch looks up, of this rank's share of the table.
    `handed_out`: elements of the distinct rows of this rank's batch that the dense component takes itself.
    `expands`: only the first id of a bag is stored; the others are computed from it (`data.multi_hot`).

    Counted per step:

    - batch: numericals, labels, numbers of events and ids are written once by the copy from the host, and all but ids are read
      once, ids twice (lookup and update), whatever number of tables a feature has.
    - rows read: each distinct row once, in the table's dtype. Repetitions may come from the cache.
    - embeddings: written by the lookup, a vector per feature of a table, or one per id without pooling, or the distinct rows that
      are handed out; read forward and backward; their gradients are written and read. What is sent is written and read once
      more in each direction.
    - rows updated: each distinct row and its optimizer state, read and written. The row has left the cache since the lookup.
      The sum of a row's gradients stays on chip.
    - activations: the input of each matrix product but embeddings, written forward and read backward. Gradients of activations
      and reads of the forward pass are not counted, since both could stay on chip.
    - dense component: weights and state read and written, gradients written and read.

    Not counted: sorting the ids, casts, padding, the multi-hot expansion, metrics.
    """
    tables = declared_tables(config.model, spec)
    columns = embedding_columns(tables, spec)
    model = build_meta(config.model, spec)
    activations = model.activations()
    saved = sum(before for before, _ in model.linear_layers()) - activations.reread_columns
    states = dense_rule(config.effective_optimizer).states_per_weight
    elements = sum(unique[table.name] * table.embedding_dim for table in tables)
    ids = sum(1 if expands else feature.mean_hotness for feature in spec.categorical)
    events = {feature.name: feature.mean_hotness for feature in spec.categorical}
    numbers = len(spec.numerical) + sum(
        events[group.features[0]] * len(group.numbers) for group in spec.sequences
    )
    weight_bytes = FP32_BYTES if config.model.embedding_dtype is TableDtype.fp32 else 2
    activation_bytes = 4 if config.train.amp is Amp.off else 2
    rule = table_rule(config.effective_optimizer.table_name)
    updated = elements * (weight_bytes + rule.bytes_per_element)
    updated += sum(unique.values()) * rule.bytes_per_row
    return {
        "batch": batch * (2 * (NUMERICAL_BYTES * numbers + LABEL_BYTES) + 3 * ID_BYTES * ids),
        "rows read": elements * weight_bytes,
        "embeddings": (5 * (batch * columns + handed_out) + 4 * sum(sent.values()))
        * _embedding_bytes(config),
        "rows updated": 2 * updated,
        "activations": batch * saved * activation_bytes * 2,
        "dense component": model.num_parameters() * FP32_BYTES * (2 + 2 + 2 * states),
    }


def count_all_to_all(
    config: Config,
    spec: FeatureSpec,
    batch: float,
    sent: Mapping[str, float],
    own: Mapping[str, float],
    world_size: int,
    *,
    expands: bool = False,
) -> dict[str, float]:
    """Count the bytes that one rank sends to others; with `expands` only the first id of a bag is sent.

    Embeddings go to the ranks of their samples and gradients come back, in the dtype of the all-to-all. Not counted: the
    all-reduce of the gradients of the dense component and of replicated tables, which a switch can sum.
    """
    one_way = sum(sent.values()) * _embedding_bytes(config)
    remote_share = (world_size - 1) / world_size
    # An id per stored one, once per feature, or per distinct row.
    of_feature = {
        name: table.name
        for table in declared_tables(config.model, spec)
        if table.name in sent
        for name in table.feature_names
    }
    ids = sum(
        min(batch * (1 if expands else feature.mean_hotness), own[of_feature[feature.name]])
        for feature in spec.categorical
        if feature.name in of_feature
    )
    return {"ids": remote_share * ID_BYTES * ids, "embeddings": one_way, "gradients": one_way}


def power_law_shares(exponent: float) -> ShareOf:
    """Return how often ids occur that `dataloading.randomness.power_law` draws for tables."""
    return lambda _, cardinality: power_law_share(cardinality, exponent)


def unique_rows(
    cardinality: int, batch: float, hotness: float, share: IdShare, *, expands: bool = False
) -> float:
    """Return the expected number of distinct rows of a table that a batch looks up.

    With `expands` only the bags' first ids are draws from `share`. Each distinct first id adds the same hotness - 1 rows every
    time, and those are drawn uniformly.
    """
    if not expands:
        return expected_distinct(batch * hotness, share, 0, cardinality)
    first = expected_distinct(batch, share, 0, cardinality)
    uniform = power_law_share(cardinality, 0)
    others = expected_distinct(first * (hotness - 1), uniform, 0, cardinality)
    return first + others - first * others / cardinality


def _embedding_bytes(config: Config) -> int:
    return 2 if config.train.amp is Amp.bf16 else 4  # the all-to-all of fp16 is in fp32
