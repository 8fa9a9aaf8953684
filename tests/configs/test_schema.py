"""Options: refusals and their messages, descriptions, and use of every option."""

import ast
import re
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from configs.built_in import MODELS
from configs.options import describe, option
from configs.preproc_schema import PreprocConfig, StreamConfig
from configs.schema import (
    Amp,
    CheckpointConfig,
    Component,
    Config,
    DataConfig,
    DayToTrain,
    DecayShape,
    EvalConfig,
    Fp8,
    InferenceConfig,
    LogConfig,
    Mode,
    ModelConfig,
    MultiHotConfig,
    OptimizerConfig,
    OptimizerName,
    SchedulerConfig,
    ShardingConfig,
    ShardingType,
    SyntheticConfig,
    TaskConfig,
    Tier,
    TrainConfig,
    table_optimizers,
)
from nn.embedding.optimizer import table_rule
from nn.models.options import (
    CrossConfig,
    DCNv2Options,
    DeepFMOptions,
    DINOptions,
    DLRMOptions,
    EmbeddingMLPOptions,
    FinalMLPOptions,
    MaskNetOptions,
    MMoEOptions,
    PLEOptions,
    SharedBottomOptions,
    WideDeepOptions,
    WuKongOptions,
)
from nn.models.registry import find_options, typed_config
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, compose_config, compose_with_hydra

OPTIONS = {name: find_options(name) for name in MODELS}

ROOT = Path(__file__).resolve().parents[2]

SYNTHETIC = {"cardinalities": [10, 20]}

# fmt: off
REFUSED = [
    (SyntheticConfig, {"train_rows": 0}, "data.synthetic.train_rows must be positive, got 0"),
    (SyntheticConfig, {"test_rows": -1}, "data.synthetic.test_rows must be positive, got -1"),
    (SyntheticConfig, {"num_numerical": -1}, "data.synthetic.num_numerical must not be negative, got -1"),
    (SyntheticConfig, {"cardinalities": [4, 0]}, "data.synthetic.cardinalities must all be positive, got [4, 0]"),
    (SyntheticConfig, SYNTHETIC | {"hotness": [1]},
     "data.synthetic.hotness has 1 entries for 2 data.synthetic.cardinalities; give one per table, or none"),
    (SyntheticConfig, SYNTHETIC | {"hotness": [1, 0]}, "data.synthetic.hotness must all be positive, got [1, 0]"),
    (SyntheticConfig, SYNTHETIC | {"names": ["a"]},
     "data.synthetic.names has 1 entries for 2 data.synthetic.cardinalities; give one per table, or none"),
    (SyntheticConfig, SYNTHETIC | {"names": ["a", "a"]},
     "data.synthetic.names has 'a', which is empty or the name of another column"),
    (SyntheticConfig, SYNTHETIC | {"history": ["cat_2"]},
     "data.synthetic.history has 'cat_2'; want names of data.synthetic.names, each once"),
    (SyntheticConfig, SYNTHETIC | {"history": ["cat_1", "cat_1"]},
     "data.synthetic.history has 'cat_1'; want names of data.synthetic.names, each once"),
    (SyntheticConfig, SYNTHETIC | {"names": ["a", "hist_a"], "history": ["a"]},
     "data.synthetic.names: data.synthetic.history=['a'] makes a column 'hist_a'; rename the one of that name"),
    (SyntheticConfig, SYNTHETIC | {"history": ["cat_1"], "history_length": 9.5, "history_max_length": 9},
     "data.synthetic.history_length=9.5 is not below data.synthetic.history_max_length=9; lower it"),
    (SyntheticConfig, SYNTHETIC | {"names": ["a", "num_0"]},
     "data.synthetic.names has 'num_0', which is empty or the name of another column"),
    (SyntheticConfig, {"exponent": -0.5}, "data.synthetic.exponent must not be negative, got -0.5"),
    (MultiHotConfig, {"hotness": [3, 0]},
     "data.multi_hot.hotness must all be positive or null, got [3, 0]"),
    (MultiHotConfig, {"hotness": []},
     "data.multi_hot.hotness must name at least one, got []"),
    (MultiHotConfig, {"seed": -1}, "data.multi_hot.seed must lie in [0, 4294967296), got -1"),
    (DataConfig, {"shuffle_block": -1}, "data.shuffle_block must not be negative, got -1"),
    (DataConfig, {"prefetch": 0}, "data.prefetch must be positive or null, got 0"),
    (DataConfig, {"workers": 0}, "data.workers must be positive or null, got 0"),
    (DataConfig, {}, "no data: set data.path to a dataset directory, or data.synthetic.cardinalities"),
    (CrossConfig, {"num_layers": 0}, "model.cross.num_layers must be positive, got 0"),
    (CrossConfig, {"projection_dim": 0}, "model.cross.projection_dim must be positive or null, got 0"),
    (DLRMOptions, {"bottom_mlp": []}, "model.bottom_mlp must name at least one, got []"),
    (DCNv2Options, {"bottom_mlp": []}, "model.bottom_mlp must name at least one, got []"),
    (DLRMOptions, {"top_mlp": [-8, 1]}, "model.top_mlp must all be positive, got [-8, 1]"),
    (DCNv2Options, {"top_mlp": []}, "model.top_mlp must name at least one, got []"),
    (DLRMOptions, {"top_mlp": [8, 2]}, "model.top_mlp must end in 1 (the logit), got [8, 2]"),
    (DCNv2Options, {"top_mlp": [8, 2]}, "model.top_mlp must end in 1 (the logit), got [8, 2]"),
    (DLRMOptions, {"bottom_mlp": [64]},
     "model.bottom_mlp must end in model.embedding_dim=128 for dlrm (the dot interaction needs equal widths), got [64]"),
    (WideDeepOptions, {"hidden": [8, 0]},
     "model.hidden must all be positive, got [8, 0]"),
    (DeepFMOptions, {"dropout": 1.0},
     "model.dropout must lie in [0, 1), got 1.0"),
    (EmbeddingMLPOptions, {"embedding_dims": {"kind": 0}},
     "model.embedding_dims must map features to columns from 1 to 65536, such as {genres: 16}, or be suggested, got "
     "{'kind': 0}"),
    (EmbeddingMLPOptions, {"embedding_dims": "auto"},
     "model.embedding_dims must map features to columns from 1 to 65536, such as {genres: 16}, or be suggested, got auto"),
    (FinalMLPOptions, {"hidden_1": []}, "model.hidden_1 must name at least one, got []"),
    (FinalMLPOptions, {"hidden_2": [0]}, "model.hidden_2 must all be positive, got [0]"),
    (FinalMLPOptions, {"heads": 3}, "model.heads must divide the last widths of both streams, 400 and 800, got 3"),
    (MaskNetOptions, {"blocks": []}, "model.blocks must name at least one, got []"),
    (MaskNetOptions, {"reduction_ratio": 0.001},
     "model.reduction_ratio must leave at least one column of every block's width, got 0.001"),
    (WuKongOptions, {"fm_vectors": 0}, "model.fm_vectors must be positive, got 0"),
    (DINOptions, {"history_positions": 0}, "model.history_positions must be positive or null, got 0"),
    (SharedBottomOptions, {"hidden": []}, "model.hidden must name at least one, got []"),
    (MMoEOptions, {"experts": 0}, "model.experts must be positive, got 0"),
    (MMoEOptions, {"expert_hidden": []}, "model.expert_hidden must name at least one, got []"),
    (PLEOptions, {"levels": 0}, "model.levels must be positive, got 0"),
    (PLEOptions, {"expert_hidden": []}, "model.expert_hidden must name at least one, got []"),
    (PLEOptions, {"tower_hidden": [-1]},
     "model.tower_hidden must all be positive, got [-1]"),
    (DLRMOptions, {"embedding_dim": 0}, "model.embedding_dim must be positive, got 0"),
    (ModelConfig, {"embedding_dim": 0}, "model.embedding_dim must be positive, got 0"),
    (
        OptimizerConfig,
        {"embedding_name": "lamb"},
        f"optimizer.embedding_name: Invalid value 'lamb', expected one of [{', '.join(table_optimizers())}], or "
        "package.module:NAME",
    ),
    (OptimizerConfig, {"lr": 0.0}, "optimizer.lr must be positive, got 0.0"),
    (OptimizerConfig, {"lr": float("nan")}, "optimizer.lr must be positive, got nan"),
    (OptimizerConfig, {"embedding_lr": -1.0}, "optimizer.embedding_lr must be positive or null, got -1.0"),
    (OptimizerConfig, {"eps": 0.0}, "optimizer.eps must be positive, got 0.0"),
    (OptimizerConfig, {"beta1": 1.0}, "optimizer.beta1 must lie in [0, 1), got 1.0"),
    (OptimizerConfig, {"beta2": -0.1}, "optimizer.beta2 must lie in [0, 1), got -0.1"),
    (OptimizerConfig, {"momentum": 1.0}, "optimizer.momentum must lie in [0, 1), got 1.0"),
    (OptimizerConfig, {"name": "adam", "momentum": 0.9},
     "optimizer.momentum=0.9 is of sgd, and optimizer.name=adam would ignore it; set optimizer.name=sgd (the tables' "
     "optimizer is optimizer.embedding_name), or optimizer.momentum=0"),
    (OptimizerConfig, {"nesterov": True},
     "optimizer.nesterov=true without optimizer.momentum does nothing; set optimizer.momentum too, such as 0.9"),
    (OptimizerConfig, {"weight_decay": -1.0}, "optimizer.weight_decay must not be negative, got -1.0"),
    (OptimizerConfig, {"weight_decay": 0.01},
     "optimizer.weight_decay=0.01 is of adam (AdamW), lion and lamb, and optimizer.name=sgd would ignore it; set "
     "optimizer.name=adam (the tables' optimizer is optimizer.embedding_name), or optimizer.weight_decay=0"),
    (OptimizerConfig, {"embedding_l2": -1.0}, "optimizer.embedding_l2 must not be negative, got -1.0"),
    (OptimizerConfig, {"name": "ftrl"},
     "optimizer.name=ftrl: ftrl trains tables only; set optimizer.embedding_name=ftrl, and another optimizer.name"),
    (OptimizerConfig, {"name": "lamb"},
     "optimizer.name=lamb trains the dense component only; set optimizer.embedding_name to another one for the tables"),
    (OptimizerConfig, {"ftrl_l1": -1.0}, "optimizer.ftrl_l1 must not be negative, got -1.0"),
    (OptimizerConfig, {"ftrl_beta": 0.0}, "optimizer.ftrl_beta must be positive, got 0.0"),
    (OptimizerConfig, {"embedding_name": "adam", "ftrl_l2": 0.1},
     "optimizer.ftrl_l2 is of ftrl, and tables with adam would ignore it; set optimizer.embedding_name=ftrl, or leave it "
     "out"),
    (SchedulerConfig, {"warmup_steps": -1}, "scheduler.warmup_steps must not be negative, got -1"),
    (SchedulerConfig, {"decay_start_step": 5, "warmup_steps": 9},
     "scheduler.decay_start_step=5 lies before the end of scheduler.warmup_steps=9"),
    (SchedulerConfig, {"decay_start_step": 5},
     "scheduler.decay_steps must be positive with a decay_start_step, got 0"),
    (SchedulerConfig, {"decay_steps": 5},
     "scheduler.decay_steps=5 never begins: set scheduler.decay_start_step too"),
    (SchedulerConfig, {"decay_start_step": 5, "decay_steps": 5, "decay_power": 0.0},
     "scheduler.decay_power must be positive, got 0.0"),
    (SchedulerConfig, {"decay": DecayShape.cosine},
     "scheduler.decay=cosine never begins: set scheduler.decay_start_step and scheduler.decay_steps too"),
    (SchedulerConfig, {"decay": DecayShape.cosine, "decay_start_step": 5, "decay_steps": 5, "decay_power": 1.0},
     "scheduler.decay_power=1.0 is of scheduler.decay=polynomial, and scheduler.decay=cosine would ignore it; leave "
     "it out, or set scheduler.decay=polynomial"),
    (TrainConfig, {"fp8": Fp8.full},
     "train.fp8=full needs train.amp=bf16 for all other operations, got train.amp=off; set train.amp=bf16, or "
     "train.fp8=off"),
    (TrainConfig, {"fp8": Fp8.partial, "amp": Amp.bf16, "freeze": [Component.dense]},
     "train.fp8=partial trains wide layers of the dense component in 8 bits, and train.freeze keeps them as they are; set "
     "train.fp8=off, or train it"),
    (TrainConfig, {"accumulate": 33, "batch_size": 32},
     "train.accumulate=33 is more than the rows of train.batch_size=32"),
    (TrainConfig, {"batch_size": 0}, "train.batch_size must be positive, got 0"),
    (TrainConfig, {"epochs": 0}, "train.epochs must be positive, got 0"),
    (TrainConfig, {"max_steps": 0}, "train.max_steps must be positive or null, got 0"),
    (TrainConfig, {"loss_scale": 0.0}, "train.loss_scale must be positive, got 0.0"),
    (TrainConfig, {"clip_norm": 0.0}, "train.clip_norm must be positive or null, got 0.0"),
    (TrainConfig, {"clip_norm": 1.0, "freeze": [Component.dense]},
     "train.clip_norm=1.0 clips the gradient of the dense component, which train.freeze keeps from being trained; set "
     "train.clip_norm=null, or train it"),
    (TrainConfig, {"ema_decay": 1.0}, "train.ema_decay must lie between 0 and 1 or be null, got 1.0"),
    (TrainConfig, {"ema_decay": 0.9, "freeze": [Component.dense]},
     "train.ema_decay=0.9 averages the weights of the dense component, which train.freeze keeps as they are; set "
     "train.ema_decay=null, or train it"),
    (EvalConfig, {"batch_size": 0}, "eval.batch_size must be positive, got 0"),
    (EvalConfig, {"per_epoch": 0}, "eval.per_epoch must be positive, got 0"),
    (EvalConfig, {"auc_threshold": 1.0}, "eval.auc_threshold must lie between 0 and 1 or be null, got 1.0"),
    (DataConfig, {"validation_fraction": 1.0}, "data.validation_fraction must lie between 0 and 1 or be null, got 1.0"),
    (CheckpointConfig, {"mirror": "/mnt/a"}, "checkpoint.mirror=/mnt/a is no address of an object store; write it as "
        "s3://BUCKET/FOLDER, or copy a directory by other means"),
    (LogConfig, {"loggers": ["tensorbord"]}, "log.loggers names tensorbord, which is none of tensorboard, wandb, mlflow, nor "
        "package.module:NAME"),
    (LogConfig, {"loggers": ["a.b:C", "a.b:C"]}, "log.loggers names a.b:C twice; name it once"),
    (LogConfig, {"mlperf_org": ""}, "log.mlperf_org is empty; name it, or leave it out"),
    (EvalConfig, {"max_steps": -3}, "eval.max_steps must be positive or null, got -3"),
    (TrainConfig, {"batch_size_per_rank": 0}, "train.batch_size_per_rank must be positive or null, got 0"),
    (EvalConfig, {"every": 0}, "eval.every must be positive or null, got 0"),
    (EvalConfig, {"final_max_steps": 0}, "eval.final_max_steps must be positive or null, got 0"),
    (EvalConfig, {"patience": 0}, "eval.patience must be positive or null, got 0"),
    (EvalConfig, {"importance_repeats": 0}, "eval.importance_repeats must be positive, got 0"),
    (InferenceConfig, {"batch_sizes": []}, "inference.batch_sizes must name at least one, got []"),
    (InferenceConfig, {"batch_sizes": [64, 0]}, "inference.batch_sizes must all be positive, got [64, 0]"),
    (InferenceConfig, {"steps": 0}, "inference.steps must be positive, got 0"),
    (InferenceConfig, {"warmup_steps": -1}, "inference.warmup_steps must not be negative, got -1"),
    (ShardingConfig, {"types": []}, "sharding.types must name at least one, got []"),
    (ShardingConfig, {"world_size": 0}, "sharding.world_size must be positive or null, got 0"),
    (ShardingConfig, {"local_world_size": -2}, "sharding.local_world_size must be positive or null, got -2"),
    (ShardingConfig, {"hbm_gib": 0.0}, "sharding.hbm_gib must be positive or null, got 0.0"),
    (ShardingConfig, {"host_gib": -1.0}, "sharding.host_gib must be positive or null, got -1.0"),
    (ShardingConfig, {"hbm_gib": 1e-30},
     "sharding.hbm_gib=1e-30 less sharding.reserve=0.1 leaves under a KiB for tables"),
    (ShardingConfig, {"reserve": 1.0}, "sharding.reserve must lie in [0, 1), got 1.0"),
    (ShardingConfig, {"tables": "row_wise"},
     "sharding.tables must map tables to sharding types, such as {cat_0: row_wise}, got row_wise"),
    (ShardingConfig, {"tables": {"cat_1": "rowwise"}},
     "sharding.tables sets cat_1 to rowwise, which is none of table_wise, column_wise, row_wise, "
     "table_row_wise, data_parallel"),
    (ShardingConfig, {"tables": {"cat_1": ["row_wise"]}},
     "sharding.tables sets cat_1 to ['row_wise'], which is none of table_wise, column_wise, row_wise, "
     "table_row_wise, data_parallel"),
    (ShardingConfig, {"tables": {"cat_1": {"tiers": "host"}}},
     "sharding.tables.cat_1: Key 'tiers' not in 'TableOverride'; want type, tier, cache or exchange"),
    (ShardingConfig, {"tables": {"cat_1": {"tier": "disk"}}},
     "sharding.tables puts cat_1 on disk; set sharding.disk_path to a directory on a local disk"),
    (ShardingConfig, {"tables": {"cat_1": {"tier": "tape"}}},
     "sharding.tables.cat_1: Invalid value 'tape', expected one of [device, host, disk]; want type, tier, cache or exchange"),
    (ShardingConfig, {"tiers": [Tier.device, Tier.disk]},
     "sharding.tiers names disk, which the planner does not choose; name the tables in sharding.tables, as "
     "{cat_0: {tier: disk}}"),
    (ShardingConfig, {"read_ahead_gib": 0.0},
     "sharding.read_ahead_gib=0.0 leaves under a KiB for rows of tables with tier: disk"),
    (ShardingConfig, {"tables": {"cat_1": {"tier": "host", "cache": "10%"}}},
     "sharding.tables.cat_1: Value '10%' of type 'str' could not be converted to Float; want type, tier, cache or exchange"),
    (ShardingConfig, {"tables": {"cat_1": {"cache": 0.1}}},
     "sharding.tables.cat_1.cache=0.1: want a fraction of rows in (0, 1], with tier: host or disk"),
    (ShardingConfig, {"tables": {"cat_1": {"type": "data_parallel", "tier": "host"}}},
     "sharding.tables.cat_1 is data_parallel with tier: host; a replicated table lies on every device, so choose "
     "another sharding type or tier: device"),
    (ShardingConfig, {"tiers": [Tier.host]},
     "sharding.tiers=['host'] must name device; {cat_0: {tier: host}} in sharding.tables puts a table into host memory"),
    (LogConfig, {"every": 0}, "log.every must be positive, got 0"),
    (Config, {"days": ["data/*"]}, "days names several datasets; set day=next, and leave data.path out"),
    (Config, {"days": ["data/*"], "day": DayToTrain.next, "mode": Mode.eval},
     "days=['data/*'] is of mode=train, and mode=eval would ignore it; leave it out, or set mode=train"),
    (Config, {"watch_days": 5.0}, "watch_days=5.0: want seconds above 0, and days; set both, or leave it out"),
]
# fmt: on


def made(section: type, options: dict):
    """Make a section with the nested sections that Hydra would fill in."""
    nested = {
        DataConfig: {"synthetic": SyntheticConfig(), "multi_hot": MultiHotConfig()},
        # What lies in no section is checked before other sections are read.
        Config: {
            "data": DataConfig(synthetic=SyntheticConfig(**SYNTHETIC), multi_hot=MultiHotConfig())
        },
    }
    return section(**(nested.get(section, {}) | options))


@pytest.mark.parametrize(
    ("section", "options", "message"), REFUSED, ids=[message[:50] for _, _, message in REFUSED]
)
def test_an_invalid_value_is_refused_with_its_name(section, options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        made(section, options)


@dataclass(kw_only=True)
class InnerOptions:
    width: int = option(3, "of a model of the user", ge=2, lt=9)


@dataclass(kw_only=True)
class OwnOptions(ModelConfig):
    embedding_dim: int = option(8, "declared again, so all its bounds hold", ge=4)
    share: float = option(1.5, "", gt=1)
    inner: InnerOptions = field(default_factory=InnerOptions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 1}, "model.share must be > 1, got 1"),
        ({"embedding_dim": 2}, "model.embedding_dim must be > 0 and >= 4, got 2"),
        ({"inner": InnerOptions(width=9)}, "model.inner.width must lie in [2, 9), got 9"),
    ],
)
def test_any_bounds_of_a_model_of_the_user_hold(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        OwnOptions(**options)


def test_every_check_is_tried():
    """Every `require` and `refuse` has a case, so a message that cannot be formatted is noticed."""
    files = [ROOT / "configs" / "schema.py", *(ROOT / "nn" / "models").glob("*.py")]
    text = "\n".join(path.read_text() for path in files)
    checks = len(re.findall(r"^ +(?:require(?:_widths)?|refuse)\(", text, re.MULTILINE))
    assert len(REFUSED) + len(TASK_PROBLEMS) >= checks


def test_the_tables_have_the_dense_optimizer_by_default():
    same = OptimizerConfig(name=OptimizerName.adam, lr=0.5)
    assert (same.table_name, same.table_lr) == (OptimizerName.adam, 0.5)
    own = OptimizerConfig(lr=0.5, embedding_name=OptimizerName.adagrad, embedding_lr=0.1)
    assert (own.table_name, own.table_lr) == (OptimizerName.adagrad, 0.1)


@pytest.mark.parametrize(
    "override",
    ["sharding.tables={cat_0:row_wise,cat_1.bin:data_parallel}", "+sharding.tables.cat_0=row_wise"],
)
def test_tables_are_overridden_by_name(override):
    tables = typed_config(compose_with_hydra(*TINY, override)).sharding.tables
    assert tables["cat_0"] is ShardingType.row_wise
    assert tables.get("cat_1.bin") in (None, ShardingType.data_parallel)


def test_no_override_means_an_empty_mapping():
    assert compose_config(*TINY).sharding.tables == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "train.batchsize=3",
            "error: there is no option train.batchsize; did you mean train.batch_size? --help lists",
        ),
        (
            "batch_size=4096",
            "error: there is no option batch_size; did you mean train.batch_size? --help lists",
        ),
        ("epoch=2", "error: there is no option epoch; did you mean train.epochs? --help lists"),
        ("lr=1", "error: there is no option lr; did you mean optimizer.lr? --help lists"),
        ("sed=1", "error: there is no option sed; did you mean seed? --help lists"),
        ("batch=3", "error: there is no option batch; --help lists them all"),
        (
            "--train.epochz=2",
            "error: there is no flag --train.epochz; options are written key=value",
        ),
        ("--batchsize", "error: there is no flag --batchsize; options are written key=value"),
        ("-b", "error: there is no flag -b; options are written key=value"),
        (
            "+train.batchsize=3",
            "there is no option train.batchsize; did you mean train.batch_size? --help lists",
        ),
        ("+xyz=3", "error: there is no option xyz; --help lists them all"),
        ("train.batch_size=big", "Value 'big' of type 'str' could not be converted to Integer"),
        (
            "mode=trian",
            "Invalid value 'trian', expected one of [train, eval, inference, importance, predict, plan]",
        ),
        (
            "model.name=dlm",
            "error: there is no model.name=dlm; did you mean dlrm? the models are dlrm, dcnv2, wide_deep, ",
        ),
        (
            "model.top_mpl=[8,1]",
            "error: there is no option model.top_mpl; did you mean model.top_mlp? --help lists",
        ),
        (
            "model.cross.num_layer=2",
            "error: there is no option model.cross.num_layer; did you mean model.cross.num_layers?",
        ),
        *(
            (
                f"{name}=3",
                f"{name}: there is no such option; to add a key, write + before it, as +{name}",
            )
            for name in (
                "tasks.label",
                "sharding.tables.cat_0",
                "optimizer.embedding_options.beta1",
            )
        ),
        ("top_mpl=[8,1]", "there is no option top_mpl; did you mean model.top_mlp? --help lists"),
        ("model.top_mlp=8", "error: model.top_mlp: got 8, want a list"),
        ("model.top_mlp=[x]", "error: model.top_mlp[0]: Value 'x' of type 'str' could not be"),
        ("model.embedding_dtype=fp64", "Invalid value 'fp64', expected one of [fp32, bf16, fp16]"),
        ("sharding.types=[row]", "Invalid value 'row', expected one of [table_wise, column_wise,"),
        (
            "experiment=dlrm_t15",
            "there is no experiment=dlrm_t15; did you mean dlrm_criteo_t15? choose one of autoint_criteo_buckets, bst_movielens",
        ),
        ("data=criteo", "there is no data=criteo; did you mean criteo_"),
        ("epochs", "there is no option epochs; did you mean train.epochs?"),
    ],
)
def test_a_typing_error_is_named_and_ends_the_command(override, message):
    ended = run_command(override)
    assert ended.exit_code not in (0, None)
    assert message in ended.err


def test_an_unknown_experiment_is_refused_with_the_known_ones():
    ended = run_command("experiment=nope")
    for path in (ROOT / "configs" / "experiment").glob("*.yaml"):
        assert path.stem in ended.err


def test_a_refused_value_ends_the_command_in_one_line():
    ended = run_command("optimizer.lr=-1")
    assert (ended.exit_code, ended.out) == (2, "")
    assert ended.err == "error: optimizer.lr must be positive, got -1.0\n"


def test_only_dlrm_needs_equal_widths():
    assert DCNv2Options(bottom_mlp=[64]).bottom_mlp == [64]


@pytest.mark.parametrize("config", [Config, PreprocConfig, *OPTIONS.values()])
def test_every_option_has_a_meaning(config):
    described = dict(describe(config))
    assert len(described) >= (20 if config in (Config, PreprocConfig) else 5)
    for key, meaning in described.items():
        assert len(meaning.split()) >= 2, key


def all_sections(config: type) -> set[type]:
    """Return `config` and every class below it."""
    below = [section for section in get_type_hints(config).values() if is_dataclass(section)]
    return {config}.union(*(all_sections(section) for section in below))


def test_every_option_is_read():
    """Every field is read outside the schema."""
    read = {
        node.attr
        for folder in ("dataloading", "nn", "preproc", "configs/preproc_schema.py", "main.py")
        for path in ([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    # A table optimizer names the options of its own.
    read |= {name for rule in map(table_rule, table_optimizers()) for name in rule.options}
    sections = {PreprocConfig, StreamConfig}.union(*map(all_sections, [Config, *OPTIONS.values()]))
    options = {field.name for section in sections for field in fields(section)}
    # The schema's own `table_name` and `table_lr` read these two.
    assert options - read == {"embedding_name", "embedding_lr"}
    assert {"table_name", "table_lr"} <= read


@pytest.mark.parametrize(("recipe", "options"), [("dlrm", DLRMOptions), ("dcnv2", DCNv2Options)])
def test_help_lists_every_option_with_value_and_meaning(recipe, options):
    ended = run_command("--help", "train.batch_size=2048", "data.path=DIR", recipe=recipe)
    assert ended.exit_code == 0
    words = " ".join(ended.out.split())
    for key, meaning in describe(Config, sections={"model": options}):
        assert [line for line in ended.out.splitlines() if line.startswith(f"  {key}=")], key
        assert " ".join(meaning.split()) in words, key
    assert "  train.batch_size=2048 " in ended.out
    assert "  data.path=DIR " in ended.out
    assert ("  model.cross.projection_dim=64 " in ended.out) == (recipe == "dcnv2")
    assert ("  model.cross.structure=stacked " in ended.out) == (
        recipe == "dcnv2"
    )  # not in the yaml


def test_help_has_a_title_per_group_and_names_the_experiments():
    lines = run_command("--help").out.splitlines()
    title = lines.index(
        "optimizer: Optimizers of the dense component and of the tables; the tables' is fused into "
        "their backward pass"
    )
    assert lines[title - 1] == ""
    assert lines[title + 1].startswith("  optimizer.name=")
    named = {line.split()[0] for line in lines if line.startswith("  experiment=")}
    assert named == {f"experiment={path.stem}" for path in (ROOT / "configs/experiment").iterdir()}
    assert "  experiment=dlrm_criteo_t3             DLRM on Criteo 1TB, frequency limit 3" in lines


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["lr"], {"optimizer.lr", "optimizer.embedding_lr"}),
        (["data.synthetic.names", "seed"], {"data.synthetic.names", "seed"}),
        (["cross", "--config-name", "dcnv2"], {"model.cross.num_layers", "model.cross.structure"}),
        (["experiment"], {"experiment"}),
        (["profile"], {"profile.steps", "profile.start_step", "profile.nvtx"}),
    ],
)
def test_a_word_narrows_the_help(words, keys):
    ended = run_command("--help", *words)
    assert (ended.exit_code, ended.err) == (0, "")
    printed = {line.split("=")[0].strip() for line in ended.out.splitlines() if "=" in line[:40]}
    assert printed == keys | ({"model.cross.projection_dim"} if "cross" in words else set())
    assert "Hydra" not in ended.out


def test_a_word_that_is_in_no_option_is_refused():
    ended = run_command("--help", "optimzer")
    assert (ended.exit_code, ended.out) == (2, "")
    assert ended.err == (
        "error: --help: no option has 'optimzer' in its name; did you mean optimizer? --help alone lists all options\n"
    )


def test_help_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_command("--help").exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_the_default_mode_trains():
    assert compose_config().mode is Mode.train


TASK_PROBLEMS = [
    ({"weight": -1}, "weight must not be negative, got -1"),
    ({"label_smoothing": 1}, "label_smoothing must lie in [0, 1), got 1"),
    ({"focal_gamma": -0.5}, "focal_gamma must not be negative, got -0.5"),
    ({"focal_alpha": 1}, "focal_alpha must lie between 0 and 1 or be null, got 1"),
    ({"positive_weight": 0}, "positive_weight must be positive, got 0"),
    ({"keep_rate": 0}, "keep_rate must lie in (0, 1] or be null, got 0"),
    ({"keep_rate": "all"}, "keep_rate: got all, want a number or null"),
    ({"weight": None}, "weight: got None, want a number"),
    ({"weight": True}, "weight: got True, want a number"),
    ({"weight": float("nan")}, "weight: got nan, want a number"),
]


@pytest.mark.parametrize(("values", "message"), TASK_PROBLEMS)
def test_an_invalid_option_of_a_task_is_refused_by_name(values, message):
    with pytest.raises(ValueError, match=re.escape(f"tasks.click.{message}")):
        TaskConfig.of("tasks.click", values)


def test_both_factors_of_positive_rows_are_refused():
    with pytest.raises(ValueError, match="focal_alpha and positive_weight both"):
        TaskConfig.of("tasks.click", {"focal_alpha": 0.25, "positive_weight": 2})
    with pytest.raises(ValueError, match=r"tasks\.click: got 2, want options of a label"):
        TaskConfig.of("tasks.click", 2)
    assert TaskConfig.of("tasks.click", {"keep_rate": None, "weight": 2}) == TaskConfig(weight=2)
    assert not TaskConfig(weight=2, keep_rate=0.5).changes_loss
