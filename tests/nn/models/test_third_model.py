"""A third model, defined in this file alone: training, sharding, plan, resuming, evaluation and export."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from configs.options import option
from configs.schema import ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec
from nn.build import build_plan, open_source, planned_hardware
from nn.embedding.declared_tables import check_tables, one_table_per_feature
from nn.export.tables import export_tables
from nn.layers.mlp import MLP
from nn.layers.pooled_embeddings import PooledEmbeddings, join
from nn.models.model import Activations, Model
from nn.models.registry import build_dense, declared_tables
from nn.planning.memory_estimate import plan_memory
from tests.helpers.command import run_command
from tests.helpers.composed import compose_config, losses_of_cases
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import stored_bytes, summary
from tests.nn.training.test_accumulate import on_ranks, scores

HERE = "tests.nn.models.test_third_model"


@dataclass(kw_only=True, slots=True)
class DeepFMOptions(ModelConfig):
    """Options of DeepFM."""

    hidden: list[int] = option(
        [32, 16], "widths of the deep network's hidden layers", gt=0, filled=True
    )


class DeepFM(Model):
    """Deep network and factorization machine on the same embeddings (arXiv:1703.04247)."""

    Options = DeepFMOptions

    def __init__(self, num_numerical: int, num_features: int, dim: int, hidden: list[int]) -> None:
        super().__init__()
        self.num_features = num_features
        self.prefix_columns = num_numerical
        columns = num_features * dim
        self.deep = MLP(num_numerical + columns, [*hidden, 1], final_activation=False)
        self.linear = nn.Linear(num_numerical, 1)  # PyTorch's initial weights
        self.scale = nn.Parameter(torch.ones(dim))

    @classmethod
    def tables(cls, options: DeepFMOptions, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
        """Return tables whose names and order differ from those of the features."""
        return [
            EmbeddingBagConfig(
                name=f"factors_{feature.name}",
                num_embeddings=feature.cardinality,
                embedding_dim=options.embedding_dim,
                feature_names=[feature.name],
                pooling=PoolingType.SUM,
                data_type=DataType[options.embedding_dtype.name.upper()],
            )
            for feature in reversed(spec.categorical)
        ]

    @classmethod
    def build(cls, options: DeepFMOptions, spec: FeatureSpec) -> "DeepFM":
        return cls(
            len(spec.numerical), len(spec.categorical), options.embedding_dim, options.hidden
        )

    def activations(self) -> Activations:
        columns = self.num_features * self.scale.numel()
        return Activations(
            backward_columns=columns,
            reread_columns=columns,
            products={"factorization machine": 4 * columns},
        )

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        x = join(numerical, embeddings)
        vectors = x[:, self.prefix_columns :].unflatten(1, (self.num_features, -1))
        pairs = vectors.sum(1).square() - vectors.square().sum(1)
        logits = self.deep(x).squeeze(1) + self.linear(numerical).squeeze(1)
        return (logits + (pairs * self.scale).sum(1)).float()


class WithoutPrefix(DeepFM):
    """DeepFM without prefix columns for the numerical features."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.num_numerical, self.prefix_columns = self.prefix_columns, 0

    def forward(self, numerical: Tensor, embeddings: Tensor | PooledEmbeddings) -> Tensor:
        self.prefix_columns = self.num_numerical
        try:
            return super().forward(numerical, embeddings)
        finally:
            self.prefix_columns = 0


def _mistaken(name: str, **methods: object) -> type[DeepFM]:
    return type(name, (DeepFM,), methods)


def _returns(value: object) -> classmethod:
    return classmethod(lambda cls, options, spec: value)


def _changes(change) -> object:
    return lambda self, numerical, embeddings: change(DeepFM.forward(self, numerical, embeddings))


NoneAsTables = _mistaken("NoneAsTables", tables=_returns(None))
TextTables = _mistaken("TextTables", tables=_returns(["x"]))
NoneAsModel = _mistaken("NoneAsModel", build=_returns(None))
PlainModule = _mistaken("PlainModule", build=_returns(nn.Linear(1, 1)))
NoLogits = _mistaken("NoLogits", forward=_changes(lambda logits: None))
TwoLogits = _mistaken("TwoLogits", forward=_changes(lambda logits: (logits, logits)))
Classes = _mistaken("Classes", forward=_changes(lambda logits: (logits > 0).long()))
TooFew = _mistaken("TooFew", forward=_changes(lambda logits: logits[1:]))
Mean = _mistaken("Mean", forward=_changes(lambda logits: logits.mean()))

CASE = [
    f"model.name={HERE}:DeepFM",
    "model.embedding_dim=8",
    "model.hidden=[16,8]",
    "data.synthetic.train_rows=2048",
    "data.synthetic.test_rows=256",
    "data.synthetic.cardinalities=[500,40,7,300,1000]",
    "data.synthetic.hotness=[1,2,1,1,3]",
    "data.synthetic.num_numerical=3",
    "train.batch_size=64",
    "eval.batch_size=128",
    "log.every=4",
    "log.pictures=false",
    "device=cpu",
]
TABLES = [f"factors_cat_{number}" for number in (4, 3, 2, 1, 0)]


def trained(run_dir: Path, *overrides: str) -> Path:
    ended = run_command(*CASE, f"run_dir={run_dir}", *overrides)
    assert (ended.exit_code, ended.err) == (0, "")
    return run_dir


@pytest.fixture(scope="module")
def complete_run(tmp_path_factory) -> Path:
    """Return the directory of a run of 12 steps."""
    return trained(tmp_path_factory.mktemp("third") / "run", "train.max_steps=12")


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """Return the losses of 24 steps of one rank."""
    return losses_of_cases([CASE], 24)[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoneAsTables", "tables() returns NoneType; want a list of EmbeddingBagConfig"),
        ("TextTables", "tables() returns a list with 'x'; want a list of EmbeddingBagConfig"),
        ("NoneAsModel", "build() returns NoneType; want a nn.models.model.Model"),
        ("PlainModule", "build() returns Linear; want a nn.models.model.Model"),
        ("NoLogits", "the model's forward() returns NoneType; want a tensor of logits"),
        ("TwoLogits", "the model's forward() returns tuple; want a tensor of logits"),
        ("Classes", "the model's forward() returns a tensor of torch.int64; want a tensor of"),
        ("TooFew", "the model's forward() returns logits of 63 rows for a batch of 64"),
        ("Mean", "the model returns logits [], and the dataset's labels (label) need [B]"),
    ],
)
def test_what_a_model_must_not_return_is_one_line(name, message, tmp_path):
    case = [text for text in CASE if not text.startswith("model.name")]
    ended = run_command(
        *case, f"model.name={HERE}:{name}", "eval.at_start=false", f"run_dir={tmp_path / 'run'}"
    )
    assert ended.exit_code == 2
    assert message in ended.err
    assert ended.err.count("\n") == 1


def test_the_model_trains_with_the_ordinary_command(complete_run, losses):
    assert summary(complete_run)["steps"] == 12
    assert np.mean(losses[-6:]) < np.mean(losses[:6])


def test_a_run_resumes_bit_by_bit(complete_run, tmp_path):
    resumed = trained(tmp_path / "resumed", "train.max_steps=5")
    assert stored_bytes(resumed) != stored_bytes(complete_run)
    trained(resumed, "train.max_steps=12")
    assert stored_bytes(resumed) == stored_bytes(complete_run)


def test_a_saved_model_is_evaluated_to_the_same_numbers(complete_run, tmp_path):
    restore = f"checkpoint.restore={complete_run}/checkpoints/step_12"
    ended = run_command(*CASE, "mode=eval", restore, f"run_dir={tmp_path}/eval")
    assert (ended.exit_code, ended.err) == (0, "")
    wanted = summary(complete_run)
    evaluated = summary(tmp_path / "eval")
    for key in ("steps", "test_auc", "test_log_loss", "test_rows"):
        assert evaluated[key] == wanted[key], key


def test_tables_are_exported_under_their_names(complete_run, tmp_path):
    written = export_tables(complete_run / "checkpoints" / "step_12", tmp_path / "out")["tables"]
    assert list(written) == TABLES
    weight = np.load(tmp_path / "out" / "factors_cat_3.weight.npy")
    assert weight.shape == (300, 8)


def test_two_ranks_train_as_one(losses):
    layouts = [
        "sharding.types=[table_wise]",
        "sharding.types=[row_wise]",
        "sharding.tables={cat_0:column_wise,factors_cat_2:data_parallel}",
    ]
    cases = [[*CASE, layout] for layout in layouts]
    for of_rank in run_distributed(losses_of_cases, 2, cases, 8):
        for layout, found in zip(layouts, of_rank, strict=True):
            np.testing.assert_allclose(found, losses[:8], rtol=2e-5, err_msg=layout)


# Vectors that owners send: whole, cut in two, and of rows on both ranks, which are added. Then rows and replicas.
SENT = "factors_cat_0:table_wise,factors_cat_1:column_wise,factors_cat_4:row_wise"
ROWS = (
    "factors_cat_0:{type:data_parallel,exchange:rows},factors_cat_1:{type:table_wise,exchange:rows}"
)
LAYOUTS = [
    ["sharding.types=[table_wise]"],
    [f"sharding.tables={{{SENT},factors_cat_2:data_parallel,factors_cat_3:row_wise}}"],
    [f"sharding.tables={{{ROWS},factors_cat_2:data_parallel,factors_cat_4:data_parallel}}"],
    ["sharding.types=[data_parallel]"],
]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("chunks", [[], ["train.accumulate=3"]], ids=str)
def test_prefix_columns_do_not_change_the_result(num_ranks, chunks):
    """With them, lookups and copies fill one matrix; without, a copy joins all at the end."""
    further = [*CASE[1:], "data.synthetic.train_rows=241", *chunks]

    def results(name: str) -> list:
        model = f"model.name={HERE}:{name}"
        cases = [[model, *further, *layout] for layout in LAYOUTS]
        return [run_distributed(function, num_ranks, cases) for function in (on_ranks, scores)]

    torch.testing.assert_close(results("DeepFM"), results("WithoutPrefix"), rtol=0, atol=0)


def test_tables_and_memory_are_planned():
    ended = run_command(*CASE, "mode=plan", "device=cuda", "sharding.hbm_gib=1")
    assert (ended.exit_code, ended.err) == (0, "")
    assert all(name in ended.out for name in TABLES)
    assert "GiB at its peak on rank 0" in ended.out


def test_the_memory_of_the_dense_component_is_as_declared():
    config = compose_config(*CASE, "device=cuda", "sharding.hbm_gib=1", "train.amp=off")
    source = open_source(config)
    _, plan = build_plan(config, source, planned_hardware(config))
    (memory,) = plan_memory(config, source.spec, plan, 1, dense_states=1)  # adagrad
    # 3 numerical features and 5 embeddings of 8 padded to 48; a linear layer; the scale
    parameters = 48 * 16 + 16 + 16 * 8 + 8 + 8 + 1 + 3 + 1 + 8
    assert memory.dense_component == parameters * 4 * 3
    assert memory.dense_pass == 64 * 4 * (48 + 16 + 8 + 3 + 40 + 2 * 48)
    assert memory.lookups == 64 * 4 * 40


def test_the_help_lists_the_options_of_the_model_only():
    ended = run_command("--help", *CASE)
    assert "  model.hidden=[16,8]" in ended.out
    assert "widths of the deep network's hidden layers" in ended.out
    assert "model.top_mlp" not in ended.out


def test_options_may_refer_to_others():
    config = compose_config(*CASE, "model.hidden=['${model.embedding_dim}',4]")
    assert config.model.hidden == [8, 4]


def test_a_mistyped_option_is_named():
    ended = run_command(*CASE, "model.hiden=[8]")
    wanted = (
        "error: there is no option model.hiden; did you mean model.hidden? --help lists them all\n"
    )
    assert (ended.exit_code, ended.err) == (2, wanted)


class NoModel:
    """Class that is no model."""


class NoOptions(Model):
    """Model without options."""


class Buffered(DeepFM):
    """Model with a persistent buffer."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.norm = nn.BatchNorm1d(4)


class OtherConstructor(DeepFM):
    """Model without `build` whose constructor takes something else."""

    build = Model.build

    def __init__(self) -> None:
        super().__init__()


class OneName(DeepFM):
    """Model with two tables of one name."""

    @classmethod
    def tables(cls, options, spec):
        return one_table_per_feature(options, spec) + one_table_per_feature(options, spec, 1)


class OneTableMissing(DeepFM):
    """Model with a feature without a table."""

    @classmethod
    def tables(cls, options, spec):
        return one_table_per_feature(options, spec)[:-1]


class NoColumns(DeepFM):
    """Model with a table without columns."""

    @classmethod
    def tables(cls, options, spec):
        return one_table_per_feature(options, spec, columns=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "no_such.module:Class",
            "no_such.module cannot be imported (ModuleNotFoundError: No module named 'no_such')",
        ),
        (f"{HERE}:Nobody", f"{HERE} has no Nobody"),
        ("ending_script:Class", "ending_script cannot be imported (SystemExit: usage: x, at "),
        (f"{HERE}:NoModel", "it is no subclass of nn.models.model.Model"),
        (f"{HERE}:NoOptions", "it has no Options, a dataclass"),
        (
            f"{HERE}:OneName",
            "the tables of features 'cat_0' and 'cat_0' have one name, 'cat_0'; rename a feature in the feature "
            "spec, or name them apart, such as by the prefix of ",
        ),
        (
            f"{HERE}:OneTableMissing",
            "feature 'cat_4' has no table; declare one, or take it out of the dataset's feature spec",
        ),
        (f"{HERE}:NoColumns", "table 'cat_0' has 0 columns; give it at least 1"),
        (f"{HERE}:Buffered", "has a persistent buffer norm.num_batches_tracked, and only"),
        (
            f"{HERE}:OtherConstructor",
            "cannot be built from its options and the features (TypeError",
        ),
        (f"{HERE}:", "the models are dlrm, dcnv2, wide_deep, "),
        ("dcn", "there is no model.name=dcn; did you mean dcnv2?"),
    ],
)
def test_an_invalid_model_ends_the_command_with_one_line(name, message, tmp_path, monkeypatch):
    def refused(*_, **__) -> None:
        raise AssertionError("a process group was opened")

    monkeypatch.setattr(torch.distributed, "init_process_group", refused)
    (tmp_path / "ending_script.py").write_text("import sys\nsys.exit('usage: x')\n")
    monkeypatch.syspath_prepend(tmp_path)
    ended = run_command(f"model.name={name}", *CASE[1:], f"run_dir={tmp_path}/run")
    assert (ended.exit_code, ended.out) == (2, "")
    assert message in ended.err
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "run").exists(), "refused before anything is written"


def changed(**changes):
    """Return a function that changes the first table."""
    return lambda tables: [replace(tables[0], **changes), *tables[1:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tables: tables[1:], "feature 'cat_4' has no table"),
        (changed(name="factors_cat_1"), "have one name, 'factors_cat_1'"),
        (lambda tables: [tables[0], *tables], "features 'cat_4' and 'cat_4' have one name"),
        (
            lambda tables: [*tables, replace(tables[0], feature_names=[])],
            "has no feature; name the features that look it up",
        ),
        (changed(name="type"), "no module can have the table name 'type'; use 'type_'"),
        (changed(feature_names=["cat_9"]), "is of feature 'cat_9', which the dataset lacks"),
        (changed(num_embeddings=999), "has 999 rows, and ids of feature 'cat_4' need 1000"),
        (changed(embedding_dim=0), "has 0 columns; give it at least 1"),
        (changed(feature_names=[]), "has no feature; name the features that look it up"),
        (changed(feature_names=["cat_4", "cat_4"]), "names a feature twice"),
        (
            changed(data_type=DataType.BF16),
            "is bf16; a dtype other than model.embedding_dtype=fp32",
        ),
        (changed(weight_init_min=0.5), "initial weights that are not symmetric"),
    ],
)
def test_invalid_tables_are_refused(change, message):
    config = compose_config(*CASE)
    spec = open_source(config).spec
    tables = declared_tables(config.model, spec)
    check_tables(tables, config.model, spec)
    with pytest.raises(ValueError, match=r"^model\.name=\S+DeepFM: ") as error:
        check_tables(change(tables), config.model, spec)
    assert message in str(error.value)


def test_initial_weights_depend_on_the_seed_alone():
    config = compose_config(*CASE)
    spec = open_source(config).spec
    state = torch.random.get_rng_state()
    first = build_dense(config.model, spec, seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(1)
    second, third = (build_dense(config.model, spec, seed=seed) for seed in (1, 2))
    assert torch.equal(first.linear.weight, second.linear.weight)
    assert not torch.equal(first.linear.weight, third.linear.weight)
