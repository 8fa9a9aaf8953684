"""Sizes that keep files readable: no function over 60 lines, no constructor with more than 7 arguments.

Records (dataclasses) are exempt: their fields are named where they are made.
"""

from tests.project.layout import ROOT, long_functions, modules_of, wide_constructors
from tests.project.test_layers import SUBPACKAGES, subpackages_imported

# Compiled kernels, whose compilers want one function.
KERNELS = {
    "nn.ops.triton.served_lookup._served_lookup",
    "nn.ops.triton.embedding_bag._segment_update",
    "nn.ops.triton.target_attention._backward",
}


def test_no_function_is_too_long():
    found = {name for _, name in long_functions(modules_of(ROOT))}
    assert sorted(found ^ KERNELS) == []


def test_no_constructor_has_too_many_arguments():
    found = {name for _, name in wide_constructors(modules_of(ROOT))}
    assert sorted(found) == []


def test_the_table_of_subpackages_allows_nothing_that_is_not_imported():
    used = subpackages_imported(lazy=True)
    assert {
        subpackage: sorted(allowed - used[subpackage])
        for subpackage, allowed in SUBPACKAGES.items()
    } == {subpackage: [] for subpackage in SUBPACKAGES}
