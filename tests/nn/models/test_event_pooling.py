"""Pooling of events in models of a vector per feature: by formulas, and what is refused."""

import re
from dataclasses import replace

import pytest
import torch

from configs.schema import EventPooling
from dataloading.dataset.sequences import SequenceGroup
from nn.layers.initialization import initialise_dense
from nn.models.event_pooling import WithPooledEvents, pooled_tables
from nn.models.registry import build_dense, check_model, declared_tables, find_options
from tests.helpers.specs import feature, spec_of
from tests.nn.models.test_sequence_models import SPEC, B, D, Data

POOLED = EventPooling.last, EventPooling.attention
MODELS = {
    "dlrm": {"bottom_mlp": [8, D], "top_mlp": [5, 1]},
    "deepfm": {"hidden": [5], "dropout": 0.0},
    "sasrec": {"item_features": ["kind"], "sequence": "kinds", "hidden": [5]},
}
TWO_GROUPS = replace(
    SPEC,
    sequences=(
        SequenceGroup("kinds", ("hist_kind",), 6),
        SequenceGroup("items", ("hist_item", "hist_action"), 6),
        SPEC.sequences[1],
    ),
)


def plain_pooling(how, model, table, weight, ids):
    """Return the pooled vector of each sample, by loops."""
    found = []
    for of_sample in ids:
        if not of_sample:
            found.append(weight.new_zeros(weight.shape[1]))
            continue
        events = weight[of_sample]
        if how is EventPooling.last:
            found.append(events[-1])
            continue
        layer = model.poolings[table]
        scores = (
            torch.tanh(events @ layer.hidden.weight.T + layer.hidden.bias) @ layer.score.weight[0]
        )
        found.append((torch.softmax(scores, 0)[:, None] * events).sum(0))
    return torch.stack(found)


@pytest.mark.parametrize("how", POOLED)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_reads_the_pooled_vectors_in_its_order(name, how):
    options = find_options(name)(name=name, embedding_dim=D, sequence_pooling=how, **MODELS[name])
    model = build_dense(options, TWO_GROUPS)
    initialise_dense(model, 1)
    model = model.double().eval()
    data, declared = Data.of(TWO_GROUPS), declared_tables(options, TWO_GROUPS)
    random = torch.Generator().manual_seed(3)
    for table in declared:
        shape = table.num_embeddings, table.embedding_dim
        data.tables[table.name] = torch.randn(shape, generator=random, dtype=torch.float64)
    without = replace(options, sequence_pooling=EventPooling.sum)
    embeddings = data.embeddings(declared)
    seen = []
    model.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    logits = model(data.numerical, embeddings)
    of_group = {of for group in TWO_GROUPS.sequences for of in group.features}
    wanted = []
    for table in declared_tables(without, TWO_GROUPS):
        if table.pooling.name == "NONE":
            continue
        weight = data.tables[table.name]
        for of in table.feature_names:
            if of in of_group:
                wanted.append(plain_pooling(how, model, table.name, weight, data.ids[of]))
            else:
                wanted.append(torch.stack([weight[ids].sum(0) for ids in data.ids[of]]))
    (found,) = seen
    found = found if torch.is_tensor(found) else found.matrix()
    torch.testing.assert_close(found, torch.cat(wanted, 1))
    assert logits.shape == (B,)
    logits.sum().backward()
    assert all(parameter.grad.any() for parameter in model.poolings.parameters())


def test_the_mean_is_the_tables_own():
    options = find_options("deepfm")(name="deepfm", sequence_pooling=EventPooling.mean)
    tables = {table.name: table.pooling.name for table in declared_tables(options, SPEC)}
    assert tables["item"] == tables["weight_hist_action"] == "MEAN"
    assert tables["user"] == tables["tags"] == "SUM"
    assert not isinstance(build_dense(options, SPEC), WithPooledEvents)


@pytest.mark.parametrize("how", [EventPooling.sum, EventPooling.mean])
def test_weights_of_events_weigh_their_vectors_and_gradients(how):
    weights = {"event_weights": {"history": "hist_rating"}, "sequence_pooling": how}
    options = find_options("deepfm")(name="deepfm", embedding_dim=D, **weights)
    model = build_dense(options, SPEC).double()
    data, declared = Data.of(SPEC), declared_tables(options, SPEC)
    random = torch.Generator().manual_seed(3)
    for table in declared:
        shape = table.num_embeddings, table.embedding_dim
        rows = torch.randn(shape, generator=random, dtype=torch.float64)
        data.tables[table.name] = rows.requires_grad_()
    data.numbers["hist_rating"][1] = [0.0] * len(data.numbers["hist_rating"][1])
    handed = {table.name for table in declared if table.pooling.name == "NONE"}
    assert handed == {
        f"{prefix}{name}" for name in ("item", "kind", "hist_action") for prefix in ("", "weight_")
    }
    seen = []
    model.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    model.eval()(data.numerical, data.embeddings(declared))
    (found,) = seen
    found = found if torch.is_tensor(found) else found.matrix()
    columns = 0
    for table in declared:
        weight, width = data.tables[table.name], table.embedding_dim
        for of in table.feature_names:
            if of.startswith("hist_"):
                plain = torch.stack(
                    [
                        (torch.tensor(w).view(-1, 1) * weight[ids]).sum(0)
                        / (1 if how is EventPooling.sum else sum(w) or 1)
                        for w, ids in zip(data.numbers["hist_rating"], data.ids[of], strict=True)
                    ]
                )
                pooled = found[:, columns : columns + width].double()
                torch.testing.assert_close(pooled, plain, rtol=1e-6, atol=1e-6)
                pair = [
                    torch.autograd.grad(x.square().sum(), weight, retain_graph=True)[0]
                    for x in (pooled, plain)
                ]
                torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-5)
            columns += width


def test_a_negative_weight_has_no_result():
    weights = {"event_weights": {"history": "hist_rating"}}
    options = find_options("deepfm")(name="deepfm", embedding_dim=D, **weights)
    model, data = build_dense(options, SPEC).double().eval(), Data.of(SPEC)
    declared = declared_tables(options, SPEC)
    for table in declared:
        data.tables[table.name] = torch.ones(table.num_embeddings, table.embedding_dim).double()
    data.numbers["hist_rating"][-1][0] = -0.5
    is_lost = model(data.numerical, data.embeddings(declared)).isnan()
    assert is_lost.tolist() == [False] * (B - 1) + [True]


SHARED = replace(
    spec_of(feature("item"), feature("past", 50, None, "item"), feature("tags", 50, None, "item")),
    sequences=(SequenceGroup("history", ("past",), 5),),
)
REFUSALS = {
    "no sequence group": (
        replace(SPEC, sequences=()),
        "model.sequence_pooling=last has no effect: no table sums a feature of a sequence group; leave it out",
    ),
    "several ids in the table of events": (
        SHARED,
        "model.sequence_pooling=last: feature 'tags' shares table 'item' with events and has several ids per row; make it a "
        "sequence group, or give it a table of its own",
    ),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"event_weights": {"past": "w"}}, "model.event_weights names 'past', which the dataset lacks; it has history"),
        ({"event_weights": {"cart": "w"}}, "model.event_weights.cart names 'w', which the dataset lacks; it has none"),
        (
            {"event_weights": {"history": "hist_rating"}, "sequence_pooling": EventPooling.last},
            "model.event_weights weighs sums and means, and model.sequence_pooling=last is none",
        ),
    ],
)  # fmt: skip
def test_weights_that_are_missing_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_model(find_options("deepfm")(name="deepfm", **changes), SPEC)


def test_weights_of_a_group_that_the_model_reads_itself_are_refused():
    options = find_options("sasrec")(name="sasrec", event_weights={"history": "hist_rating"})
    with pytest.raises(
        ValueError, match=r"has no effect on 'history': no table of model\.name=sasrec sums"
    ):
        pooled_tables([], options, SPEC)


@pytest.mark.parametrize(("spec", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_pooled_is_refused(spec, message):
    options = find_options("deepfm")(name="deepfm", sequence_pooling=EventPooling.last)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_model(options, spec)
