"""Models of a sequence group against plain formulas, sample after sample: logits, gradients, and what must change nothing."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, gelu

from dataloading.dataset.sequences import EventColumn, SequenceGroup
from nn.embedding.declared_tables import hands_out_rows
from nn.layers.initialization import initialise_dense
from nn.layers.pass_state import PassState, attach
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.models.options import OutputPooling, Residual, Search
from nn.models.registry import build_dense, check_model, declared_tables, find_options
from tests.helpers.events import embeddings_with_events
from tests.helpers.specs import feature, spec_of
from tests.plain_models import linear, mlp

D, L = 4, 6
FLOAT = np.dtype(np.float32)
HISTORY = SequenceGroup(
    "history",
    ("hist_item", "hist_kind", "hist_action"),
    L,
    (EventColumn("hist_time", np.dtype(np.int64)), EventColumn("hist_rating", FLOAT)),
    "hist_time",
)
SPEC = replace(
    spec_of(
        feature("user", 9),
        feature("item", 20),
        feature("kind", 7),
        feature("hist_item", 20, None, "item"),
        feature("hist_kind", 7, None, "kind"),
        feature("hist_action", 3, None),
        feature("cart_item", 20, None, "item"),
        feature("last_item", 20, 1, "item"),
        feature("tags", 11, None),
        numerical=("age", "price"),
    ),
    sequences=(HISTORY, SequenceGroup("cart", ("cart_item",), L)),
)
# One feature, no numbers, nothing beside.
SMALL = replace(
    spec_of(feature("item", 20), feature("hist_item", 20, None, "item"), numerical=()),
    sequences=(SequenceGroup("history", ("hist_item",), L),),
)
LENGTHS = [3, 0, L, 1, 2]
B = len(LENGTHS)
Parameters = dict[str, Tensor]


@dataclass(slots=True)
class Sample:
    """One sample as a formula reads it."""

    item: Tensor  # [P * D]
    events: Tensor  # [n, columns]
    ages: Tensor | None  # [n]
    numbers: list[list[float]]  # of each event, without the time
    others: Tensor


@dataclass(slots=True)
class Data:
    """Random inputs of a dataset's features."""

    spec: Any
    tables: dict[str, Tensor]
    ids: dict[str, list[list[int]]] = field(default_factory=dict)
    numbers: dict[str, list[list[float]]] = field(default_factory=dict)
    numerical: Tensor = field(default_factory=lambda: torch.zeros(B, 0))

    @classmethod
    def of(cls, spec: Any, seed: int = 0) -> "Data":
        random = np.random.default_rng(seed)
        tables = {
            table: torch.tensor(random.normal(size=(of[0].cardinality, D)))
            for table, of in spec.table_features.items()
        }
        data = cls(spec, tables)
        group_of = {name: group.name for group in spec.sequences for name in group.features}
        lengths = {"history": LENGTHS, "cart": [2, 1, 0, 3, 1]}
        for of in spec.categorical:
            counts = lengths.get(group_of.get(of.name, ""), [1, 0, 2, 3, 1])
            counts = [of.hotness or count for count in counts]
            data.ids[of.name] = [random.integers(0, of.cardinality, n).tolist() for n in counts]
        for column in spec.event_columns:
            data.numbers[column.name] = [(random.random(n) * 5 + 0.5).tolist() for n in LENGTHS]
        if "hist_time" in data.numbers:
            data.numbers["hist_time"] = [
                sorted((10 ** (random.random(n) * 7)).tolist(), reverse=True) for n in LENGTHS
            ]
        data.numerical = torch.tensor(random.normal(size=(B, len(spec.numerical))))
        return data

    def embeddings(self, declared: list[Any], **changes: Any) -> PooledEmbeddings:
        """Return the embeddings of a model that declares these tables."""
        pooled, handed_out = [], {}
        for table in declared:
            if hands_out_rows(table, self.spec):
                handed_out[table.name] = self.tables[table.name]
                continue
            for name in table.feature_names:
                offsets = np.cumsum([0, *map(len, self.ids[name])])[:-1]
                flat = torch.tensor([number for of in self.ids[name] for number in of])
                weight = self.tables[table.name]
                pooled.append(embedding_bag(flat, weight, torch.tensor(offsets), mode="sum"))
        matrix = torch.cat(pooled, 1) if pooled else torch.zeros(B, 0, dtype=torch.float64)
        return embeddings_with_events(
            self.spec, handed_out, self.ids, self.numbers, matrix, **changes
        )

    def sample(self, row: int) -> Sample:
        tables, group = self.tables, self.spec.sequences[0]

        def vectors(name: str, table: str | None = None) -> Tensor:
            return tables[table or name][self.ids[name][row]].view(-1, D)

        items = [name for name in ("item", "kind") if name in self.ids]
        shared = {
            "hist_item": "item",
            "hist_kind": "kind",
            "cart_item": "item",
            "last_item": "item",
        }
        others = [
            vectors(name, shared.get(name)).sum(0)
            for name in ("user", "tags", "cart_item", "last_item")
            if name in self.ids
        ]
        plain = [column.name for column in group.numbers if column.name != group.time]
        return Sample(
            torch.cat([vectors(name)[0] for name in items]),
            torch.cat([vectors(name, shared.get(name)) for name in group.features], 1),
            torch.tensor(self.numbers[group.time][row]) if group.time else None,
            [
                [self.numbers[name][row][event] for name in plain]
                for event in range(len(self.ids[group.features[0]][row]))
            ],
            torch.cat([*others, self.numerical[row]]),
        )


def layer_norm(p: Parameters, name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def bucket(seconds: float, buckets: int = 64) -> int:
    """Return which of two buckets per doubling, the second from the middle between them on."""
    octave = math.floor(math.log2(max(seconds, 1)))
    return min(2 * octave + (max(seconds, 1) / 2**octave >= 1.5), buckets - 1)


def event_tokens(p: Parameters, of: Sample) -> Tensor:
    """Return the tokens of a sample's events."""
    found = []
    for number, event in enumerate(of.events):
        token = event + p["tokens.places"][len(of.events) - 1 - number]
        if of.ages is not None:
            token = token + p["tokens.ages"][bucket(of.ages[number].item())]
        for value, vector in zip(of.numbers[number], p.get("tokens.numbers", []), strict=True):
            token = token + value * vector
        found.append(token)
    return torch.stack(found) if found else p["tokens.places"][:0]


def transformer(
    p: Parameters,
    x: Tensor,
    ages: Tensor | None,
    *,
    heads: int,
    residual: str,
    causal: bool,
    activation: Any,
) -> Tensor:
    """Apply all blocks to the tokens of one sample, [n, D]."""

    def attention(name: str, x: Tensor) -> Tensor:
        joined = []
        parts = [part.chunk(heads, 1) for part in linear(p, f"{name}.projections", x).chunk(3, 1)]
        for head, (q, k, v) in enumerate(zip(*parts, strict=True)):
            rows = []
            for i in range(len(x)):
                scores = []
                for j in range(i + 1 if causal else len(x)):
                    score = q[i] @ k[j] / math.sqrt(q.shape[1])
                    if (bias := p.get(f"{name}.place_bias")) is not None:
                        score = score + bias[head, i - j + (0 if causal else bias.shape[1] // 2)]
                    if (bias := p.get(f"{name}.time_bias")) is not None:
                        score = score + bias[head, bucket(abs(ages[i] - ages[j]).item())]
                    scores.append(score)
                weights = torch.softmax(torch.stack(scores), 0)
                rows.append(sum(w * v[j] for j, w in enumerate(weights)))
            joined.append(torch.stack(rows))
        return linear(p, f"{name}.attended", torch.cat(joined, 1))

    def network(name: str, x: Tensor) -> Tensor:
        return linear(p, f"{name}.output", activation(linear(p, f"{name}.hidden", x)))

    for number in range(sum(key.endswith(".attended.weight") for key in p) if len(x) else 0):
        name = f"blocks.{number}"
        for which, layer in enumerate((attention, network)):
            if residual == "post_norm":
                x = layer_norm(p, f"{name}.norms.{which}", x + layer(name, x))
                continue
            change = layer(name, layer_norm(p, f"{name}.norms.{which}", x))
            if residual == "gated":
                change = change / (1 + torch.exp(-linear(p, f"{name}.gates.{which}", x)))
            x = x + change
    return x


def din(p: Parameters, of: Sample, *, pooling: str = "sum") -> Tensor:
    query = torch.cat([of.item, of.item.new_zeros(of.events.shape[1] - len(of.item))])
    weights = []
    for event in of.events:
        x = torch.cat([query, event, query - event, query * event])[None]
        for number in range(2):
            x = 1 / (1 + torch.exp(-linear(p, f"attention.layers.{number}", x)))
        weights.append(linear(p, "attention.layers.2", x)[0, 0])
    if pooling == "softmax":
        weights = [torch.exp(weight) for weight in weights]
    divisor = {"sum": 1, "mean": len(weights), "softmax": sum(weights)}[pooling]
    both = zip(weights, of.events, strict=True)
    pooled = sum((w / divisor * event for w, event in both), torch.zeros_like(query))
    x = torch.cat([of.item, pooled, of.others])[None]
    for number in range(2):
        x = linear(p, f"top.layers.{number}", x)
        x = torch.where(x > 0, x, x * p[f"top.activations.{number}.weight"])
    return linear(p, "top.layers.2", x)[0, 0]


def top(p: Parameters, of: Sample, *found: Tensor) -> Tensor:
    return mlp(p, "top", torch.cat([of.item, *found, of.others])[None])[0, 0]


def sasrec(p: Parameters, of: Sample, *, heads: int = 1, residual: str = "pre_norm") -> Tensor:
    x = event_tokens(p, of)
    relu = torch.relu
    x = transformer(p, x, of.ages, heads=heads, residual=residual, causal=True, activation=relu)
    last = layer_norm(p, "norm", x[-1]) if len(x) else x.new_zeros(x.shape[1])
    return last[: len(of.item)] @ of.item + top(p, of)


def bst(
    p: Parameters, of: Sample, *, heads: int = 2, residual: str = "post_norm", is_mean: bool = False
) -> Tensor:
    target = torch.cat([of.item, of.item.new_zeros(of.events.shape[1] - len(of.item))])
    x = torch.cat([event_tokens(p, of), target[None]])
    ages = None if of.ages is None else torch.cat([of.ages, torch.zeros(1)])
    x = transformer(
        p,
        x,
        ages,
        heads=heads,
        residual=residual,
        causal=False,
        activation=lambda x: torch.where(x > 0, x, 0.01 * x),
    )
    return top(p, of, sum(x) / len(x) if is_mean else x[-1])


def transact(p: Parameters, of: Sample, *, recent: int, outputs: int, heads: int = 2) -> Tensor:
    x = torch.stack([torch.cat([x, of.item]) for x in event_tokens(p, of)[-recent:]] or [of.item])[
        : len(of.events)
    ]
    columns = of.events.shape[1] + len(of.item)
    last = [of.item.new_zeros(columns)] * (outputs + 1)
    mean = of.item.new_zeros(of.events.shape[1])
    if len(x):
        ages = None if of.ages is None else of.ages[-recent:]
        kinds = {"residual": "post_norm", "causal": False, "activation": torch.relu}
        x = transformer(p, x, ages, heads=heads, **kinds)
        for position in range(min(outputs, len(x))):
            last[position] = x[-1 - position]
        last[-1] = torch.stack([column.max() for column in x.T])
        mean = of.events.mean(0)
    last[-1] = linear(p, "maximum", last[-1][None])[0]
    return top(p, of, *last, mean)


def onetrans(p: Parameters, of: Sample, *, tokens: int, heads: int = 4) -> Tensor:
    def rms(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p[f"{name}.weight"]

    def of_token(name: str, token: int, x: Tensor) -> Tensor:
        return x @ p[f"{name}.weight"][token] + p[f"{name}.bias"][token, 0]

    own = {f"tokens.{key[7:]}": value for key, value in p.items() if key.startswith("places.")}
    read = replace(of, events=linear(p, "events", of.events))
    features = linear(p, "features", torch.cat([of.item, of.others])[None])[0].chunk(tokens)
    x = [*event_tokens(own, read), *features]
    first = len(of.events)
    for number in range(sum(key.endswith("token_attended.weight") for key in p)):
        name = f"blocks.{number}"
        is_last = f"{name}.hidden.weight" not in p
        projected = []
        for position, vector in enumerate(x):
            normed = rms(f"{name}.attention_norm", vector)
            if position < first:
                projected.append(linear(p, f"{name}.projections", normed[None])[0])
            else:
                projected.append(of_token(f"{name}.token_projections", position - first, normed))
        q, k, v = torch.stack(projected).chunk(3, 1)
        mask = torch.full((len(x), len(x)), -math.inf, dtype=q.dtype).triu(1)
        found = []
        for one, other, values in zip(
            q.chunk(heads, 1), k.chunk(heads, 1), v.chunk(heads, 1), strict=True
        ):
            scores = one @ other.T / math.sqrt(one.shape[1]) + mask
            found.append(torch.softmax(scores, 1) @ values)
        attended = torch.cat(found, 1)
        for position in range(first if is_last else 0, len(x)):
            vector, token = attended[position], position - first
            if token < 0:
                z = x[position] + linear(p, f"{name}.attended", vector[None])[0]
                hidden = linear(p, f"{name}.hidden", rms(f"{name}.network_norm", z)[None])
                x[position] = z + linear(p, f"{name}.output", gelu(hidden))[0]
                continue
            z = x[position] + of_token(f"{name}.token_attended", token, vector)
            network = f"{name}.token_network"
            hidden = rms(f"{name}.network_norm", z) @ p[f"{network}.up"][token]
            hidden = gelu(hidden + p[f"{network}.up_bias"][token, 0])
            x[position] = (
                z + hidden @ p[f"{network}.down"][token] + p[f"{network}.down_bias"][token, 0]
            )
    return mlp(p, "top", torch.cat(x[first:])[None])[0, 0]


def sim(
    p: Parameters, of: Sample, *, found: int, recent: int, hashes: Tensor | None = None
) -> Tensor:
    item, heads, columns = of.item, 2, of.events.shape[1]
    scores = []
    for event in of.events:
        one, other = event[: len(item)], item
        if hashes is not None:
            one, other = ((each @ hashes).sign() for each in (one, other))
        scores.append((one @ other).item())
    best = sorted(range(len(scores)), key=lambda event: -scores[event])[:found]
    read = event_tokens(p, of)
    queries = (p["query.weight"] @ item).chunk(heads)
    results = [item.new_zeros(columns // heads)] * heads
    for head in range(heads if best else 0):
        keys, values = (
            (read[best] @ weight.T).chunk(heads, 1)[head]
            for weight in p["key_value.weight"].chunk(2)
        )
        weights = torch.softmax(keys @ queries[head] / math.sqrt(columns / heads), 0)
        results[head] = weights @ values
    if recent:
        query = torch.cat([item, item.new_zeros(columns - len(item))])
        pooled = torch.zeros_like(query)
        for event in of.events[-recent:]:
            x = torch.cat([query, event, query - event, query * event])[None]
            for number in range(2):
                x = 1 / (1 + torch.exp(-linear(p, f"attention.layers.{number}", x)))
            pooled = pooled + linear(p, "attention.layers.2", x)[0, 0] * event
        results.append(pooled)
    return top(p, of, *results)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    plain: Any
    options: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    spec: Any = SPEC

    def typed(self) -> Any:
        items = [name for name in ("item", "kind") if name in self.spec.names]
        given = {"embedding_dim": D, "item_features": items, "sequence": "history"}
        return find_options(self.name)(name=self.name, **given, **self.options)

    def built(self) -> tuple[nn.Module, list[Any]]:
        """Return a model whose parameters all matter, and its tables."""
        model = build_dense(self.typed(), self.spec)
        initialise_dense(model, 1)
        state = PassState(1, torch.device("cpu"))
        attach(model, state)
        state.set(0, B, B, B)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.abs().max() < 0.05:
                    parameter.normal_(std=0.5)
        return model.double(), declared_tables(self.typed(), self.spec)


DIN = {"attention_hidden": [9, 5], "hidden": [8, 6]}
TWO = {"blocks": 2, "heads": 2, "hidden": [7], "relative_bias": True}
CASES = {
    **{
        f"din, {pooling.value}": Case(
            "din", din, DIN | {"attention_pooling": pooling}, {"pooling": pooling.value}
        )
        for pooling in find_options("din")().attention_pooling.__class__
    },
    "din of one feature": Case("din", din, DIN, spec=SMALL),
    "sasrec": Case("sasrec", sasrec, {"blocks": 1, "hidden": [7]}),
    "sasrec of one feature": Case("sasrec", sasrec, {"expansion": 3}, spec=SMALL),
    **{
        f"sasrec, {of.value}": Case(
            "sasrec", sasrec, TWO | {"residual": of}, {"residual": of.value, "heads": 2}
        )
        for of in Residual
    },
    "bst": Case("bst", bst, {"hidden": [7]}),
    "bst of one feature": Case("bst", bst, {"blocks": 2, "expansion": 2}, spec=SMALL),
    "bst, mean": Case("bst", bst, TWO | {"pooling": OutputPooling.mean}, {"is_mean": True}),
    **{
        f"bst, {of.value}": Case("bst", bst, TWO | {"residual": of}, {"residual": of.value})
        for of in Residual
    },
    "transact": Case(
        "transact",
        transact,
        {"recent": 4, "outputs": 3, "hidden": [7], "heads": 4, "relative_bias": True},
        {"recent": 4, "outputs": 3, "heads": 4},
    ),
    "transact, compact": Case(
        "transact", transact, {"recent": 2, "outputs": 1}, {"recent": 2, "outputs": 1}
    ),
    "transact of one feature": Case(
        "transact", transact, {"outputs": 2}, {"recent": L, "outputs": 2}, SMALL
    ),
    "onetrans": Case(
        "onetrans",
        onetrans,
        {"tokens": 3, "token_dim": 8, "expansion": 2, "hidden": [7]},
        {"tokens": 3},
    ),
    "onetrans of one feature": Case(
        "onetrans", onetrans, {"tokens": 1, "token_dim": 4, "blocks": 1}, {"tokens": 1}, SMALL
    ),
    "sim": Case("sim", sim, {"found": 2, "recent": 1}, {"found": 2, "recent": 1}),
    "eta": Case(
        "sim",
        sim,
        {"found": 3, "recent": 2, "search": Search.hash, "hash_bits": 16},
        {
            "found": 3,
            "recent": 2,
            "hashes": torch.randn(2 * D, 16, generator=torch.Generator().manual_seed(0)).double(),
        },
    ),
    "sim of one feature": Case("sim", sim, {"recent": 0}, {"found": L, "recent": 0}, SMALL),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.parametrize("name", ["sasrec", "bst", "transact", "onetrans", "sim"])
def test_no_bias_drowns_small_rows_of_tables(name):
    model = build_dense(Case(name, None, {"hidden": [7]}).typed(), SPEC)
    initialise_dense(model, 1)
    biases = {key for key, of in model.named_parameters() if key.endswith("bias") and of.any()}
    # DIN's unit has those of DIN.
    assert biases <= {f"attention.layers.{number}.bias" for number in range(2)}


@each_case
def test_logits_and_gradients_equal_the_plain_formula(case):
    model, declared = case.built()
    data = Data.of(case.spec)
    leaves = dict(model.named_parameters()) | {f"table {k}": v for k, v in data.tables.items()}
    for leaf in leaves.values():
        leaf.requires_grad_()
    logits = model(data.numerical, data.embeddings(declared))
    parameters = dict(model.named_parameters())
    wanted = torch.stack(
        [case.plain(parameters, data.sample(row), **case.arguments) for row in range(B)]
    )
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)
    weights = torch.randn(B, dtype=torch.float64)
    gradients = torch.autograd.grad((logits.double() * weights).sum(), leaves.values())
    expected = torch.autograd.grad((wanted * weights).sum(), leaves.values())
    for name, gradient, right in zip(leaves, gradients, expected, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-5, msg=f"gradient of {name}")
        assert right.any() or "attention.layers.2.bias" in name, f"{name} is not used"


@each_case
def test_what_is_behind_the_last_event_and_other_samples_change_nothing(case):
    model, declared = case.built()
    model.eval()
    data, others = Data.of(case.spec), Data.of(case.spec, 1)
    for name, ids in others.ids.items():
        others.ids[name] = [*ids[:2], *data.ids[name][2:]]
    for name, numbers in others.numbers.items():
        others.numbers[name] = [*numbers[:2], *data.numbers[name][2:]]
    others.tables, others.numerical = data.tables, data.numerical
    wanted = model(data.numerical, data.embeddings(declared))
    unused = (math.nan, math.inf, -1e30, 5.0, 7.0)
    for leaf in data.tables.values():
        leaf.requires_grad_()
    found = model(others.numerical, others.embeddings(declared, unused=unused))
    torch.testing.assert_close(found[2:], wanted[2:])
    assert not torch.equal(found[:2], wanted[:2])
    gradients = torch.autograd.grad(found.sum(), [*data.tables.values(), *model.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)


@each_case
def test_bf16_autocast_gives_float32_logits_close_to_the_exact_ones(case):
    model, declared = case.built()
    model, data = model.float().eval(), Data.of(case.spec)
    data.tables = {name: table.float() for name, table in data.tables.items()}
    numerical = data.numerical.float()
    wanted = model(numerical, data.embeddings(declared))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(numerical, data.embeddings(declared))
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, wanted, rtol=0.1, atol=0.3)


@each_case
def test_the_initial_weights_depend_on_the_seed_alone(case):
    models = []
    for draws in (0, 5):
        torch.randn(draws)
        model = build_dense(case.typed(), case.spec, 3)
        initialise_dense(model, 3)
        models.append(model)
    first, second = models
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


def test_din_of_a_sequence_group_is_that_of_padded_histories():
    """With the same parameters, on rows that both can say."""
    group = SequenceGroup("history", ("hist_item", "hist_kind"), L)
    both = feature("item", 20), feature("kind", 7)
    ragged = (feature("hist_item", 20, None, "item"), feature("hist_kind", 7, None, "kind"))
    padded = (feature("hist_item", 20, L, "item"), feature("hist_kind", 7, L, "kind"))
    spec = replace(
        spec_of(*both, *ragged, feature("user", 9), numerical=("age",)), sequences=(group,)
    )
    fixed = spec_of(*both, *padded, feature("user", 9), numerical=("age", "history_length"))
    data = Data.of(spec)
    names = {"item_features": ["item", "kind"], **DIN, "embedding_dim": D, "name": "din"}
    kind = find_options("din")
    one = kind(sequence="history", **names)
    other = kind(history_features=list(group.features), **names)
    model, long = build_dense(one, spec).double(), build_dense(other, fixed).double()
    long.load_state_dict(model.state_dict())
    vectors = []
    for item, past in zip(("item", "kind"), group.features, strict=True):
        weight = data.tables[item]
        full = [[*ids, *[3] * (L - len(ids))] for ids in data.ids[past]]
        vectors += [weight[torch.tensor(data.ids[item])], weight[torch.tensor(full)]]
    vectors.append(data.tables["user"][torch.tensor(data.ids["user"])])
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)[:, None]
    wanted = long(
        torch.cat([data.numerical, lengths], 1), torch.cat([x.flatten(1) for x in vectors], 1)
    )
    logits = model(data.numerical, data.embeddings(declared_tables(one, spec)))
    torch.testing.assert_close(logits, wanted)


SHARED = replace(
    spec_of(
        feature("item"),
        feature("hist_item", 50, None, "item"),
        feature("other_item", 50, None, "item"),
        feature("tags", 50, None, "item"),
        feature("genre"),
    ),
    sequences=(
        SequenceGroup("history", ("hist_item",), L),
        SequenceGroup("cart", ("other_item",), L),
    ),
)
REFUSALS = {
    "no such group": (
        {"sequence": "clicks"},
        "model.sequence=clicks is no sequence group of the dataset; it has history, cart",
    ),
    "no candidate": (
        {"item_features": []},
        "model.name=bst needs a candidate for the events of hist_item, got model.item_features=[]; name features of item",
    ),
    "more features than an event has": (
        {"item_features": ["item", "genre"]},
        "model.name=bst needs a candidate for the events of hist_item, got model.item_features=['item', 'genre']",
    ),
    "a candidate that is not there": (
        {"item_features": ["movie"]},
        "model.item_features names 'movie', which the dataset lacks",
    ),
    "a candidate with another table": (
        {"item_features": ["genre"]},
        "item feature 'genre' needs one id per row and the table of 'hist_item', got 1 ids and table 'genre'; name item "
        "features in the order of hist_item: here item, or set table: item in the feature spec",
    ),
    "a candidate of several ids": (
        {"item_features": ["tags"]},
        "item feature 'tags' needs one id per row and the table of 'hist_item', got varying ids",
    ),
    "ids of an event's table in no group": (
        {},
        "feature 'tags' shares the table of 'history' and has several ids per row; make it a sequence group, or give it a table",
    ),
    "heads that do not divide": (
        {"heads": 3},
        "model.heads must divide the 16 columns of an event's token, got 3",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_fit_is_refused_on_one_line(options, message):
    spec = SHARED
    if "heads" in options:
        without = tuple(of for of in SHARED.categorical if of.name != "tags")
        spec = replace(SHARED, categorical=without)
    given = {"name": "bst", "sequence": "history", "item_features": ["item"]}
    typed = find_options("bst")(**given | options)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_model(typed, spec)
    assert "\n" not in str(error.value)
