"""Descriptions of models: every model of the family is built again from its model.json, and the counts are right."""

import json
import re

import pytest
import torch

from configs.built_in import MODELS
from configs.option_values import plain_values
from dataloading.dataset.source import Source
from nn.build import model_spec, open_source
from nn.models.description import build_from_json, describe_model
from nn.models.ranking_model import RankingModel
from nn.models.registry import build_dense, declared_tables
from tests.helpers.composed import TINY, compose_config, tiny
from tests.helpers.sequence_models import write_sequences
from tests.nn.models.test_family_training import CASES, write_two_labels

PLAIN_CASES = {name: tiny(name) for name in ("dlrm", "dcnv2")}
OF_EVENTS = ("sasrec", "bst", "transact", "onetrans", "sim", "hstu")


@pytest.fixture(scope="module")
def two_labels(tmp_path_factory):
    return write_two_labels(tmp_path_factory.mktemp("labels") / "data")


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    return write_sequences(tmp_path_factory.mktemp("events") / "data")


def test_all_models_are_tested():
    tested = {*PLAIN_CASES, *OF_EVENTS, *(case.name for case in CASES.values())}
    assert tested == set(MODELS)


@pytest.mark.parametrize("name", [*PLAIN_CASES, *CASES, *OF_EVENTS])
def test_a_model_is_built_again_from_its_description(name, two_labels, events, tmp_path):
    if name in OF_EVENTS:
        model = (f"model.name={name}", "model.item_features=[item,genre]", "model.embedding_dim=8")
        overrides = [*model, "model.sequence=history", f"data.path={events}"]
    else:
        overrides = PLAIN_CASES.get(name) or CASES[name].overrides(two_labels)
    config = compose_config(*overrides, "model.embedding_init=0.5")
    source: Source = open_source(config)
    spec = model_spec(config, source)
    description = describe_model(config.model, source.spec, spec)
    path = tmp_path / "model.json"
    path.write_text(json.dumps(description))

    built = build_from_json(path, seed=4)
    wanted = RankingModel(declared_tables(config.model, spec), build_dense(config.model, spec))
    shapes = {key: value.shape for key, value in built.state_dict().items()}
    assert shapes == {key: value.shape for key, value in wanted.state_dict().items()}
    assert description["model"] == plain_values(config.model)
    dense = sum(parameter.numel() for parameter in wanted.dense.parameters())
    assert description["parameters"]["dense"] == dense
    tables = sum(parameter.numel() for parameter in wanted.tables.parameters())
    assert description["parameters"]["tables"] == tables
    # Every linear layer is called at least once per sample; the gate of FinalMLP without context once per batch.
    linear = sum(2 * before * after for before, after in wanted.dense.linear_layers())
    assert description["flops_per_sample"] >= linear or name == "finalmlp"
    table = next(iter(built.tables.values()))
    assert 0.4 < table.abs().max() <= 0.5


def test_shapes_and_operations_of_dlrm_are_those_counted_by_hand():
    config = compose_config(*TINY)
    source = open_source(config)
    description = describe_model(config.model, source.spec, source.spec)
    layers = {layer["name"]: layer for layer in description["layers"]}
    # 3 numbers are padded to 8; 6 vectors of 8 columns make 15 pairs, padded to 16.
    assert layers["bottom.layers.0"]["input"] == [[8]]
    assert layers["bottom.layers.0"]["parameters"] == 8 * 16 + 16
    assert layers["interaction"]["output"] == layers["top.layers.0"]["input"][0] == [24]
    products = 2 * 6 * 6 * 8
    linear = 2 * (8 * 16 + 16 * 8 + 24 * 16 + 16 * 1)
    assert description["flops_per_sample"] == products + linear
    assert layers["interaction"]["flops_per_sample"] == products
    assert description["parameters"]["tables"] == (500 + 40 + 7 + 300 + 1000) * 8


def test_the_global_random_state_is_kept():
    config = compose_config(*TINY)
    source = open_source(config)
    before = torch.get_rng_state()
    describe_model(config.model, source.spec, source.spec)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 9}, "it has format 9, and this version reads 1"),
        ({"model": {"name": "dlrm", "deep": 1}}, "there is no option model.deep"),
        ({"model": {"name": "os:system"}}, "model.name='os:system' is no model of the project"),
        ({"features": {}}, "no description of a model (it lacks 'numerical')"),
    ],
)
def test_a_wrong_description_is_refused_in_one_line(change, message, tmp_path):
    config = compose_config(*TINY)
    source = open_source(config)
    path = tmp_path / "model.json"
    content = describe_model(config.model, source.spec, source.spec) | change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        build_from_json(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (FileNotFoundError, "no such file; runs of earlier versions"),
        (PermissionError, r"model.json: cannot be read \(Permission denied\)"),
    ],
)
def test_a_description_that_cannot_be_read_is_refused_in_one_line(monkeypatch, error, problem):
    def fail(path):
        raise error(13, "Permission denied")

    monkeypatch.setattr("nn.models.description.read_json", fail)
    with pytest.raises(ValueError, match=problem):
        build_from_json("model.json")
