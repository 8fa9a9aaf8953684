"""Requests of a step: tables whose distinct rows the ranks of the samples ask of their owners, and how many they expect."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from configs.schema import Config
from dataloading.dataset.batch_layout import id_counts
from dataloading.dataset.feature_spec import FeatureSpec
from nn.models.registry import declared_tables
from nn.planning.plan import TablePlan
from nn.sharding.request_capacity import capacity_for
from nn.tiers.traffic import expected_distinct, power_law_share


@dataclass(frozen=True, slots=True)
class Requests:
    """Tables of one width whose distinct rows are asked of their owners; a replicated table's, or a single rank's, is itself."""

    tables: tuple[str, ...]
    columns: int
    keys: int  # ids of all lookups of a rank's samples
    capacity: tuple[int, ...]  # rows that a rank can ask of each owner
    # distinct ones that a group can ask of each owner, if owners merge them
    merged: tuple[int, ...]
    tiers: frozenset[str]  # memories that their rows lie in
    hands_out: bool  # whether the dense component takes the rows
    has_sums: bool  # whether the gradients of a row are added up by the sort of its ids: chunks do it themselves
    groups: int  # of ranks, which all hold the tables

    @property
    def is_sent(self) -> bool:
        return len(self.capacity) > 1

    def asked_of(self, rank: int) -> int:
        """Return the rows that the ranks of a group ask of one of them."""
        return len(self.capacity) * self.capacity[rank if self.is_sent else 0]

    def of_groups(self, rank: int) -> int:
        """Return the rows that all groups ask of a rank."""
        return self.groups * (self.merged[rank] if self.merged else self.asked_of(rank))


def requests_of(
    config: Config,
    spec: FeatureSpec,
    plan: Sequence[TablePlan],
    world_size: int,
    rank_rows: int | None = None,
) -> list[Requests]:
    """Return the tables whose rows are asked for, with their expected capacity, for the samples of a rank or those of training.

    How often ids occur is not known before they are read: the power law of `data.synthetic.exponent` stands for it, unless the
    plan has those of measured batches.
    """
    trained_rows = config.train.batch_size // world_size
    if rank_rows is None:
        rank_rows = trained_rows
    counts = id_counts(spec, rank_rows)
    keys = {
        table.name: sum(counts[feature].capacity for feature in table.feature_names)
        for table in declared_tables(config.model, spec)
    }

    def capacity(tables: Sequence[TablePlan], owners: int, senders: int) -> tuple[int, ...]:
        rows = [0.0] * owners
        for table in tables:
            measured = table.batch_rows if senders == 1 else table.group_rows
            asked = [number * (rank_rows / trained_rows) for number in measured]
            if not asked:
                # The distinct rows that ids of a power law are expected to ask of each owner.
                num_ids, num_rows = senders * (rank_rows * table.hotness), table.num_embeddings
                share = power_law_share(num_rows, config.data.synthetic.exponent)
                per_owner = -(-num_rows // len(table.owners))
                firsts = [min(i * per_owner, num_rows) for i in range(len(table.owners) + 1)]
                asked = [expected_distinct(num_ids, share, *part) for part in pairwise(firsts)]
            for owner, number in zip(table.owners, asked, strict=True):
                rows[owner] += number
        return tuple(map(capacity_for, rows))

    requests = []
    for tables in _asked_together(plan):
        ranks = 1 if tables[0].is_replicated else config.sharding.group_size or world_size
        groups = 1 if tables[0].is_replicated else world_size // ranks
        hands_out = tables[0].hands_out_rows
        requests.append(
            Requests(
                tables=tuple(table.table for table in tables),
                columns=tables[0].embedding_dim,
                keys=sum(keys[table.table] for table in tables),
                capacity=capacity(tables, ranks, senders=1),
                merged=capacity(tables, ranks, senders=ranks) if ranks > 1 and groups > 1 else (),
                tiers=frozenset(table.tier for table in tables),
                hands_out=hands_out,
                has_sums=not hands_out or config.train.accumulate == 1,
                groups=groups,
            )
        )
    return requests


def not_requested(plan: Sequence[TablePlan], requests: Sequence[Requests]) -> list[TablePlan]:
    asked = {name for request in requests for name in request.tables}
    return [table for table in plan if table.table not in asked]


def _asked_together(plan: Sequence[TablePlan]) -> list[list[TablePlan]]:
    """Return the requested tables by width; a replicated one, and one whose rows the dense component takes, is alone."""
    groups: dict[tuple[int, str], list[TablePlan]] = {}
    for table in plan:
        if table.exchange == "rows":
            is_alone = table.is_replicated or table.hands_out_rows
            key = (table.embedding_dim, table.table if is_alone else "")
            groups.setdefault(key, []).append(table)
    return list(groups.values())
