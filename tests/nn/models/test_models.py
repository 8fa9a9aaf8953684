"""DLRM and DCNv2 against a plain reference, and their tables, options, compilation and export."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from configs.built_in import MODELS
from configs.option_values import plain_values
from configs.overrides import WrittenOption
from dataloading.batch import Batch
from dataloading.dataset.batch_layout import BatchLayout
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.row_columns import RowColumn
from nn.embedding.declared_tables import table_name
from nn.layers.dot_interaction import DotInteraction
from nn.layers.mlp import MLP
from nn.library.options import options
from nn.models.dlrm import DLRMOptions
from nn.models.options import CrossConfig, CrossStructure, DCNv2Options
from nn.models.ranking_model import RankingModel
from nn.models.registry import build_dense, declared_tables, typed_config
from nn.resume import can_restart
from tests.helpers.command import ROOT, run_command, start_command
from tests.helpers.composed import TINY, compose_config, compose_with_hydra
from tests.helpers.datasets import synthetic_source
from tests.project.test_layers import importers_of, reached_from
from tests.reference import Reference, ReferenceCross, ReferenceMLP

EXPERIMENTS = ROOT / "configs/experiment"
OWN = "--config-dir of the user"
NONE_OF_DLRM = (
    "and model.name=dlrm has none of this name; leave it out, or choose another model (--help model lists the options of this "
    "one)"
)
CARDINALITIES = (11, 5, 23)
DIM = 4
CPU = torch.device("cpu")
STACKED, PARALLEL = CrossStructure.stacked, CrossStructure.parallel


def spec_of(*names, num_numerical=3):
    return FeatureSpec(
        root=None,
        numerical=tuple(f"num_{i}" for i in range(num_numerical)),
        numerical_dtype=np.dtype(np.float32),
        labels=(RowColumn("label"),),
        categorical=tuple(
            CategoricalFeature.of(*pair) for pair in zip(names, CARDINALITIES, strict=False)
        ),
        splits={},
        metadata={},
    )


SPEC = spec_of("cat_0.bin", "cat_1.bin", "cat_2.bin")


def config_of(name, projection_dim=2, structure=STACKED, **changes):
    settings = {"embedding_dim": DIM, "bottom_mlp": [8, DIM], "top_mlp": [8, 6, 1]} | changes
    if name == "dlrm":
        return DLRMOptions(name=name, **settings)
    cross = CrossConfig(num_layers=2, projection_dim=projection_dim, structure=structure)
    return DCNv2Options(name=name, cross=cross, **settings)


# DLRM has no cross layers.
STRUCTURES = [("dlrm", STACKED), *(("dcnv2", structure) for structure in CrossStructure)]


def batch_of(spec, size=6):
    """Return a one-hot batch."""
    generator = torch.Generator().manual_seed(0)
    layout = BatchLayout.of(spec, size)
    batch = Batch(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout, size, size)
    for feature in spec.categorical:
        batch.feature(feature.name).values().random_(feature.cardinality, generator=generator)
    batch.numerical.normal_(generator=generator)
    return batch


def model_of(config, spec=SPEC):
    return RankingModel(declared_tables(config, spec), build_dense(config, spec))


@torch.no_grad()
def copy_into(reference: Reference, model: RankingModel):
    """Copy the model's weights into the reference, without the columns of padding."""

    def copy_mlp(target: ReferenceMLP, source: MLP):
        linears = [layer for layer in target if isinstance(layer, nn.Linear)]
        for to, layer in zip(linears, source.layers, strict=True):
            to.weight.copy_(layer.weight[:, : to.in_features])
            to.bias.copy_(layer.bias)

    for table, feature in zip(reference.tables, SPEC.categorical, strict=True):
        table.weight.copy_(model.tables[table_name(feature.name)])
    copy_mlp(reference.bottom, model.dense.bottom)
    copy_mlp(reference.top, model.dense.top)
    if reference.structure is None:
        return
    if reference.structure.parallel:
        copy_mlp(reference.deep, model.dense.deep)
    for index, (weights, layer) in enumerate(
        zip(reference.cross, model.dense.cross.layers, strict=True)
    ):
        layer.up.bias.normal_()
        reference.cross_bias[index].copy_(layer.up.bias)
        sources = [layer.up.weight] if layer.down is None else [layer.down.weight, layer.up.weight]
        for to, source in zip(weights, sources, strict=True):
            to.copy_(source)


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        (config_of("dlrm"), {}),
        (config_of("dcnv2"), {"cross": ReferenceCross(2, 2)}),
        (config_of("dcnv2", None), {"cross": ReferenceCross(2, None)}),
        (config_of("dcnv2", 2, PARALLEL), {"cross": ReferenceCross(2, 2, parallel=True)}),
        (config_of("dcnv2", bottom_mlp=[8, 5]), {"cross": ReferenceCross(2, 2), "bottom": [8, 5]}),
    ],
    ids=["dlrm", "dcnv2", "full-rank", "parallel", "other-width"],
)
def test_logits_and_gradients_equal_the_plain_reference(config, arguments):
    torch.manual_seed(0)
    arguments = {"bottom": [8, DIM], "top": [8, 6, 1]} | arguments
    model = model_of(config)
    reference = Reference(list(CARDINALITIES), 3, DIM, **arguments)
    copy_into(reference, model)
    batch = batch_of(SPEC)
    ids = batch.ids.values().view(len(CARDINALITIES), -1).T.long()
    logits, wanted = model(batch), reference(batch.numerical, ids)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
    for output in (logits, wanted):
        nn.functional.binary_cross_entropy_with_logits(output, torch.ones(6)).backward()
    for feature, table in zip(SPEC.categorical, reference.tables, strict=True):
        grad = model.tables[table_name(feature.name)].grad
        torch.testing.assert_close(grad, table.weight.grad.to_dense(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        model.dense.bottom.layers[0].weight.grad[:, :3], reference.bottom[0].weight.grad
    )


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (DLRMOptions(), 172_928 + 2_198_529),
        (DCNv2Options(name="dcnv2"), 172_928 + 10_627_200 + 5_245_953),
    ],
)
def test_the_published_models_have_their_sizes(options, wanted):
    spec = FeatureSpec(
        None,
        tuple(f"num_{i}" for i in range(13)),
        np.dtype(np.float32),
        (RowColumn("label"),),
        tuple(CategoricalFeature.of(f"cat_{i}", 10) for i in range(26)),
        {},
        {},
    )
    with torch.device("meta"):
        dense = build_dense(options, spec)
    assert sum(p.numel() for p in dense.parameters()) == wanted


def test_dlrm_without_numerical_features_interacts_the_embeddings():
    spec = spec_of("a", "b", "c", num_numerical=0)
    model = model_of(config_of("dlrm"), spec)
    assert model.dense.bottom is None
    batch = batch_of(spec)
    vectors = model.embeddings(batch)
    pairs = DotInteraction(3, DIM, has_bottom=False)(None, vectors)
    torch.testing.assert_close(model(batch), model.dense.top(pairs).squeeze(1))


@pytest.mark.parametrize("structure", list(CrossStructure))
def test_dcnv2_without_numerical_features_crosses_the_embeddings(structure):
    spec = spec_of("a", "b", "c", num_numerical=0)
    model = model_of(config_of("dcnv2", structure=structure), spec)
    batch = batch_of(spec)
    x0 = model.embeddings(batch)
    crossed = model.dense.cross(x0)
    assert crossed.shape == (6, 3 * DIM)
    if structure is PARALLEL:
        crossed = torch.cat([crossed, model.dense.deep(x0)], dim=1)
    torch.testing.assert_close(model(batch), model.dense.top(crossed).squeeze(1))


def test_a_parallel_structure_without_hidden_layers_is_refused():
    with pytest.raises(ValueError, match=r"model.cross.structure=parallel .* model.top_mlp=\[1\]"):
        build_dense(config_of("dcnv2", structure=PARALLEL, top_mlp=[1]), SPEC)


def test_ids_are_found_by_feature_name():
    model = model_of(config_of("dlrm"))
    batch = batch_of(SPEC)
    other = batch_of(replace(SPEC, categorical=SPEC.categorical[::-1]))
    other.numerical.copy_(batch.numerical)
    for feature in SPEC.categorical:
        other.feature(feature.name).values().copy_(batch.feature(feature.name).values())
    torch.testing.assert_close(model(other), model(batch))


def test_bags_are_summed_and_empty_bags_are_zero():
    spec = spec_of("a", num_numerical=0)
    ragged = replace(spec.categorical[0], hotness=None, mean_hotness=3)
    model = RankingModel(declared_tables(config_of("dcnv2"), spec), nn.Identity())
    layout = BatchLayout.of(replace(spec, categorical=(ragged,)), 2)
    batch = Batch(torch.zeros(layout.num_bytes, dtype=torch.uint8), layout, 2, 2)
    batch.flat_ids[:3] = torch.tensor([1, 2, 2])
    batch.flat_ids[-2] = 3
    pooled = model.embeddings(batch)
    weight = model.tables["a"]
    torch.testing.assert_close(pooled[0], weight[1] + 2 * weight[2])
    assert not pooled[1].any()


def test_tables_are_named_and_sized_by_the_spec():
    tables = declared_tables(config_of("dlrm"), SPEC)
    assert [(t.name, t.feature_names, t.num_embeddings) for t in tables] == [
        ("cat_0_bin", ["cat_0.bin"], 11),
        ("cat_1_bin", ["cat_1.bin"], 5),
        ("cat_2_bin", ["cat_2.bin"], 23),
    ]


@pytest.mark.parametrize("feature", ["type", "keys", "training", "forward", "a.b"])
def test_names_that_no_module_can_have_are_changed_for_the_table_only(feature):
    (table,) = declared_tables(config_of("dlrm"), spec_of(feature))
    assert table.name != feature
    assert table.feature_names == [feature]


def test_two_features_with_one_table_name_are_refused():
    with pytest.raises(ValueError, match=r"'a\.b' and 'a_b' have one name, 'a_b'"):
        declared_tables(config_of("dlrm"), spec_of("a.b", "a_b"))


def test_initial_tables_depend_on_seed_and_name_and_lie_within_the_bound():
    config = config_of("dlrm")
    first, second, third = (
        RankingModel(declared_tables(config, SPEC), nn.Module(), seed).tables for seed in (1, 1, 2)
    )
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert not torch.equal(weight, third[name])
        bound = len(weight) ** -0.5
        assert 0.5 * bound < weight.abs().max().item() <= bound
    assert not torch.equal(first["cat_0_bin"][:5], first["cat_1_bin"][:5])


@pytest.mark.parametrize(("name", "structure"), STRUCTURES)
def test_bf16_autocast_gives_float32_logits_close_to_the_exact_ones(name, structure):
    torch.manual_seed(0)
    model = model_of(config_of(name, structure=structure))
    batch = batch_of(SPEC)
    wanted = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch)
    assert logits.dtype is torch.float32
    assert not torch.equal(logits, wanted)
    torch.testing.assert_close(logits, wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("name", "structure"), STRUCTURES)
def test_the_dense_component_compiles_without_a_graph_break(name, structure):
    torch.compiler.reset()
    dense = build_dense(config_of(name, structure=structure), SPEC)
    numerical, embeddings = torch.randn(6, 3), torch.randn(6, 3 * DIM)
    compiled = torch.compile(dense, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(numerical, embeddings), dense(numerical, embeddings))


@pytest.mark.parametrize("name", ["dlrm", "dcnv2"])
def test_the_dense_component_exports_for_any_batch_size(name):
    dense = build_dense(config_of(name), SPEC).eval()
    any_size = {0: torch.export.Dim("batch")}
    example = (torch.randn(6, 3), torch.randn(6, 3 * DIM))
    exported = torch.export.export(dense, example, dynamic_shapes=(any_size, any_size)).module()
    others = (torch.randn(9, 3), torch.randn(9, 3 * DIM))
    torch.testing.assert_close(exported(*others), dense(*others))


def test_a_dot_interaction_of_one_vector_is_refused():
    spec = synthetic_source(num_numerical=0, cardinalities=[10]).spec
    config = DLRMOptions(embedding_dim=8, bottom_mlp=[8], top_mlp=[1])
    with pytest.raises(
        ValueError, match=r"needs two vectors to interact, got 1 .* use model.name=dcnv2"
    ):
        build_dense(config, spec)


def test_a_recipe_of_one_model_can_select_another():
    assert type(compose_config("model.name=dlrm", recipe="dcnv2").model) is DLRMOptions
    assert type(compose_config("model.name=dcnv2").model) is DCNv2Options


def test_an_older_run_without_an_option_had_its_default(tmp_path):
    before = plain_values(compose_config(*TINY))
    del before["optimizer"]["beta1"], before["train"]["freeze"], before["model"]["name"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before))
    assert can_restart(tmp_path, compose_config(*TINY))
    for change in ("optimizer.beta1=0.8", "train.freeze=[dense]", "model.name=dcnv2"):
        assert not can_restart(tmp_path, compose_config(*TINY, change))


def test_an_option_that_a_model_has_lost_is_a_change(tmp_path):
    config = compose_config(*TINY, "model.name=dlrm")
    before = plain_values(config)
    before["model"]["dropout"] = 0.5
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before))
    assert not can_restart(tmp_path, config)


def test_the_options_of_a_model_need_no_torchrec():
    modules = {path.partition(":")[0] for path in MODELS.values()} | {"nn.models.registry"}
    brought = set().union(*(reached_from(module, lazy=False) for module in modules))
    assert importers_of("torchrec", brought, lazy=False) == set()
    assert importers_of("torchrec", brought) != set()


def test_an_option_is_refused_before_torch_is_imported():
    program = "import sys; from main import command; sys.argv = ['dlrm.py', 'model.cross={num_layers: 2}']\n"
    program += "try:\n    command('dlrm')()\nexcept SystemExit:\n    print('torch' in sys.modules)"
    ended = start_command("-c", program, directory=ROOT, program=sys.executable)
    message = f"model.cross.num_layers is an option of dcnv2, {NONE_OF_DLRM}"
    assert (ended.out, ended.err) == ("False\n", f"error: {message}\n")


def deepfm_of_a_user(folder: Path) -> None:
    (folder / "experiment").mkdir()
    (folder / "experiment/mine.yaml").write_text(
        "# @package _global_\nmodel: {name: deepfm, top_mlp: [8, 1]}\n"
    )
    (folder / "mine.yaml").write_text("defaults: [dlrm, _self_]\nmodel: {bottom_mlp: [8, 16]}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.name=deepfm", "model.top_mlp=[64,1]"], "model.top_mlp is an option of dlrm, dcnv2, and"),
        (["model.name=deepfm", "+model.top_mlp=[64,1]"], "model.top_mlp is an option of dlrm, dcnv2, and"),
        (["model.name=hstu", "model.batch_norm=true"], "model.batch_norm is an option of dlrm, dcnv2,"),
        (["model.name=hstu", "model.batch_norm=true"], "and model.name=hstu has none of this name"),
        (["model.name=masknet", "model.batch_norm=true"], "model.batch_norm has no effect: the hidden layers are"),
        (["model.name=star", "model.hidden=[]", "model.auxiliary_hidden=[]", "model.batch_norm=true"], "the model has no"),
        (["model.numerical_size=8"], "model.numerical_size has no effect: model.numerical_encoding=plain"),
        (["model.pooling=mean"], "model.pooling is an option of embedding_mlp, bst, and"),
        (["experiment=deepfm_criteo", "model.top_mlp=[8,1]"], "and model.name=deepfm has none of this"),
        (["model.name=masknet", "model.hidden=[8]"], "model.hidden has no effect: the hidden layers are those"),
        (["model.name=din", "model.history_positions=3"], "model.history_positions has no effect: the history is"),
        (["model.top_mlp=[1]", "model.dropout=0.1"], "model.dropout has no effect: the model has no hidden"),
        (["experiment=mine", OWN], "experiment/mine.yaml: model.top_mlp is an option of dlrm, dcnv2, and"),
        (["--config-name=mine", OWN, "model.name=deepfm"], "mine.yaml: model.bottom_mlp is an option of"),
    ],
)  # fmt: skip
def test_what_a_user_writes_for_another_model_is_refused(arguments, message, tmp_path):
    if OWN not in arguments:
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            options("dlrm", *arguments)
        assert "\n" not in str(error.value)
        return
    deepfm_of_a_user(tmp_path)
    ended = run_command(
        *(text.replace(OWN, f"--config-dir={tmp_path}") for text in arguments), "mode=plan"
    )
    assert (ended.exit_code, ended.err.count("\n")) == (2, 1)
    assert message in ended.err


def test_what_a_recipe_leaves_for_its_own_model_is_dropped():
    assert options("dlrm", "model.name=deepfm").model.name == "deepfm"
    # The experiment's own embedding_dim, too, which the value leaves without an effect.
    suggested = ["experiment=embedding_mlp_movielens", "model.embedding_dims=suggested"]
    for arguments in (suggested, ["experiment=dlrm_criteo_kaggle", "model.name=wukong"]):
        ended = run_command(*arguments, "mode=plan", "device=cpu")
        assert (ended.exit_code, ended.err) == (0, "")


@pytest.mark.parametrize("experiment", sorted(path.stem for path in EXPERIMENTS.glob("*.yaml")))
def test_an_experiment_has_options_of_its_own_model(experiment):
    content = yaml.safe_load((EXPERIMENTS / f"{experiment}.yaml").read_text())["model"]
    written = [WrittenOption(f"model.{key}") for key in content]
    typed_config(compose_with_hydra(f"experiment={experiment}"), written)
