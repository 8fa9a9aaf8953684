"""Events of sequence groups in the step, against plain PyTorch: at any fill of their capacity, and beyond it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding
from torchrec.modules.embedding_configs import PoolingType

from configs.schema import ModelConfig
from dataloading.batch import Batch
from dataloading.dataset import batch_layout
from dataloading.dataset.batch_layout import id_counts
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.sequences import EventColumn, SequenceGroup
from nn.build import build_plan, checked_plan, open_source, planned_hardware
from nn.checkpoint import state as checkpoint
from nn.distributed.process_group import process_group, ranks_from_environment
from nn.embedding.declared_tables import embedding_columns, one_table_per_feature
from nn.embedding.torch_optimizer import TableOptimizer
from nn.models.description import _parsed, describe_model
from nn.models.model import Activations, Model
from nn.planning.memory_estimate import RankMemory, plan_memory
from nn.planning.row_requests import requests_of
from nn.sharding import request_capacity
from nn.sharding.request_capacity import capacity_for, most_expected
from nn.step_floor import floor_of, power_law_shares, unique_rows
from nn.tiers.traffic import power_law_share
from nn.training.evaluator import predictions
from tests.helpers.composed import TINY, Built, build, compose_config
from tests.helpers.datasets import make_loader
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, worlds
from tests.nn.checkpoint.test_state import save
from tests.nn.training.plain_training import local_state

HERE = "tests.nn.training.test_sequences"
NUM_STEPS = 6
LONGEST = 9
ITEMS = 8000
FLOAT = np.dtype(np.float32)
GROUPS = (
    SequenceGroup(
        "history",
        ("hist_item", "hist_genre"),
        LONGEST,
        (EventColumn("hist_time", np.dtype(np.int64)), EventColumn("hist_rating", FLOAT)),
        "hist_time",
    ),
    SequenceGroup("cart", ("cart_item",), LONGEST, (EventColumn("cart_price", FLOAT),)),
)


@dataclass(kw_only=True, slots=True)
class EventOptions(ModelConfig):
    """Options of the model."""


class Events(Model):
    """A candidate, and events weighted by their numbers, their places and their likeness to it."""

    Options = EventOptions

    def __init__(self, num_columns: int, columns: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.linspace(1, 0.1, LONGEST))
        self.by_number = nn.Parameter(torch.tensor([0.03, -0.2, 0.1]))
        self.mix = nn.Linear(columns, columns)
        self.last = nn.Linear(num_columns + 3 * columns, 1)

    @classmethod
    def tables(cls, options, spec):
        item, genre, pair = one_table_per_feature(options, spec)
        return [
            pair,
            *(replace(table, pooling=PoolingType.NONE) for table in (item, genre)),
        ]

    @classmethod
    def build(cls, options, spec):
        columns = embedding_columns(cls.tables(options, spec), spec)
        return cls(len(spec.numerical) + columns, options.embedding_dim)

    def likes(self, rows: Tensor, candidate: Tensor, place: Tensor, *numbers: Tensor) -> Tensor:
        """Return what each event adds to its sample."""
        gain = sum(weight * value for weight, value in zip(self.by_number, numbers, strict=False))
        likeness = (rows * candidate).sum(1)
        of_place = embedding(place, self.places[:, None])
        return rows.tanh() * (1 + gain + likeness)[:, None] * of_place

    def forward(self, numerical, embeddings):
        candidate = embeddings.distinct_rows("item", "item").by_id()
        taken = [numerical, embeddings.matrix(), candidate]
        for name in ("history", "cart"):
            found = embeddings.sequence(name)
            rows = sum(rows.by_id() for rows in found.rows.values())
            if name == "history":
                # A product over rows, of which the captured step has as many as its capacity.
                rows = rows + embedding(
                    found.rows["hist_genre"].positions, self.mix(found.rows["hist_genre"].rows)
                )
            samples, starts = found.samples.long(), found.starts.long()
            place = torch.arange(len(samples), device=samples.device) - starts[samples]
            likes = self.likes(
                rows,
                embedding(samples, candidate),
                place.clamp(0, LONGEST - 1),
                *found.numbers.values(),
            )
            each = torch.arange(LONGEST, device=samples.device)
            at = torch.where(each < found.lengths[:, None], starts[:, None] + each, len(likes))
            padded = torch.cat([likes, torch.zeros_like(likes[:1])])
            taken.append(embedding(at, padded).sum(1))
        return self.last(torch.cat(taken, 1)).squeeze(1).float()


def plain_logits(dense: Events, tables: dict[str, Tensor], batch: Batch) -> Tensor:
    """Return the logits of the model, sample after sample."""
    numbers = {name: column for name, column in zip(COLUMNS, batch.events, strict=True)}
    found = []
    for row in range(len(batch.labels)):
        ids = {
            name: values.values()[values.offsets()[row] : values.offsets()[row + 1]].long()
            for name, values in batch.ids.to_dict().items()
        }
        events = slice(*batch.ids["hist_item"].offsets()[row : row + 2])
        carts = slice(*batch.ids["cart_item"].offsets()[row : row + 2])
        candidate = tables["item"][ids["item"]]
        genres = tables["hist_genre"][ids["hist_genre"]]
        history = tables["item"][ids["hist_item"]] + genres + dense.mix(genres)
        cart = tables["item"][ids["cart_item"]]
        of_history = (numbers[name][events] for name in COLUMNS[:2])
        likes = dense.likes(history, candidate, torch.arange(len(history)), *of_history)
        of_cart = dense.likes(
            cart, candidate, torch.arange(len(cart)), numbers["cart_price"][carts]
        )
        pair = tables["pair"][ids["pair"]].sum(0, keepdim=True)
        parts = [
            batch.numerical[row][None],
            pair,
            candidate,
            likes.sum(0)[None],
            of_cart.sum(0)[None],
        ]
        found.append(dense.last(torch.cat(parts, 1)).squeeze())
    return torch.stack(found)


COLUMNS = [column.name for group in GROUPS for column in group.numbers]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    return written(tmp_path_factory.mktemp("sequences") / "dataset", is_keyed=False)


def written(root: Path, *, is_keyed: bool) -> Path:
    """Write 197 rows for training, some of which have no events; items are rows of a table, or raw keys."""
    item = CategoricalFeature.of_keys if is_keyed else CategoricalFeature.of
    features = [
        item("item", ITEMS, table="item"),
        item("hist_item", ITEMS, None, "item"),
        CategoricalFeature.of("hist_genre", 19, None),
        item("cart_item", ITEMS, None, "item"),
        CategoricalFeature.of("pair", 50, 2),
    ]
    generator = np.random.default_rng(1)
    with write_dataset(
        root, categorical=features, numerical=("n", "m"), sequences=GROUPS
    ) as directory:
        for split, rows in (("train", 197), ("test", 64)):
            lengths = {
                "history": np.minimum(generator.geometric(0.3, rows) - 1, LONGEST),
                "cart": generator.integers(0, 4, rows),
            }
            history, cart = (count.sum() for count in lengths.values())
            moments = generator.integers(10**9, 10**9 + 1000, rows)
            ages = [np.sort(generator.integers(1, 20, count))[::-1] for count in lengths["history"]]
            directory[split].append(
                numerical=generator.normal(size=(rows, 2)),
                labels=generator.random(rows) < 0.4,
                ids={
                    "item": generator.integers(1, ITEMS, rows),
                    "hist_item": generator.integers(1, ITEMS, history),
                    "hist_genre": generator.integers(0, 19, history),
                    "cart_item": generator.integers(1, ITEMS, cart),
                    "pair": generator.integers(0, 50, (rows, 2)),
                },
                lengths=lengths,
                events={
                    "hist_time": np.repeat(moments, lengths["history"]) - np.concatenate(ages),
                    "hist_rating": generator.normal(size=history),
                    "cart_price": generator.normal(size=cart),
                },
                moments={"history": moments},
            )
    return root


RULES = {"sgd": 0.3, "adagrad": 0.05, "adam": 0.01}
L2 = "optimizer.embedding_l2=0.2"
CHUNKS = "train.accumulate=3"


def tiered(layout: str, tier: str) -> list[str]:
    item = f"item: {{type: {layout}, tier: {tier}, cache: 0.5}}"
    return [f"sharding.tables={{hist_genre: data_parallel, {item}}}"]


LAYOUTS = {
    "table_wise": ["sharding.types=[table_wise]"],
    "row_wise": ["sharding.types=[row_wise]"],
    "replicated": ["sharding.types=[data_parallel]"],
    "mixed": ["sharding.tables={item: row_wise, hist_genre: data_parallel, pair: table_wise}"],
    "host": tiered("row_wise", "host"),
    "disk": [*tiered("table_wise", "disk"), "sharding.read_ahead_gib=0.001"],
}
CASES = [
    ("sgd", "table_wise"),
    ("adagrad", "row_wise"),
    ("adam", "replicated"),
    ("adagrad", "mixed", CHUNKS),
    ("adam", "row_wise"),
    ("sgd", "replicated", CHUNKS),
    ("adagrad", "host"),
    ("adam", "disk"),
    ("sgd", "mixed", L2),
]


def overrides_of(data: Path, rule: str, layout: str, *others: str) -> list[str]:
    return [
        *TINY,
        f"model.name={HERE}:Events",
        f"data.path={data}",
        "eval.batch_size=32",
        f"sharding.disk_path={data / 'disk'}",
        f"optimizer.name={rule}",
        f"optimizer.lr={RULES[rule]}",
        "optimizer.eps=0.01",
        *LAYOUTS[layout],
        *others,
    ]


@contextmanager
def ranks_with_room(
    reserve: float = 1.125, spread: float = 6.0, device: str = "cpu"
) -> Iterator[None]:
    """Open the ranks' group; a step has room for `reserve` of the ids and rows that are expected."""
    group = process_group(ranks_from_environment(device))
    with group, pytest.MonkeyPatch.context() as patched:
        for module, name in ((batch_layout, "CAPACITY"), (request_capacity, "RESERVE")):
            patched.setattr(module, name, reserve)
            patched.setattr(module, "SPREAD", spread)
        patched.setattr(request_capacity, "EVENT_RESERVE", min(reserve, 1.03125))
        yield


def built(overrides: list[str]) -> Built:
    return build(compose_config(*overrides))


@dataclass
class Plain:
    """Results of plain PyTorch."""

    losses: list[float]
    scores: Tensor  # of the test rows
    tables: dict[str, Tensor]


def plain(overrides: list[str]) -> Plain:
    with ranks_with_room():
        run = built(overrides)
        tables = {
            shard.table: nn.Parameter(shard.rows(torch.arange(len(shard.weight))))
            for shard in run.step.tables.shards()
        }
        dense = Events.build(run.config.model, run.source.spec)
        dense.load_state_dict(run.step.dense.state_dict())
        chosen = run.config.effective_optimizer
        known = run.step.dense_optimizer.defaults
        options = {key: known[key] for key in ("eps", "betas") if key in known}
        updates = [
            TableOptimizer(tables.values(), chosen),
            type(run.step.dense_optimizer)(dense.parameters(), **options, lr=chosen.lr),
        ]
        losses = []
        for batch in run.train_loader.batches(0, NUM_STEPS):
            valid = slice(batch.num_valid)
            logits = plain_logits(dense, tables, batch)
            loss = binary_cross_entropy_with_logits(logits[valid], batch.labels[valid])
            for update in updates:
                update.zero_grad()
            loss.backward()
            for update in updates:
                update.step()
            losses.append(loss.item())
        with torch.no_grad():
            scores = [plain_logits(dense, tables, b) for b in run.test_loader.batches(0, 2)]
        weights = {name: table.detach() for name, table in tables.items()}
        return Plain(losses, torch.cat(scores), weights)


@pytest.fixture(scope="module")
def wanted(dataset) -> dict[tuple, Plain]:
    """By rule and L2."""
    kinds = [(rule,) for rule in RULES] + [("sgd", L2)]
    return {
        (rule, *l2): plain(overrides_of(dataset, rule, "table_wise", *l2)) for rule, *l2 in kinds
    }


def trained(cases: list[list[str]], reserve: float, spread: float) -> list:
    """Return losses, scores of this rank's test rows, and its shards of the tables, of each case."""
    found = []
    with ranks_with_room(reserve, spread):
        for overrides in cases:
            run = built(overrides)
            losses = run.train(0, NUM_STEPS)
            passed = predictions(run.step, run.test_loader.batches(0, 2), run.ranks.device)
            scores = torch.stack([logits.clone() for _, logits in passed])
            shards = [
                (
                    shard.table,
                    shard.row_offset,
                    shard.column_offset,
                    shard.rows(torch.arange(len(shard.weight))),
                )
                for shard in run.step.tables.shards()
            ]
            found.append((losses, scores, shards))
            run.step.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "reserve", "spread"), [(1, 1.125, 6.0), (2, 1.125, 6.0), (2, 0.3, 0.0)]
)
def test_it_trains_as_plain_pytorch_at_any_fill(dataset, wanted, world_size, reserve, spread):
    """With 0.3 of the expected ids every batch takes a larger capacity."""
    cases = [overrides_of(dataset, *case) for case in CASES]
    for rank, of_rank in enumerate(run_distributed(trained, world_size, cases, reserve, spread)):
        for case, (losses, scores, shards) in zip(CASES, of_rank, strict=True):
            expected = wanted[(case[0], *(option for option in case[2:] if option == L2))]
            assert losses == pytest.approx(expected.losses, rel=1e-6), case
            assert losses[-1] != losses[0]
            of_ranks = expected.scores.view(2, world_size, -1)
            torch.testing.assert_close(scores, of_ranks[:, rank], rtol=2e-5, atol=2e-5)
            for table, row, column, weight in shards:
                rows, columns = weight.shape
                whole = expected.tables[table][row : row + rows, column : column + columns]
                torch.testing.assert_close(weight, whole, rtol=2e-5, atol=2e-5, msg=str(case))


def parts_of(overrides: list[str], room: int | None) -> tuple[list[float], list[str], list[int]]:
    """Return losses, what was said of slow batches, and the events that fit at once; `room` replaces what is measured."""
    said: list[str] = []
    with ranks_with_room(), pytest.MonkeyPatch.context() as patched:
        patched.setattr("nn.training.step_runner.SlowBatchWarning", lambda ranks: said.append)
        if room is not None:
            patched.setattr(request_capacity, "event_capacity", lambda batches: room)
        run = built(overrides)
        run.step.runner.measure(run.train_loader)
        losses = run.train(0, NUM_STEPS)
        facts = run.step.runner.request_capacity.facts()
        [most] = facts.get("parts", {}).get(str(64 // run.ranks.world_size), [[]])
        run.step.close()
    return losses, said, list(most)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_dense_component_takes_as_many_events_as_batches_or_their_parts_have(
    dataset, num_ranks
):
    """Fewer than there is room for in a batch; one with more takes the slower way."""
    cases = ((CHUNKS, None), (CHUNKS, 1), ("train.accumulate=1", None))
    measured, over, whole = (
        run_distributed(parts_of, num_ranks, overrides_of(dataset, "sgd", "mixed", chunks), room)[0]
        for chunks, room in cases
    )
    losses, said, most = measured
    assert losses == pytest.approx(whole[0], rel=1e-6)
    assert said == whole[1] == []
    for group, room in zip(GROUPS, most, strict=True):
        assert room < -(-64 // num_ranks // 3) * group.max_length
    with ranks_with_room():
        counts = id_counts(
            open_source(compose_config(f"data.path={dataset}")).spec, 64 // num_ranks
        )
    for group, room in zip(GROUPS, whole[2], strict=True):
        assert room < counts[group.features[0]].capacity
    assert over[0] == pytest.approx(whole[0], rel=1e-6)
    assert len(over[1]) >= NUM_STEPS - 1, "the last batch of an epoch is smaller"
    assert over[2] == [1, 1]


def test_a_checkpoint_has_the_room_of_parts(dataset):
    with ranks_with_room():
        first, other, older = (
            built(overrides_of(dataset, "sgd", "mixed", chunks)).step.runner
            for chunks in (CHUNKS, "train.accumulate=2", CHUNKS)
        )
        loader = built(overrides_of(dataset, "sgd", "mixed", CHUNKS)).train_loader
        first.measure(loader)
        facts = json.loads(json.dumps(first.request_capacity.facts()))
        assert facts["part_rows"] == 22
        other.request_capacity.take(facts)
        assert not other.request_capacity.facts()["rows"], "parts of other sizes"
        # Of a program that gave parts room for all events of their samples.
        del facts["part_rows"], facts["parts"]
        older.request_capacity.take(facts)
        older.measure(loader)
        found = json.loads(json.dumps(older.request_capacity.facts()))
        assert found == facts | {"part_rows": 22, "parts": {}}


def resumed(directory: Path, overrides: list[str]) -> tuple[list[float], list[float], bool]:
    """Return the losses of an uninterrupted run and of one in two parts, and whether their states are the same."""
    half = NUM_STEPS // 2
    with ranks_with_room():
        whole, first, second = (built(overrides) for _ in range(3))
        rows = whole.train_loader.rows(0).global_rows
        assert (np.diff(rows) != 1).any() == (whole.ranks.world_size > 1), "ranks are balanced"
        losses = whole.train(0, NUM_STEPS)
        parts = first.train(0, half)
        checkpoint.restore(save(directory, first, half), second.step, with_optimizer=True)
        facts = json.loads(json.dumps(first.step.runner.request_capacity.facts()))
        second.step.runner.request_capacity.take(facts)
        parts += second.train(half, NUM_STEPS - half)
        wanted, got = local_state(whole), local_state(second)
        return losses, parts, all(torch.equal(wanted[name], got[name]) for name in wanted)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_resumed_run_has_the_same_shapes_and_bits(dataset, num_ranks, tmp_path):
    """A product over the rows of a batch has other bits with another capacity for them."""
    for whole, parts, is_same in run_distributed(
        resumed, num_ranks, tmp_path, overrides_of(dataset, "adam", "mixed")
    ):
        assert whole == parts
        assert is_same


def test_raw_keys_of_events_train_alike_on_any_number_of_ranks(tmp_path):
    root = written(tmp_path / "keyed", is_keyed=True)
    cases = [overrides_of(root, "adagrad", layout) for layout in ("row_wise", "replicated")]
    one, two = (run_distributed(trained, ranks, cases, 1.125, 6.0)[0] for ranks in (1, 2))
    for (losses, *_), (wanted, *_) in zip(two, one, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert losses[-1] != losses[0]


def test_the_model_is_described_and_built_again_with_its_events(dataset):
    with ranks_with_room():
        run = built(overrides_of(dataset, "sgd", "mixed"))
        content = json.loads(json.dumps(describe_model(run.config.model, *[run.source.spec] * 2)))
        model = _parsed(content, trusted=True).build(run.config.seed)
        model.dense.load_state_dict(run.step.dense.state_dict())
        (batch,) = run.test_loader.batches(0, 1)
        (predicted,) = predictions(run.step, run.test_loader.batches(0, 1), run.ranks.device)
        torch.testing.assert_close(model(batch), predicted[1], rtol=1e-5, atol=1e-6)


def test_events_whose_tables_all_pool_are_refused(dataset, monkeypatch):
    tables = Events.tables

    def pooled(options, spec):
        pair, item, genre = tables(options, spec)
        item = replace(item, feature_names=["item", "hist_item"])
        cart = replace(item, name="cart", feature_names=["cart_item"], pooling=PoolingType.SUM)
        return [pair, item, genre, cart]

    monkeypatch.setattr(Events, "tables", pooled)
    with (
        ranks_with_room(),
        pytest.raises(ValueError, match="the events of 'cart', and all of their tables"),
    ):
        built(overrides_of(dataset, "sgd", "replicated")).train(0, 1)


def test_plan_and_floor_count_events_and_rows_that_are_handed_out(dataset, monkeypatch):
    config = compose_config(
        *overrides_of(dataset, "sgd", "table_wise", "device=cuda", "sharding.hbm_gib=1"),
        "train.amp=off",
        "eval.batch_size=64",
    )
    source = open_source(config)
    plan = build_plan(config, source, planned_hardware(config))[1]
    counts = id_counts(source.spec, 64)
    history, cart = (counts[name].capacity for name in ("hist_item", "cart_item"))

    def memory(groups: tuple[SequenceGroup, ...] = GROUPS) -> RankMemory:
        return plan_memory(config, replace(source.spec, sequences=groups), plan, 1, 0)[0]

    counted = memory()
    without_numbers = tuple(replace(group, numbers=(), time=None) for group in GROUPS)
    # Two batches, and the graph's input; each column is aligned.
    numbers = 3 * 4 * (2 * history + cart)
    found = counted.batches - memory(without_numbers).batches
    assert numbers <= found < numbers + 3 * 3 * 256
    requests = requests_of(config, source.spec, plan, 1)
    rows = {asked.tables[0]: sum(asked.capacity) * 8 for asked in requests if asked.hands_out}
    assert rows.keys() == {"item", "hist_genre"}
    # Pair's vectors, and rows with the sums of their gradients.
    assert counted.lookups == 4 * (64 * 8 + 2 * sum(rows.values()))
    asked = {asked.tables[0]: asked.keys for asked in requests}
    assert asked == {"item": 64 + history + cart, "hist_genre": history}
    # Gradients of all rows, and of each id of the larger table, by feature and side by side.
    by_id = 2 * 8 * asked["item"]
    first_layer = 8
    assert counted.dense_pass == 4 * (64 * (8 + first_layer) + sum(rows.values()) + by_id)
    # Two chunks add up the gradients of all rows, and torch those of a chunk's ids, with sums of parts of a row.
    config.train.accumulate = 2
    most = {group.name: 32 * group.max_length for group in GROUPS}
    share = min(most["history"], history) + min(most["cart"], cart)
    ids = asked["item"] * share / (history + cart)
    by_id = 8 * ids + rows["item"] + 8 * (ids // 10)
    of_chunk = 32 * (8 + first_layer) + sum(rows.values()) + by_id
    in_chunks = memory()
    assert in_chunks.lookups == 4 * (64 * 8 + sum(rows.values()))
    assert in_chunks.dense_pass == round(4 * (64 * 8 + sum(rows.values()) + of_chunk))
    config.train.accumulate = 1
    kept = Activations(event_columns={"history": 1000})
    before = memory().dense_pass
    monkeypatch.setattr(Events, "activations", lambda self: kept)
    assert memory().dense_pass == pytest.approx(before + 4 * 1000 * history, abs=before)

    hotness = {feature.name: feature.mean_hotness for feature in source.spec.categorical}
    for world_size in (1, 2):
        floor = floor_of(config, source.spec, world_size, power_law_shares(0.0))
        batch = 64 / world_size
        of_item = 1 + hotness["hist_item"] + hotness["cart_item"]
        own = unique_rows(ITEMS, batch, of_item, power_law_share(ITEMS, 0.0))
        own += unique_rows(19, batch, hotness["hist_genre"], power_law_share(19, 0.0))
        vectors = 5 * (batch * 8 + 8 * own)
        # Half of the rows, and of the vectors of pair, are on the other rank.
        sent = (world_size - 1) / 2 * 8 * (own + min(batch, 50 * (1 - 0.98 ** (2 * batch))))
        assert floor.hbm["embeddings"] == pytest.approx(4 * (vectors + 4 * sent), rel=1e-3)
        events = 2 * hotness["hist_item"] + hotness["cart_item"]
        ids = of_item + hotness["hist_genre"] + 2
        assert floor.hbm["batch"] == pytest.approx(batch * (8 * (2 + events) + 8 + 12 * ids))


def test_a_plan_has_the_distinct_rows_of_batches(dataset):
    row_wise = "sharding.tables={item: row_wise, hist_genre: data_parallel}"
    options = ("device=cuda", "sharding.hbm_gib=1", "sharding.world_size=2", "train.batch_size=64")
    found = overrides_of(dataset, "sgd", "table_wise", *options, row_wise)
    config = compose_config(*found, "data.shuffle_block=0")
    source = open_source(config)
    plan = {row.table: row for row in checked_plan(config, source, planned_hardware(config))[1]}
    # Not the first 32: ranks get about equally many events.
    loader = make_loader(source, "train", batch_size=64, world_size=2, balances_events=True)
    half, counts = -(-ITEMS // 2), []
    for step in loader.spread_steps():
        ids = source.read("train", loader.rows(step).runs).ids
        of = dict(zip([feature.name for feature in source.spec.categorical], ids, strict=True))
        rows = np.unique(np.concatenate([of[name] for name in ("item", "hist_item", "cart_item")]))
        genres = len(np.unique(of["hist_genre"]))
        counts.append((int((rows < half).sum()), int((rows >= half).sum()), genres))
    *items, genres = map(most_expected, zip(*counts, strict=True))
    assert plan["item"].batch_rows == tuple(items)
    assert plan["hist_genre"].batch_rows == (genres,)
    assert plan["pair"].batch_rows == ()
    asked = {each.tables[0]: each for each in requests_of(config, source.spec, [*plan.values()], 2)}
    assert asked["item"].capacity == tuple(map(capacity_for, plan["item"].batch_rows))


def test_rows_of_events_are_not_cut_by_columns(dataset):
    column_wise = ("sharding.tables={item: column_wise}", "sharding.world_size=2")
    config = compose_config(*overrides_of(dataset, "sgd", "table_wise", *column_wise))
    with pytest.raises(ValueError, match="table item of 8 columns to column_wise, which is for "):
        build_plan(config, open_source(config), planned_hardware(config))


@pytest.mark.parametrize("world_size", worlds(1, 2))
def test_the_captured_step_trains_as_the_launched_one_and_as_cpus(dataset, world_size):
    """With a capacity for every batch, and for none."""
    kinds = [("adagrad", "mixed"), ("adam", "host"), ("sgd", "row_wise", CHUNKS)]
    both = [overrides_of(dataset, *kind) for kind in kinds]
    cases = [
        [*case, *ON_GPU, f"train.capture={captured}"]
        for case in both
        for captured in ("true", "false")
    ]
    for reserve in (1.125, 0.3):
        found = run_distributed(on_gpus, world_size, cases, reserve)[0]
        wanted = run_distributed(trained, world_size, both, 1.125, 6.0)[0]
        for captured, launched, cpu in zip(found[::2], found[1::2], wanted, strict=True):
            assert captured == launched
            assert captured[0] == pytest.approx(cpu[0], rel=1e-4)
            assert captured[1] == pytest.approx(cpu[1].flatten().tolist(), rel=1e-3, abs=1e-4)


def on_gpus(cases: list[list[str]], reserve: float) -> list[tuple[list[float], list[float]]]:
    """Return the losses of each case, and the scores of this rank's test rows."""
    found = []
    with ranks_with_room(reserve, 6.0 if reserve > 1 else 0.0, "cuda"):
        for overrides in cases:
            run = built(overrides)
            losses = run.train(0, NUM_STEPS)
            passed = predictions(run.step, run.test_loader.batches(0, 2), run.ranks.device)
            found.append((losses, [x for _, logits in passed for x in logits.tolist()]))
            run.step.close()
    return found
