"""Models behind projections and encoded numbers: their initial weights, and their export for any batch size."""

import pytest
import torch

from configs.schema import NumericalEncoding
from nn.embedding.declared_tables import embedding_columns
from nn.layers.initialization import initialise_dense
from nn.models.registry import build_dense, declared_tables, find_options
from tests.helpers.specs import sized_spec

SPEC = sized_spec(3, 4)
PERIODIC = {
    "numerical_encoding": NumericalEncoding.periodic,
    "numerical_size": 64,
    "numerical_sigma": 2.5,
}
CASES = {
    "projections": ("deepfm", {"embedding_dims": {"C0": 3, "C2": 9}, "hidden": [8]}),
    "encoded numbers": ("shared_bottom", {"hidden": [8], **PERIODIC}),
    "both": ("dlrm", {"bottom_mlp": [8, 8], "embedding_dims": {"C1": 4}, **PERIODIC}),
    "encoded vectors": ("fcn", {**PERIODIC, "numerical_encoding": NumericalEncoding.buckets}),
}


def built(name: str, options: dict):
    typed = find_options(name)(name=name, embedding_dim=8, **options)
    model = build_dense(typed, SPEC)
    initialise_dense(model, 1)
    return model.eval(), embedding_columns(declared_tables(typed, SPEC), SPEC)


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
def test_it_exports_for_any_batch_size(name, options):
    model, columns = built(name, options)
    any_size = {0: torch.export.Dim("batch")}
    example = torch.randn(5, 3), torch.randn(5, columns)
    exported = torch.export.export(model, example, dynamic_shapes=(any_size, any_size)).module()
    others = torch.randn(9, 3), torch.randn(9, columns)
    torch.testing.assert_close(exported(*others), model(*others))


def test_the_first_frequencies_have_the_deviation_of_the_option():
    model, _ = built("shared_bottom", CASES["encoded numbers"][1])
    assert model.numbers.first.std().item() == pytest.approx(2.5, rel=0.15)
