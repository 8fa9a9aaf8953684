"""A training step: equality over numbers of ranks, and refusal of a loss that is not finite."""

import gc
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._python_dispatch import TorchDispatchMode

from dataloading.batch import Batch
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.source import Columns, DerivedSource
from nn.build import open_source
from nn.distributed.errors import DivergedError
from nn.models.options import DCNv2Options, DLRMOptions
from nn.sharding.batch_rows import BatchRows
from nn.training.prefetch import Prefetcher
from tests.helpers.composed import TINY, Built, build, compose_config, ranks_of_cpu, tiny
from tests.helpers.distributed import run_distributed
from tests.reference import Reference, ReferenceCross, ReferenceMLP

RATES = {"sgd": 0.5, "adagrad": 0.05, "rowwise_adagrad": 0.05, "adam": 0.005}
TABLES = {
    "rows": {
        "cat_0": "table_wise",
        "cat_1": "data_parallel",
        "cat_2": "row_wise",
        "cat_4": "row_wise",
    },
    "whole": {"cat_0": "table_wise", "cat_1": "data_parallel"},
}
# 133 rows in batches of 64 leave 5 for the tail: 3 for one rank, 2 for the other. Of 129, one rank gets none.
EPOCHS = {"uneven_tail": 133, "tail_of_one": 129}


def rule(name: str) -> list[str]:
    return [f"optimizer.name={name}", f"optimizer.lr={RATES[name]}", "optimizer.eps=0.01"]


def two_epochs(name: str, rows: int, way: str = "rows") -> list[str]:
    tables = TABLES[way] | ({} if name == "rowwise_adagrad" else {"cat_3": "column_wise"})
    overrides = ",".join(f"{table}:{layout}" for table, layout in tables.items())
    return [
        *TINY,
        *rule(name),
        f"data.synthetic.train_rows={rows}",
        "data.shuffle_block=16",
        "train.epochs=2",
        f"sharding.tables={{{overrides}}}",
    ]


def parts(built: Built) -> dict[str, list[tuple[int, int, torch.Tensor]]]:
    """This rank's pieces of all weights: name -> (first row, first column, values)."""
    pieces: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    for shard in built.step.tables.shards():
        piece = (shard.row_offset, shard.column_offset, shard.weight.detach().clone())
        pieces.setdefault(shard.table, []).append(piece)
    for name, value in built.step.dense.named_parameters():
        pieces[name] = [(0, 0, value.detach().clone().view(len(value), -1))]
    return pieces


def whole(parts_of_ranks: list[dict]) -> dict[str, torch.Tensor]:
    """Put the pieces of all ranks together."""
    weights = {}
    for name in dict.fromkeys(name for each in parts_of_ranks for name in each):
        pieces = [piece for each in parts_of_ranks for piece in each.get(name, [])]
        weight = torch.full(
            (
                max(row + len(value) for row, _, value in pieces),
                max(column + value.shape[1] for _, column, value in pieces),
            ),
            torch.nan,
        )
        for row, column, value in pieces:
            weight[row : row + len(value), column : column + value.shape[1]] = value
        weights[name] = weight
    return weights


def train_cases(cases: list[list[str]]) -> list[tuple[list[float], dict]]:
    """Losses and this rank's weights of each case."""
    results = []
    with ranks_of_cpu():
        for case in cases:
            built = build(compose_config(*case))
            losses = built.train(0, 2 * built.train_loader.steps_per_epoch)
            results.append((losses, parts(built)))
    return results


# Every two of optimizer, tail and way occur together.
CASES = [
    (name, list(EPOCHS)[(number + way) % 2], list(TABLES)[way])
    for number, name in enumerate(RATES)
    for way in range(2)
]


@pytest.fixture(scope="module")
def ragged(tmp_path_factory) -> Path:
    """A dataset directory with a ragged, a two-hot and a single-hot feature."""
    root = tmp_path_factory.mktemp("step") / "ragged"
    features = [
        CategoricalFeature.of("genres", 19, None),
        CategoricalFeature.of("pair", 50, 2),
        CategoricalFeature.of("item", 300),
    ]
    generator = np.random.default_rng(1)
    with write_dataset(root, categorical=features, numerical=("n", "m")) as dataset:
        for split, rows in (("train", 197), ("test", 64)):
            lengths = generator.integers(0, 4, rows)
            genres = generator.integers(0, 19, lengths.sum())
            clicked = np.bincount(np.repeat(np.arange(rows), lengths), genres > 9, rows) > 0
            dataset[split].append(
                numerical=generator.normal(size=(rows, 2)),
                labels=clicked,
                ids={
                    "genres": genres,
                    "pair": generator.integers(0, 50, (rows, 2)),
                    "item": generator.integers(0, 300, rows),
                },
                lengths={"genres": lengths},
            )
    return root


@pytest.fixture(scope="module")
def trained(ragged) -> dict[int, dict]:
    """World size -> case -> (losses, whole weights)."""
    cases = {each: two_epochs(each[0], EPOCHS[each[1]], each[2]) for each in CASES}
    for layout in ("table_wise", "row_wise", "data_parallel"):
        tables = f"sharding.tables={{genres:{layout},pair:{layout}}}"
        cases["ragged", layout] = [*TINY, *rule("adagrad"), f"data.path={ragged}", tables]
    one = train_cases(list(cases.values()))
    two = run_distributed(train_cases, 2, list(cases.values()))
    results = {1: {}, 2: {}}
    for index, case in enumerate(cases):
        results[1][case] = (one[index][0], whole([one[index][1]]))
        assert two[0][index][0] == two[1][index][0], "ranks disagree about the global loss"
        results[2][case] = (two[0][index][0], whole([rank[index][1] for rank in two]))
    return results


RAGGED = [("ragged", layout) for layout in ("table_wise", "row_wise", "data_parallel")]


@pytest.mark.parametrize("case", [*CASES, *RAGGED], ids="-".join)
def test_two_ranks_train_two_epochs_with_their_tails_as_one_does(trained, case):
    (losses, weights), (wanted_losses, wanted) = trained[2][case], trained[1][case]
    assert len(losses) == (8 if case in RAGGED else 6)
    assert losses == pytest.approx(wanted_losses, rel=1e-5)
    assert set(weights) == set(wanted)
    for name, weight in wanted.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6, msg=name)


def test_ragged_features_are_learnt(trained):
    losses, _ = trained[1]["ragged", "table_wise"]
    assert sum(losses[4:]) < sum(losses[:4]) * 0.97


def test_the_loss_is_the_mean_over_the_rows_of_the_batch_and_not_over_its_padding():
    with ranks_of_cpu():
        built = build(compose_config(*TINY, "data.synthetic.train_rows=197"))
        prefetcher = built.prefetcher(3, 1)
        batch, ids = next(built.prefetcher(3, 1))
        logits = built.step.predict(batch, ids)
        loss = built.step.train(3, prefetcher).loss
    assert len(logits) == 5
    wanted = binary_cross_entropy_with_logits(logits, batch.labels)
    assert loss == pytest.approx(wanted.item(), rel=1e-6)


@torch.no_grad()
def reference_of(built: Built) -> Reference:
    """The plain model of `tests.reference` with the weights of an untrained run."""
    model, spec = built.config.model, built.source.spec
    assert isinstance(model, DLRMOptions | DCNv2Options)
    cross = getattr(built.step.dense, "cross", None)
    reference = Reference(
        [feature.cardinality for feature in spec.categorical],
        len(spec.numerical),
        model.embedding_dim,
        model.bottom_mlp,
        model.top_mlp,
        ReferenceCross(model.cross.num_layers, model.cross.projection_dim)
        if isinstance(model, DCNv2Options)
        else None,
    )
    weights = whole([parts(built)])
    for table, feature in zip(reference.tables, spec.categorical, strict=True):
        table.weight.copy_(weights[feature.name])
    for name in ("bottom", "top"):
        ours, theirs = getattr(built.step.dense, name), getattr(reference, name)
        assert isinstance(theirs, ReferenceMLP)
        linears = [layer for layer in theirs if isinstance(layer, nn.Linear)]
        for to, layer in zip(linears, ours.layers, strict=True):
            to.weight.copy_(layer.weight[:, : to.in_features])  # less what meets padding
            to.bias.copy_(layer.bias)
    for index, layer in enumerate(cross.layers if cross else []):
        down, up = reference.cross[index]
        down.copy_(layer.down.weight)
        up.copy_(layer.up.weight)
        reference.cross_bias[index].copy_(layer.up.bias)
    return reference


def optimizers_of(reference: Reference, name: str) -> list[torch.optim.Optimizer]:
    tables = list(reference.tables.parameters())
    dense = [p for key, p in reference.named_parameters() if not key.startswith("tables.")]
    settings = {"lr": RATES[name]} | ({} if name == "sgd" else {"eps": 1e-8})
    of_tables, of_dense = {
        "sgd": (torch.optim.SGD, torch.optim.SGD),
        "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad),
        "adam": (torch.optim.SparseAdam, torch.optim.Adam),
    }[name]
    return [of_tables(tables, **settings), of_dense(dense, **settings)]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("model", ["dlrm", "dcnv2"])
def test_it_trains_as_the_plain_reference_does(model, name):
    config = compose_config(*tiny(model), *rule(name), "optimizer.eps=1e-8")
    with ranks_of_cpu():
        built = build(config)
        reference = reference_of(built)
        losses = built.train(0, 6)
        batches = list(built.train_loader.batches(0, 6))
    wanted = []
    optimizers = optimizers_of(reference, name)
    for batch in batches:
        ids = batch.ids.values().view(-1, len(batch.labels)).T.long()
        loss = binary_cross_entropy_with_logits(reference(batch.numerical, ids), batch.labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, rel=1e-5)


def test_bf16_trains_close_to_fp32():
    losses = {}
    with ranks_of_cpu():
        for amp in ("off", "bf16"):
            losses[amp] = build(compose_config(*TINY, f"train.amp={amp}")).train(0, 30)
    assert losses["bf16"] == pytest.approx(losses["off"], rel=2e-2)
    assert losses["bf16"] != losses["off"]
    assert sum(losses["bf16"][-5:]) < sum(losses["bf16"][:5])


@pytest.mark.doors
def test_a_compiled_dense_half_trains_alike_and_keeps_its_names():
    losses, names = {}, {}
    # Each further layer is another start of the C++ compiler.
    small = ["model.bottom_mlp=[8]", "model.top_mlp=[1]"]
    # To try vector instructions, the compiler would start processes that import torch. Scalar code does here.
    with ranks_of_cpu(), inductor_config.patch("cpp.vec_isa_ok", False):
        for compiled in ("false", "true"):
            built = build(compose_config(*TINY, *small, f"train.compile={compiled}"))
            losses[compiled] = built.train(0, 4)
            names[compiled] = [name for name, _ in built.step.dense.named_parameters()]
            is_compiled = built.step.dense._compiled_call_impl is not None
            assert is_compiled == (compiled == "true")
    assert losses["true"] == pytest.approx(losses["false"], rel=1e-5)
    assert names["true"] == names["false"]
    assert not any("_orig_mod" in name for name in names["true"])


class OneBadRow(DerivedSource):
    """A source whose training row `row` has a numerical that is no number."""

    def __init__(self, source, row: int) -> None:
        super().__init__(source)
        self._row = row

    def read(self, split: str, runs: np.ndarray, *others) -> Columns:
        columns = self._source.read(split, runs, *others)
        rows = np.concatenate([np.arange(*run) for run in runs])
        columns.numerical[: len(rows)][rows == self._row] = np.nan
        return columns


def meet_a_bad_row(name: str) -> tuple[int, str, bool]:
    """The step that was refused, its message, and whether all weights are what they were before it."""
    config = compose_config(*two_epochs(name, 256), "data.shuffle_block=0")
    # Rows 128 .. 191 are step 2; with two ranks, the second reads this one.
    built = build(config, OneBadRow(open_source(config), 170))
    prefetcher = built.prefetcher(0, 4)
    for step in range(4):
        before = parts(built)
        try:
            built.step.train(step, prefetcher)
        except DivergedError as error:
            after = parts(built)
            same = all(
                torch.equal(old[2], new[2])
                for key in before
                for old, new in zip(before[key], after[key], strict=True)
            )
            return step, str(error), same
        assert any(not torch.equal(before[key][0][2], parts(built)[key][0][2]) for key in before)
    raise AssertionError("it learnt from a loss that is no number")


def bad_rows(names: list[str]) -> list[tuple[int, str, bool]]:
    # In one process group: a second one at the same address could meet a rank that still closes the first.
    with ranks_of_cpu():
        return [meet_a_bad_row(name) for name in names]


def test_a_loss_that_is_no_number_stops_every_rank_before_anything_is_updated():
    names = list(RATES)
    one, two = [bad_rows(names)], run_distributed(bad_rows, 2, names)
    for results in (*one, *two):
        for name, (step, message, same) in zip(names, results, strict=True):
            assert step == 2, name
            assert same, name
            assert message == (
                f"the loss is nan at step 2 (learning rate {RATES[name]:g}); nothing was updated with "
                "it. Lower optimizer.lr, lengthen scheduler.warmup_steps, or look for bad numerical "
                "values in the data"
            )


def test_a_learning_rate_out_of_all_bounds_is_named():
    with ranks_of_cpu():
        built = build(compose_config(*TINY, "optimizer.name=sgd", "optimizer.lr=1e30"))
        with pytest.raises(DivergedError) as caught:
            built.train(0, 10)
    assert re.match(
        r"the loss is (nan|inf) at step \d \(learning rate 1e\+30\); nothing was", str(caught.value)
    )


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_evaluating_between_two_steps_changes_nothing(name):
    losses = []
    with ranks_of_cpu():
        for evaluates in (False, True):
            built = build(compose_config(*TINY, *rule(name)))
            first = built.train(0, 3)
            if evaluates:
                built.score(2)
            losses.append(first + built.train(3, 3))
    assert losses[0] == losses[1]


def test_a_loss_scale_changes_nothing_until_a_gradient_overflows(monkeypatch):
    with ranks_of_cpu():
        plain = build(compose_config(*TINY)).train(0, 4)
        for name in ("nn.training.train_step.loss_scale", "nn.build.loss_scale"):
            monkeypatch.setattr(name, lambda config: 1024.0)
        assert build(compose_config(*TINY)).train(0, 4) == pytest.approx(plain, rel=1e-6)
        for name in ("nn.training.train_step.loss_scale", "nn.build.loss_scale"):
            # Times a gradient of more than a hundredth this is more than float32 holds.
            monkeypatch.setattr(name, lambda config: 3e40)
        built = build(compose_config(*TINY))
        before = [each.detach().clone() for each in built.step.dense.parameters()]
        before += [shard.weight.clone() for shard in built.step.tables.shards()]
        with pytest.raises(DivergedError, match=r"overflowed fp16.*Lower train.loss_scale"):
            built.train(0, 1)
        after = [each.detach() for each in built.step.dense.parameters()]
        after += [shard.weight for shard in built.step.tables.shards()]
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def scaled_losses(cases: list[list[str]]) -> list[list[float]]:
    """Return the losses of some steps with a loss scale, as under fp16, where new memory holds NaN until it is filled."""
    with pytest.MonkeyPatch.context() as patched, ranks_of_cpu():
        for name in ("nn.training.train_step.loss_scale", "nn.build.loss_scale"):
            patched.setattr(name, lambda config: 1024.0)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return [build(compose_config(*case)).train(0, 3) for case in cases]
        finally:
            torch.use_deterministic_algorithms(False)


def test_the_check_for_overflows_reads_no_memory_that_nothing_has_filled():
    """The gradient of a vector that ranks add up is spread over their parts only where tables are trained."""
    vectors = "sharding.tables={cat_0:{type:row_wise,exchange:vectors}}"
    case = [*TINY, "device=cpu", vectors]
    trained, frozen = run_distributed(scaled_losses, 2, [case, [*case, "train.freeze=[tables]"]])[0]
    assert trained[0] == frozen[0]


def test_batches_that_nobody_takes_are_left_without_a_collection(monkeypatch):
    """In the thread that leaves them: where Python collects cycles, another thread may be starting, and all would hang."""
    left = []
    shutdown = ThreadPoolExecutor.shutdown
    monkeypatch.setattr(
        ThreadPoolExecutor, "shutdown", lambda *a, **k: (left.append(k), shutdown(*a, **k))
    )
    with ranks_of_cpu():
        prefetcher = build(compose_config(*TINY)).prefetcher(0, 4)
        next(prefetcher)
        gc.disable()
        try:
            del prefetcher
            assert left
        finally:
            gc.enable()


def test_a_pass_that_is_not_recorded_releases_its_ids_too():
    """Else a recorded exchange would hold them forever, and send all further ids operation by operation."""
    released = []
    with ranks_of_cpu():
        built = build(compose_config(*TINY))
        batch, rows = next(built.prefetcher(0, 1))
        rows = BatchRows(rows.ids, release=lambda: released.append(True))
        built.step.predict(batch, rows)
    assert released == [True]


# A replicated table: the ids of the others are put together.
WITH_EXCHANGE = "sharding.tables={cat_1: data_parallel}"


class Graph:
    """Stands for `CudaGraph` where there is no GPU: calls the function at each replay, and counts."""

    made: ClassVar[list["Graph"]] = []
    is_replayed: ClassVar[bool] = False

    def __init__(
        self, function, *inputs, stream=None, warm_up=None, beside=None, in_place=False, warm_ups=3
    ):
        self.function = function
        self.inputs = [each if in_place else each.clone() for each in inputs]
        self.stream, self.beside, self.in_place = stream, beside, in_place
        self.replays, self.is_closed = 0, False
        self.warms_up = warm_up is not None and warm_ups
        self.outputs = function(*self.inputs) if stream is not None else None
        self.made.append(self)

    def is_of(self, *inputs):
        return all(mine is given for mine, given in zip(self.inputs, inputs, strict=True))

    def load(self, *inputs):
        for mine, new in zip(self.inputs, inputs, strict=True):
            mine.copy_(new)

    def replay(self):
        self.replays += 1
        Graph.is_replayed = True
        outputs = self.function(*self.inputs)
        if self.stream is not None:
            self.outputs.copy_(outputs)
        Graph.is_replayed = False
        return outputs

    def close(self):
        self.is_closed = True


@pytest.fixture
def graphs(monkeypatch) -> list[Graph]:
    """All graphs that are made from here on, on a CPU that records as a GPU would."""
    monkeypatch.setattr(Graph, "made", [])
    monkeypatch.setattr("nn.training.captured_pass.CudaGraph", Graph)
    monkeypatch.setattr("nn.sharding.id_all_to_all.CudaGraph", Graph)
    monkeypatch.setattr("nn.training.train_step.capture_blocker", lambda *_: None)
    stream = SimpleNamespace(wait_event=lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))
    return Graph.made


def test_full_batches_share_graphs_and_the_tail_of_an_epoch_has_none(request):
    config = compose_config(*TINY, "data.synthetic.train_rows=200", WITH_EXCHANGE)
    with ranks_of_cpu():
        plain = build(config).train(0, 8)
        graphs = request.getfixturevalue("graphs")
        built = build(config)
        assert built.train(0, 8) == plain
        built.step.close()
    exchanges, training = graphs[:2], graphs[2:]
    assert [[len(each) for each in exchange.inputs] for exchange in exchanges] == [[64 * 5]] * 2
    # The tail has its turn too.
    assert [exchange.replays for exchange in exchanges] == [4, 2]
    # On a CPU batches have a memory of their own. Those behind the first of each turn are copied.
    assert [graph.in_place for graph in training] == [True, True, False]
    assert [graph.replays for graph in training] == [1, 1, 4]
    for graph in training:
        # The memory of a batch, and that of its ids, 4 bytes each.
        assert [each.dtype for each in graph.inputs] == [torch.uint8] * 2
        assert len(graph.inputs[1]) == (64 * 4 + 64) * 4
    assert [bool(graph.warms_up) for graph in training] == [True, False, False]
    # NCCL waits for recordings when its groups are closed.
    assert all(graph.is_closed for graph in graphs)


class Launches(TorchDispatchMode):
    """Counts the operations that a host would launch: neither views, nor what a recording has."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += not (Graph.is_replayed or function.is_view)
        return function(*arguments, **(keywords or {}))


def launches_of_a_step(root: Path, num_features: int) -> int:
    """Return the launches that take a full batch of so many ragged features through the step, with its copy to the device."""
    names = [f"list_{index}" for index in range(num_features)]
    features = [CategoricalFeature.of(name, 50, None) for name in names]
    lengths = np.arange(256) % 4
    with write_dataset(root, categorical=features, splits=["train"]) as dataset:
        dataset["train"].append(
            labels=np.arange(256) % 2,
            ids=dict.fromkeys(names, np.arange(lengths.sum()) % 50),
            lengths=dict.fromkeys(names, lengths),
        )
    built = build(
        compose_config(*TINY, f"data.path={root}", "eval.split=train", "model.name=deepfm")
    )
    counted = 0
    for batch in built.train_loader.batches(0, 3):
        built.step.tables.prepare_update(0, 0.1)
        with Launches() as launches:
            batch.to(torch.device("meta"))
            built.step.runner.train(*built.step.runner.start(batch))
        counted = launches.count
    built.step.close()
    return counted


@pytest.mark.usefixtures("graphs")
def test_the_launches_of_a_step_do_not_grow_with_the_ragged_features(tmp_path):
    """The copy of the batch to the device, of the ids to the exchange, and of batch and ids to the recorded pass."""
    with ranks_of_cpu():
        counts = [launches_of_a_step(tmp_path / str(number), number) for number in (2, 9)]
    assert counts == [1 + 1 + 2] * 2


@pytest.mark.usefixtures("graphs")
def test_the_step_number_of_layers_is_no_launch_beside_the_recorded_pass(tmp_path):
    """It comes with the scalars of the tables' updates, and is that of the step in each pass."""
    counts, numbers = [], []
    with ranks_of_cpu():
        for options in ([], ["model.dropout=0.2"]):
            built = build(compose_config(*TINY, *options))
            prefetcher = built.prefetcher(0, 8)
            for step in range(5, 8):
                with Launches() as launches:
                    built.step.train(step, prefetcher)
                layers = built.step._pass_layers
                numbers += [layer.pass_state.step.item() for layer in layers[:1]]
            counts.append(launches.count)
            built.step.close()
    assert numbers == [5, 6, 7]
    assert counts[0] == counts[1]


def test_the_layout_of_batches_is_compared_with_the_step_once(monkeypatch):
    with ranks_of_cpu():
        built = build(compose_config(*TINY))
        capacity = built.step.runner._capacity
        of_dataset, asked = capacity._counts, []
        monkeypatch.setattr(
            capacity, "_counts", lambda *size: (asked.append(size), of_dataset(*size))[1]
        )
        one = next(built.train_loader.batches(0, 1))
        assert [capacity.of(one.at(one.memory)).layout for _ in range(3)] == [one.layout] * 3
        other = next(built.test_loader.batches(0, 1))
        capacity.of(other)
    assert asked == [(64, ()), (128, ())]


def test_ids_that_are_copied_are_released_before_the_recorded_pass(graphs, monkeypatch):
    """The next batch's exchange would wait for the pass; in place the one after it does, whose ids arrive there."""
    events = []
    with ranks_of_cpu():
        built = build(compose_config(*TINY, WITH_EXCHANGE))
        prefetcher = built.prefetcher(0, 4)
        built.step.train(0, prefetcher)
        for place in built.step.runner.builder.sizes[64].exchange._places:
            place._released.record = lambda: events.append("release")
        for name in ("load", "replay"):
            of_graph = getattr(Graph, name)

            def noted(graph, *inputs, name=name, of_graph=of_graph):
                if graph.stream is None:
                    events.append(name)
                return of_graph(graph, *inputs)

            monkeypatch.setattr(Graph, name, noted)
        built.step.train(1, prefetcher)
        assert events == ["replay", "release"]
        events.clear()
        # On a CPU its memory is not that of the turn's first batch.
        built.step.train(2, prefetcher)
    assert events == ["load", "release", "replay"]


def test_batches_of_a_turn_share_a_graph_behind_an_evaluation_and_a_tail_too(graphs, monkeypatch):
    buffers: dict[tuple[int, int, int], Batch] = {}

    def on_device(prefetcher: Prefetcher, batch: Batch) -> Batch:
        """Use the memory of a turn again, as on a GPU."""
        key = id(prefetcher), prefetcher._turn, batch.memory.nbytes
        buffer = buffers.setdefault(key, batch.at(batch.memory.clone()))
        buffer.memory.copy_(batch.memory)
        return batch.at(buffer.memory) if batch.global_valid < 64 else buffer

    options = [*TINY, WITH_EXCHANGE, "data.synthetic.train_rows=200"]
    with ranks_of_cpu():
        expected = build(compose_config(*options, "train.capture=false")).train(0, 8)
        graphs.clear()
        built = build(compose_config(*options))
        monkeypatch.setattr(Prefetcher, "_on_device", on_device)
        prefetcher, losses = built.prefetcher(0, 8), []
        for step in range(8):
            losses.append(built.step.train(step, prefetcher).loss)
            if step == 4:
                built.score(1)
        assert losses == expected
    training = [graph for graph in graphs if graph.stream is None and graph.in_place]
    assert [graph.replays for graph in training] == [4, 2]


def test_a_batch_in_one_memory_is_one_input_of_the_recorded_pass(graphs, monkeypatch):
    """Without an exchange its ids are those of the lookups; a batch that a thread has read is brought into the same form."""
    # As on a GPU, where a batch is copied to such a memory.
    monkeypatch.setattr(Prefetcher, "_on_device", lambda _, batch: batch)
    with ranks_of_cpu():
        plain = build(compose_config(*TINY, "train.capture=false"))
        expected = plain.train(0, 6)
        graphs.clear()
        built = build(compose_config(*TINY))
        built.train_loader.fork_readers()
        losses = built.train(0, 3)
        built.train_loader.close()
        assert losses + built.train(3, 3) == expected
    rows, columns = 64, 3 + 1 + 5
    for graph in graphs:
        assert [each.dtype for each in graph.inputs] == [torch.uint8]
        assert len(graph.inputs[0]) >= rows * columns * 4
    assert sum(graph.replays for graph in graphs) == 6


def test_scoring_and_training_share_the_memory_of_their_graphs(graphs):
    with ranks_of_cpu():
        built = build(compose_config(*TINY))
        built.train(0, 1)
        built.score(1)
        built.train(1, 1)
        built.step.close()
    training, scoring, training_of_copies = graphs
    assert training.beside is None
    assert scoring.beside is training_of_copies.beside is training
    assert [graph.in_place for graph in graphs] == [True, False, False]
    assert all(graph.is_closed for graph in graphs)


@pytest.mark.parametrize("way", TABLES)
def test_no_batch_is_handed_out_twice(way):
    with ranks_of_cpu():
        built = build(compose_config(*two_epochs("sgd", 256, way)))
        prefetcher = built.prefetcher(0, 2)
        first, _ = next(prefetcher)
        with pytest.raises(RuntimeError, match=r"call start_next\(\) once per batch"):
            next(prefetcher)
        prefetcher.start_next()
        with pytest.raises(RuntimeError, match="would lose a batch"):
            prefetcher.start_next()
        second, _ = next(prefetcher)
        prefetcher.start_next()
        assert list(prefetcher) == []
    assert not torch.equal(first.numerical, second.numerical)


def test_a_state_that_was_copied_is_loaded_into_another_step():
    with ranks_of_cpu():
        trained, other = (build(compose_config(*TINY, *rule("adam"))) for _ in range(2))
        trained.train(0, 2)
        other.train(0, 1)
        copied = {
            name: value.clone()
            for name, value in trained.step.state_dict().items()
            if name.startswith("dense")
        }
        other.step.load_state_dict(copied)
        state = other.step.state_dict()
        assert set(other.step.state_shapes()) == set(state)
        assert all(torch.equal(state[name], value) for name, value in copied.items())
