"""Every option of the recipe: type, default, meaning and check. Imports neither torch nor hydra.

Values live in `configs/**/*.yaml`; this file says what may be set and what it means. `python dlrm.py --help` prints the
text given to `option` beside each name. `main.command` turns the composed yaml into these classes (`configs/overrides.py`),
so every check here runs before a file is opened or a process group exists.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum, StrEnum
from functools import cache
from math import isfinite
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.built_in import LOGGERS, MODELS
from configs.options import (
    LEAST_GIB,
    MOST_COLUMNS,
    MOST_RANKS,
    MOST_ROWS,
    MOST_SAMPLES,
    OPEN_SECTION,
    Section,
    bounds_of,
    check_bounds,
    check_section,
    is_file_name,
    is_import_path,
    option,
    refuse,
    require,
)

Mode = StrEnum("Mode", "train eval inference importance predict plan")
Amp = StrEnum("Amp", "off bf16 fp16")
Fp8 = StrEnum("Fp8", "off partial full")
"""Matrix products of wide layers in 8 bits: all three of a layer, or without the gradients of weights."""
TableDtype = StrEnum("TableDtype", "fp32 bf16 fp16")
EventPooling = StrEnum("EventPooling", "sum mean last attention")
NumericalEncoding = StrEnum("NumericalEncoding", "plain periodic buckets")
DecayShape = StrEnum("DecayShape", "polynomial cosine")
OptimizerName = StrEnum("OptimizerName", "sgd adagrad rowwise_adagrad adam lion lamb")
"""Built-in optimizers of the dense component; all but lamb are some of tables too."""


@cache
def table_optimizers() -> list[str]:
    """Return the names of the built-in optimizers of tables: each is one file, which is not imported here."""
    rules = Path(__file__).parents[1] / "nn/embedding/rules"
    return sorted(path.stem for path in rules.glob("[a-z]*.py"))


ShardingType = StrEnum(
    "ShardingType", "table_wise column_wise row_wise table_row_wise data_parallel"
)
"""Sharding of one table over the ranks, by TorchRec's names; `table_row_wise` is row-wise within one node."""
Exchange = StrEnum("Exchange", "vectors rows least")
"""Content that the ranks of the samples get of a table; `least` is the one of fewer bytes."""
Evict = Enum("Evict", {"age": "age", "count": "count", "never": "never"})
"""The keys that leave the table of a feature with raw keys when it is full; texts have a method `count`."""
Tier = StrEnum("Tier", "device host disk")
"""Memory that holds all rows of a table: the device's, or the host's or a disk with an arena of rows on the device."""
DrawRule = StrEnum("DrawRule", "frequency uniform")
Component = StrEnum("Component", "dense tables")
"""The two components of a model: the data-parallel dense layers and the model-parallel tables."""
CheckpointPart = StrEnum("CheckpointPart", "dense tables optimizer")
"""Parts of a checkpoint that can be loaded: weights of either component, and the optimizers' state with the step."""
DeltaType = StrEnum("DeltaType", "table bf16 int8 int4")
Division = StrEnum("Division", "closed open")
"""Divisions of MLPerf: the benchmark's own training method, or any other."""
RENAMED = {"stage": "day", "sharding.staged_gib": "sharding.read_ahead_gib"}
"""Options of earlier versions, and their names now; 0.4.0 refuses them."""
DayToTrain = StrEnum("DayToTrain", "next")
Device = StrEnum("Device", "auto cpu cuda")


@dataclass(kw_only=True, slots=True)
class SyntheticConfig(Section):
    """The built-in synthetic clicks, used when `data.path` is null."""

    section = "data.synthetic"

    train_rows: int = option(262_144, "rows in the training split", most=MOST_ROWS, gt=0)
    test_rows: int = option(32_768, "rows in the test split", most=MOST_ROWS, gt=0)
    num_numerical: int = option(13, "numerical features", most=MOST_COLUMNS, ge=0)
    cardinalities: list[int] = option(
        [], "rows per table, one entry per categorical feature", most=MOST_ROWS, gt=0
    )
    hotness: list[int] = option(
        [], "ids per row and table; empty means 1 for every table", most=MOST_COLUMNS, gt=0
    )
    names: list[str] = option(
        [], "names of the categorical features, one per table; empty: cat_0, cat_1 and so on"
    )
    exponent: float = option(
        1.05, "power-law exponent of the ids; 0 draws them uniformly", most=64, ge=0
    )
    history: list[str] = option(
        [],
        "features whose tables past events have ids of, as the sequence group 'history' of hist_NAME and hist_time; empty: no "
        "events",
    )
    history_length: float = option(20.0, "mean events per row", gt=0)
    history_max_length: int = option(100, "most events per row", most=MOST_COLUMNS, gt=0)

    def check_relations(self) -> Iterator[str]:
        for name, given in (("hotness", self.hotness), ("names", self.names)):
            if len(given) not in (0, len(self.cardinalities)):
                yield (
                    f"data.synthetic.{name} has {len(given)} entries for {len(self.cardinalities)} "
                    "data.synthetic.cardinalities; give one per table, or none"
                )
        taken = {"", "label", *(f"num_{number}" for number in range(self.num_numerical))}
        for name in self.names:
            if name in taken:
                yield f"data.synthetic.names has '{name}', which is empty or the name of another column"
            taken.add(name)
        for name in self.history:
            if name not in self.tables or self.history.count(name) != 1:
                yield f"data.synthetic.history has '{name}'; want names of data.synthetic.names, each once"
        if not self.history:
            return
        made = ["history", "hist_time", *(f"hist_{name}" for name in self.history)]
        for name in made:
            if name in self.tables or made.count(name) != 1:
                yield (
                    f"data.synthetic.names: data.synthetic.history={self.history} makes a column '{name}'; "
                    "rename the one of that name"
                )
        if self.history_length >= self.history_max_length:
            yield (
                f"data.synthetic.history_length={self.history_length:g} is not below "
                f"data.synthetic.history_max_length={self.history_max_length}; lower it"
            )

    @property
    def tables(self) -> dict[str, int]:
        names = self.names or [f"cat_{number}" for number in range(len(self.cardinalities))]
        return dict(zip(names, self.cardinalities, strict=True))


@dataclass(kw_only=True, slots=True)
class MultiHotConfig(Section):
    """Expansion of stored ids to several, as in MLPerf's synthetic multi-hot Criteo."""

    section = "data.multi_hot"

    hotness: list[int] | None = option(
        None,
        "ids to look up per stored id, one entry per categorical feature; 1 leaves a feature as it is "
        "stored, null leaves all features so",
        most=MOST_COLUMNS,
        filled=True,
        gt=0,
    )
    seed: int = option(0, "seed of the added ids; MLPerf's is 0", ge=0, lt=2**32)


@dataclass(kw_only=True, slots=True)
class DynamicConfig(Section):
    """Rows for the keys of features with `vocabulary: dynamic`."""

    section = "data.dynamic"

    admit_after: int = option(
        1, "training rows with a key before it has a row, not row 0", most=2**31 - 1, gt=0
    )
    evict: Evict = option(
        Evict.age,
        "keys that leave a full table: age, the longest unseen; count, the rarest; never: an error",
    )
    expire_after: int | None = option(
        None,
        "steps without a key after which it leaves, looked at eight times as often; null: never",
        most=2**31 - 1,
        gt=0,
    )


@dataclass(kw_only=True, slots=True)
class NegativesConfig(Section):
    """Negatives that the loader adds behind every row."""

    section = "data.negatives"

    features: list[str] = option(
        [],
        "features of the item, itself the first, that negatives have of another one, with the label 0; all others are the "
        "row's; []: no negatives",
    )
    per_row: int = option(4, "negatives behind every row", most=1024, gt=0)
    rule: DrawRule = option(
        DrawRule.frequency,
        "frequency: the item of another row, so as often as it occurs; uniform: any id of the table, for one feature",
    )
    history: str | None = option(
        None, "feature with items that negatives of the row must not have; null: none"
    )

    def check_relations(self) -> Iterator[str]:
        for declared in fields(self)[1:]:
            if getattr(self, declared.name) != declared.default and not self.features:
                yield f"data.negatives.{declared.name} has no effect without data.negatives.features, the features of the item"
        if self.rule is DrawRule.uniform and len(self.features) != 1:
            yield f"data.negatives.rule=uniform draws ids of one feature, got features={self.features}; set rule=frequency"
        if len({*self.features}) < len(self.features):
            yield f"data.negatives.features={self.features} names a feature twice; name each once, the item first"
        if self.history in self.features:
            yield (
                f"data.negatives.history={self.history} is one of data.negatives.features; name a feature with a list of other "
                "items"
            )


@dataclass(kw_only=True, slots=True)
class DataConfig(Section):
    """Source of the rows, and how they are read."""

    section = "data"

    path: str | None = option(
        None, "dataset directory; null trains on the built-in synthetic clicks", path=True
    )
    feature_spec: str = option("feature_spec.yaml", "name of the spec file inside data.path")
    shuffle_block: int = option(
        1024,
        "consecutive rows that stay together when an epoch is shuffled; 1 shuffles single rows, "
        "0 keeps the order on disk; a Parquet dataset rounds it up to complete row groups",
        ge=0,
    )
    prefetch: int | None = option(
        None, "batches read ahead of the step; null: 4, or 8 with ragged features", most=1024, gt=0
    )
    workers: int | None = option(
        None,
        "reader workers per rank and split: processes where a GPU trains; threads on CPUs and for large row groups of "
        "Parquet. Also the threads that draw data.multi_hot at the start; null: 4, or 8 where a feature is ragged",
        most=1024,
        gt=0,
    )
    validation_fraction: float | None = option(
        None,
        "fraction of the training rows, the last ones, held out as split validation; null: none",
        gt=0,
        lt=1,
    )
    watch_dir: str | None = option(
        None,
        "directory to which datasets of the fit of data.path are added while a run trains: their training rows follow "
        "those of data.path, each once (docs/every_day.md)",
        path=True,
    )
    watch_idle_s: float | None = option(
        None,
        "seconds without a further batch after which a run with data.watch_dir ends; null: wait",
        gt=0,
    )
    dynamic: DynamicConfig = MISSING
    negatives: NegativesConfig = MISSING
    multi_hot: MultiHotConfig = MISSING
    synthetic: SyntheticConfig = MISSING

    def check_relations(self) -> Iterator[str]:
        if self.path is None and not self.synthetic.cardinalities:
            yield "no data: set data.path to a dataset directory, or data.synthetic.cardinalities"


SUGGESTED = "suggested"
"""Value of model.embedding_dims that derives the columns from the rows of each table."""


@dataclass(kw_only=True, slots=True)
class ModelConfig(Section):
    """Options that every model has; a model's own are declared with it, in `nn/models/`."""

    section = "model"

    name: str = option(
        "dlrm", f"{', '.join(MODELS)}, or package.module:Class for a model of your own"
    )
    embedding_dim: int = option(128, "columns of every table", most=MOST_COLUMNS, gt=0)
    embedding_dtype: TableDtype = option(
        TableDtype.fp32,
        "what table weights are stored in: fp32, or bf16 or fp16 with stochastic rounding, at fp32's "
        "accuracy as far as measured; replicated tables and optimizer state stay fp32",
    )
    embedding_init: float | None = option(
        None, "tables begin uniform in +-embedding_init; null: in +-1/sqrt(rows) of each", gt=0
    )
    # Any, since Hydra lets nobody add keys to a typed dictionary; checked below.
    embedding_dims: Any = option(
        None,
        "columns of single tables, by feature: {genres: 16}, projected to embedding_dim where the model needs one width; "
        "suggested: 16 to 512 by each table's rows, as NVTabular suggests them",
    )
    # Any, as above; checked against the dataset.
    event_weights: Any = option(
        None,
        "number of the events that weighs their vectors in sequence_pooling=sum or mean, by sequence group: {tags: tag_weight}; "
        "the mean is divided by the sum of the weights",
    )
    numerical_encoding: NumericalEncoding = option(
        NumericalEncoding.plain,
        "form of numerical features: plain, as the model's paper has it; or embedding_dim columns each, by learned frequencies "
        "(periodic) or learned buckets",
    )
    numerical_size: int = option(
        16, "frequencies or buckets of each number in numerical_encoding", most=MOST_COLUMNS, gt=0
    )
    numerical_sigma: float = option(
        0.1, "standard deviation of the initial frequencies of numerical_encoding=periodic", gt=0
    )
    pretrained: Any = option(
        None,
        "vectors that are not trained, by feature: {item: items.npy}, float [rows, columns], with the columns in "
        "embedding_dims (docs/models.md)",
        paths=True,
    )
    sequence_pooling: EventPooling = option(
        EventPooling.sum,
        "vector of a feature of a sequence group that the model does not read event by event: sum or mean of its events, the "
        "last one, or their mean weighted by a learned attention",
    )

    def check_relations(self) -> Iterable[str] | None:
        return self._mistakes()

    def _mistakes(self) -> Iterator[str]:
        widths = self.embedding_dims = self.embedding_dims or {}
        if not (
            widths == SUGGESTED
            or (
                isinstance(widths, dict)
                and all(type(n) is int and 0 < n <= MOST_COLUMNS for n in widths.values())
            )
        ):
            yield (
                f"model.embedding_dims must map features to columns from 1 to {MOST_COLUMNS}, such as "
                f"{{genres: 16}}, or be {SUGGESTED}, got {widths}"
            )
        self.event_weights = self.event_weights or {}
        if not isinstance(self.event_weights, dict):
            yield (
                "model.event_weights must map sequence groups to numbers, such as {tags: tag_weight}, got "
                f"{self.event_weights}"
            )
        if self.event_weights and self.sequence_pooling not in ("sum", "mean"):
            yield (
                f"model.event_weights weighs sums and means, and model.sequence_pooling={self.sequence_pooling.value} is none; "
                "leave one of them out"
            )
        files = self.pretrained = self.pretrained or {}
        if not isinstance(files, dict) or not all(isinstance(path, str) for path in files.values()):
            yield f"model.pretrained must map features to files, such as {{item: items.npy}}, got {files}"
        for name in files:
            if not isinstance(widths, dict) or name not in widths:
                yield f"model.pretrained names {name} without a width; set model.embedding_dims={{{name}: columns of its file}}"


@dataclass(kw_only=True, slots=True)
class OptimizerConfig(Section):
    """Optimizers of the dense component and of the tables; the tables' is fused into their backward pass."""

    section = "optimizer"

    name: str = option("sgd", f"{', '.join(OptimizerName)}, or package.module:NAME of a DenseRule")
    lr: float = option(24.0, "peak learning rate, reached after scheduler.warmup_steps", gt=0)
    embedding_name: str | None = option(
        None,
        f"optimizer of tables: {', '.join(table_optimizers())}, or package.module:NAME; null: optimizer.name",
    )
    # Any, since Hydra lets nobody add keys to a typed dictionary.
    embedding_options: Any = option(
        None, "options of the tables' optimizer, as {beta2: 0.98} instead of optimizer.beta2"
    )
    embedding_lr: float | None = option(
        None, "peak learning rate of the tables; null: optimizer.lr", gt=0
    )
    eps: float = option(
        1e-8, "added to the denominator by adagrad, rowwise_adagrad, adam and lamb", gt=0
    )
    beta1: float = option(
        0.9, "decay of the first moment of adam and lamb; lion's beta1", ge=0, lt=1
    )
    beta2: float = option(
        0.999,
        "decay of the second moment of adam and lamb; beta2 of the dense component's lion, whose paper has 0.99",
        ge=0,
        lt=1,
    )
    momentum: float = option(
        0.0,
        "momentum of the dense component's sgd; 0: none. That of tables is of sgd_momentum",
        ge=0,
        lt=1,
    )
    nesterov: bool = option(False, "use optimizer.momentum in Nesterov's form")
    weight_decay: float = option(
        0.0,
        "decoupled weight decay of the dense component's adam (AdamW), lion, and lamb before it scales the step",
        ge=0,
    )
    embedding_l2: float = option(
        0.0,
        "L2 of the tables: the gradient of each row that a step looks up gets embedding_l2 * its weights, once; with "
        "every optimizer of tables",
        ge=0,
    )
    ftrl_l1: float = option(
        0.0, "ftrl's L1: the larger, the more weights of tables are exactly zero", ge=0
    )
    ftrl_l2: float = option(0.0, "ftrl's L2, on the weight itself and not on its change", ge=0)
    ftrl_beta: float = option(1.0, "ftrl's beta, added to the root of the sum of squares", gt=0)

    def check_relations(self) -> Iterator[str]:
        if self.name in table_optimizers() and self.name not in list(OptimizerName):
            yield (
                f"optimizer.name={self.name}: {self.name} trains tables only; set optimizer.embedding_name={self.name}, and "
                "another optimizer.name"
            )
        for key, known in (("name", [*OptimizerName]), ("embedding_name", table_optimizers())):
            name = getattr(self, key)
            if name is not None:
                if name not in known and not is_import_path(name):
                    yield f"optimizer.{key}: Invalid value '{name}', expected one of [{', '.join(known)}], or package.module:NAME"
                setattr(self, key, str(name))
        if self.table_name == OptimizerName.lamb:
            yield (
                "optimizer.name=lamb trains the dense component only; set optimizer.embedding_name to another one for the "
                "tables"
            )
        yield from self._check_embedding_options()
        yield from self._check_dense_options()
        if self.table_name != "ftrl" and not is_import_path(self.table_name):
            for name, default in FTRL_DEFAULTS.items():
                if getattr(self, name) != default:
                    yield (
                        f"optimizer.{name} is of ftrl, and tables with {self.table_name} would ignore it; set "
                        "optimizer.embedding_name=ftrl, or leave it out"
                    )

    def _check_embedding_options(self) -> Iterator[str]:
        """Refuse values that are no numbers, or outside the bounds of the option that they replace."""
        kind: Any = type(self)
        known = bounds_of(kind)
        options = self.embedding_options or {}
        if not isinstance(options, dict):
            yield f"optimizer.embedding_options must be a mapping such as {{beta2: 0.98}}, got {options}"
        for name, value in options.items():
            key = f"optimizer.embedding_options.{name}"
            if not isinstance(value, int | float) or isinstance(value, bool):
                yield f"{key} must be a number, got {value}"
            if name == "table_lr":
                yield f"{key} is optimizer.embedding_lr; set that"
            if name == "nesterov" and value not in (0, 1):
                yield f"{key} must be 0 or 1, got {value}"
            if name in known:
                check_bounds(key, value, known[name][1], float)

    def _check_dense_options(self) -> Iterator[str]:
        """Refuse options that the dense component's optimizer would ignore; one outside the project may read any."""
        is_built_in = not is_import_path(self.name)
        if self.momentum > 0 and self.name != OptimizerName.sgd and is_built_in:
            yield (
                f"optimizer.momentum={self.momentum} is of sgd, and optimizer.name={self.name} would ignore it; set "
                "optimizer.name=sgd (the tables' optimizer is optimizer.embedding_name), or optimizer.momentum=0"
            )
        if self.nesterov and self.momentum == 0:
            yield "optimizer.nesterov=true without optimizer.momentum does nothing; set optimizer.momentum too, such as 0.9"
        if self.weight_decay > 0 and self.name not in ("adam", "lion", "lamb") and is_built_in:
            yield (
                f"optimizer.weight_decay={self.weight_decay} is of adam (AdamW), lion and lamb, and optimizer.name={self.name} "
                "would ignore it; set optimizer.name=adam (the tables' optimizer is optimizer.embedding_name), or "
                "optimizer.weight_decay=0"
            )

    @property
    def table_name(self) -> str:
        return self.name if self.embedding_name is None else self.embedding_name

    @property
    def table_lr(self) -> float:
        return self.lr if self.embedding_lr is None else self.embedding_lr


FTRL_DEFAULTS = {"ftrl_l1": 0.0, "ftrl_l2": 0.0, "ftrl_beta": 1.0}

PLAIN_SGD: dict[Component, dict[str, Any]] = {
    Component.dense: {
        "name": OptimizerName.sgd,
        "momentum": 0.0,
        "nesterov": False,
        "weight_decay": 0.0,
    },
    Component.tables: {
        "embedding_name": OptimizerName.sgd,
        "embedding_options": None,
        "embedding_l2": 0.0,
        **FTRL_DEFAULTS,
    },
}
"""Options of a component that is not trained."""


@dataclass(kw_only=True, slots=True)
class SchedulerConfig(Section):
    """Linear warm-up, hold, decay to zero; after the decay the rate stays at zero."""

    section = "scheduler"

    warmup_steps: int = option(0, "steps of linear warm-up; 0 starts at the peak", ge=0)
    first_step: int = option(
        1, "number of the first update in the schedule; 0: a warm-up begins at rate 0", ge=0, le=1
    )
    decay_start_step: int | None = option(None, "first step of the decay; null never decays")
    decay_steps: int = option(0, "length of the decay")
    decay: DecayShape = option(
        DecayShape.polynomial, "curve of the decay: polynomial, or cosine (half a period)"
    )
    decay_power: float = option(
        2.0, "exponent of the polynomial decay", gt=0, only="decay=polynomial"
    )

    def check_relations(self) -> Iterator[str]:
        if self.decay_start_step is None:
            if self.decay is DecayShape.cosine:
                yield "scheduler.decay=cosine never begins: set scheduler.decay_start_step and scheduler.decay_steps too"
            if self.decay_steps != 0:
                yield f"scheduler.decay_steps={self.decay_steps} never begins: set scheduler.decay_start_step too"
            return
        if self.decay_start_step < self.warmup_steps:
            yield (
                f"scheduler.decay_start_step={self.decay_start_step} lies before the end of "
                f"scheduler.warmup_steps={self.warmup_steps}"
            )
        if self.decay_steps <= 0:
            yield f"scheduler.decay_steps must be positive with a decay_start_step, got {self.decay_steps}"


@dataclass(kw_only=True, slots=True)
class TrainConfig(Section):
    """The training loop."""

    section = "train"

    batch_size: int = option(
        65_536, "global batch size, the sum over all ranks", most=MOST_SAMPLES, gt=0
    )
    batch_size_per_rank: int | None = option(
        None,
        "rows per rank and step: the global batch is this times the ranks; replaces train.batch_size",
        most=MOST_SAMPLES,
        replaces="batch_size",
        gt=0,
    )
    epochs: int = option(1, "passes over the training split", most=MOST_SAMPLES, gt=0)
    max_steps: int | None = option(None, "stop after this many steps; null trains all epochs", gt=0)
    amp: Amp = option(Amp.off, "precision of the dense component: off (fp32), bf16 or fp16")
    loss_scale: float = option(65_536.0, "static loss scale, used with amp=fp16 only", gt=0)
    tf32: bool = option(True, "let fp32 matrix products use TF32 on GPUs that have it")
    fp8: Fp8 = option(
        Fp8.off,
        "products of DCNv2's cross layers and first top layer, or RankMixer's networks, in 8 bits, in training with amp=bf16: "
        "off, partial (gradients of weights stay in 16 bits), or full",
    )
    compile: bool = option(False, "torch.compile the dense component")
    capture: bool = option(True, "capture the step as a CUDA graph, on GPUs")
    accumulate: int = option(
        1,
        "chunks of a batch that the dense component takes one after the other, their gradients added up, to save memory; "
        "updates are those of the complete batch, but for batch normalization, which is per chunk",
        gt=0,
        most=MOST_SAMPLES,
    )
    freeze: list[Component] = option([], "components that keep their weights: dense or tables")
    clip_norm: float | None = option(
        None, "largest norm of the dense component's gradient, not of tables'; null: any", gt=0
    )
    ema_decay: float | None = option(
        None,
        "decay per step of an exponential moving average of the dense component's weights, such as 0.999, after a warm-up: "
        "min(ema_decay, (1 + step) / (10 + step)); evaluation and inference use the average; null: none",
        gt=0,
        lt=1,
    )

    def check_relations(self) -> Iterator[str]:
        is_in_8_bits, keeps_dense = self.fp8 is not Fp8.off, Component.dense in self.freeze
        if is_in_8_bits and self.amp is not Amp.bf16:
            yield (
                f"train.fp8={self.fp8.value} needs train.amp=bf16 for all other operations, got train.amp={self.amp.value}; set "
                "train.amp=bf16, or train.fp8=off"
            )
        if self.accumulate > self.batch_size:
            yield f"train.accumulate={self.accumulate} is more than the rows of train.batch_size={self.batch_size}"
        if is_in_8_bits and self.accumulate != 1:
            yield (
                f"train.fp8={self.fp8.value} scales by the largest values of complete batches, and train.accumulate="
                f"{self.accumulate} takes them in chunks; set one of the two"
            )
        if is_in_8_bits and keeps_dense:
            yield (
                f"train.fp8={self.fp8.value} trains wide layers of the dense component in 8 bits, and train.freeze keeps them as "
                "they are; set train.fp8=off, or train it"
            )
        if keeps_dense and Component.tables in self.freeze:
            yield "train.freeze names both components, so nothing would be trained; freeze one, or set mode=eval"
        if self.clip_norm is not None and keeps_dense:
            yield (
                f"train.clip_norm={self.clip_norm} clips the gradient of the dense component, which train.freeze keeps from "
                "being trained; set train.clip_norm=null, or train it"
            )
        if self.ema_decay is not None and keeps_dense:
            yield (
                f"train.ema_decay={self.ema_decay} averages the weights of the dense component, which train.freeze keeps as they "
                "are; set train.ema_decay=null, or train it"
            )


@dataclass(kw_only=True, slots=True)
class TaskConfig:
    """Options of one label, in the section `tasks` under the label's name."""

    weight: float = option(1.0, "factor of its loss in the sum over all labels", ge=0)
    loss: str | None = option(
        None, "loss of a row: a name, or package.module:NAME; null: that of its kind of label"
    )
    label_smoothing: float = option(0.0, "s: labels 1 and 0 become 1 - s/2 and s/2", ge=0, lt=1)
    focal_gamma: float = option(0.0, "gamma of the focal loss; 0: cross entropy", ge=0)
    focal_alpha: float | None = option(
        None, "alpha of the focal loss: factor of positive rows; 1 - alpha of others", gt=0, lt=1
    )
    positive_weight: float = option(
        1.0, "factor of the loss of positive rows, for which predictions are corrected", gt=0
    )
    keep_rate: float | None = option(
        None, "kept fraction of the negatives, for which predictions are corrected", gt=0, le=1
    )
    teacher: str | None = option(
        None, "column of the dataset with a teacher's scores, from which it learns too; null: none"
    )
    teacher_weight: float = option(
        0.5, "w: the loss is (1 - w) that of the label + w that of the teacher's score", ge=0, le=1
    )
    teacher_temperature: float = option(
        1.0, "divisor of the logit of the teacher's score; above 1 it is softer", gt=0
    )

    @property
    def changes_cross_entropy(self) -> bool:
        """Return whether an option changes the cross entropy of a row."""
        changes = (self.label_smoothing, self.focal_gamma, self.positive_weight - 1)
        return any(changes) or self.focal_alpha is not None

    @property
    def changes_loss(self) -> bool:
        """Return whether the loss of a row differs from the plain one."""
        return self.loss is not None or self.changes_cross_entropy or self.teacher is not None

    @classmethod
    def of(cls, where: str, values: Any) -> "TaskConfig":
        """Return the checked options under the key `where`; ValueError names the option that is wrong."""
        types = get_type_hints(cls)
        require(
            isinstance(values, dict) and bool(values),
            f"{where}: got {values}, want options of a label, such as {{weight: 2}}",
        )
        for name, value in values.items():
            require(
                name in types, f"{where}.{name}: no such option; want one of {', '.join(types)}"
            )
            kinds = get_args(types[name]) or (types[name],)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_good = isinstance(value, str) if str in kinds else is_number and isfinite(value)
            want = ("text" if str in kinds else "a number") + " or null" * (NoneType in kinds)
            require(
                is_good or (value is None and NoneType in kinds),
                f"{where}.{name}: got {value}, want {want}",
            )
        made = cls(**values)
        check_section(made, where)
        refuse(
            made.focal_alpha is not None and made.positive_weight != 1,
            f"{where}: focal_alpha and positive_weight both weigh positive rows; set one of them",
        )
        if made.teacher is not None:
            require(
                made.positive_weight == 1 and made.keep_rate is None,
                f"{where}: a teacher's scores are probabilities, and positive_weight and keep_rate let logits be others; "
                "leave one of the two out",
            )
            return made
        for name in ("teacher_weight", "teacher_temperature"):
            refuse(
                name in values,
                f"{where}.{name} has no effect without {where}.teacher, the column of a teacher's scores",
            )
        return made


@dataclass(kw_only=True, slots=True)
class EvalConfig(Section):
    """Evaluation on `split`."""

    section = "eval"

    batch_size: int = option(65_536, "global batch size of evaluation", most=MOST_SAMPLES, gt=0)
    per_epoch: int = option(
        1, "evaluations per epoch, evenly spaced, the last at its end", most=1_000_000, gt=0
    )
    every: int | None = option(
        None, "steps between evaluations; replaces eval.per_epoch", replaces="per_epoch", gt=0
    )
    first_step: int = option(
        0, "no evaluation before this step, as MLPerf's dlrm_v4 begins late; 0: all are made", ge=0
    )
    at_start: bool = option(False, "evaluate the untrained model too")
    auc_threshold: float | None = option(
        None, "stop on all ranks once test AUC reaches this", gt=0, lt=1
    )
    max_steps: int | None = option(
        None, "evaluate only this many batches; null evaluates every row", gt=0
    )
    final_max_steps: int | None = option(
        None, "batches of one more evaluation at the end, the run's result; null: none", gt=0
    )
    patience: int | None = option(
        None,
        "stop on all ranks after this many evaluations in a row no better by eval.best_metric than the best before; the "
        "run's result is then that of the best checkpoint, also if all steps are done; null never stops",
        gt=0,
    )
    split: str = option("test", "split of the dataset to evaluate on")
    best_metric: str | None = option(
        None,
        "metric that tells which evaluation and checkpoint is the best, such as log_loss, or auc.click of one of "
        "several labels; null: the first label's first metric, auc or rmse",
    )
    importance_repeats: int = option(
        3, "permutations per feature with mode=importance", most=10_000, gt=0
    )
    metrics: list[str] = option(
        [],
        "metrics beyond auc and log_loss of binary labels and rmse of regression labels: pr_auc (of rare labels without being "
        "named), normalised_entropy, calibration, mae, or package.module:NAME of a Metric (docs/tasks_and_metrics.md)",
    )
    baseline: bool | None = option(
        None,
        "measure a logistic regression too, in at most 20 s; null: of up to 1 M rows, fewer of over 299 ids",
    )
    group: str | None = option(
        None, "categorical feature of one id per row, as user_id: measures gauc, AUC within its ids"
    )


@dataclass(kw_only=True, slots=True)
class InferenceConfig(Section):
    """`mode=inference`: forward latency and throughput."""

    section = "inference"

    batch_sizes: list[int] = option(
        [1, 64, 512, 2048, 8192, 32768, 65536],
        "global batch sizes to time",
        most=MOST_SAMPLES,
        filled=True,
        gt=0,
    )
    steps: int = option(200, "timed forward passes per batch size", most=10**6, gt=0)
    warmup_steps: int = option(20, "untimed forward passes before the timed ones", most=10**6, ge=0)


@dataclass(kw_only=True, slots=True)
class PredictConfig(Section):
    """`mode=predict`: scores of rows."""

    section = "predict"

    columns: list[str] = option(
        [], "columns that preprocessing has kept, beside the scores; empty: the row number"
    )
    split: str | None = option(
        None, "split of the dataset to score; null: test, or the only split of a dataset"
    )
    average: list[str] = option(
        [], "run directories whose scores are averaged, instead of checkpoint.restore", path=True
    )

    def check_relations(self) -> Iterator[str]:
        for name in self.columns:
            if self.columns.count(name) > 1:
                yield f"predict.columns names {name} twice"


@dataclass(kw_only=True, slots=True)
class TableOverride:
    """Sharding type, memory and exchange of a single table in `sharding.tables`; None leaves the choice to the planner.

    `cache`: fraction of rows with room on the device, with `tier: host` or `disk`. `exchange`: None is `sharding.exchange`.
    """

    type: ShardingType | None = None
    tier: Tier | None = None
    cache: float | None = None
    exchange: Exchange | None = None

    @classmethod
    def of(cls, table: str, values: dict[Any, Any]) -> "TableOverride":
        """Return the checked override of a table; ValueError names the table and what is wrong."""
        where = f"sharding.tables.{table}"
        try:
            made: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))
        except OmegaConfBaseException as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{where}: {reason}; want type, tier, cache or exchange") from None
        has_arena = made.tier in (Tier.host, Tier.disk)
        require(
            made.cache is None or (has_arena and 0 < made.cache <= 1),
            f"{where}.cache={made.cache}: want a fraction of rows in (0, 1], with tier: host or disk",
        )
        refuse(
            has_arena and made.type is ShardingType.data_parallel,
            f"{where} is data_parallel with tier: {made.tier}; a replicated table lies on every device, so choose "
            "another sharding type or tier: device",
        )
        return made


DEFAULT_CACHE = 0.1
"""Fraction of the rows of a table in host memory or on disk for which the device has room, unless an override sets it."""


@dataclass(kw_only=True, slots=True)
class ShardingConfig(Section):
    """Limits within which the planner distributes tables over ranks."""

    section = "sharding"

    types: list[ShardingType] = option(
        [ShardingType.table_wise, ShardingType.column_wise, ShardingType.data_parallel],
        "sharding types that the planner may choose from",
        filled=True,
    )
    # Any, since Hydra lets nobody add keys to a typed dictionary; checked and converted below.
    tables: Any = option(
        None,
        "sharding type of single tables, {cat_0: row_wise}, or also their exchange, memory and the fraction of rows on "
        "the device, {cat_0: {type: table_wise, tier: host, cache: 0.1}}; tier is device, host or disk",
    )
    exchange: Exchange | None = option(
        None,
        "what the ranks of the samples get of a table: vectors, rows (each distinct one of a batch once), or least (what "
        "the plan expects to be fewer bytes); null: vectors, and rows of row-wise tables that are looked up by few ids; of "
        "several groups of ranks, least",
    )
    tiers: list[Tier] = option(
        [Tier.device, Tier.host],
        "memories that the planner may choose for the rows of a table; host: host memory with an arena of rows on "
        "the GPU, chosen only if the GPUs have too little memory",
    )
    group_size: int | None = option(
        None,
        "ranks that share the tables, such as those of a node; other groups of as many hold the same tables, and exchange the "
        "gradients of rows; null: all ranks",
        most=MOST_RANKS,
        gt=0,
    )
    two_hops: bool = option(
        False,
        "ids, embeddings and their gradients of several nodes go within the node first, and then between the ranks of one "
        "local number: same bits, fewer and larger messages between nodes; not with group_size",
    )
    world_size: int | None = option(
        None, "ranks to plan for with mode=plan; null: the ranks of this run", most=MOST_RANKS, gt=0
    )
    local_world_size: int | None = option(
        None, "ranks per node of mode=plan; null: as here, or at most 8", most=MOST_RANKS, gt=0
    )
    within_gb_s: float = option(
        394.0, "GB/s that a GPU sends to others of its node, to plan with; of an H200 server", gt=0
    )
    between_gb_s: float = option(
        50.0, "GB/s that a GPU sends to other nodes, to plan with; of a 400 Gb/s card", gt=0
    )
    within_us: float = option(
        1.0, "microseconds that a message to a rank of the node takes, to plan with; assumed", gt=0
    )
    between_us: float = option(
        2.0, "microseconds that a message to another node takes, to plan with; assumed", gt=0
    )
    hbm_gib: float | None = option(
        None, "GPU memory per rank to plan with; null asks the device", most=2**30, gt=0
    )
    host_gib: float | None = option(
        None, "host memory per node to plan with; null asks the machine", most=2**30, gt=0
    )
    disk_path: str | None = option(
        None, "directory on a local disk for the rows of tables with tier: disk", path=True
    )
    read_ahead_gib: float = option(
        4.0, "host memory per rank for rows on disk, read ahead of their batches", most=2**30
    )
    reserve: float = option(
        0.1, "fraction of each rank's memory kept free of tables, for activations", ge=0, lt=1
    )

    def check_relations(self) -> Iterator[str]:
        overrides = {} if self.tables is None else self.tables
        if not isinstance(overrides, dict):
            yield f"sharding.tables must map tables to sharding types, such as {{cat_0: row_wise}}, got {overrides}"
        self.tables = {
            table: TableOverride.of(table, of) if isinstance(of, dict) else _type_of(table, of)
            for table, of in overrides.items()
        }
        if Tier.device not in self.tiers:
            yield (
                f"sharding.tiers={[tier.value for tier in self.tiers]} must name device; {{cat_0: {{tier: host}}}} in "
                "sharding.tables puts a table into host memory"
            )
        if Tier.disk in self.tiers:
            yield (
                "sharding.tiers names disk, which the planner does not choose; name the tables in sharding.tables, as "
                "{cat_0: {tier: disk}}"
            )
        if self.two_hops and self.group_size is not None:
            yield (
                f"sharding.two_hops=true shards the tables over all ranks, and sharding.group_size={self.group_size} over groups "
                "that hold the same ones; set one of them"
            )
        for table, override in self.tables.items():
            is_on_disk = isinstance(override, TableOverride) and override.tier is Tier.disk
            if is_on_disk and self.disk_path is None:
                yield f"sharding.tables puts {table} on disk; set sharding.disk_path to a directory on a local disk"
        if self.read_ahead_gib < LEAST_GIB:
            yield f"sharding.read_ahead_gib={self.read_ahead_gib} leaves under a KiB for rows of tables with tier: disk"
        for name in ("hbm_gib", "host_gib"):
            value = getattr(self, name)
            if value is not None and value * (1 - self.reserve) < LEAST_GIB:
                yield f"sharding.{name}={value} less sharding.reserve={self.reserve} leaves under a KiB for tables"


def _type_of(table: str, kind: Any) -> ShardingType:
    require(
        isinstance(kind, str) and kind in ShardingType.__members__,
        f"sharding.tables sets {table} to {kind}, which is none of {', '.join(each.name for each in ShardingType)}",
    )
    return ShardingType[kind]


@dataclass(kw_only=True, slots=True)
class CheckpointConfig(Section):
    """State on disk."""

    section = "checkpoint"

    save: bool = option(True, "save checkpoints, one of them at the end of the run")
    save_every: int | None = option(
        None, "save every this many steps; null: by the clock alone", gt=0
    )
    save_every_minutes: float | None = option(
        30, "save every this many minutes too; null: never by the clock", gt=0
    )
    keep: int = option(
        2, "latest checkpoints to keep; the best one by eval.best_metric is kept too", gt=0
    )
    restore: str | None = option(
        None, "step_N, or NVIDIA's TF2 checkpoint, to start from if run_dir has none", path=True
    )
    restore_tables: Any = option(
        None,
        "checkpoints, by table, from which single tables come in place of that of restore: {cat_0: PATH}",
        paths=True,
    )
    mirror: str | None = option(
        None, "s3://BUCKET/FOLDER for copies of checkpoints and records, from which runs resume"
    )
    delta_every: int | None = option(
        None,
        "write a delta every this many steps, and with each checkpoint: the table rows that changed since the last one, and the "
        "dense component (docs/deltas.md); null: none",
        gt=0,
    )
    delta_dtype: DeltaType = option(
        DeltaType.table,
        "of rows in deltas: table (exact), bf16 (half of the bytes of float32), or int8 or int4 with a scale per row, for models "
        "that are served with this dtype",
    )
    delta_keep: int | None = option(None, "latest deltas to keep; null: all", gt=0)
    parts: list[CheckpointPart] = option(
        list(CheckpointPart),
        "what to load from checkpoint.restore: dense, tables, or both; with optimizer the run resumes "
        "at its step, without it a new run starts at step 0 from those weights",
        filled=True,
    )
    grow: bool = option(
        False, "let tables have more rows than in checkpoint.restore; those begin from the seed"
    )
    allow_changes: bool = option(
        False, "resume although data files or settings differ from those of the checkpoint"
    )

    def check_relations(self) -> Iterator[str]:
        if self.mirror is not None and "://" not in self.mirror:
            yield (
                f"checkpoint.mirror={self.mirror} is no address of an object store; write it as s3://BUCKET/FOLDER, or copy a "
                "directory by other means"
            )
        if self.delta_every is not None and not self.save:
            yield (
                f"checkpoint.delta_every={self.delta_every} writes deltas, which begin at a checkpoint, and checkpoint.save="
                "false saves none; leave one of them out"
            )
        dtype = None if self.delta_dtype is DeltaType.table else self.delta_dtype.value
        for name, value in (("delta_dtype", dtype), ("delta_keep", self.delta_keep)):
            if value is not None and self.delta_every is None:
                yield f"checkpoint.{name}={value} is of deltas, and checkpoint.delta_every=null writes none; set that too"
        others = self.restore_tables = {} if self.restore_tables is None else self.restore_tables
        are_paths = isinstance(others, dict) and {*map(type, others.values())} == {str}
        is_beside = self.restore is not None and CheckpointPart.tables in self.parts
        if not (others == {} or (are_paths and is_beside)):
            yield (
                f"checkpoint.restore_tables={others}: want checkpoints by table, such as {{cat_0: PATH}}, beside "
                "checkpoint.restore and with tables in checkpoint.parts"
            )
        if self.takes_optimizer and self.components != {*Component}:
            yield (
                f"checkpoint.parts=[{', '.join(self.parts)}] loads the optimizers' state without the weights it belongs to; "
                "name dense and tables too, or leave optimizer out"
            )

    @property
    def components(self) -> set[Component]:
        return {part for part in Component if CheckpointPart[part.name] in self.parts}

    @property
    def takes_optimizer(self) -> bool:
        """Return whether the run resumes at the checkpoint's step."""
        return CheckpointPart.optimizer in self.parts


@dataclass(kw_only=True, slots=True)
class LogConfig(Section):
    """Records of a run while it trains."""

    section = "log"

    every: int = option(100, "steps between records of loss, AUC and speed", gt=0)
    loggers: list[str] = option(
        ["tensorboard"],
        f"destinations of the records beside metrics.jsonl: {', '.join(LOGGERS)}, or package.module:NAME of one of "
        "your own (docs/operations.md#loggers)",
    )
    observers: list[str] = option(
        [], "observers of the training loop, each package.module:NAME (docs/library.md#observers)"
    )
    prometheus: str | None = option(
        None, "file NAME.prom of node-exporter's textfile collector (docs/operations.md)", path=True
    )
    mlperf: bool = option(
        False,
        "write the log of MLPerf's dlrmv4 or dlrm_dcnv2 into run_dir/mlperf.log (docs/mlperf.md)",
    )
    mlperf_division: Division = option(
        Division.closed, "division that the log of log.mlperf names: closed or open"
    )
    mlperf_org: str = option("unnamed", "submitter that the log of log.mlperf names")
    mlperf_platform: str | None = option(
        None, "system that the log of log.mlperf names; null: hosts x GPUs per host x GPU"
    )
    mlperf_cache_cleared: bool = option(
        False, "say in the log of log.mlperf that the caches of all hosts were cleared before"
    )
    pictures: bool = option(
        True, "draw curves.png and predictions.png at the end, which takes a second or two"
    )

    def check_relations(self) -> Iterator[str]:
        for name in self.loggers:
            if name not in LOGGERS and not is_import_path(name):
                yield f"log.loggers names {name}, which is none of {', '.join(LOGGERS)}, nor package.module:NAME"
            if self.loggers.count(name) != 1:
                yield f"log.loggers names {name} twice; name it once"
        for name in self.observers:
            if not is_import_path(name):
                yield f"log.observers names {name}, no package.module:NAME"
            if self.observers.count(name) != 1:
                yield f"log.observers names {name} twice"
        if self.prometheus is not None and not self.prometheus.endswith(".prom"):
            yield f"log.prometheus={self.prometheus}: the textfile collector reads files NAME.prom alone; name it so"
        for name in ("mlperf_org", "mlperf_platform"):
            if getattr(self, name) == "":
                yield f"log.{name} is empty; name it, or leave it out"


@dataclass(kw_only=True, slots=True)
class ProfileConfig(Section):
    """Profile of a few training steps: docs/profiling.md."""

    section = "profile"

    steps: int = option(
        0, "steps to profile, into run_dir/profile; 0 profiles none", most=10**5, ge=0
    )
    start_step: int = option(50, "steps of this run before the profiled ones, at least 1", gt=0)
    nvtx: bool = option(False, "annotate the steps for Nsight Systems (nsys) and write no trace")


SCORE_ENDINGS = (".parquet", ".csv")
"""Endings of `output`; they tell the format."""


@dataclass(kw_only=True, slots=True)
class Config(Section):
    recipe: str = option("dlrm", "name of the recipe, used in the default run_dir")
    config: str | None = option(
        None,
        "config.yaml of a run, whose options replace the recipe's, but not those written here",
        path=True,
    )
    mode: Mode = option(Mode.train, "train, eval, inference, importance, predict or plan")
    device: Device = option(Device.auto, "auto uses GPUs if there are any, else the CPU")
    seed: int = option(1, "seed of the initial weights, the shuffle and the synthetic clicks", ge=0)
    run_dir: str | None = option(
        None, "run directory, for all results; null: runs/<recipe>/<time>", path=True
    )
    day: DayToTrain | None = option(
        None, "next: continue the run in run_dir with the next day (docs/every_day.md)"
    )
    days: list[str] = option(
        [],
        "with day=next: dataset directories, or patterns such as 'data/*', that the run trains one after another in the order "
        "of their days, from where it is",
        path=True,
        only="mode=train",
    )
    watch_days: float | None = option(
        None, "seconds between looks for further directories of days; null: end after the last one"
    )
    output: str | None = option(
        None, "file to write: .parquet or .csv (docs/scores.md)", path=True, only="mode=predict"
    )
    source: str | None = option(
        None, "raw file, directory or pattern of files to score", path=True, only="mode=predict"
    )
    fitted: str | None = option(
        None, "dataset whose fit transforms source; null: data.path", path=True, only="mode=predict"
    )
    data: DataConfig = MISSING
    model: ModelConfig = field(default_factory=ModelConfig, metadata=OPEN_SECTION)
    optimizer: OptimizerConfig = MISSING
    scheduler: SchedulerConfig = MISSING
    train: TrainConfig = MISSING
    eval: EvalConfig = MISSING
    # Any, since a dataset names its labels; checked below.
    tasks: Any = option(
        None,
        "options per label, such as {click: {weight: 2}}: weight, loss, label_smoothing, focal_gamma, focal_alpha, "
        "positive_weight, keep_rate, teacher, teacher_weight, teacher_temperature (docs/tasks_and_metrics.md)",
    )
    inference: InferenceConfig = MISSING
    predict: PredictConfig = MISSING
    sharding: ShardingConfig = MISSING
    checkpoint: CheckpointConfig = MISSING
    log: LogConfig = MISSING
    profile: ProfileConfig = MISSING

    def check_relations(self) -> Iterator[str]:
        if not is_file_name(self.recipe):
            yield f"recipe={self.recipe} names a folder below runs/: no slash, no leading dot"
        if self.tasks is not None and not isinstance(self.tasks, dict):
            yield f"tasks must map labels to options, such as {{click: {{weight: 2}}}}, got {self.tasks}"
        self.tasks = self.tasks or None
        taught = [name for name, of in self.task_options.items() if of.teacher is not None]
        if taught and self.data.negatives.features:
            yield (
                f"tasks.{', '.join(taught)}.teacher has scores of the rows of the dataset, and data.negatives adds others; leave "
                "one of them out"
            )
        yield from self._check_day()
        yield from self._check_watch()
        if self.eval.patience is not None and not self.checkpoint.save:
            yield (
                f"eval.patience={self.eval.patience} ends with the best checkpoint, and checkpoint.save=false saves none; "
                "set checkpoint.save=true, or eval.patience=null"
            )
        yield from self._check_mlperf()
        yield from self._check_predict()

    def _check_day(self) -> Iterator[str]:
        if self.days and (self.day is None or self.data.path is not None):
            yield "days names several datasets; set day=next, and leave data.path out"
        if self.watch_days is not None and (not self.days or self.watch_days <= 0):
            yield f"watch_days={self.watch_days}: want seconds above 0, and days; set both, or leave it out"
        if self.day is None or self.mode is not Mode.train:
            return
        if not (self.run_dir is not None and (self.data.path is not None or bool(self.days))):
            yield "day=next continues a run on the data of its next day; set run_dir and data.path, or days"
        if not self.checkpoint.save:
            yield "day=next resumes from checkpoints; set checkpoint.save=true"
        if self.log.mlperf:
            yield "day=next is none of MLPerf's trainings; set log.mlperf=false"
        if self.data.multi_hot.hotness is not None:
            yield "day=next keeps the ids of all rows, and data.multi_hot draws others for larger tables; leave one of them out"

    def _check_watch(self) -> Iterator[str]:
        """Refuse options that rows without an end do not go with."""
        data = self.data
        if data.watch_dir is None or self.mode is not Mode.train:
            return
        for is_met, wanted in (
            (data.path is not None, "data.path"),
            (data.shuffle_block == 0, "data.shuffle_block=0, as its rows keep their order"),
            (
                self.train.epochs == 1 and self.eval.every is not None,
                "train.epochs=1 and eval.every, as its rows have no end",
            ),
            (
                data.validation_fraction is None and not data.negatives.features,
                "neither data.validation_fraction nor data.negatives",
            ),
            (self.day is None and not self.log.mlperf, "neither day nor log.mlperf"),
        ):
            if not is_met:
                yield f"data.watch_dir={data.watch_dir} wants {wanted}"

    def _check_mlperf(self) -> Iterator[str]:
        """Refuse a log of a benchmark for a run that cannot be one: it is HSTU or DCNv2, one epoch and a target."""
        if not self.log.mlperf:
            return
        for key, got, wanted in (
            ("model.name", self.model.name, ("hstu", "dcnv2")),
            ("train.epochs", self.train.epochs, (1,)),
        ):
            if got not in wanted:
                yield (
                    f"log.mlperf=true is the log of MLPerf's dlrmv4 or dlrm_dcnv2, which wants {key}="
                    f"{' or '.join(map(str, wanted))}, got {got}; change it, or set log.mlperf=false"
                )
        if self.eval.auc_threshold is None:
            yield (
                "log.mlperf=true needs the AUC that ends the run: set eval.auc_threshold (MLPerf's is 0.75 of hstu, 0.80275 of "
                "dcnv2)"
            )

    def _check_predict(self) -> Iterator[str]:
        if self.mode is not Mode.predict:
            return
        if self.output is None or not self.output.endswith(SCORE_ENDINGS):
            yield (
                f"mode=predict writes scores to the file output, got {self.output}; set output to a name that ends in "
                f"{' or '.join(SCORE_ENDINGS)}"
            )
        if self.predict.average:
            return  # each run is a command with the other checks
        if self.checkpoint.restore is None:
            yield "mode=predict needs a trained model; set checkpoint.restore to a run's checkpoints/best or checkpoints/step_N"
        if self.checkpoint.components != set(Component):
            yield "mode=predict needs both components of a trained model; let checkpoint.parts name dense and tables"
        if self.source is not None:
            # The options of a run name the dataset that it was trained on, which has the fit.
            self.fitted, self.data.path = self.fitted or self.data.path, None
        if (self.source is None) != (self.fitted is None):
            yield (
                "source names raw files, and fitted the dataset whose fit transforms them; set both, or data.path to score a "
                "dataset"
            )
        if self.source is not None and self.predict.split is not None:
            yield (
                f"source={self.source} and predict.split={self.predict.split} exclude each other: predict.split is of rows that "
                "are a dataset already; leave one of them out"
            )

    @property
    def task_options(self) -> dict[str, TaskConfig]:
        """`tasks` as typed options by label; labels that it does not name have the defaults."""
        return {
            str(name): TaskConfig.of(f"tasks.{name}", values)
            for name, values in (self.tasks or {}).items()
        }

    @property
    def fills_tables(self) -> bool:
        """Return whether tables begin from the seed and files of vectors; else a checkpoint has all of their rows."""
        parts = self.checkpoint
        has_all = parts.restore is not None and Component.tables in parts.components
        return self.mode is Mode.train or not has_all or parts.grow

    @property
    def effective_optimizer(self) -> OptimizerConfig:
        """`optimizer` as it applies: a frozen component has plain SGD, which keeps no state."""
        chosen = self.optimizer
        changes: dict[str, Any] = {
            "embedding_name": chosen.table_name,
            "embedding_lr": chosen.table_lr,
        }
        for component in self.train.freeze:
            changes |= PLAIN_SGD[component]
        return replace(chosen, **changes)
