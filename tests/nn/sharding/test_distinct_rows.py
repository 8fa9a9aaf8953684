"""The distinct rows of a batch: pooled on the rank of the samples, or taken by the dense component, against plain PyTorch.

Tables are whole, shared by rows, and replicated; features are ragged and of fixed hotness.
"""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import embedding
from torchrec.modules.embedding_configs import PoolingType

from configs.schema import ModelConfig
from nn.build import open_source
from nn.checkpoint.directory import read_facts
from nn.embedding.declared_tables import embedding_columns, one_table_per_feature
from nn.embedding.embedding_bags import LocalEmbeddingBags
from nn.models.description import describe_model
from nn.models.model import Model
from nn.sharding import request_capacity
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config, losses_of_cases, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, needs_no_gpu, worlds
from tests.nn.models.test_kinds_of_tables import case as kinds
from tests.nn.models.test_kinds_of_tables import plain_losses, sharded
from tests.nn.training.plain_training import resumes_bit_by_bit
from tests.nn.training.test_ragged import RaggedModel, dataset, sharded_with  # noqa: F401

HERE = "tests.nn.sharding.test_distinct_rows"
LAYOUTS = ["table_wise", "row_wise", "data_parallel"]
RULES = {"sgd": 0.3, "adagrad": 0.05, "adam": 0.01}
LONGEST = 12


@dataclass(kw_only=True, slots=True)
class TakerOptions(ModelConfig):
    """Options of the model."""


class Taker(Model):
    """Takes the rows of two tables itself, a ragged and a fixed feature of one of them, and pools the others.

    An id is weighted by its place in the sample, so that its rows cannot be pooled before.
    """

    Options = TakerOptions

    def __init__(self, num_columns: int, columns: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.linspace(1, 0.1, LONGEST))
        self.last = nn.Linear(num_columns + 3 * columns, 1)

    @classmethod
    def tables(cls, options, spec):
        genres, item, _, pair = one_table_per_feature(options, spec)
        return [
            replace(item, feature_names=["item", "tags"], pooling=PoolingType.NONE),
            replace(genres, pooling=PoolingType.NONE),
            pair,
        ]

    @classmethod
    def build(cls, options, spec):
        columns = embedding_columns(cls.tables(options, spec), spec)
        return cls(len(spec.numerical) + columns, options.embedding_dim)

    def forward(self, numerical, embeddings):
        taken = []
        for table, feature in (("item", "tags"), ("item", "item"), ("genres", "genres")):
            found = embeddings.distinct_rows(table, feature)
            place = torch.arange(LONGEST, device=numerical.device)
            at = found.starts.long()[:, None] + place
            is_id = place < found.lengths[:, None]
            positions = found.positions.long()[at.clamp(max=len(found.positions) - 1)]
            rows = embedding(torch.where(is_id, positions, len(found.rows) - 1), found.rows)
            taken.append((rows.tanh() * self.places[:, None]).sum(1))
        return self.last(torch.cat([numerical, embeddings.matrix(), *taken], 1)).squeeze(1).float()


def model(name: str, data: Path | None, rule: str, *overrides: str) -> list[str]:
    """Return the overrides of a model: `kinds` on synthetic clicks, the others on ragged features."""
    if name == "kinds":
        return kinds(rule, RULES[rule], *overrides)
    chosen = {"ragged": f"{RaggedModel.__module__}:RaggedModel", "taker": f"{HERE}:Taker"}
    return [
        *TINY,
        f"model.name={chosen[name]}",
        f"data.path={data}",
        f"optimizer.name={rule}",
        f"optimizer.lr={RULES[rule]}",
        "optimizer.eps=0.01",
        *overrides,
    ]


# Every layout with every optimizer, every model with every layout.
CASES = [
    (name, list(RULES)[(at + number) % 3], layout)
    for (number, name), (at, layout) in product(
        enumerate(["kinds", "ragged", "taker"]), enumerate(LAYOUTS)
    )
]


@pytest.fixture(scope="module")
def wanted(dataset):  # noqa: F811
    """Model and optimizer -> losses of plain PyTorch, and its tables after them."""
    both = dict.fromkeys((name, rule) for name, rule, _ in CASES)
    return {(name, rule): plain_losses(model(name, dataset, rule)) for name, rule in both}


def of_cases(data: Path, *overrides: str) -> list[list[str]]:
    return [
        model(name, data, rule, f"sharding.types=[{layout}]", *overrides)
        for name, rule, layout in CASES
    ]


@pytest.mark.parametrize(("world_size", "reserve"), [(1, 1.125), (2, 1.125), (2, 0.3)])
def test_it_trains_as_plain_pytorch(dataset, wanted, world_size, reserve):  # noqa: F811
    """With a capacity for 0.3 of the rows of the first batch, every batch asks for more."""
    cases = of_cases(dataset, "sharding.exchange=rows")
    spread = 6.0 if reserve > 1 else 0.0
    for of_rank in run_distributed(sharded_with, world_size, reserve, spread, cases):
        for case, (losses, shards) in zip(CASES, of_rank, strict=True):
            expected, tables = wanted[case[:2]]
            assert losses == pytest.approx(expected, rel=1e-6), case
            assert losses[-1] != losses[0]
            for table, row, column, weight in shards:
                rows, columns = weight.shape
                whole = tables[table][row : row + rows, column : column + columns]
                torch.testing.assert_close(weight, whole, rtol=2e-5, atol=2e-5, msg=str(case))


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_and_vectors_have_the_same_bits_where_sums_have_one_order(dataset, world_size):  # noqa: F811
    """Between ranks, sharded tables add up sums of each rank: only what is looked up first is the same."""
    cases = [case for case in zip(CASES, of_cases(dataset), strict=True) if case[0][0] != "taker"]
    overrides = [
        [*case, f"sharding.exchange={exchange}"]
        for exchange in ("rows", "vectors")
        for _, case in cases
    ]
    found = run_distributed(sharded, world_size, overrides)[0]
    for ((_, _, layout), _), rows, vectors in zip(
        [each for each in cases], found[: len(cases)], found[len(cases) :], strict=True
    ):
        if world_size == 1 or layout == "data_parallel":
            assert rows[0] == vectors[0], layout
            for one, other in zip(rows[1], vectors[1], strict=True):
                assert torch.equal(one[3], other[3]), layout
        else:
            assert rows[0][0] == vectors[0][0], layout
            assert rows[0] == pytest.approx(vectors[0], rel=1e-6)


MIXED = "sharding.tables={item: row_wise, genres: data_parallel, pair: {type: table_wise, exchange: rows}}"


def taker(data: Path, *overrides: str) -> list[str]:
    """Return a model that takes rows of a row-wise and of a replicated table, and pools those of a whole one."""
    return model("taker", data, "adagrad", MIXED, *overrides)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_chunks_of_a_batch_add_their_gradients_of_a_row_up(dataset, num_ranks):  # noqa: F811
    cases = [taker(dataset, f"train.accumulate={chunks}") for chunks in (1, 3)]
    for whole, chunked in run_distributed(sharded, num_ranks, cases):
        assert chunked[0] == pytest.approx(whole[0], rel=1e-6)
        for one, other in zip(chunked[1], whole[1], strict=True):
            torch.testing.assert_close(one[3], other[3], rtol=1e-5, atol=2e-6, msg=one[0])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restored_run_resumes_bit_by_bit(dataset, num_ranks, tmp_path):  # noqa: F811
    """The capacity for rows is measured again, at another batch."""
    assert resumes_bit_by_bit(tmp_path, taker(dataset), num_ranks)


def test_a_resumed_run_has_the_capacity_of_the_run(dataset, tmp_path, monkeypatch):  # noqa: F811
    of_run = []
    options = [option for option in taker(dataset) if "_mlp=" not in option]
    for steps in (4, 8):
        ended = run_command(
            *options,
            f"run_dir={tmp_path}",
            f"train.max_steps={steps}",
            "train.epochs=9",
            "checkpoint.save_every=4",
        )
        assert ended.exit_code == 0, ended.err
        facts = read_facts(tmp_path / f"checkpoints/step_{steps}")
        of_run.append(facts["trainer"]["row_capacity"])
        monkeypatch.setattr(request_capacity, "RESERVE", 9.0)
    assert "64" in of_run[0]["rows"]
    assert of_run[0] == of_run[1]


def test_the_loss_scale_is_divided_out_once(dataset, monkeypatch):  # noqa: F811
    """A power of two changes no bit; on a CPU only a test can set one."""
    found = []
    for scale in (1.0, 1024.0):
        for module in ("nn.training.train_step", "nn.build"):
            monkeypatch.setattr(f"{module}.loss_scale", lambda config, scale=scale: scale)
        found += sharded([taker(dataset)])
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one[3], other[3])


def test_a_batch_beyond_the_capacity_is_reported(dataset, monkeypatch):  # noqa: F811
    monkeypatch.setattr(request_capacity, "capacity_for", lambda rows: 1)
    reasons: list[str] = []
    monkeypatch.setattr("nn.training.step_runner.SlowBatchWarning", lambda ranks: reasons.append)
    sharded([taker(dataset)])
    (reason,) = set(reasons)
    assert reason.startswith("a batch asks for more distinct rows of tables, or ")


def test_the_model_is_described_and_built_again_with_its_rows(dataset):  # noqa: F811
    config = compose_config(*taker(dataset))
    spec = open_source(config).spec
    described = describe_model(config.model, spec, spec)
    assert {layer["name"] for layer in described["layers"]} == {"last"}


def test_rows_that_nobody_takes_are_refused(dataset, monkeypatch):  # noqa: F811
    def forward(self, numerical, embeddings):
        embeddings.distinct_rows("item", "tags")
        return self.last(nn.functional.pad(embeddings.matrix(), (0, 26))).squeeze(1)

    monkeypatch.setattr(Taker, "forward", forward)
    with pytest.raises(
        ValueError, match="table 'genres' without pooling has a ragged feature, and"
    ):
        sharded([taker(dataset)])


@needs_no_gpu
def test_kernels_train_rows_as_torch_does(dataset):  # noqa: F811
    pytest.importorskip("triton")
    small = taker(dataset, "train.batch_size=4")
    losses, kernels = run_distributed(with_kernels, 1, small)[0]
    wanted, torch_ = sharded_for(small, 2)
    assert losses == pytest.approx(wanted, rel=1e-6)
    for one, other in zip(kernels, torch_, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def sharded_for(case: list[str], num_steps: int) -> tuple[list[float], list[torch.Tensor]]:
    with ranks_of_cpu():
        built = build(compose_config(*case))
        losses = built.train(0, num_steps)
        return losses, [shard.weight.clone() for shard in built.step.tables.shards()]


def with_kernels(case: list[str]) -> tuple[list[float], list[torch.Tensor]]:
    """Train two steps with the kernels of a GPU, interpreted."""
    from nn.embedding.triton_launcher import TritonLauncher

    make = LocalEmbeddingBags.__init__

    def make_with_kernels(self, tables, blocks, num_samples, config, *rest):
        make(self, tables, blocks, num_samples, config, *rest)
        if self.tables:
            self._kernels = TritonLauncher(
                self.tables, self._lookups, self._key_bases, self._sources, num_samples, config
            )

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalEmbeddingBags, "__init__", make_with_kernels)
        return sharded_for(case, 2)


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_the_captured_step_trains_as_the_launched_one_and_as_cpus(dataset, world_size):  # noqa: F811
    """With a capacity for every batch, and for none."""
    both = [taker(dataset), kinds("adam", RULES["adam"], "sharding.exchange=rows")]
    cases = [
        [*case, *ON_GPU, f"train.capture={captured}"]
        for case in both
        for captured in ("true", "false")
    ]
    for reserve in (1.125, 0.3):
        found = run_distributed(on_gpus, world_size, cases, reserve)[0]
        wanted = run_distributed(sharded, world_size, both)[0]
        for captured, launched, cpu in zip(found[::2], found[1::2], wanted, strict=True):
            assert captured == launched
            assert captured == pytest.approx(cpu[0], rel=1e-4)


def on_gpus(cases: list[list[str]], reserve: float) -> list[list[float]]:
    request_capacity.RESERVE = reserve
    return losses_of_cases(cases, 6)
