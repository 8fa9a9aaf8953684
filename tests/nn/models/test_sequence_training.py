"""Models of a sequence group, trained: one rank against plain PyTorch, two ranks, parts of a batch, and a captured step."""

import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._python_dispatch import TorchDispatchMode

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.sequences import EventColumn, SequenceGroup
from nn.embedding.declared_tables import hands_out_rows, table_name
from nn.layers.pass_state import PassState, attach
from nn.models.ranking_model import RankingModel
from nn.models.registry import declared_tables
from nn.sharding import request_capacity
from nn.sharding.sharded_lookup import ShardedLookup
from tests.helpers.composed import Built, build, compose_config, losses_of_cases, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.event_datasets import write_events
from tests.helpers.gpus import ON_GPU, needs_gpus, worlds
from tests.nn.models.test_family_options import OF_EVENTS

STEPS, LONGEST = 4, 9
SIZES = {"item": 300, "hist_item": 300, "hist_kind": 12, "cart_item": 300, "user": 50}
GROUPS = (
    SequenceGroup(
        "history",
        ("hist_item", "hist_kind"),
        LONGEST,
        (
            EventColumn("hist_time", np.dtype(np.int64)),
            EventColumn("hist_rating", np.dtype(np.float32)),
        ),
        "hist_time",
    ),
    SequenceGroup("cart", ("cart_item",), LONGEST),
)
OPTIONS = {
    "din": ["attention_hidden=[9]", "hidden=[8]"],
    **{name: ["hidden=[8]"] for name in OF_EVENTS},
}
# With dropout in training, which formulas of single samples cannot tell.
BLOCKS = ["relative_bias=true", "block_dropout=0.2", "dropout=0.1"]
OPTIONS |= {name: [*OPTIONS[name], *BLOCKS] for name in ("sasrec", "bst", "transact")}
OPTIONS["onetrans"] += ["token_dim=8", "tokens=3", "block_dropout=0.2"]
OPTIONS["sim"] += ["found=3", "recent=2", "search=hash"]
OPTIONS["transact"] += ["recent=4", "outputs=2"]
OPTIONS |= {
    "dcnv2": ["bottom_mlp=[8]", "top_mlp=[8,1]", "sequence_pooling=attention"],
    "deepfm": ["hidden=[8]", "sequence_pooling=last"],
    "wide_deep": ["hidden=[8]", "sequence_pooling=mean"],
    "masknet": ["blocks=[8]", "event_weights={history:hist_rating}"],
    "finalmlp": ["hidden_1=[8]", "hidden_2=[8]", "gate_hidden=[8]", "heads=2"],
}
OPTIONS["finalmlp"] += ["sequence_pooling=mean", "event_weights={history:hist_rating}"]
# The longest sample of a batch is another on two ranks, and in its parts.
OPTIONS["hstu"] = ["width=8", "input_hidden=4", "layers=2", "head_dim=4", "attention_norm=capacity"]
CHUNKS = "train.accumulate=3"
LAYOUTS = ["sharding.types=[row_wise]", "sharding.tables={hist_kind:data_parallel}", CHUNKS]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    """Labels that the last event decides; some rows have no events."""
    root = tmp_path_factory.mktemp("events") / "data"
    random = np.random.default_rng(1)
    tables = {"hist_item": "item", "cart_item": "item"}
    features = [
        CategoricalFeature.of(name, size, None if "_" in name else 1, tables.get(name))
        for name, size in SIZES.items()
    ]
    with write_dataset(
        root,
        categorical=features,
        numerical=("age",),
        numerical_dtype="float32",
        sequences=GROUPS,
    ) as directory:
        for split, rows in (("train", 229), ("test", 64)):
            lengths = {
                "history": np.minimum(random.geometric(0.25, rows) - 1, LONGEST),
                "cart": random.integers(0, 4, rows),
            }
            count = {name: lengths["history"].sum() for name in ("hist_item", "hist_kind")}
            count |= {"cart_item": lengths["cart"].sum(), "item": rows, "user": rows}
            ids = {name: random.integers(0, SIZES[name], number) for name, number in count.items()}
            ends = lengths["history"].cumsum()
            last = np.where(lengths["history"] > 0, ids["hist_kind"][ends - 1], 0)
            steps = random.integers(1, 10_000, count["hist_item"])
            directory[split].append(
                numerical=random.normal(size=(rows, 1)),
                labels=last % 2,
                ids=ids,
                lengths=lengths,
                events={
                    "hist_time": 10**9 + steps.cumsum(),
                    "hist_rating": random.random(count["hist_item"]),
                },
                moments={"history": 10**9 + steps.sum() + 1 + np.arange(rows)},
            )
    return root


def overrides(name: str, data: Path, *others: str) -> list[str]:
    candidate = ["item_features=[item]", "sequence=history"] if name in ("din", *OF_EVENTS) else []
    options = ["embedding_dim=8", *candidate, *OPTIONS[name]]
    return [
        f"model.name={name}",
        *(f"model.{option}" for option in options),
        f"data.path={data}",
        "train.batch_size=64",
        "eval.batch_size=64",
        "optimizer.name=sgd",
        "optimizer.lr=0.1",
        "device=cpu",
        "log.pictures=false",
        *others,
    ]


def plain_model(built: Built) -> RankingModel:
    """Return tables and dense component on one device."""
    config, spec = built.config, built.source.spec
    declared = declared_tables(config.model, spec)
    handed_out = [table.name for table in declared if hands_out_rows(table, spec)]
    return RankingModel(declared, built.step.dense, config.seed, handed_out, spec.sequences)


def plain_losses(name: str, data: Path, *others: str) -> list[float]:
    """Train the tables and the dense component on one device with torch's autograd."""
    built = build(compose_config(*overrides(name, data, *others)))
    model = plain_model(built)
    state = PassState(built.config.seed, torch.device("cpu"))
    attach(built.step.dense, state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, batch in enumerate(built.train_loader.batches(0, STEPS)):
        valid = slice(batch.num_valid)
        state.set(step, len(batch.labels), batch.num_valid, batch.num_valid)
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch)[valid], batch.labels[valid])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    built.step.close()
    return losses


@pytest.fixture(scope="module")
def wanted(dataset) -> dict[str, list[float]]:
    with ranks_of_cpu():
        return {name: plain_losses(name, dataset) for name in OPTIONS}


@pytest.mark.parametrize("world_size", [1, 2])
def test_it_trains_as_plain_pytorch(dataset, wanted, world_size):
    cases = [overrides(name, dataset, LAYOUTS[number % 3]) for number, name in enumerate(OPTIONS)]
    for found in run_distributed(losses_of_cases, world_size, cases, STEPS):
        for name, losses in zip(OPTIONS, found, strict=True):
            np.testing.assert_allclose(losses, wanted[name], rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_it_trains_as_plain_pytorch_on_gpus(dataset, wanted, world_size):
    cases = [overrides(name, dataset, *ON_GPU) for name in OPTIONS]
    for found in run_distributed(losses_of_cases, world_size, cases, STEPS):
        for name, losses in zip(OPTIONS, found, strict=True):
            np.testing.assert_allclose(losses, wanted[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=needs_gpus(1))])
def test_the_longest_sample_is_that_of_the_batch_in_all_of_its_parts(dataset, device):
    longest = "model.attention_norm=batch_max"
    on_device = ON_GPU if device == "gpu" else []
    with ranks_of_cpu():
        wanted = plain_losses("hstu", dataset, longest)
    cases = [overrides("hstu", dataset, longest, *on_device, *more) for more in ([], [CHUNKS])]
    for losses in run_distributed(losses_of_cases, 1, cases, STEPS)[0]:
        np.testing.assert_allclose(losses, wanted, rtol=1e-4, atol=1e-4 if on_device else 1e-6)


def test_hstu_looks_up_no_event_by_its_id(tmp_path, monkeypatch):
    """It reads distinct rows where they lie; a lookup by id is of all features of their table."""
    asked = []
    monkeypatch.setattr(ShardedLookup, "vectors", lambda *arguments: asked.append(arguments))
    with ranks_of_cpu():
        data = write_events(tmp_path / "data")
        built = build(compose_config(*overrides("hstu", data, "train.batch_size=16")))
        built.train(0, 1)
        built.step.close()
    assert asked == []


def test_features_of_one_table_share_a_copy_of_it(dataset):
    with ranks_of_cpu():
        built = build(compose_config(*overrides("sasrec", dataset)))
        (batch,) = built.train_loader.batches(0, 1)
        embeddings = plain_model(built).embeddings(batch)
        rows = embeddings.distinct_rows(table_name("item"), "item").rows
        assert embeddings.sequence("history").rows["hist_item"].rows is rows
        built.step.close()


class _Constants(TorchDispatchMode):
    """Notes what in the product makes tensors of Python's numbers: on a GPU each is a copy that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.made_by: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.lift_fresh.default:
            files = [Path(frame.filename) for frame in traceback.extract_stack()]
            own = [file.stem for file in files if not {"tests", "torch"} & {*file.parts}]
            self.made_by.append(own[-1])
        return func(*args, **(kwargs or {}))


def test_a_step_of_usual_capacity_makes_no_tensor_of_numbers(tmp_path, monkeypatch):
    """Beyond the capacity a step builds its lookup again, of many such tensors."""
    made = []
    with ranks_of_cpu():
        data = write_events(tmp_path / "data")
        config = compose_config(*overrides("hstu", data, "train.batch_size=16", CHUNKS))
        for _ in range(2):
            built = build(config)
            built.train(0, 2)
            with _Constants() as constants:
                built.train(2, 1)
            built.step.close()
            made.append(constants.made_by)
            monkeypatch.setattr(request_capacity, "capacity_for", lambda rows: 1)
    assert not made[0]
    assert {"row_requests", "request_keys", "embedding_bags"} < set(made[1])
