"""Figures of a log of listens beside Yambda's."""

from collections.abc import Iterator

import numpy as np

from dataloading.dataset.binary import BinarySource
from dataloading.dataset.feature_spec import FeatureSpec
from preproc.listens.events import ITEMS, POOLS, Listens

RANKS, RANK_ROWS = 8, 1024
"""Of the reference, whose ranks take every eighth row."""


class Figures:
    """Figures of a log, to be compared with Yambda's."""

    def __init__(self, num_items: int) -> None:
        self._lengths: list[np.ndarray] = []
        self._actions = np.zeros(5, np.int64)
        self._of_item = np.zeros(num_items, np.int64)
        self._repeated = 0

    def add(self, events: Listens) -> None:
        users, lengths = np.unique(events.uid, return_counts=True)
        self._lengths.append(lengths)
        self._actions += np.bincount(events.action, minlength=5)
        np.add.at(self._of_item, events.item, 1)
        pairs = np.searchsorted(users, events.uid) * len(self._of_item) + events.item
        self._repeated += len(pairs) - len(np.unique(pairs))

    def lines(self, spec: FeatureSpec) -> Iterator[str]:
        """Yield lines of figures; Yambda's are of arXiv:2505.22238 and of MLPerf's reference, a dash where it has none."""
        lengths = np.concatenate(self._lengths)
        total, counts = int(lengths.sum()), np.sort(self._of_item[self._of_item > 0])[::-1]
        hot = counts[: -(-len(counts) // 100)].sum() / total
        yield f"{'':42}{'here':>16}{'Yambda-5B':>16}"
        for name, here, other in (
            ("events", f"{total:,}", "4,764,000,000"),
            ("users", f"{len(lengths):,}", "1,000,000"),
            ("items with events", f"{len(counts):,}", "9,390,000"),
            ("events of a user, mean", f"{lengths.mean():,.0f}", "4,763"),
            ("events of a user, median", f"{np.median(lengths):,.0f}", "2,695"),
            ("events of a user, most", f"{lengths.max():,}", "27,738"),
            *(
                (pool, f"{self._actions[bit] / total:.1%}", other)
                for (bit, pool), other in zip(
                    POOLS.items(), ("61.3%", "1.9%", "35.9%"), strict=True
                )
            ),
            ("events of an item that the user had before", f"{self._repeated / total:.1%}", "-"),
            ("events of the hottest 1% of items", f"{hot:.1%}", "-"),
            ("training rows", f"{spec.splits['train'].num_rows:,}", "2,290,835,423"),
            ("evaluation rows", f"{spec.splits['test'].num_rows:,}", "2,058,204"),
            ("events that a row sees", f"{spec.categorical[-1].mean_hotness:,.0f}", "2,663"),
            *zip(
                (f"distinct {name} of {RANK_ROWS:,} rows, each {RANKS}th" for name in ITEMS),
                (f"{share:.1%}" for share in _distinct(spec)),
                ("2.4%", "0.6%", "1.5%"),
                strict=True,
            ),
        ):
            yield f"{name:42}{here:>16}{other:>16}"


def _distinct(spec: FeatureSpec) -> np.ndarray:
    """Return the share of distinct ids among those of the events of a rank of the reference, by feature of the group."""
    source, num_rows = BinarySource(spec), spec.splits["train"].num_rows
    shares = []
    for start in np.linspace(0, max(num_rows - RANKS * RANK_ROWS, 0), 5).astype(int):
        rows = np.arange(start, min(start + RANKS * RANK_ROWS, num_rows), RANKS)
        read = source.read("train", np.stack([rows, rows + 1], axis=1))
        shares.append([len(np.unique(ids)) / max(len(ids), 1) for ids in read.ids[-3:]])
    return np.mean(shares, axis=0)
