"""The models beside DLRM and DCNv2, trained: one and two ranks against plain PyTorch, plans, memory, resuming and export."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.built_in import MODELS
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.row_columns import RowColumn
from nn.build import open_source
from nn.export.tables import export_tables
from nn.models.registry import declared_tables, find_model, find_options
from tests.end_to_end.test_gpu_capture import losses_around_an_evaluation
from tests.helpers.command import run_command
from tests.helpers.composed import build, compose_config, losses_of_cases, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import NUM_STEPS, ON_GPU, worlds
from tests.helpers.runs import stored_bytes, summary
from tests.plain_models import LOSSES, PLAIN, bce, encoded, pooled

STEPS = 3
DATA = [
    "data.synthetic.train_rows=2048",
    "data.synthetic.test_rows=256",
    "data.synthetic.cardinalities=[50,40,40,30,100]",
    "data.synthetic.names=[user,item,items,kind,page]",
    "data.synthetic.num_numerical=3",
    "train.batch_size=64",
    "eval.batch_size=128",
    "optimizer.name=sgd",
    "optimizer.lr=0.1",
    "device=cpu",
    "log.pictures=false",
    "log.loggers=[]",
]
HOTNESS = "data.synthetic.hotness=[1,2,2,1,3]"
HISTORY = "data.synthetic.hotness=[1,1,6,1,3]"


@dataclass(frozen=True, slots=True)
class Case:
    """Options of a small model, and the arguments of its plain formula."""

    name: str
    options: list[str] = field(default_factory=list)
    plain: dict[str, Any] = field(default_factory=dict)
    hotness: str = HOTNESS
    layout: str = "sharding.tables={kind:data_parallel}"

    def overrides(self, two_labels: Path) -> list[str]:
        """Return the command; `two_labels` is a dataset for models of two tasks."""
        options = [f"model.{option}" for option in self.options]
        data = [f"data.path={two_labels}"] if self.plain.get("tasks") == 2 else [self.hotness]
        return [*DATA, *data, f"model.name={self.name}", *options]


EXPERTS = ["expert_hidden=[8,6]", "tower_hidden=[5]", "embedding_dim=4"]
MIXER = ["tokens=4", "token_dim=8", "expansion=2", "tower_hidden=[5]", "embedding_dim=4"]
TWO = "deep", "shallow"
ORDER = [6, 1, 0, 2, 3, 4, 5, 7]  # of three numerical features, and five others
CASES = {
    "wide_deep": Case(
        "wide_deep",
        ["embedding_dim=6", "hidden=[8,6]", "dropout=0", "wide_features=[kind,user]"],
        {"num_wide": 2},
    ),
    "wide_deep of all": Case(
        "wide_deep",
        ["embedding_dim=4", "hidden=[8]", "dropout=0", "wide_numerical=true"],
        {"num_wide": 5},
    ),
    "deepfm": Case("deepfm", ["embedding_dim=10", "hidden=[8,6]", "dropout=0"]),
    "embedding_mlp": Case(
        "embedding_mlp",
        ["embedding_dim=8", "hidden=[8,6]"],
        layout="sharding.tables={user:column_wise,item:row_wise}",
    ),
    "embedding_mlp of means": Case(
        "embedding_mlp",
        ["embedding_dim=4", "hidden=[8]", "pooling=mean", "embedding_dims={kind:1,page:7}"],
    ),
    "embedding_mlp of positions": Case(
        "embedding_mlp",
        ["embedding_dim=8", "hidden=[8]", "pooling=none"],
        layout="sharding.tables={user:column_wise,page:column_wise}",
    ),
    "finalmlp": Case(
        "finalmlp",
        [
            "embedding_dim=4",
            "hidden_1=[8,6]",
            "hidden_2=[6]",
            "gate_hidden=[5]",
            "heads=2",
            "gate_features_1=[item,num_1]",
        ],
        {"gates": [[4, 1], []]},
    ),
    "serial masknet": Case("masknet", ["embedding_dim=4", "blocks=[8,6]"], {"serial": True}),
    "parallel masknet": Case(
        "masknet",
        ["embedding_dim=4", "blocks=[8,6]", "hidden=[7]", "structure=parallel"],
        {"serial": False},
    ),
    "wukong": Case(
        "wukong",
        [
            "embedding_dim=4",
            "fm_vectors=2",
            "linear_vectors=3",
            "compression=3",
            "fm_hidden=[7]",
            "numerical_hidden=[5]",
            "hidden=[9]",
        ],
    ),
    "din": Case(
        "din",
        [
            "embedding_dim=4",
            "item_features=[item]",
            "history_features=[items]",
            "history_length=num_1",
            "attention_hidden=[6]",
            "hidden=[8]",
        ],
        {"pairs": 1, "length": 1},
        HISTORY,
    ),
    "din with dice": Case(
        "din",
        [
            "embedding_dim=4",
            "item_features=[item]",
            "history_features=[items]",
            "history_length=null",
            "attention_hidden=[6]",
            "hidden=[8,6]",
            "activation=dice",
        ],
        {"pairs": 1, "length": None},
        HISTORY,
    ),
    "shared_bottom": Case(
        "shared_bottom", ["hidden=[8,6]", "tower_hidden=[5]", "embedding_dim=4"], {"tasks": 1}
    ),
    "shared_bottom of two tasks": Case(
        "shared_bottom", ["hidden=[8,6]", "tower_hidden=[5]", "embedding_dim=4"], {"tasks": 2}
    ),
    "mmoe": Case("mmoe", [*EXPERTS, "experts=3"], {"tasks": 1}),
    "mmoe of two tasks": Case("mmoe", [*EXPERTS, "experts=3"], {"tasks": 2}),
    "ple": Case("ple", [*EXPERTS, "task_experts=2", "shared_experts=3"], {"tasks": 1}),
    "ple of two tasks": Case("ple", [*EXPERTS, "task_experts=2", "shared_experts=3"], {"tasks": 2}),
    "rankmixer": Case("rankmixer", [*MIXER, "feature_order=[kind,num_1]"], {"order": ORDER}),
    "fcn": Case(
        "fcn",
        ["embedding_dim=4", *(f"{x}_layers=2" for x in TWO), *(f"{x}_dropout=0" for x in TWO)],
    ),
    "autoint": Case(
        "autoint",
        ["embedding_dim=4", "layers=2", "head_dim=4", "hidden=[6]"],
        {"heads": 2},
    ),
    "xdeepfm": Case("xdeepfm", ["embedding_dim=4", "cross_layers=[5,3]", "hidden=[6]"]),
    "esmm": Case("esmm", ["embedding_dim=4", "tower_hidden=[6]"], {"tasks": 2}),
    "pepnet": Case(
        "pepnet",
        [
            "embedding_dim=4",
            "tower_hidden=[6,5]",
            "domain_features=[kind]",
            "prior_features=[user,item]",
        ],
        {"tasks": 1, "domain": [3], "prior": [0, 1]},
    ),
    "pepnet of two tasks": Case(
        "pepnet",
        [
            "embedding_dim=4",
            "tower_hidden=[6,5]",
            "domain_features=[kind]",
            "prior_features=[user,item]",
        ],
        {"tasks": 2, "domain": [3], "prior": [0, 1]},
    ),
    "deepfm of widths": Case(
        "deepfm",
        ["embedding_dim=8", "hidden=[8]", "dropout=0", "embedding_dims={kind:3,page:16}"],
        layout="sharding.tables={kind:row_wise,page:column_wise}",
    ),
    "shared_bottom of periodic numbers": Case(
        "shared_bottom",
        [
            "hidden=[8,6]",
            "tower_hidden=[5]",
            "embedding_dim=4",
            "numerical_encoding=periodic",
            "numerical_size=3",
        ],
        {"tasks": 2},
    ),
    "wide_deep of buckets": Case(
        "wide_deep",
        [
            "embedding_dim=4",
            "hidden=[8]",
            "dropout=0",
            "numerical_encoding=buckets",
            "numerical_size=3",
        ],
        {"num_wide": 5},
    ),
    "autoint of buckets": Case(
        "autoint",
        [
            "embedding_dim=4",
            "layers=2",
            "head_dim=4",
            "hidden=[6]",
            "numerical_encoding=buckets",
            "numerical_size=3",
        ],
        {"heads": 2},
    ),
    "din of widths": Case(
        "din",
        [
            "embedding_dim=4",
            "item_features=[item]",
            "history_features=[items]",
            "history_length=null",
            "attention_hidden=[6]",
            "hidden=[8]",
            "embedding_dims={item:6}",
        ],
        {"pairs": 1, "length": None},
        HISTORY,
    ),
    "star of two tasks": Case(
        "star",
        [
            "embedding_dim=4",
            "hidden=[6,5]",
            "auxiliary_hidden=[5]",
            "domain=num_2",
            "domains=3",
        ],
        {"tasks": 2, "domain": 2},
    ),
    "rankmixer of experts": Case("rankmixer", [*MIXER, "experts=3"], {"experts": 3, "tasks": 2}),
}
NORMALISED = [
    *("din", "din with dice", "fcn", "parallel masknet", "wukong", "pepnet of two tasks"),
    "star of two tasks",
]
"""Models whose own layers take batch normalization, beside those of `MLP` alone."""
CASES |= {
    f"normalised {name}": replace(CASES[name], options=[*CASES[name].options, "batch_norm=true"])
    for name in NORMALISED
}


@dataclass(frozen=True, slots=True)
class Trained:
    """Losses and final weights of a run and of its plain formula."""

    losses: list[float]
    weights: dict[str, Tensor]
    plain_losses: list[float]
    plain_weights: dict[str, Tensor]


@pytest.fixture(scope="module")
def two_labels(tmp_path_factory) -> Path:
    return write_two_labels(tmp_path_factory.mktemp("labels") / "data")


def write_two_labels(root: Path) -> Path:
    """Write a dataset of two binary labels with the features of the synthetic clicks; return `root`."""
    sizes = {"user": (50, 1), "item": (40, 2), "items": (40, 2), "kind": (30, 1), "page": (100, 3)}
    generator = np.random.default_rng(3)
    with write_dataset(
        root,
        categorical=[CategoricalFeature.of(name, *size) for name, size in sizes.items()],
        numerical=("num_0", "num_1", "num_2"),
        numerical_dtype="float32",
        label=(RowColumn("click"), RowColumn("buy")),
    ) as dataset:
        for split, rows in (("train", 2048), ("test", 256)):
            ids = {
                name: generator.integers(0, size, (rows, hotness)).squeeze()
                for name, (size, hotness) in sizes.items()
            }
            labels = np.stack([ids["user"] % 2, ids["kind"] % 3 == 0], axis=1)
            numerical = generator.normal(size=(rows, 3))
            numerical[:, 2] = ids["item"][:, 0] % 3  # the number of a domain
            dataset[split].append(numerical=numerical, labels=labels, ids=ids)
    return root


def train_both(case: Case, two_labels: Path, num_steps: int = STEPS) -> Trained:
    """Train a model on one rank and its plain formula on the same batches, from the same weights."""
    built = build(compose_config(*case.overrides(two_labels)))
    weights = {shard.table: shard.weight for shard in built.step.tables.shards()}
    parameters = dict(built.step.dense.named_parameters())
    copies = {
        name: value.detach().clone().requires_grad_()
        for name, value in {**weights, **parameters}.items()
    }
    batches = [
        (batch.numerical.clone(), batch.labels.clone(), ids_of(batch))
        for batch in built.train_loader.batches(0, num_steps)
    ]
    losses = built.train(0, num_steps)
    tables = declared_tables(built.config.model, built.source.spec)
    plain_losses = []
    for numerical, labels, ids in batches:
        lookups = [
            pooled(projected(table.name, ids[feature], copies), table.pooling.name.lower())
            for table in tables
            for feature in table.feature_names
        ]
        dense = {name.removeprefix("model."): copies[name] for name in parameters}
        if "numbers.first" in dense:
            numerical = torch.cat(encoded(dense, "numbers", numerical), 1)
        if case.name in LOSSES:
            loss = LOSSES[case.name](dense, numerical, lookups, labels, **case.plain)
        else:
            loss = bce(PLAIN[case.name](dense, numerical, lookups, **case.plain), labels)
        gradients = torch.autograd.grad(loss, list(copies.values()), allow_unused=True)
        with torch.no_grad():
            for value, gradient in zip(copies.values(), gradients, strict=True):
                if gradient is not None:
                    value -= 0.1 * gradient
        plain_losses.append(loss.item())
    after = {shard.table: shard.weight for shard in built.step.tables.shards()} | parameters
    built.step.close()
    return Trained(losses, after, plain_losses, copies)


def projected(table: str, ids: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Return rows of a table [B, L, D], projected if the model has a projection of it."""
    rows, key = weights[table][ids], f"projections.{table}.weight"
    return rows @ weights[key].T if key in weights else rows


def ids_of(batch) -> dict[str, Tensor]:
    """Return the ids [B, hotness] of every feature of a complete batch."""
    size = len(batch.numerical)
    return {
        name: feature.values().clone().view(size, -1).long()
        for name, feature in batch.ids.to_dict().items()
    }


@pytest.fixture(scope="module")
def trained(two_labels) -> dict[str, Trained]:
    with ranks_of_cpu():
        return {name: train_both(case, two_labels) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_one_rank_trains_as_plain_pytorch(trained, name):
    run = trained[name]
    np.testing.assert_allclose(run.losses, run.plain_losses, rtol=1e-6, atol=1e-6)
    for key, value in run.weights.items():
        torch.testing.assert_close(
            value,
            run.plain_weights[key],
            rtol=1e-6,
            # float32's moments of 64 rows divide by small deviations.
            atol=5e-6 if name.startswith("normalised") else 1e-6,
            msg=lambda text, key=key: f"{key}: {text}",
        )
    assert run.losses[0] != run.losses[-1]


@pytest.fixture(scope="module")
def two_ranks(two_labels) -> dict[str, list[float]]:
    """Return the losses of every model on two ranks."""
    cases = [[*case.overrides(two_labels), case.layout] for case in CASES.values()]
    both = run_distributed(losses_of_cases, 2, cases, STEPS)
    assert both[0] == both[1]
    return dict(zip(CASES, both[0], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_plain_pytorch(trained, two_ranks, name):
    np.testing.assert_allclose(two_ranks[name], trained[name].plain_losses, rtol=1e-6, atol=1e-6)


def test_towers_drop_the_same_elements_on_one_rank_and_on_two(two_labels, trained):
    names = ["pepnet of two tasks", "star of two tasks"]
    both = [[*CASES[x].overrides(two_labels), "model.batch_norm=true"] for x in names]
    cases = [[*case, "model.dropout=0.5", CASES[names[0]].layout] for case in both]
    one = losses_of_cases(cases, STEPS)
    two = run_distributed(losses_of_cases, 2, cases, STEPS)
    np.testing.assert_allclose(two, [one, one], rtol=1e-5)
    for name, losses in zip(names, one, strict=True):
        assert losses[0] != pytest.approx(trained[f"normalised {name}"].losses[0], rel=1e-3)


def extra_losses_of(overrides: list[str]) -> tuple[float, dict[str, float], float]:
    """Return the loss of one step, the further losses that its record has, and the penalties of this rank's routers."""
    with ranks_of_cpu():
        built = build(compose_config(*overrides))
        (loss,) = built.train(0, 1)
        logged = built.step.extra_losses()
        routers = [block.router for block in built.step.dense.blocks]
        share = sum(router.penalty().item() for router in routers)
        built.step.close()
    return loss, logged, share


def test_further_losses_are_logged_as_sums_over_ranks(two_labels, tmp_path):
    case = CASES["rankmixer of experts"].overrides(two_labels)
    loss, logged, share = extra_losses_of(case)
    assert logged == {"extra_loss.router": pytest.approx(share, rel=1e-6)}
    both = run_distributed(extra_losses_of, 2, case)
    assert share == pytest.approx(sum(own for *_, own in both), rel=1e-5)
    for loss_there, logged_there, _ in both:
        assert loss_there == pytest.approx(loss, rel=1e-6)
        assert logged_there == {"extra_loss.router": pytest.approx(share, rel=1e-5)}
    command = [*case, f"run_dir={tmp_path / 'run'}", "train.max_steps=2", "log.every=1"]
    assert run_command(*command).exit_code == 0
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    found = [record["extra_loss.router"] for record in map(json.loads, lines) if "loss" in record]
    assert len(found) == 2
    assert found[0] == pytest.approx(share, rel=1e-6)


@pytest.fixture(scope="module")
def trained_longer(two_labels) -> dict[str, Trained]:
    with ranks_of_cpu():
        return {name: train_both(case, two_labels, NUM_STEPS) for name, case in CASES.items()}


@pytest.mark.parametrize("world_size", worlds(1, 2))
@pytest.mark.parametrize("amp", ["off", "bf16"])
def test_captured_steps_equal_launched_ones_and_plain_pytorch(
    trained_longer, two_labels, amp, world_size
):
    cases = [
        [*case.overrides(two_labels), *ON_GPU, f"train.amp={amp}", f"train.capture={capture}"]
        for case in CASES.values()
        for capture in ("true", "false")
    ]
    results = run_distributed(losses_around_an_evaluation, world_size, cases)[0]
    for name, captured, launched in zip(CASES, results[::2], results[1::2], strict=True):
        assert (captured[0], launched[0]) == (True, False), name
        assert captured[1] == pytest.approx(launched[1], rel=2e-5), name
        rel = {"off": 2e-5, "bf16": 0.05}[amp]
        if name == "normalised wukong":
            # It multiplies roundings: after 12 steps plain float32 and float64 differ by 1.5e-5 of the
            # loss, those of the other cases by 2e-7; plain bf16 and float32 by .06, the others by .03.
            rel *= {"off": 10, "bf16": 3}[amp]
        smallest = {"off": 0, "bf16": 0.02}[amp]
        assert captured[1] == pytest.approx(trained_longer[name].plain_losses, rel, smallest), name


# Each model, tables of all widths, without pooling, and of two tasks.
@pytest.mark.parametrize(
    "name",
    [
        "wide_deep",
        "deepfm",
        "embedding_mlp of means",
        "embedding_mlp of positions",
        "finalmlp",
        "parallel masknet",
        "wukong",
        "din",
        "shared_bottom",
        "mmoe",
        "ple of two tasks",
        "rankmixer of experts",
        "fcn",
        "autoint",
        "xdeepfm",
        "esmm",
        "pepnet of two tasks",
        "deepfm of widths",
        "star of two tasks",
        "shared_bottom of periodic numbers",
        "autoint of buckets",
    ],
)
def test_the_model_is_planned_with_its_memory(name, two_labels):
    case = CASES[name]
    ended = run_command(
        *case.overrides(two_labels),
        "device=cuda",
        "mode=plan",
        "sharding.hbm_gib=1",
        "sharding.world_size=2",
    )
    assert (ended.exit_code, ended.err) == (0, "")
    assert "GiB" in ended.out


# Tables of two widths, without pooling, of two tasks, and with a layer's own state.
@pytest.mark.parametrize(
    "name",
    [
        "wide_deep",
        "din",
        "rankmixer of experts",
        "star of two tasks",
        "deepfm of widths",
        "autoint of buckets",
        *(f"normalised {name}" for name in NORMALISED),
    ],
)
def test_a_run_resumes_bit_by_bit_and_exports_its_tables(name, two_labels, tmp_path):
    case = CASES[name]
    for run, steps in (("complete", [4]), ("resumed", [2, 4])):
        for count in steps:
            ended = run_command(
                *case.overrides(two_labels), f"run_dir={tmp_path / run}", f"train.max_steps={count}"
            )
            assert (ended.exit_code, ended.err) == (0, "")
    assert summary(tmp_path / "complete")["steps"] == 4
    assert stored_bytes(tmp_path / "resumed") == stored_bytes(tmp_path / "complete")
    written = export_tables(tmp_path / "complete" / "checkpoints" / "step_4", tmp_path / "out")[
        "tables"
    ]
    config = compose_config(*case.overrides(two_labels))
    spec = open_source(config).spec
    for table in declared_tables(config.model, spec):
        assert table.name in written
        weight = np.load(tmp_path / "out" / f"{table.name}.weight.npy")
        assert weight.shape == (table.num_embeddings, table.embedding_dim)


@pytest.mark.parametrize("name", MODELS)
def test_help_lists_the_options_of_every_model(name):
    ended = run_command(f"model.name={name}", "--help")
    assert (ended.exit_code, ended.err) == (0, "")
    assert find_options(name) is find_model(name).Options
    for option in find_options(name).__dataclass_fields__:
        assert f"model.{option}" in ended.out
