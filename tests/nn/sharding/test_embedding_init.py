"""Initial weights of tables: the bound that `model.embedding_init` sets, for all layouts."""

import pytest
import torch

from tests.helpers.composed import TINY, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed

LAYOUTS = ["table_wise", "column_wise", "row_wise", "data_parallel"]
ROWS = [500, 40, 7, 300, 1000]
BOUND = 0.01


def initial_tables(cases: list[list[str]]) -> list[dict[tuple[str, int, int], torch.Tensor]]:
    """Return this rank's shards by table, first row and first column, per case."""
    results = []
    with ranks_of_cpu():
        for overrides in cases:
            built = build(compose_config(*overrides))
            results.append(
                {
                    (shard.table, shard.row_offset, shard.column_offset): shard.weight.clone()
                    for shard in built.step.tables.shards()
                }
            )
    return results


def case(layout: str, bound: str) -> list[str]:
    tables = ",".join(f"cat_{index}:{layout}" for index in range(len(ROWS)))
    return [*TINY, f"sharding.tables={{{tables}}}", f"model.embedding_init={bound}"]


def test_layouts_start_with_the_same_weights_within_the_bound():
    cases = [case(layout, str(BOUND)) for layout in LAYOUTS]
    complete = run_distributed(initial_tables, 1, [cases[0]])[0][0]
    assert len(complete) == len(ROWS)
    for weight in complete.values():
        assert 0.9 * BOUND < weight.abs().max() <= BOUND
    of_ranks = run_distributed(initial_tables, 2, cases)
    for number, layout in enumerate(LAYOUTS):
        seen = 0
        for shards in (of_rank[number] for of_rank in of_ranks):
            for (table, row, column), weight in shards.items():
                rows, columns = weight.shape
                expected = complete[table, 0, 0][row : row + rows, column : column + columns]
                torch.testing.assert_close(weight, expected, rtol=0, atol=0, msg=layout)
                seen += weight.numel()
        copies = 2 if layout == "data_parallel" else 1
        assert seen == copies * sum(weight.numel() for weight in complete.values())


def test_bound_is_one_by_the_root_of_the_rows_by_default():
    tables = run_distributed(initial_tables, 1, [case("table_wise", "null")])[0][0]
    for rows, weight in zip(ROWS, tables.values(), strict=True):
        assert len(weight) == rows
        assert 0.9 * rows**-0.5 < weight.abs().max() <= rows**-0.5


@pytest.mark.parametrize("bound", ["0", "-1"])
def test_bound_must_be_positive(bound):
    with pytest.raises(ValueError, match=r"model\.embedding_init must be positive or null, got"):
        compose_config(*TINY, f"model.embedding_init={bound}")
