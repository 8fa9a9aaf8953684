"""Options of the models beside DLRM and DCNv2: tables that they declare, defaults, and refusals."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from configs.built_in import MODELS
from configs.overrides import to_section
from configs.schema import ModelConfig
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.sequences import SequenceGroup
from nn.embedding.declared_tables import embedding_columns, hands_out_rows
from nn.layers.mlp import MLP
from nn.models.numerical_features import encoded_spec, named_numbers
from nn.models.options import DLRMOptions
from nn.models.registry import (
    build_dense,
    build_meta,
    check_model,
    declared_tables,
    find_options,
)
from tests.helpers.composed import compose_config
from tests.helpers.events import embeddings_with_events
from tests.helpers.specs import feature, sized_spec, spec_of

OPTIONS = {name: find_options(name) for name in MODELS}

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "models.md").read_text()
FAMILY = [name for name in MODELS if name not in ("dlrm", "dcnv2")]


SPEC = spec_of(
    feature("user"), feature("item"), feature("history", 50, 7, "item"), feature("kind", 21)
)
PAIRS = spec_of(*SPEC.categorical, feature("kinds", 21, 7, "kind"))
CRITEO = spec_of(
    *(feature(f"C{number}") for number in range(1, 27)),
    numerical=tuple(f"I{number}" for number in range(1, 14)),
)
ON_CRITEO: dict[str, dict[str, Any]] = {
    "din": {"item_features": ["C1"], "history_features": ["C2"], "history_length": None},
    "pepnet": {"domain_features": ["C1"], "prior_features": ["C2", "C3"]},
    "star": {"domain": "I1"},
}
HISTORY = {"item_features": ["item"], "history_features": ["history"]}


# Histories of PAIRS, and the first two features of CRITEO, as sequence groups.
RAGGED_PAIRS = replace(
    spec_of(
        *(
            replace(of, hotness=None) if of.hotness == 7 else replace(of, table=None)
            for of in PAIRS.categorical
        )
    ),
    sequences=(SequenceGroup("history", ("history",), 7), SequenceGroup("kinds", ("kinds",), 7)),
)
CRITEO_EVENTS = replace(
    CRITEO,
    categorical=tuple(
        replace(of, hotness=None, table="C1") if of.name == "C2" else of
        for of in CRITEO.categorical
    ),
    sequences=(SequenceGroup("history", ("C2",), 100),),
)
OF_EVENTS = [
    name for name, kind in OPTIONS.items() if name != "din" and hasattr(kind(), "sequence")
]
ON_CRITEO |= {name: {"item_features": ["C1"]} for name in OF_EVENTS}


def of_labels(name: str, spec: FeatureSpec) -> FeatureSpec:
    """Return the features with the labels that a model needs."""
    return replace(spec, labels=(RowColumn("click"), RowColumn("buy"))) if name == "esmm" else spec


def options_of(name: str, **options: object) -> ModelConfig:
    """Return typed options, converted as those of the command line."""
    return to_section(OmegaConf.create({"name": name, **options}), OPTIONS[name], "model")


def tables_of(name: str, spec: FeatureSpec = SPEC, **options: object):
    return [
        (
            table.name,
            table.feature_names,
            table.num_embeddings,
            table.embedding_dim,
            table.pooling.name,
        )
        for table in declared_tables(options_of(name, **options), spec)
    ]


def num_used(model: nn.Module) -> int:
    """Return the parameters of a model without the weights of MLPs that read padding only."""
    mlps = [layer for layer in model.modules() if isinstance(layer, MLP)]
    padding = sum(mlp.padding * mlp.layers[0].out_features for mlp in mlps)
    return sum(parameter.numel() for parameter in model.parameters()) - padding


def test_the_published_models_have_their_sizes():
    every = [feature.name for feature in CRITEO.categorical]
    of_sok = spec_of(*(feature(f"slot_{slot}", hotness=10) for slot in range(100)), numerical=())
    import torchrec  # noqa: F401  # whose first import fails where tensors are meta

    with torch.device("meta"):
        wide_deep = build_dense(
            options_of("wide_deep", wide_features=["C1", "C2"], deep_features=every), CRITEO
        )
        deepfm = build_dense(options_of("deepfm"), CRITEO)
        movielens = build_dense(options_of("embedding_mlp"), sized_spec(0, 3))
        sok = build_dense(
            options_of("embedding_mlp", embedding_dim=4, pooling="none", hidden=[1024] * 6), of_sok
        )
    assert num_used(wide_deep.deep) == num_used(wide_deep) == 1_490_945
    assert num_used(deepfm.deep) == 477_601
    assert num_used(deepfm) == 477_601 + 13 * (10 + 1)
    assert num_used(movielens) == movielens.num_parameters() == 22_913
    assert num_used(sok) == sok.num_parameters() == 9_346_049


@pytest.mark.parametrize("name", FAMILY)
def test_a_model_is_one_short_file(name):
    module = MODELS[name].partition(":")[0]
    lines = (ROOT / (module.replace(".", "/") + ".py")).read_text().splitlines()
    assert len(lines) <= 150


@pytest.mark.parametrize("name", MODELS)
def test_the_page_has_every_model_with_its_parameters(name):
    # As the command of the page has them: the recipe names a width of the tables.
    options = replace(compose_config(f"model.name={name}").model, **ON_CRITEO.get(name, {}))
    spec = CRITEO_EVENTS if name in OF_EVENTS else of_labels(name, CRITEO)
    check_model(options, spec)
    (row,) = re.findall(rf"^\| `{name}` \|.*", PAGE, re.MULTILINE)
    assert f"| {sum(map(torch.numel, build_meta(options, spec).parameters())):,} |" in row


def test_wide_and_deep_features_have_tables_of_their_own():
    assert tables_of("wide_deep", wide_features=["kind", "user"], embedding_dim=6) == [
        ("item", ["item", "history"], 50, 6, "SUM"),
        ("wide_user", ["user"], 50, 1, "SUM"),
        ("wide_kind", ["kind"], 21, 1, "SUM"),
    ]
    names = [name for name, *_ in tables_of("wide_deep")]
    assert names == ["user", "item", "kind", "wide_user", "wide_item", "wide_kind"]
    names = [
        name
        for name, *_ in tables_of(
            "wide_deep", wide_features=["kind"], deep_features=["user", "item", "history", "kind"]
        )
    ]
    assert names == ["user", "item", "kind", "wide_kind"]


def test_deepfm_looks_every_feature_up_twice():
    widths = [(name, columns) for name, _, _, columns, _ in tables_of("deepfm")]
    assert widths == [
        ("user", 10),
        ("item", 10),
        ("kind", 10),
        ("weight_user", 1),
        ("weight_item", 1),
        ("weight_kind", 1),
    ]


def test_din_shares_the_table_of_an_item_with_its_history():
    wanted = [
        ("item", ["item", "history"], 50, 16, "NONE"),
        ("user", ["user"], 50, 16, "SUM"),
        ("kind", ["kind"], 21, 16, "SUM"),
    ]
    assert tables_of("din", **HISTORY) == wanted
    apart = spec_of(*(feature(f.name, f.cardinality, f.hotness) for f in SPEC.categorical))
    assert tables_of("din", apart, **HISTORY) == wanted


def test_pairs_of_items_and_histories_have_the_order_of_the_options():
    spec = spec_of(
        feature("item"), feature("kind", 21), feature("kinds", 21, 7), feature("items", 50, 7)
    )
    options = {"item_features": ["kind", "item"], "history_features": ["kinds", "items"]}
    assert [(name, features) for name, features, *_ in tables_of("din", spec, **options)] == [
        ("kind", ["kind", "kinds"]),
        ("item", ["item", "items"]),
    ]


def test_columns_are_suggested():
    columns = [columns for *_, columns, _ in tables_of("embedding_mlp", embedding_dims="suggested")]
    assert columns == [16, 16, 16]
    # din takes the rows of `item`, as wide as it wants them.
    options = options_of(
        "din",
        embedding_dims="suggested",
        embedding_dim=4,
        sequence="history",
        item_features=["item"],
    )
    assert {of.name: of.embedding_dim for of in declared_tables(options, RAGGED_PAIRS)} == {
        "item": 4,
        "user": 16,
        "kind": 16,
    }
    build_meta(options, RAGGED_PAIRS)


def test_widths_of_single_tables_are_those_of_the_option():
    tables = tables_of("embedding_mlp", embedding_dims={"history": 3, "kind": 1}, pooling="none")
    assert [(name, columns, pooling) for name, _, _, columns, pooling in tables] == [
        ("user", 16, "NONE"),
        ("item", 3, "NONE"),
        ("kind", 1, "NONE"),
    ]
    options = options_of(
        "embedding_mlp", embedding_dims={"history": 3, "kind": 1}, pooling="none", hidden=[]
    )
    model = build_dense(options, SPEC)
    assert model.mlp.layers[0].in_features - model.mlp.padding == 2 + 16 + 3 * (1 + 7) + 1


# Of options whose valid values depend on others, or on the features.
OTHER_VALUES: dict[str, Any] = {
    "embedding_dim": 32,
    "embedding_dtype": "bf16",
    "embedding_init": 0.5,
    "bottom_mlp": [9, 8],
    "top_mlp": [9, 8, 1],
    "hidden_1": [30],
    "hidden_2": [20],
    "embedding_dims": {"kind": 3},
    "item_features": ["kind"],
    "history_features": ["kinds"],
    "history_length": None,
    "history_positions": 3,
    "wide_features": ["kind"],
    "deep_features": ["user", "item", "history", "kind", "kinds"],
    "gate_features_1": ["item"],
    "gate_features_2": ["item"],
    "heads": 5,
    "tokens": 8,
    "token_dim": 32,
    "active_experts": 0.5,
    "domain_features": ["item"],
    "domain": "history_length",
    "prior_features": ["item"],
    "feature_order": ["kinds", "age"],
    "sequence": "kinds",
    "recent": 1,
    "found": 1,
    "hash_bits": 1,
}
BOTTOM = {"embedding_dim": 8, "bottom_mlp": [8]}
# What a model needs, and what an option needs to have an effect.
NEEDED: dict[str, dict[str, Any]] = {
    "dlrm": BOTTOM,
    "dcnv2": BOTTOM,
    "din": HISTORY,
    "pepnet": {"domain_features": ["kind"], "prior_features": ["user"]},
    "star": {"domain": "age"},
    "wide_deep.deep_features": {"wide_features": ["kind", "kinds"]},
    "rankmixer.active_experts": {"experts": 2},
    "masknet.hidden": {"structure": "parallel"},
    "masknet.batch_norm": {"structure": "parallel"},
    **{
        name: {"item_features": ["item"], "sequence": "history", "embedding_dim": 20}
        for name in OF_EVENTS
    },
    "transact.recent": {"recent": 2},
    "sim.found": {"found": 2},
    "sim.recent": {"recent": 2},
    "sim.search": {"found": 1},
    "sim.hash_bits": {"search": "hash", "found": 1},
    **{f"{name}.numerical_size": {"numerical_encoding": "buckets"} for name in MODELS},
    "onetrans": {"item_features": ["item"], "sequence": "history", "token_dim": 40},
    "hstu": {
        "item_features": ["item"],
        "sequence": "history",
        "width": 8,
        "input_hidden": 8,
        "layers": 1,
        "positions": 9,
    },
}
# What changes with an option.
TOGETHER: dict[str, dict[str, Any]] = {
    "dlrm.embedding_dim": {"bottom_mlp": [32]},
    "din.item_features": {"history_features": ["kinds"]},
    "din.history_features": {"item_features": ["kind"]},
    "din.sequence": {"item_features": ["kind"]},
    **{f"{name}.sequence": {"item_features": ["kind"]} for name in OF_EVENTS},
    **{f"{name}.item_features": {"sequence": "kinds"} for name in OF_EVENTS},
}


# Rows that a table hands out are float32; what hstu computes once changes nothing, and other options need numbers of events.
# Tests of their own show these.
ELSEWHERE = {(name, "embedding_dtype") for name in OF_EVENTS}
ELSEWHERE |= {(name, "numerical_sigma") for name in MODELS}  # of initial weights alone
ELSEWHERE |= {
    ("hstu", name)
    for name in (
        "action",
        "action_bits",
        "action_dim",
        "hour",
        "item_mlps",
        "query_time",
        "time_buckets",
    )
}


def of_each_option() -> Iterator[tuple[str, str, Any]]:
    """Yield model, option and another value than its default, for each option of each model."""

    def changed(value: Any) -> list[Any]:
        if isinstance(value, Enum):
            return [other.name for other in type(value) if other is not value]
        if isinstance(value, bool):
            return [not value]
        return [[*value[:-1], 7] if isinstance(value, list) else value + 1 if value >= 1 else 0.25]

    for name, kind in OPTIONS.items():
        for item in fields(kind):
            default = getattr(
                kind(bottom_mlp=[8, 128]) if kind is DLRMOptions else kind(), item.name
            )
            if is_dataclass(default):
                yield from (
                    (name, item.name, {below.name: value})
                    for below in fields(default)
                    for value in changed(getattr(default, below.name))
                )
            # The pooling of events and vectors of files have tests of their own.
            elif (
                item.name not in ("name", "sequence_pooling", "event_weights", "pretrained")
                and (name, item.name) not in ELSEWHERE
            ):
                other = OTHER_VALUES.get(item.name)
                values = [other] if item.name in OTHER_VALUES else changed(default)
                yield from ((name, item.name, value) for value in values)


def pairs_for(options: ModelConfig) -> FeatureSpec:
    return RAGGED_PAIRS if getattr(options, "sequence", None) else of_labels(options.name, PAIRS)


def described(name: str, **options: object) -> str:
    """Return the tables of a model, its layers and their sizes."""
    typed = options_of(name, **options)
    spec = pairs_for(typed)
    dense = build_meta(typed, spec)
    shapes = [(key, value.shape) for key, value in dense.state_dict().items()]
    return f"{declared_tables(typed, spec)} {dense} {shapes}"


def computed(name: str, **options: object) -> list[float]:
    """Return the logits of a model for inputs and weights that do not depend on its options."""
    typed = options_of(name, **options)
    spec = pairs_for(typed)
    dense = build_dense(typed, spec).eval()
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter.copy_(torch.linspace(-9, 9, parameter.numel()).sin().view_as(parameter) / 4)
    tables = declared_tables(typed, spec)
    matrix = torch.linspace(-1, 1, 2 * embedding_columns(tables, spec)).view(2, -1)
    numerical = torch.linspace(0, 20, 2 * len(spec.numerical)).view(2, -1)
    handed_out = {
        table.name: torch.linspace(-9, 9, table.num_embeddings * table.embedding_dim)
        .sin()
        .view(-1, table.embedding_dim)
        for table in tables
        if hands_out_rows(table, spec)
    }
    if handed_out:
        ids = {of.name: [[3], [5]] if of.hotness else [[1, 2, 4], [7]] for of in spec.categorical}
        return dense(numerical, embeddings_with_events(spec, handed_out, ids, {}, matrix)).tolist()
    return dense(numerical, matrix).tolist()


@pytest.mark.parametrize(("name", "option", "value"), list(of_each_option()))
def test_every_option_of_every_model_has_an_effect(name, option, value):
    """Or it is refused: a model without dropout has no option of it."""
    needed = NEEDED.get(name, {}) | NEEDED.get(f"{name}.{option}", {})
    changes = TOGETHER.get(f"{name}.{option}", {}) | {option: value}
    both = needed, needed | changes
    before, after = (described(name, **options) for options in both)
    if before == after:
        before, after = (computed(name, **options) for options in both)
    assert before != after


REFUSALS = {
    "a wide feature that is not there": (
        "wide_deep",
        {"wide_features": ["kind", "C1_C2"]},
        "model.wide_features names 'C1_C2', which the dataset lacks; it has user, item, history, kind",
    ),
    "a deep feature twice": (
        "wide_deep",
        {"deep_features": ["kind", "kind"]},
        "model.deep_features names 'kind' twice; name each feature once",
    ),
    "a feature neither wide nor deep": (
        "wide_deep",
        {"wide_features": ["kind"], "deep_features": ["user", "item"]},
        "feature 'history' has no table",
    ),
    "a width of 0": ("deepfm", {"embedding_dim": 0}, "model.embedding_dim must be positive, got 0"),
    "columns of a feature that is not there": (
        "embedding_mlp",
        {"embedding_dims": {"genres": 16}},
        "model.embedding_dims names 'genres', which the dataset lacks; it has user, item, history, kind",
    ),
    "two widths of one table": (
        "embedding_mlp",
        {"embedding_dims": {"item": 4, "history": 8}},
        "model.embedding_dims gives [4, 8] columns to features item, history, which share a table; name one of them",
    ),
    "another pooling": ("embedding_mlp", {"pooling": "max"}, "model.pooling"),
    "a gate of an unknown feature": (
        "finalmlp",
        {"gate_features_2": ["sex"]},
        "model.gate_features_2 names 'sex', which the dataset lacks; it has age, history_length, user, item, history, kind",
    ),
    "one label for clicks and conversions": (
        "esmm",
        {},
        "model.name=esmm needs two binary labels, click, and click and conversion, and the dataset has label; list them",
    ),
    "a domain that is not there": (
        "pepnet",
        {"domain_features": ["page"], "prior_features": ["user"]},
        "model.domain_features names 'page', which the dataset lacks; it has user, item, history, kind",
    ),
    "no number of a domain": (
        "star",
        {},
        "model.name=star needs model.domain, the numerical feature with the number of a row's domain; name one of ",
    ),
    "a number of a domain that is not there": (
        "star",
        {"domain": "page"},
        "model.domain names 'page', which the dataset lacks; it has ",
    ),
    "no prior": (
        "pepnet",
        {"domain_features": ["kind"]},
        "model.name=pepnet needs model.prior_features; name features of user, item, history, kind",
    ),
    "no history": (
        "din",
        {},
        "model.name=din reads a sequence group, and the dataset has none; make one by table.sequence, or set "
        "model.history_features",
    ),
    "an item without a history": (
        "din",
        {"item_features": ["item", "kind"], "history_features": ["history"]},
        "needs a history per item feature",
    ),
    "an unknown history": (
        "din",
        {"item_features": ["item"], "history_features": ["past"]},
        "model.history_features names 'past', which the dataset lacks",
    ),
    "no length": (
        "din",
        {**HISTORY, "history_length": "length"},
        "model.history_length names 'length', which the dataset lacks; it has age, history_length",
    ),
    "a history longer than its table's hotness": (
        "din",
        {**HISTORY, "history_positions": 8},
        "model.history_positions=8 is longer than history 'history', which has 7 positions; use at most 7, or null for all",
    ),
    "histories of other items": (
        "din",
        {"item_features": ["kind"], "history_features": ["history"]},
        "history 'history' has 50 ids and 'kind' 21; they share a table, so preprocess both with one vocabulary",
    ),
    "an item of several ids": (
        "din",
        {"item_features": ["history"], "history_features": ["item"]},
        "item feature 'history' has 7 ids per row; din needs one",
    ),
}


@pytest.mark.parametrize(("name", "options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_fit_is_refused_on_one_line(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check_model(options_of(name, **options), SPEC)
    assert "\n" not in str(error.value)


RAGGED = spec_of(feature("item"), feature("history", 50, None), feature("old", 50, 3))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "embedding_mlp",
            {"pooling": "none"},
            "model.pooling=none requires fixed hotness, but feature 'history' is ragged; use sum or mean",
        ),
        (
            "din",
            HISTORY,
            "history 'history' is ragged; name its sequence group by model.sequence, or give it fixed hotness and the true "
            "length as a numerical feature",
        ),
    ],
)
def test_positions_need_fixed_hotness(name, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_model(options_of(name, **options), RAGGED)


def test_histories_of_different_lengths_are_refused():
    spec = spec_of(feature("item"), feature("new", 50, 4), feature("user"), feature("old", 50, 3))
    options = {"item_features": ["item", "user"], "history_features": ["new", "old"]}
    with pytest.raises(
        ValueError, match="history 'old' has 3 positions and 'new' 4; all must be equal"
    ):
        declared_tables(options_of("din", **options), spec)


def test_numbers_that_an_option_names_are_not_encoded():
    spec = spec_of(feature("item"), numerical=("sum", "plain", "fcn"))
    assert named_numbers(options_of("fcn"), spec) == ()
    options = options_of("din", **HISTORY, numerical_encoding="periodic", embedding_dim=4)
    assert encoded_spec(options, PAIRS).numerical == (
        "history_length",
        *(f"age.{column}" for column in range(4)),
    )
    # The length of padded histories means nothing beside a sequence group, named or the only one.
    every = [f"{name}.{column}" for name in PAIRS.numerical for column in range(4)]
    for group in ({"sequence": "history"}, {}):
        of_group = options_of("din", **group, numerical_encoding="periodic", embedding_dim=4)
        assert encoded_spec(of_group, PAIRS).numerical == (*every,)
    without = spec_of(*PAIRS.categorical, numerical=("history_length",))
    with pytest.raises(
        ValueError, match="the dataset has no numerical feature to encode; leave it"
    ):
        build_meta(options, without)
