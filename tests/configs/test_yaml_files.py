"""Recipes and experiments: composition, settings of NVIDIA and MLPerf, and plans for the GPUs of their commands."""

import re
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError

from configs.command_line import composed_command
from configs.schema import Amp, Config, OptimizerName, SchedulerConfig
from nn.build import build_plan, open_source, planned_hardware
from nn.models.registry import typed_config
from nn.training.lr_scheduler import learning_rate_factor
from tests.helpers.command import Ended, run_command
from tests.helpers.composed import TINY, compose_config, compose_with_hydra
from tests.helpers.preproc_command import compose_preproc, compose_preproc_with_hydra
from tests.project.layout import is_ours

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RECIPES = ["dlrm", "dcnv2"]
EXPERIMENTS = sorted(path.stem for path in filter(is_ours, (CONFIGS / "experiment").glob("*.yaml")))
PUBLISHED = [
    name
    for name in EXPERIMENTS
    if name.startswith(tuple(RECIPES)) and not name.endswith(("kaggle", "buckets"))
]
NVIDIAS = [name for name in PUBLISHED if name != "dcnv2_mlperf"]

# Data set -> rows of all tables, GiB of their FP32 weights at 128 columns, as NVIDIA and MLPerf document them.
TABLES = {
    "criteo_t15": (32_709_138, 15.6),
    "criteo_t3": (177_944_291, 84.9),
    "criteo_t0": (882_774_575, 420.9),
    "criteo_mlperf": (204_184_588, 97.4),
}
# Experiment -> NVIDIA's results on A100-80: test AUC in full precision and AMP, then million samples/s in both. For MLPerf:
# minutes to its AUC, then million samples/s on 4 H200.
RESULTS = {
    "dlrm_criteo_t15": "0.8025 / 0.8025, 2.84 / 4.55",
    "dlrm_criteo_t3": "0.8027 / 0.8026, 10.9 / 13.8",
    "dlrm_criteo_t0": "0.8026 / 0.8026, 9.76 / 11.5",
    "dcnv2_criteo_t15": "0.8078 / 0.8077, 0.689 / 1.37",
    "dcnv2_criteo_t3": "0.8075 / 0.8074, 3.81 / 5.75",
    "dcnv2_mlperf": "4 x H200-NVL (v5.0, batch 32,768) 6.79, 7.28",
}
# Experiment -> number of H200s in its command, and a number that is too small (0: one is enough).
GPUS = {
    "dlrm_criteo_t15": (1, 0),
    "dlrm_criteo_t3": (2, 0),
    "dlrm_criteo_t0": (4, 3),
    "dcnv2_criteo_t15": (1, 0),
    "dcnv2_criteo_t3": (4, 2),
    "dcnv2_mlperf": (4, 1),
}


# Recipes of other models, and the command of each.
OTHERS = {
    "din_movielens": "python main.py experiment=din_movielens data.path=DIR",
    "deepfm_criteo": "torchrun --nproc-per-node 4 main.py experiment=deepfm_criteo data.path=DIR",
    "embedding_mlp_movielens": "python main.py experiment=embedding_mlp_movielens data.path=DIR",
    "hstu_mlperf": "torchrun --nproc-per-node 8 main.py experiment=hstu_mlperf data.path=DIR",
    "embedding_mlp_sok": "python main.py experiment=embedding_mlp_sok",
    "wide_deep_criteo": "python main.py experiment=wide_deep_criteo data.path=DIR",
    **{
        f"{model}_movielens_events": f"python main.py experiment={model}_movielens_events data.path=DIR"
        for model in ("din", "sasrec", "hstu", "bst", "transact", "onetrans", "sim")
    },
    **{
        name: f"python main.py experiment={name} data.path=DIR"
        for name in EXPERIMENTS
        if name.endswith("_criteo_buckets")
    },
}


def recipe_of(experiment: str) -> str:
    """Return the script of an experiment; `main.py` begins as `dlrm.py` does."""
    return "dcnv2" if experiment.startswith("dcnv2") else "dlrm"


def compose_experiment(name: str) -> Config:
    return compose_config(f"experiment={name}", recipe=recipe_of(name))


def head_of(path: Path) -> str:
    """Return the comments at the head of a file as one line."""
    lines = path.read_text().splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_composes_and_names_itself(recipe):
    config = compose_config(recipe=recipe)
    assert config.recipe == config.model.name == recipe
    assert config.data.path is None


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_helper_composes_as_the_command_line(recipe):
    overrides = [
        *TINY,
        "experiment=dcnv2_mlperf",
        "data=criteo_t3",
        "sharding.tables={cat_0:row_wise,cat_1:data_parallel}",
        "sharding.types=[table_wise]",
        "train.max_steps=null",
        "optimizer.lr=1e-3",
        "run_dir='a b'",
    ]
    composed = compose_with_hydra(*overrides, recipe=recipe)
    assert compose_config(*overrides, recipe=recipe) == typed_config(composed)


def test_preprocessing_options_of_tests_are_set_as_hydra_sets_them():
    overrides = [
        "source=[/a/day_0,'/a/odd[1]*b']",
        "output='/tmp/out put'",
        "train_fraction=0.29",
        "memory_limit=60MB",
        "data.synthetic.train_rows=300",
    ]
    table = "table={label:{name:y},categorical:[a,{name:both,cross:[a,b]}],sources:{t:{files:x}}}"
    choices = [["dataset=criteo_1tb"], ["dataset=any", table], []]
    for more in choices:
        composed = compose_preproc(*overrides, *more)
        assert composed == compose_preproc_with_hydra(*overrides, *more)
        assert OmegaConf.is_struct(composed)
    assert compose_preproc("dataset=any", table) != compose_preproc("dataset=any")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("data", sorted(path.stem for path in (CONFIGS / "data").glob("*.yaml")))
def test_every_data_set_composes_with_every_recipe(recipe, data):
    synthetic = compose_config(f"data={data}", recipe=recipe).data.synthetic
    sizes = {
        "criteo_wdl": (13, 28),
        "movielens": (0, 3),
        "movielens_history": (0, 4),
        "sok": (0, 100),
    }
    assert (synthetic.num_numerical, len(synthetic.cardinalities)) == sizes.get(data, (13, 26))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_and_names_itself(name):
    config = compose_experiment(name)
    assert config.recipe == name
    assert name.startswith(config.model.name)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_the_same_in_both_scripts(name):
    """The experiment sets every option that differs between the recipes."""
    first, second = (compose_config(f"experiment={name}", recipe=recipe) for recipe in RECIPES)
    assert first == second


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_opens_with_its_command(name):
    head = head_of(CONFIGS / "experiment" / f"{name}.yaml")
    command = f"{recipe_of(name)}.py experiment={name} data.path=DIR"
    assert OTHERS.get(name, command) in head


@pytest.mark.parametrize("data", TABLES)
def test_table_sizes_are_the_documented_ones(data):
    rows, gib = TABLES[data]
    cardinalities = compose_config(f"data={data}").data.synthetic.cardinalities
    assert sum(cardinalities) == rows
    assert round(rows * 128 * 4 / 2**30, 1) == gib
    assert f"{gib} GiB of FP32 tables at dim 128" in head_of(CONFIGS / "data" / f"{data}.yaml")


def test_the_synthetic_dataset_has_the_tables_of_t15():
    [written] = [yaml.safe_load((CONFIGS / "dataset" / "synthetic.yaml").read_text())["data"]]
    streamed = compose_config("data=criteo_t15").data.synthetic
    assert written["synthetic"]["cardinalities"] == streamed.cardinalities


@pytest.mark.parametrize("name", NVIDIAS)
def test_published_experiments_hold_nvidias_settings(name):
    config = compose_experiment(name)
    assert config.train.batch_size == config.eval.batch_size == 65_536
    assert (config.train.epochs, config.train.max_steps, config.eval.per_epoch) == (1, None, 1)
    assert config.train.loss_scale == 65_536
    # NVIDIA uses fp16 with a loss scale; here bf16 replaces it. AMP is on as in their tables.
    assert config.train.amp is Amp.bf16
    assert config.model.embedding_dim == 128
    assert config.model.bottom_mlp == [512, 256, 128]
    assert config.model.top_mlp == [1024, 1024, 512, 256, 1]
    decay = {"decay_start_step": 48_000, "decay_steps": 24_000, "decay_power": 2.0}
    optimizer = config.optimizer
    assert (optimizer.embedding_name, optimizer.embedding_lr) == (None, None)
    if config.model.name == "dlrm":
        assert (optimizer.name, optimizer.lr) == (OptimizerName.sgd, 24.0)
        assert config.scheduler == SchedulerConfig(warmup_steps=8000, **decay)
    else:
        assert (optimizer.name, optimizer.lr) == (OptimizerName.adam, 1e-4)
        assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.999, 1e-7)
        assert config.scheduler == SchedulerConfig(warmup_steps=100, **decay)
        cross = config.model.cross
        assert (cross.num_layers, cross.projection_dim, cross.structure.value) == (
            3,
            512,
            "stacked",
        )


def test_the_mlperf_experiment_holds_mlperfs_settings():
    """In the closed division only batch size and learning rate may be chosen; all submissions chose 0.004."""
    config = compose_experiment("dcnv2_mlperf")
    optimizer, cross = config.optimizer, config.model.cross
    assert (optimizer.name, optimizer.lr) == (OptimizerName.adagrad, 0.004)
    assert (optimizer.eps, optimizer.embedding_name, optimizer.embedding_lr) == (1e-8, None, None)
    assert config.scheduler == SchedulerConfig()
    assert (config.train.batch_size, config.train.epochs) == (32_768, 1)
    assert (config.eval.per_epoch, config.eval.auc_threshold) == (20, 0.80275)
    assert (config.model.embedding_dim, config.model.bottom_mlp) == (128, [512, 256, 128])
    assert config.model.top_mlp == [1024, 1024, 512, 256, 1]
    assert (cross.num_layers, cross.projection_dim, cross.structure.value) == (3, 512, "stacked")
    assert config.data.multi_hot.seed == 0
    hotness, rows = config.data.multi_hot.hotness, config.data.synthetic.cardinalities
    assert sum(hotness) == 214
    large = [hot for hot, size in zip(hotness, rows, strict=True) if size == 40_000_000]
    assert large == [3, 7, 12, 100, 27]
    assert 4 * sum((h - 1) * n for h, n in zip(hotness, rows, strict=True)) / 2**30 < 21.55


def test_the_experiment_of_dlrmv4_holds_mlperfs_settings():
    """The closed division fixes all but batch and learning rate."""
    config = compose_experiment("hstu_mlperf")
    optimizer = config.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.95, 0.999, 1e-8)
    assert (optimizer.name, optimizer.table_name) == (OptimizerName.adam, "rowwise_adagrad")
    assert (optimizer.lr, optimizer.table_lr, optimizer.weight_decay) == (1e-6, 1e-6, 0)
    assert config.scheduler == SchedulerConfig(warmup_steps=24_000, first_step=0)
    # Fact of a published log: the rate of sample 409,600.
    assert optimizer.lr * learning_rate_factor(49, config.scheduler) == pytest.approx(2.0416667e-9)
    assert (config.train.batch_size, config.train.clip_norm, config.train.epochs) == (8192, 1.0, 1)
    assert config.tasks == {"listen_plus": {"weight": 0.2}}
    assert (config.data.shuffle_block, config.eval.auc_threshold) == (0, 0.75)
    model = config.model
    assert (model.width, model.layers, model.heads, model.head_dim) == (512, 3, 4, 128)
    assert (model.embedding_dim, model.query_time.value) == (512, "last_event")
    rows = compose_preproc("dataset=yambda").table_rows
    assert sum(rows) == 293_051_712
    assert round(sum(rows) * 512 * 4 / 2**30, 2) == 558.95


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_experiments_open_with_the_published_numbers(name):
    assert RESULTS[name] in head_of(CONFIGS / "experiment" / f"{name}.yaml")


def options_of_plan(name: str, count: int, *overrides: str) -> list[str]:
    gpus = ["device=cuda", "sharding.hbm_gib=139", f"sharding.world_size={count}"]
    return [f"experiment={name}", "mode=plan", *gpus, *overrides]


def plan_on_h200s(name: str, count: int, *overrides: str) -> Ended:
    return run_command(*options_of_plan(name, count, *overrides), recipe=recipe_of(name))


def check_one_h200(name: str, *overrides: str) -> None:
    """Raise ValueError unless the tables fit one GPU; the command also builds and draws the whole dense component."""
    config = compose_config(*options_of_plan(name, 1, *overrides), recipe=recipe_of(name))
    plan, _ = build_plan(config, open_source(config), planned_hardware(config))
    assert plan is not None


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_experiments_fit_the_gpus_of_their_command(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    count, _ = GPUS[name]
    command = f"torchrun --nproc-per-node {count} {recipe_of(name)}.py"
    assert command in head_of(CONFIGS / "experiment" / f"{name}.yaml")
    ended = plan_on_h200s(name, count)
    assert (ended.exit_code, ended.err) == (0, "")
    assert len(re.findall(r"^cat_\d+ ", ended.out, re.MULTILINE)) >= 5
    assert "weights and optimizer state of 26 tables" in ended.out
    assert list(tmp_path.iterdir()) == [], "a plan writes no files"


@pytest.mark.parametrize("name", [name for name, (_, too_few) in GPUS.items() if too_few])
def test_too_few_gpus_are_refused_with_a_sufficient_number(name):
    count, too_few = GPUS[name]
    batch = f"train.batch_size={65_536 // too_few * too_few}"
    ended = plan_on_h200s(name, too_few, batch, "sharding.tiers=[device]")
    assert (ended.exit_code, ended.out) == (2, "")
    assert ended.err.startswith("error: the tables do not fit: with ")
    assert f"{too_few} x 125.1 GiB are usable" in ended.err
    suggested = int(re.search(r"start (\d+) ranks or more", ended.err)[1])
    assert too_few < suggested <= count


def test_one_gpu_holds_the_mlperf_tables_with_rowwise_adagrad():
    remedy = "optimizer.embedding_name=rowwise_adagrad"
    assert remedy in head_of(CONFIGS / "experiment" / "dcnv2_mlperf.yaml")
    check_one_h200("dcnv2_mlperf", remedy)


@pytest.mark.parametrize(
    "name", [name for name, (count, too_few) in GPUS.items() if count > 1 and not too_few]
)
def test_one_gpu_is_enough_for_the_other_experiments(name):
    """Those whose command has one GPU are above."""
    check_one_h200(name)


def test_an_internal_error_is_not_reported_as_a_command_line_error(monkeypatch):
    def task(composed):
        raise ConfigKeyError("a missing key")

    monkeypatch.setattr(sys, "argv", ["dlrm.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigKeyError, match="a missing key"):
        composed_command(task, Config, "schema", "dlrm")()
