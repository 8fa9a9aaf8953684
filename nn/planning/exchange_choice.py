"""Choice of what the ranks of the samples get of each table: the vectors of its lookups, or the distinct rows of a batch."""

from collections.abc import Sequence
from dataclasses import replace

from torchrec.modules.embedding_configs import EmbeddingBagConfig

from configs.schema import Exchange
from nn.planning.plan import TablePlan
from nn.planning.plan_problem import PlanProblem
from nn.planning.table_sizes import FP32_BYTES, ID_BYTES
from nn.sharding.request_capacity import capacity_for
from nn.tiers.traffic import expected_distinct


def with_exchanges(plan: Sequence[TablePlan], problem: PlanProblem) -> list[TablePlan]:
    declared = {table.name: table for table in problem.declared}
    return [
        replace(
            table,
            exchange="rows" if _is_in_rows(table, declared[table.table], problem) else "vectors",
        )
        for table in plan
    ]


def _is_in_rows(table: TablePlan, declared: EmbeddingBagConfig, problem: PlanProblem) -> bool:
    """Return whether distinct rows are sent, as is wanted, or because they are fewer bytes than vectors."""
    wanted, ranks = problem.wanted[table.table], problem.hardware.table_ranks
    if wanted in (Exchange.rows, Exchange.vectors):
        return wanted is Exchange.rows
    # The rounding of 16 bits depends on the table, and tables whose rows are asked for are updated as one.
    if declared.data_type.name != "FP32" or table.sharding == "column_wise":
        return False
    if wanted is Exchange.least or problem.hardware.groups > 1:
        is_alone = problem.hardware.world_size == 1 or table.is_replicated
        return not is_alone and _rows_are_fewer_bytes(table, problem)
    # A vector of more ids than ranks is fewer bytes than its rows would be without repetitions.
    hotness = {feature.name: feature.mean_hotness for feature in problem.spec.categorical}
    are_few = all(hotness[feature] <= ranks for feature in declared.feature_names)
    return table.is_row_wise and (declared.pooling.name == "NONE" or are_few)


def _rows_are_fewer_bytes(table: TablePlan, problem: PlanProblem) -> bool:
    ranks, groups = problem.hardware.table_ranks, problem.hardware.groups
    share = problem.traffic_of(table.table).share
    asked, merged = (
        capacity_for(expected_distinct(samples * table.hotness, share, 0, table.num_embeddings))
        for samples in (problem.batch_size, problem.batch_size * ranks)
    )
    # Of a row-wise table, every rank gets the ids, and sends a part of the vectors.
    sent = problem.batch_size * (ranks if table.is_row_wise else 1)
    vectors, id_bytes = sent * table.num_vectors, ID_BYTES * table.hotness
    # Within a group, a column is sent in a row or vector, and in its gradient.
    of_column = FP32_BYTES * table.embedding_dim
    in_group = 2 * of_column if ranks > 1 else 0
    # To each other group go the distinct rows of all ranks with their gradients, or all ids with those of the vectors.
    in_rows = asked * (ID_BYTES + in_group)
    in_rows_between = merged / ranks * (ID_BYTES + of_column)
    in_vectors = sent * id_bytes + vectors * in_group
    in_vectors_between = sent * id_bytes + vectors * of_column
    more_between = in_rows_between - in_vectors_between
    return in_rows - in_vectors + (groups - 1) * more_between < 0
