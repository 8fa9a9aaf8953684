"""Flags of NVIDIA's TensorFlow 2 recipe as options of ours; docs/tf2_flags.md has the same with remarks."""

import shlex
from collections.abc import Sequence

OPTIONS = {
    "batch_size": "train.batch_size",
    "valid_batch_size": "eval.batch_size",
    "top_mlp_dims": "model.top_mlp",
    "bottom_mlp_dims": "model.bottom_mlp",
    "embedding_dim": "model.embedding_dim",
    "interaction": "model.name",
    "optimizer": "optimizer.name",
    "learning_rate": "optimizer.lr",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "warmup_steps": "scheduler.warmup_steps",
    "decay_start_step": "scheduler.decay_start_step",
    "decay_steps": "scheduler.decay_steps",
    "num_cross_layers": "model.cross.num_layers",
    "cross_layer_projection_dim": "model.cross.projection_dim",
    "mode": "mode",
    "seed": "seed",
    "epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "evals_per_epoch": "eval.per_epoch",
    "print_freq": "log.every",
    "log_path": "run_dir",
    "restore_checkpoint_path": "checkpoint.restore",
    "profiler_start_step": "profile.start_step",
    "dataset_path": "data.path",
    "feature_spec": "data.feature_spec",
    "synthetic_dataset_cardinalities": "data.synthetic.cardinalities",
    "synthetic_dataset_hotness": "data.synthetic.hotness",
    "synthetic_dataset_num_numerical_features": "data.synthetic.num_numerical",
    "loss_scale": "train.loss_scale",
}
SWITCHES = {"amp": "train.amp=fp16", "xla": "train.compile=true", "cpu": "device=cpu"}
"""Options in the place of flags that are set or not."""
OTHERS = (
    *("auc_thresholds", "save_checkpoint_path", "profiled_rank", "dataset_type"),
    *("synthetic_dataset_train_batches", "synthetic_dataset_valid_batches"),
    *("synthetic_dataset_use_feature_spec", "run_eagerly", "tfdata_debug"),
    *("inter_op_parallelism", "intra_op_parallelism", "column_slice_threshold"),
    *("row_slice_threshold", "data_parallel_threshold", "cpu_offloading_threshold_gb"),
    *("data_parallel_input", "concat_embedding", "use_mde_embeddings", "dist_strategy"),
    *("embedding_zeros_initializer", "embedding_trainable"),
)
"""Flags that are gone, or whose value has another unit or place."""
FLAGS = {*OPTIONS, *SWITCHES, *OTHERS}
TRUE = ("", "true", "t", "1", "yes", "y")


def is_tf2_flag(argument: str) -> bool:
    """Return whether an argument is a flag of NVIDIA's recipe."""
    name = argument.lstrip("-").partition("=")[0]
    return argument.startswith("-") and bool({name, name.removeprefix("no")} & FLAGS)


def translated(arguments: Sequence[str]) -> str:
    """Return a command line with the options in the place of the flags, and the flags that have none."""
    options, without = [], []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not is_tf2_flag(argument):
            options.append(argument)
            continue
        name, equals, value = argument.lstrip("-").partition("=")
        if name.removeprefix("no") in SWITCHES:
            if name in SWITCHES and value.lower() in TRUE:
                options.append(SWITCHES[name])
            continue
        if not equals and rest and (name in OPTIONS or not set("-=") & set(rest[0])):
            value = rest.pop(0)
        if name not in OPTIONS:
            without.append(f"--{name}")
        elif name == "interaction":
            options.append(f"model.name={'dcnv2' if value == 'cross' else 'dlrm'}")
        else:
            is_list = name.endswith(("_dims", "_cardinalities", "_hotness"))
            options.append(f"{OPTIONS[name]}={f'[{value}]' if is_list else value}")
    more = f" ({', '.join(without)} by hand, or gone)" * bool(without)
    return shlex.join(options) + more
