"""The rows of the training benchmark: recipe, number of GPUs, tables and ids."""

from argparse import ArgumentParser
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from hydra import compose, initialize_config_module

from benchmarks.launch import command_parser
from configs.command_line import register
from configs.overrides import drop_replaced
from configs.schema import Config
from nn.models.registry import typed_config

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: a recipe (`main` for experiments that name their model) on the tables of configs/data/<tables>.yaml.

    `exponent` is that of the ids' power law; 0 is uniform. `train_rows` fit into the page cache, and an epoch is a multiple of 50
    steps, so that its evaluation coincides with a record. The first `ragged` features have 0 to 10 ids per row instead of one.
    With two `tasks` num_0 is a domain and there is label_2. `synthetic` are further options of `data.synthetic` with their
    values, and replace those of the file. With `users` the data are instead their log of listens (`python -m preproc
    dataset=yambda`).
    """

    recipe: str
    world_size: int
    experiment: str
    tables: str
    overrides: tuple[str, ...] = field(default=(), kw_only=True)
    exponent: float = field(default=1.05, kw_only=True)
    train_rows: int = field(default=200 * 65_536, kw_only=True)
    ragged: int = field(default=0, kw_only=True)
    tasks: int = field(default=1, kw_only=True)
    synthetic: tuple[tuple[str, str], ...] = field(default=(), kw_only=True)
    users: int = field(default=0, kw_only=True)

    def plus(self, *overrides: str, **changes: Any) -> "Row":
        """Return the row with further overrides, and other values of fields."""
        return replace(self, overrides=(*self.overrides, *overrides), **changes)

    @property
    def needs_data(self) -> bool:
        return bool(self.users) or self.tasks > 1

    def config(self, data_path: Path | None = None) -> Config:
        """Return the configuration of the row's command line; of a row that `needs_data`, these lie at `data_path`."""
        if self.needs_data:
            path = f"data.path={data_path}"
            return compose_row(self.recipe, f"experiment={self.experiment}", path, *self.overrides)
        return compose_row(
            self.recipe,
            f"experiment={self.experiment}",
            f"data={self.tables}",
            f"data.synthetic.exponent={self.exponent}",
            *(f"data.synthetic.{name}={value}" for name, value in self.synthetic),
            *self.overrides,
        )


def compose_row(recipe: str, *overrides: str) -> Config:
    """Return the typed configuration of `<recipe>.py <overrides>`."""
    register(Config, "schema")
    # main.py has DLRM's defaults.
    with initialize_config_module("configs", version_base="1.3"):
        composed = compose("dlrm" if recipe == "main" else recipe, list(overrides))
    drop_replaced(composed, overrides, Config)
    return typed_config(composed)


def run_parser(description: str | None, *, out: str) -> ArgumentParser:
    """Return the parser of `RECIPE [overrides] --out DIR` for benchmarks of one run; `out` is the help of --out."""
    parser = command_parser(description)
    parser.add_argument("recipe", choices=["dlrm", "dcnv2"])
    parser.add_argument("overrides", nargs="*", help="such as experiment=dlrm_criteo_t3")
    parser.add_argument("--out", type=Path, required=True, help=out)
    return parser


def in_tier(tier: str, cache: float, **others: float) -> str:
    """Return the override that puts T3's large tables into a tier, with the fraction of their rows on the GPU."""
    shares = {f"cat_{index}": cache for index in (0, 9, 19, 20, 21)} | others
    tables = (f"{name}: {{tier: {tier}, cache: {share}}}" for name, share in shares.items())
    return f"sharding.tables={{{','.join(tables)}}}"


T15 = ("dlrm_criteo_t15", "criteo_t15")
RAGGED = Row("dlrm", 1, *T15, ragged=6, train_rows=100 * 65_536)
WEAK_2, WEAK_4 = ("train.batch_size=131072",), ("train.batch_size=262144",)
GIANT = ("dlrm_criteo_t15", "criteo_giant")
CROSS_T15 = ("dcnv2_criteo_t15", "criteo_t15")
MLPERF = Row("dcnv2", 1, "dcnv2_mlperf", "criteo_mlperf", train_rows=50 * 65_536)
STATE_PER_ROW = ("optimizer.embedding_name=rowwise_adagrad",)
ROW_WISE = ("sharding.types=[row_wise]",)
BF16_TABLES = ("model.embedding_dtype=bf16",)
BF16 = ("train.amp=bf16",)
TF32 = ("train.amp=off",)
FP32 = ("train.amp=off", "train.tf32=false")
FP16 = ("train.amp=fp16",)
FULL_FP8 = ("train.fp8=full",)
FEW_ROWS = 2_048_000
"""Rows of a dataset for batches of at most 8,192; an epoch is 250 steps or more."""

# Rows in host memory: every step must have a batch of its own, since the rows of a batch that comes again are still here.
HOST_T3 = Row("dlrm", 1, "dlrm_criteo_t3", "criteo_t3", overrides=(in_tier("host", 0.1),))
# Its files, 83.7 GiB, lie where TMPDIR says.
DISK_T3 = (f"sharding.disk_path={gettempdir()}", "sharding.read_ahead_gib=8")
MOVIELENS = Row("main", 1, "embedding_mlp_movielens", "movielens", train_rows=FEW_ROWS)
WIDE_DEEP = Row("main", 1, "wide_deep_criteo", "criteo_wdl", train_rows=FEW_ROWS)
B4096 = ("train.batch_size=4096",)
DEEPFM = Row("main", 1, "deepfm_criteo", "criteo_t15", overrides=B4096, train_rows=FEW_ROWS)
FAMILY = {
    f"{name}_1": DEEPFM.plus(f"model.name={name}", "model.embedding_dim=16")
    for name in (
        *("finalmlp", "masknet", "wukong", "shared_bottom", "mmoe", "ple"),
        *("rankmixer", "fcn", "autoint", "xdeepfm", "pepnet", "esmm", "star"),
    )
}
# Four features of the user and the item, whose gates weigh the towers, and one of the domain.
PEPNET = ("model.domain_features=[cat_5]", "model.prior_features=[cat_0,cat_1,cat_2,cat_3]")
FAMILY["pepnet_1"] = FAMILY["pepnet_1"].plus(*PEPNET)
FAMILY["esmm_1"] = FAMILY["esmm_1"].plus(tasks=2)
FAMILY["star_1"] = FAMILY["star_1"].plus("model.domain=num_0", tasks=2)
"""Models without a recipe of their own, with their default sizes."""
MIXER = FAMILY["rankmixer_1"].plus(*BF16)
MIXER_100M = MIXER.plus("model.token_dim=768", "model.expansion=3")
MIXER_16384 = MIXER_100M.plus("train.batch_size=16384", train_rows=200 * 16_384)
SOK = Row("main", 1, "embedding_mlp_sok", "sok", exponent=0, train_rows=50 * 65_536)
DIN = Row(
    "main",
    1,
    "din_movielens",
    "movielens_history",
    # Synthetic histories are full.
    overrides=("train.batch_size=8192", "model.history_length=null"),
    train_rows=FEW_ROWS,
)
# Events of a sequence group, 20 a row and at most 100, and as many positions as that.
OF_EVENTS = (
    *BF16,
    "~model.history_features",
    "~model.history_length",
    "model.sequence=history",
)
SHORT = (("names", "[userId,movieId,genres]"), ("cardinalities", "[162542,56586,21]"))
SHORT += (("hotness", "[1,1,10]"), ("history", "[movieId]"))
DIN_EVENTS = replace(DIN, overrides=(DIN.overrides[0], *OF_EVENTS), synthetic=SHORT)
LONG = (*SHORT, ("history_length", "200"), ("history_max_length", "1000"))
SASREC = (
    *("train.batch_size=4096", "train.amp=bf16", "model.name=sasrec", "model.embedding_dim=64"),
    *("~model.history_features", "~model.history_length", "~model.attention_hidden"),
    *("~model.attention_pooling", "model.sequence=history", "model.heads=2"),
)
CROSSES = ("user_x_artist", "user_x_album", "item_x_hour", "user_x_artist_x_hour", "artist_x_hour")
ON_DISK = dict.fromkeys((*CROSSES, "user_x_hour"), 0.001) | {"user_x_is_organic": 0.01}
TABLES_ON_DISK = ",".join(f"{name}: {{tier: disk, cache: {c}}}" for name, c in ON_DISK.items())
HSTU = Row(
    "main",
    1,
    "hstu_mlperf",
    "",
    # 29 GiB of tables on the GPU; of the crosses, 531 GiB, the rows that were read lie where TMPDIR says.
    overrides=(
        *("train.batch_size=1024", "eval.batch_size=1024", "train.accumulate=4"),
        *("sharding.types=[table_wise,row_wise]", f"sharding.tables={{{TABLES_ON_DISK}}}"),
        f"sharding.disk_path={gettempdir()}",
    ),
    users=1000,
)

ROWS = {
    # Strong scaling: a global batch of 65,536 for any number of GPUs.
    "dlrm_t15_1": Row("dlrm", 1, *T15),
    "dlrm_t15_2": Row("dlrm", 2, *T15),
    "dlrm_t15_4": Row("dlrm", 4, *T15),
    # Weak scaling: 65,536 rows per GPU; its first point is dlrm_t15_1.
    "dlrm_t15_2_weak": Row("dlrm", 2, *T15, overrides=WEAK_2),
    "dlrm_t15_4_weak": Row("dlrm", 4, *T15, overrides=WEAK_4),
    # Data as most users have it: 6 of 26 features with 5 ids on average. Tables whose rows lie on several GPUs.
    "dlrm_t15_1_ragged": RAGGED,
    "dlrm_t15_2_weak_ragged": replace(RAGGED, world_size=2, overrides=WEAK_2),
    "dlrm_t15_4_weak_ragged": replace(
        RAGGED, world_size=4, overrides=WEAK_4, train_rows=50 * 262_144
    ),
    "dlrm_t15_2_rows": Row("dlrm", 2, *T15, overrides=ROW_WISE),
    "dlrm_t15_2_weak_rows": Row("dlrm", 2, *T15, overrides=(*ROW_WISE, *WEAK_2)),
    "dlrm_t15_4_weak_rows": Row("dlrm", 4, *T15, overrides=(*ROW_WISE, *WEAK_4)),
    "dlrm_t15_2_mixed": replace(
        RAGGED, world_size=2, ragged=1, overrides=("sharding.tables={cat_9: row_wise}",)
    ),
    "dlrm_t15_1_8192": Row("dlrm", 1, *T15, overrides=("train.batch_size=8192",)),
    "dlrm_t15_1_16384": Row("dlrm", 1, *T15, overrides=("train.batch_size=16384",)),
    "dlrm_t15_2_16384": Row("dlrm", 2, *T15, overrides=("train.batch_size=16384",)),
    # A table larger than a GPU, by rows and by columns; not measured yet.
    "dlrm_giant_2_rows": Row("dlrm", 2, *GIANT, overrides=("sharding.tables={cat_0: row_wise}",)),
    "dlrm_giant_2_columns": Row(
        "dlrm", 2, *GIANT, overrides=("sharding.tables={cat_0: column_wise}",)
    ),
    "dlrm_t15_4_uniform": Row("dlrm", 4, *T15, exponent=0),
    # Precisions of the dense component; the rows without a suffix are in bf16.
    "dlrm_t15_1_tf32": Row("dlrm", 1, *T15, overrides=TF32),
    "dlrm_t15_1_fp32": Row("dlrm", 1, *T15, overrides=FP32),
    "dlrm_t15_1_fp16": Row("dlrm", 1, *T15, overrides=FP16),
    "dlrm_t3_1": Row("dlrm", 1, "dlrm_criteo_t3", "criteo_t3"),
    # Its five large tables, 83.7 of 84.9 GiB, in host memory, with room on the GPU for a tenth or a hundredth of their rows.
    "dlrm_t3_1_host_10": HOST_T3,
    # The smallest of the five has at least room for three batches.
    "dlrm_t3_1_host_1": replace(HOST_T3, overrides=(in_tier("host", 0.01, cat_20=0.02),)),
    # On a local disk: host memory has 8 GiB for their rows, and the GPU 25.
    "dlrm_t3_1_disk": replace(HOST_T3, overrides=(*DISK_T3, in_tier("disk", 0.3))),
    "dlrm_t0_4": Row("dlrm", 4, "dlrm_criteo_t0", "criteo_t0"),
    "dlrm_t0_4_bf16_tables": Row("dlrm", 4, "dlrm_criteo_t0", "criteo_t0", overrides=BF16_TABLES),
    # 420.9 GiB of tables in float32, on GPUs of 141 GB.
    "dlrm_t0_2_bf16_tables": Row("dlrm", 2, "dlrm_criteo_t0", "criteo_t0", overrides=BF16_TABLES),
    # Of which the planner puts most into host memory.
    "dlrm_t0_1_host_fp32": Row("dlrm", 1, "dlrm_criteo_t0", "criteo_t0"),
    # DCNv2, Adam.
    "dcnv2_t15_1": Row("dcnv2", 1, *CROSS_T15),
    "dcnv2_t15_1_fp8": Row("dcnv2", 1, *CROSS_T15, overrides=FULL_FP8),
    "dcnv2_t15_1_fp8_partial": Row("dcnv2", 1, *CROSS_T15, overrides=("train.fp8=partial",)),
    "dcnv2_t15_1_tf32": Row("dcnv2", 1, *CROSS_T15, overrides=TF32),
    "dcnv2_t15_1_fp32": Row("dcnv2", 1, *CROSS_T15, overrides=FP32),
    "dcnv2_t15_1_fp16": Row("dcnv2", 1, *CROSS_T15, overrides=FP16),
    "dcnv2_t15_2": Row("dcnv2", 2, *CROSS_T15),
    "dcnv2_t15_2_weak": Row("dcnv2", 2, *CROSS_T15, overrides=WEAK_2),
    "dcnv2_t15_4": Row("dcnv2", 4, *CROSS_T15),
    # MLPerf's DCNv2: 214 lookups per sample, a global batch of 32,768. On one GPU the tables leave memory for one optimizer
    # state per row.
    "dcnv2_mlperf_1": replace(MLPERF, overrides=STATE_PER_ROW),
    "dcnv2_mlperf_1_fp8": replace(MLPERF, overrides=(*STATE_PER_ROW, *FULL_FP8)),
    "dcnv2_mlperf_1_bf16_tables": replace(MLPERF, overrides=(*STATE_PER_ROW, *BF16_TABLES)),
    # Adagrad with a state per element: 194.7 GiB, of which the planner puts most into host memory.
    "dcnv2_mlperf_elementwise_1_host": MLPERF,
    "dcnv2_mlperf_4": replace(MLPERF, world_size=4),
    # HugeCTR's examples in their own precision, fp32, and with a bf16 dense component.
    "movielens_1": MOVIELENS,
    "movielens_1_bf16": MOVIELENS.plus(*BF16),
    "wide_deep_1": WIDE_DEEP,
    "wide_deep_1_bf16": WIDE_DEEP.plus(*BF16),
    "deepfm_1": DEEPFM,
    "deepfm_1_bf16": DEEPFM.plus(*BF16),
    **FAMILY,
    "rankmixer_1_bf16": MIXER,
    "rankmixer_1_10m": MIXER.plus("model.token_dim=224", "model.expansion=3"),
    "rankmixer_1_30m": MIXER.plus("model.token_dim=416", "model.expansion=3"),
    "rankmixer_1_100m": MIXER_100M,
    "rankmixer_1_100m_fp8": MIXER_100M.plus(*FULL_FP8),
    "rankmixer_1_100m_16384": MIXER_16384,
    "rankmixer_1_100m_16384_fp8": MIXER_16384.plus(*FULL_FP8),
    "sok_1": SOK,
    "sok_1_bf16": SOK.plus(*BF16),
    # DIN: 50 positions of history in the table of the item.
    "din_1": DIN,
    "din_1_bf16_100": DIN.plus(*BF16, synthetic=(("hotness", "[1,1,10,100]"),)),
    "din_1_bf16_events": DIN_EVENTS,
    "sasrec_1_events": replace(DIN, overrides=SASREC, synthetic=LONG, train_rows=614_400),
    "din_1_bf16": DIN.plus(*BF16),
    # MLPerf's dlrm_v4, 1,024 samples a GPU of 2,700 positions on average.
    "hstu_1": HSTU,
    "hstu_2": HSTU.plus("train.batch_size=2048", world_size=2),
    "hstu_4": HSTU.plus("train.batch_size=4096", world_size=4),
}
