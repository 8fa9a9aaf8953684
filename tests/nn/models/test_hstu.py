"""HSTU against its formulas, the numbers of MLPerf's dlrm_v4, and what must not reach a result."""

import math
from copy import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from configs.schema import ModelConfig
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.sequences import EventColumn, SequenceGroup
from nn.layers.distinct_rows import DistinctRows
from nn.layers.hstu import SampleParts, position_index, spread_rows, time_index
from nn.layers.initialization import initialise_dense
from nn.layers.pass_state import PassState, attach
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence_events import SequenceEvents
from nn.layers.stu import STULayer
from nn.models.description import describe_model
from nn.models.hstu import HSTU
from nn.models.registry import build_meta, check_model, model_options
from nn.ops.hstu_attention import may_see
from tests.helpers.command import ROOT
from tests.helpers.composed import losses_of_cases
from tests.helpers.distributed import run_distributed
from tests.helpers.specs import feature, spec_of
from tests.plain_hstu import stu_layer, user_item_logits

LONGEST = 7
FLOAT = np.dtype(np.float32)
ITEMS = ["item", "artist"]
HISTORIES = ["hist_item", "hist_artist"]
OPTIONS = {
    "name": "nn.models.hstu:HSTU",
    "embedding_dim": 6,
    "item_features": ITEMS,
    "action": "hist_action",
    "hour": "hour",
    "input_hidden": 5,
    "width": 8,
    "layers": 2,
    "heads": 2,
    "head_dim": 4,
    "positions": 12,
    "time_buckets": 100,
    "input_dropout": 0.0,
    "dropout": 0.0,
    "attention_norm": "batch_max",
}
RESEARCH = {"silu_all": True, "concat": False, "relative_bias": True}
ACTIONS = [0, 1, 2, 3, 4, 5, 6, 7, 8]


def options_of(**options: object) -> ModelConfig:
    return model_options(OmegaConf.create(OPTIONS | options))


def hstu_spec(num_candidates: int = 1, num_tasks: int = 1, rows: int = 40):
    numbers = (EventColumn("hist_action", FLOAT), EventColumn("hist_time", np.dtype(np.int64)))
    spec = spec_of(
        feature("user", 10),
        feature("cross", 20),
        *(feature(name, rows, num_candidates) for name in ITEMS),
        *(feature(name, rows, None, of) for name, of in zip(HISTORIES, ITEMS, strict=True)),
        numerical=("hour",),
        labels=tuple(f"label_{number}" for number in range(num_candidates * num_tasks)),
    )
    group = SequenceGroup("history", tuple(HISTORIES), LONGEST, numbers, "hist_time")
    return replace(spec, sequences=(group,))


class Samples:
    """Samples as lists, and as the embeddings of a batch of them, whose positions behind the last event hold NaN."""

    def __init__(self, lengths: list[int], num_candidates: int = 1, dtype=torch.float32) -> None:
        draw = torch.Generator().manual_seed(3)
        self.lengths, self.num_candidates = lengths, num_candidates
        events, candidates = sum(lengths), len(lengths) * num_candidates
        # An artist follows from its item.
        self.ids = {"hist_item": torch.randint(0, 9, (events,), generator=draw)}
        self.ids["item"] = torch.randint(0, 9, (candidates,), generator=draw)
        for name, of in (("hist_artist", "hist_item"), ("artist", "item")):
            self.ids[name] = self.ids[of] // 2
        self.rows = {
            name: torch.randn(size, 6, generator=draw, dtype=dtype)
            for name, size in (("item", 9), ("artist", 5))
        }
        self.context = torch.randn(len(lengths), 12, generator=draw, dtype=dtype)
        self.actions = torch.randint(0, 9, (events,), generator=draw).to(dtype)
        ages = [
            torch.rand(length, generator=draw).mul(2e5).add(1).sort(descending=True)[0]
            for length in lengths
        ]
        self.ages = torch.cat(ages).to(dtype)
        self.hours = torch.rand(len(lengths), 1, generator=draw).mul(200).to(dtype)

    def embeddings(self, spare: int = 3, first: int = 0) -> PooledEmbeddings:
        """Return the embeddings; `first` events of other samples come before."""
        lengths = torch.tensor(self.lengths)
        starts = lengths.cumsum(0) - lengths + first
        capacity = first + sum(self.lengths) + spare
        samples = torch.searchsorted(starts, torch.arange(capacity), right=True).sub(1).clamp(min=0)

        def filled(values: Tensor, other: float) -> Tensor:
            out = torch.full((capacity,), other, dtype=values.dtype)
            out[first : first + len(values)] = values
            return out

        def rows_of(table: str, name: str) -> DistinctRows:
            rows = torch.cat([self.rows[table], torch.zeros_like(self.rows[table][:1])])
            ids = self.ids[name].int()
            if name in HISTORIES:
                return DistinctRows(rows, filled(ids, len(rows) - 1), starts, lengths)
            each = torch.arange(len(self.lengths)) * self.num_candidates
            return DistinctRows(rows, ids, each, torch.full_like(each, self.num_candidates))

        pairs = zip(ITEMS, HISTORIES, strict=True)
        events = SequenceEvents(
            {history: rows_of(item, history) for item, history in pairs},
            {
                "hist_action": filled(self.actions, math.nan),
                "hist_time": filled(self.ages, math.nan),
            },
            starts,
            lengths,
            samples,
            LONGEST,
        )
        return PooledEmbeddings.with_rows(self.context, rows_of, lambda name: events)

    def of(self, number: int) -> dict:
        """Return the arguments of the plain formulas of one sample."""
        first = sum(self.lengths[:number])
        events = slice(first, first + self.lengths[number])
        own = slice(number * self.num_candidates, (number + 1) * self.num_candidates)
        return {
            "context": self.context[number].view(2, 6),
            "events": [
                self.rows[i][self.ids[h][events]] for i, h in zip(ITEMS, HISTORIES, strict=True)
            ],
            "candidates": [self.rows[item][self.ids[item][own]] for item in ITEMS],
            "actions": self.actions[events].int().tolist(),
            "ages": self.ages[events],
            "hours": self.hours[number].item(),
        }

    def leaves(self) -> list[Tensor]:
        return [*self.rows.values(), self.context]


def model_of(num_candidates: int = 1, num_tasks: int = 1, dtype=torch.float32, **options) -> HSTU:
    model = HSTU(options_of(**options), hstu_spec(num_candidates, num_tasks))
    initialise_dense(model, 1)
    draw = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        # Fresh biases are zero, which would hide one that is forgotten.
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model.to(dtype)


def plain_logits(model: HSTU, samples: Samples, **options) -> Tensor:
    weights, count = dict(model.named_parameters()), samples.num_candidates
    longest = {
        "batch_max": max(samples.lengths) + 3,
        "capacity": LONGEST + 3,
    }
    found = []
    for number, length in enumerate(samples.lengths):
        given = samples.of(number)
        ages = given.pop("ages")
        query = 0.0
        if options.get("query_time", "last_event") == "last_event" and length:
            query = ages[-1].item()
        all_ages = torch.tensor([1e18] * 2 + ages.tolist() + [query] * count, dtype=ages.dtype)
        logits = user_item_logits(
            weights,
            heads=2,
            layers=2,
            n=longest.get(options.get("attention_norm", "batch_max"), length + 3),
            bits=options.get("action_bits", [1, 2, 4]),
            seconds=ages - query,
            ages=all_ages if options.get("relative_bias") else None,
            **{key: options[key] for key in ("silu_all", "concat") if key in options},
            **given,
        )
        found.append(logits.flatten())
    return torch.stack(found).squeeze(1)


def outcome(logits: Tensor, model: HSTU, samples: Samples) -> list[Tensor]:
    """Return logits and the gradients of all parameters and embeddings."""
    weight = torch.arange(1, logits.numel() + 1, dtype=logits.dtype).view_as(logits) / 5
    targets = [*model.parameters(), *samples.leaves()]
    grads = torch.autograd.grad((logits * weight).sum(), targets, allow_unused=True)
    return [logits.detach(), *(torch.zeros(()) if grad is None else grad for grad in grads)]


LENGTHS = [4, 0, 7, 1, 6]


@pytest.mark.parametrize(
    ("num_candidates", "num_tasks", "options"),
    [
        (1, 1, {}),
        (1, 2, {"attention_norm": "length", "query_time": "sample"}),
        (3, 2, {"attention_norm": "capacity", "action_bits": [8, 1]}),
        (1, 1, RESEARCH),
        (2, 1, RESEARCH | {"item_mlps": "item"}),
        (2, 1, {"item_mlps": "item", "positions": 4, "time_buckets": 20}),
    ],
)
def test_logits_and_gradients_are_those_of_the_formulas(num_candidates, num_tasks, options):
    model = model_of(num_candidates, num_tasks, **options)
    samples = Samples(LENGTHS, num_candidates)
    for leaf in samples.leaves():
        leaf.requires_grad_()
    got = outcome(model(samples.hours, samples.embeddings()), model, samples)
    wanted = outcome(plain_logits(model, samples, **options), model, samples)
    assert got[0].shape == (
        (5,) if num_candidates * num_tasks == 1 else (5, num_candidates * num_tasks)
    )
    names = ["logits", *dict(model.named_parameters()), *ITEMS, "context"]
    for name, one, other in zip(names, got, wanted, strict=True):
        error = (one - other).norm() / other.norm().clamp(min=1e-3)
        assert error < (1e-6 if name == "logits" else 1e-5), (name, error)


@pytest.mark.parametrize("norm", ["batch_max", "capacity", "length"])
@pytest.mark.parametrize("options", [{}, RESEARCH, {"item_mlps": "item"}])
def test_several_candidates_are_as_many_samples_of_one(options, norm):
    """Logits, and loss with its gradients of parameters and rows; dropout apart, whose masks differ."""
    count, lengths = 3, LENGTHS
    together = Samples(lengths, count, torch.double)
    apart = Samples(lengths, count, torch.double)
    found = []
    for samples in (together, apart):
        for leaf in samples.leaves():
            leaf.requires_grad_()
    chosen = options | {"attention_norm": norm}
    model = model_of(count, dtype=torch.double, **chosen)
    found.append(model(together.hours, together.embeddings()))
    single = model_of(dtype=torch.double, **chosen)
    single.load_state_dict(model.state_dict())
    columns = []
    for number in range(count):
        one = copy(apart)
        one.num_candidates = 1
        one.ids = apart.ids | {name: apart.ids[name][number::count] for name in ITEMS}
        columns.append(single(one.hours, one.embeddings()))
    found.append(torch.stack(columns, dim=1))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-12)
    labels = torch.arange(found[0].numel()).view_as(found[0]) % 2
    losses = [binary_cross_entropy_with_logits(logits, labels.double()) for logits in found]
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
    grads = [
        torch.autograd.grad(loss, [*of.parameters(), *samples.leaves()])
        for loss, of, samples in zip(losses, (model, single), (together, apart), strict=True)
    ]
    names = [name for name, _ in model.named_parameters()]
    for name, one, other in zip([*names, "item", "artist", "context"], *grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=name)


def published() -> tuple[ModelConfig, FeatureSpec]:
    """Return the options of MLPerf's model, and the features of Yambda."""
    experiment = yaml.safe_load((ROOT / "configs/experiment/hstu_mlperf.yaml").read_text())
    items = [*ITEMS, "album"]
    names = {"name": OPTIONS["name"], "item_features": items, "hour": "hour"}
    options = options_of(**experiment["model"] | names | {"time_buckets": 2048})
    spec = spec_of(
        *(feature(f"cross_{number}") for number in range(8)),
        *(feature(name) for name in items),
        *(
            replace(feature(f"hist_{name}", hotness=None, table=name), mean_hotness=2663)
            for name in items
        ),
        numerical=("hour",),
    )
    numbers = (EventColumn("hist_action", FLOAT), EventColumn("hist_time", np.dtype(np.int64)))
    group = SequenceGroup(
        "history", tuple(f"hist_{name}" for name in items), 4086, numbers, "hist_time"
    )
    return options, replace(spec, sequences=(group,))


def test_the_published_model_has_its_size():
    options, spec = published()
    check_model(options, spec)
    model = build_meta(options, spec)

    def count(*parts) -> int:
        return sum(parameter.numel() for part in parts for parameter in part.parameters())

    assert count(model) == 15_243_057
    assert [count(layer) for layer in model.layers] == [1_839_104] * 3
    assert count(model.items.item) == 264_448
    assert count(model.items.additional) == 395_520
    assert count(model.actions.mlp) == 139_520
    assert count(model.actions) == 139_520 + 48
    assert count(model.context) == 2_101_248
    assert model.places.positions.numel() == 4_194_304
    assert model.places.times.numel() == 1_049_088
    assert count(model.user) == 265_728
    assert count(model.candidate) == 1_051_648
    assert count(model.head) == 264_193
    assert count(STULayer(8, 2, 4)) == 512
    # GFLOP of a sample of 2,672 positions, of which the last layer needs one: products thrice, those of attention 3.5 times.
    work = {name: count / 1e9 for name, count in model.activations().products.items()}
    assert 3 * work["positions"] == pytest.approx(67.2, abs=0.05)
    assert 3.5 * work["attention"] == pytest.approx(51.2, abs=0.05)


def test_the_published_model_begins_as_the_reference_does():
    """Xavier normal inside the transducer, uniform in its layers and outside of it."""
    model = HSTU(*published())
    initialise_dense(model, 1)
    bounds = {"places.positions": 8192**-0.5, "places.times": 2048**-0.5}
    stds = {"actions.of_bits": 0.1, "actions.of_candidate": 0.1}
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "biases")) or "norm.weight" in name:
            assert (parameter == ("weight" in name)).all(), name
            continue
        xavier = math.sqrt(2 / sum(parameter.shape[-2:]))
        if name.startswith(("layers", "candidate", "head")):
            bounds[name] = xavier * math.sqrt(3)
        if name in bounds:
            assert parameter.abs().max().item() == pytest.approx(bounds[name], rel=0.05), name
        std = bounds[name] / math.sqrt(3) if name in bounds else stds.get(name, xavier)
        # Of so many numbers, within five errors.
        error = 5 * std / math.sqrt(2 * parameter.numel())
        assert parameter.std().item() == pytest.approx(std, abs=error), name
        assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name


def test_a_layer_gives_the_values_and_gradients_of_the_reference():
    layer = STULayer(8, 2, 4).double()

    def wave(size: int, rate: float, factor: float, shift: float = 0.0) -> Tensor:
        return shift + factor * (rate * torch.arange(size, dtype=torch.double)).sin()

    def waves(rows: int, columns: int, rate: float, other: float, factor: float) -> Tensor:
        row, column = torch.arange(rows).double()[:, None], torch.arange(columns).double()
        return factor * (rate * row + other * column).sin()

    values = {
        "uvqk.weight": waves(8, 32, 0.7, 0.3, 0.5).T,
        "uvqk.bias": wave(32, 0.2, 0.1),
        "output.weight": waves(24, 8, 0.4, 0.9, 0.3).T,
        "input_norm.weight": wave(8, 0.5, 0.2, 1.0),
        "input_norm.bias": wave(8, 0.6, 0.1),
        "attention_norm.weight": wave(8, 0.8, 0.2, 1.0),
        "attention_norm.bias": wave(8, 0.9, 0.1),
    }
    layer.load_state_dict(values)
    x = waves(8, 8, 1.1, 0.37, 1.0).requires_grad_()
    at = positions_of([3, 5])
    y = layer(x, at, torch.tensor([5, 5]))
    wanted = [
        [
            5.5957236,
            3.4585583,
            -0.9597965,
            -4.5273652,
            -4.7728753,
            -1.7250205,
            2.1382782,
            3.7883108,
        ],
        [3.2616415, 3.2349219, 1.3670701, -1.0176052, -2.2737482, -1.6585641, 0.1341735, 1.5300488],
    ]
    torch.testing.assert_close(
        y[[2, 7]], torch.tensor(wanted, dtype=torch.double), rtol=0, atol=2e-6
    )
    y[[2, 7]].sum().backward()
    gradients = [
        [
            0.1442044,
            -0.6012577,
            -0.9824299,
            -0.7898521,
            -0.1519571,
            0.5423430,
            0.9307055,
            0.9082437,
        ],
        [
            -0.0466247,
            3.2932806,
            3.4979973,
            1.3999562,
            -1.0578227,
            -2.3352110,
            -2.3858359,
            -2.3657374,
        ],
    ]
    gradients = torch.tensor(gradients, dtype=torch.double)
    torch.testing.assert_close(x.grad[[0, 3]], gradients, rtol=0, atol=4e-6)
    assert layer.uvqk.weight.grad.abs().sum().item() == pytest.approx(139.774566, abs=1e-5)
    plain = stu_layer(x[3:], dict(layer.named_parameters()), 2, 5.0)
    torch.testing.assert_close(y[3:], plain, rtol=0, atol=1e-12)


def positions_of(lengths: list[int]):
    of = torch.tensor(lengths)
    zeros = torch.zeros(int(of.sum()), dtype=torch.long)
    events = SequenceEvents({}, {}, of.cumsum(0) - of, of, zeros, max(lengths))
    return SampleParts.of(events, 0, 0).at


def test_queries_see_what_the_reference_lets_them_see():
    seen = may_see(torch.arange(5)[:, None], torch.tensor(5), 5, 2)
    rows = ["".join(map(str, row)) for row in seen.int().tolist()]
    assert rows == ["10000", "11000", "11100", "11110", "11101"]


def test_positions_and_times_have_the_rows_of_the_reference():
    at = positions_of([4, 5])
    assert position_index(at, 2, 1, 8192).tolist() == [0, 1, 3, 2, 0, 1, 4, 3, 2]
    assert position_index(at, 2, 1, 3).tolist() == [0, 1, 2, 2, 0, 1, 2, 2, 2]
    times = torch.tensor([0.0, 0.0, 1000.0, 4600.0, 91000.0])
    assert time_index(91000 - times, 2048).tolist() == [38, 38, 38, 37, 0]
    assert time_index(torch.tensor([1e18]), 2048).item() == 2048


def results(samples: Samples, num_candidates: int = 1, first: int = 0, spare: int = 3, **options):
    model = model_of(num_candidates, dtype=torch.double, **options)
    for leaf in samples.leaves():
        leaf.requires_grad_()
    return outcome(model(samples.hours, samples.embeddings(spare, first)), model, samples)


@pytest.mark.parametrize("num_candidates", [1, 2])
def test_what_is_saved_changes_no_logit_and_no_gradient(num_candidates):
    wanted = results(Samples(LENGTHS, num_candidates, torch.double), num_candidates)
    samples = Samples(LENGTHS, num_candidates, torch.double)
    got = results(samples, num_candidates, item_mlps="item")
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


def test_an_item_of_two_artists_gives_no_number():
    samples = Samples(LENGTHS)
    samples.ids["hist_item"][:] = 3
    samples.ids["hist_artist"][0] = 0
    samples.ids["hist_artist"][1:] = 1
    model = model_of(item_mlps="item")
    assert model(samples.hours, samples.embeddings()).isnan().all()


def test_capacity_and_what_lies_behind_the_last_event_change_nothing():
    wanted = results(Samples(LENGTHS, dtype=torch.double))
    for first, spare in ((0, 0), (0, 40), (6, 2)):
        got = results(Samples(LENGTHS, dtype=torch.double), first=first, spare=spare)
        for one, other in zip(got, wanted, strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_a_sample_is_alone_with_a_constant_norm():
    samples = Samples(LENGTHS)
    model = model_of(attention_norm="capacity")
    together = model(samples.hours, samples.embeddings())
    for number, length in enumerate(LENGTHS):
        alone, first = Samples([length]), sum(LENGTHS[:number])
        alone.rows, events = samples.rows, slice(first, first + length)
        for name in ITEMS:
            alone.ids[name] = samples.ids[name][number : number + 1]
            alone.ids[f"hist_{name}"] = samples.ids[f"hist_{name}"][events]
        alone.actions, alone.ages = samples.actions[events], samples.ages[events]
        alone.context, alone.hours = samples.context[number][None], samples.hours[number][None]
        logit = model(alone.hours, alone.embeddings())
        torch.testing.assert_close(logit, together[number][None], rtol=1e-5, atol=1e-6)


def test_a_candidate_sees_no_other_and_no_event_sees_it():
    samples, model = Samples(LENGTHS, 3), model_of(3)
    before = model(samples.hours, samples.embeddings())
    samples.ids["item"][2::3] = (samples.ids["item"][2::3] + 4) % 9
    after = model(samples.hours, samples.embeddings())
    assert torch.equal(before[:, :2], after[:, :2])
    assert (before[:, 2] != after[:, 2]).all()


def test_dropout_follows_the_sample_and_not_its_place():
    def logits(first_row: int, first: int) -> Tensor:
        model = model_of(dropout=0.3, input_dropout=0.2, attention_norm="capacity").train()
        state = PassState(1, torch.device("cpu"))
        attach(model, state)
        state.set(4, 5, 5, 5)
        state.first_row.fill_(first_row)
        return model(samples.hours, samples.embeddings(first=first))

    samples = Samples(LENGTHS)
    wanted = logits(0, 0)
    torch.testing.assert_close(logits(0, 9), wanted)
    assert (logits(1, 0) != wanted).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence": "cart"}, "model.sequence=cart is no sequence group of the dataset; it has history"),
        ({"item_features": []}, "needs a candidate for the events of hist_item, hist_artist, got model.item"),
        ({"item_features": ["item", "user"]}, "item feature 'user' needs one id per row and the table of 'hist_artist', got"),
        ({"item_features": ["item"], "item_mlps": "item"}, "the events have 2 features and the candidate 1, so they"),
        ({"action": "rating"}, "model.action names 'rating', which the dataset lacks; it has hist_action,"),
        ({"hour": "minute"}, "model.hour names 'minute', which the dataset lacks; it has hour"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_dataset_is_refused(options, message):
    with pytest.raises(ValueError, match=r"model|item feature") as refused:
        check_model(options_of(**options), hstu_spec())
    assert message in str(refused.value)


def test_labels_that_are_no_multiple_of_the_candidates_are_refused():
    spec = replace(hstu_spec(3), labels=hstu_spec(2).labels)
    with pytest.raises(ValueError, match="2 labels are no multiple of 3 candidates; list the"):
        check_model(options_of(), spec)


@pytest.mark.parametrize("num_candidates", [1, 3])
def test_it_is_described_with_its_work(num_candidates):
    spec = hstu_spec(num_candidates)
    described = describe_model(options_of(), spec, spec)
    model = model_of(num_candidates)
    assert described["parameters"]["dense"] == sum(p.numel() for p in model.parameters())
    assert described["flops_per_sample"] >= sum(2 * i * o for i, o in model.linear_layers())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """256 rows for training, of which some have no events, with a number beside the hour."""
    root, draw = tmp_path_factory.mktemp("hstu") / "dataset", np.random.default_rng(1)
    spec = hstu_spec()
    with write_dataset(
        root, categorical=spec.categorical, numerical=("hour", "age"), sequences=spec.sequences
    ) as directory:
        for split, rows in (("train", 256), ("test", 64)):
            lengths = np.minimum(draw.geometric(0.2, rows) - 1, LONGEST)
            count = lengths.sum()
            items, item = draw.integers(0, 40, count), draw.integers(0, 40, rows)
            moments = np.full(rows, 10**6)
            times = [np.sort(draw.integers(0, 10**6, length)) for length in lengths]
            directory[split].append(
                numerical=np.stack([draw.integers(0, 200, rows), draw.random(rows)], 1),
                labels=draw.random(rows) < 0.4,
                ids={
                    "user": draw.integers(0, 10, rows),
                    "cross": draw.integers(0, 20, rows),
                    "item": item,
                    "artist": item // 2,
                    "hist_item": items,
                    "hist_artist": items // 2,
                },
                lengths={"history": lengths},
                events={
                    "hist_action": draw.integers(0, 8, count),
                    "hist_time": np.concatenate(times),
                },
                moments={"history": moments},
            )
    return root


def test_it_trains_alike_on_two_ranks_in_chunks_and_with_every_saving(dataset):
    options = OPTIONS | {"item_features": "[item,artist]", "dropout": 0.1, "input_dropout": 0.1}
    case = [
        *(f"model.{name}={value}" for name, value in options.items()),
        "model.attention_norm=capacity",
        f"data.path={dataset}",
        "train.batch_size=64",
        "device=cpu",
        "optimizer.lr=0.02",
    ]
    others = [
        ["train.accumulate=2"],
        ["sharding.types=[row_wise]"],
        ["model.item_mlps=item"],
    ]
    cases = [case, *([*case, *other] for other in others)]
    wanted, *found = losses_of_cases(cases, 6)
    assert len(set(wanted)) == 6
    of_ranks = run_distributed(losses_of_cases, 2, cases[:2], 6)
    for other, losses in zip(
        [*others, "2 ranks", "chunks of 2 ranks"], [*found, *of_ranks[0]], strict=True
    ):
        np.testing.assert_allclose(losses, wanted, rtol=2e-5, err_msg=str(other))


def test_positions_of_no_sample_do_not_meet_in_one_row():
    """Gradients of a row are added up one after the other: thousands of zeros would hold a GPU up."""
    lengths, spare = torch.tensor([30, 0, 40]), 700
    starts = lengths.cumsum(0) - lengths
    events = SequenceEvents({}, {}, starts, lengths, torch.zeros(70 + spare).long(), 40)
    parts = SampleParts.of(events, 2, 1)
    rows, last = torch.zeros(71, 4), torch.full((spare,), 70)
    of_events = DistinctRows(rows, torch.cat([torch.arange(70), last]), starts, lengths)
    of_items = DistinctRows(rows, torch.arange(3), torch.arange(3), torch.ones(3).int())
    [positions] = parts.positions([of_events], [of_items])
    places = spread_rows(torch.zeros_like(parts.at.offsets), parts.at, rows)
    for found in (positions, places[~parts.at.is_inside]):
        assert found.bincount().max() <= spare // 70 + 2
