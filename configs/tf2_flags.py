"""Flags of NVIDIA's TensorFlow 2 recipe as options of ours; docs/tf2_flags.md has all, with remarks."""

import re
import shlex
from collections.abc import Sequence

OPTIONS = dict(
    re.findall(
        r"(\w+) +(\S+)",
        """
        batch_size          train.batch_size          valid_batch_size            eval.batch_size
        top_mlp_dims        model.top_mlp             bottom_mlp_dims             model.bottom_mlp
        embedding_dim       model.embedding_dim       interaction                 model.name
        optimizer           optimizer.name            learning_rate               optimizer.lr
        beta1               optimizer.beta1           beta2                       optimizer.beta2
        warmup_steps        scheduler.warmup_steps    decay_start_step            scheduler.decay_start_step
        decay_steps         scheduler.decay_steps     num_cross_layers            model.cross.num_layers
        mode                mode                      cross_layer_projection_dim  model.cross.projection_dim
        seed                seed                      epochs                      train.epochs
        max_steps           train.max_steps           evals_per_epoch             eval.per_epoch
        print_freq          log.every                 log_path                    run_dir
        dataset_path        data.path                 restore_checkpoint_path     checkpoint.restore
        feature_spec        data.feature_spec         profiler_start_step         profile.start_step
        loss_scale          train.loss_scale          synthetic_dataset_hotness   data.synthetic.hotness
        synthetic_dataset_cardinalities               data.synthetic.cardinalities
        synthetic_dataset_num_numerical_features      data.synthetic.num_numerical
        """,
    )
)
SWITCHES = {"amp": "train.amp=fp16", "xla": "train.compile=true", "cpu": "device=cpu"}
"""Options in the place of flags that are set or not."""
VALUES = {"SGD": "sgd", "-1": "null", "cross": "dcnv2"}
"""Ours for their values."""
NOT_ONE_OPTION = frozenset(
    re.findall(
        r"\w+",
        """
        save_checkpoint_path auc_thresholds profiled_rank dataset_type run_eagerly tfdata_debug inter_op_parallelism
        intra_op_parallelism synthetic_dataset_train_batches synthetic_dataset_valid_batches
        synthetic_dataset_use_feature_spec column_slice_threshold row_slice_threshold data_parallel_threshold
        cpu_offloading_threshold_gb data_parallel_input concat_embedding use_mde_embeddings dist_strategy
        embedding_zeros_initializer embedding_trainable
        """,
    )
)
"""Flags that are gone, or that no option replaces one to one."""


def is_tf2_flag(argument: str) -> bool:
    name = argument.lstrip("-").partition("=")[0]
    names = {name, name.removeprefix("no")}
    return argument.startswith("-") and not names.isdisjoint({*OPTIONS, *SWITCHES, *NOT_ONE_OPTION})


def translated(recipe: str, arguments: Sequence[str]) -> str:
    """Return the options that do what the flags do in `recipe`, their defaults included, and the flags that have none."""
    options, without = [], []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or "." in name:
            options.append(argument)
        elif name.removeprefix("no") in SWITCHES:
            if name in SWITCHES and value.lower() not in ("false", "f", "0", "no"):
                options.append(SWITCHES[name])
        elif name not in OPTIONS:
            without.append(f"--{name}")
            if not equals and rest and not set("-=") & set(rest[0]):
                rest.pop(0)
        else:
            value = value if equals or not rest else rest.pop(0)
            value = VALUES.get(value, "dlrm" if name == "interaction" else value)
            if name == "embedding_dim" and not value.isdecimal():
                without.append(f"--{name}")  # a width per table
                continue
            is_list = name.endswith(("_dims", "_cardinalities", "_hotness"))
            options.append(f"{OPTIONS[name]}={f'[{value}]' if is_list else value}")
    if SWITCHES["amp"] not in options:
        options.insert(0, "train.amp=off")  # that of the experiment is bf16
    if not any(option.startswith("experiment=") for option in options):
        model = "dcnv2" if recipe == "dcnv2" else "dlrm"
        options.insert(0, f"experiment={model}_criteo_t15")
    more = f" ({', '.join(without)} by hand, or gone)" * bool(without)
    return shlex.join(options) + more
