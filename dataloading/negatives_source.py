"""A source with negatives: behind every row the same row with another item, labelled 0 (`data.negatives`)."""

import numpy as np

from configs.messages import shown
from configs.schema import DrawRule, NegativesConfig
from dataloading.dataset.source import EPOCH_ROWS, BatchTarget, Columns, DerivedSource, Source
from dataloading.gather import expand
from dataloading.randomness import stream_key, uniform

DRAWS = 64
"""Draws of one negative until it is another item, and none of the row's history."""


class NegativesSource(DerivedSource):
    """Rows of another source, each followed by `per_row` negatives: the row with another item, labelled 0.

    Row r is a row of the source if r is a multiple of 1 + `per_row`. A draw is a hash of (seed, split, epoch, row, number of the
    draw): rule `frequency` takes the item of a row of the split, so items come as often as they do there; `uniform` takes an id
    of the table, from 1 on. Drawn again: id 0, the row's own item, and the items of its history.

    Raises ValueError: the features are none that negatives can be drawn of.
    """

    def __init__(self, source: Source, options: NegativesConfig, seed: int) -> None:
        super().__init__(source)
        self.draws_anew = True
        self._options, self._seed, self._size = options, seed, 1 + options.per_row
        by_name = {feature.name: index for index, feature in enumerate(self.spec.categorical)}
        history = [options.history] * (options.history is not None)
        for name in (*options.features, *history):
            if name not in by_name:
                raise ValueError(
                    f"data.negatives names {shown(name)}, which the dataset lacks; it has {', '.join(by_name)}"
                )
        for name in options.features:
            feature = self.spec.categorical[by_name[name]]
            if feature.hotness != 1 or feature.is_dynamic or feature.cardinality < 3:
                raise ValueError(
                    f"data.negatives.features: {shown(name)} has raw keys, several ids per row or a table below 3 rows; want "
                    "features of the item with one id of a vocabulary"
                )
        numbers = [label.name for label in self.spec.labels if not label.is_binary]
        if numbers:
            raise ValueError(
                f"data.negatives labels rows with 0, and {shown(numbers[0])} is a regression label; leave it out"
            )
        self._features = [by_name[name] for name in options.features]
        self._history = by_name.get(options.history or "")
        tables = [
            self.spec.categorical[i].table or self.spec.categorical[i].name for i in self._features
        ]
        if self._history is not None:
            of = self.spec.categorical[self._history]
            if (of.table or of.name) != tables[0]:
                raise ValueError(
                    f"data.negatives.history: {shown(of.name)} has the table {shown(of.table or of.name)}, and "
                    f"{shown(options.features[0])} {shown(tables[0])}; name a history of the same items"
                )

    def num_rows(self, split: str) -> int:
        return self._source.num_rows(split) * self._size

    def granule(self, split: str) -> int:
        granule = self._source.granule(split)
        if granule > 1 and self._options.rule is DrawRule.frequency:
            raise ValueError(
                "data.negatives.rule=frequency reads single rows, and these lie in row groups of Parquet; convert the dataset "
                "(python -m preproc mode=convert to=binary), or set rule=uniform"
            )
        return granule * self._size

    def read(self, split: str, runs: np.ndarray, into: BatchTarget | None = None) -> Columns:
        rows = expand(runs)
        found = super().read(split, runs, into)
        negatives = np.flatnonzero(rows % EPOCH_ROWS % self._size)
        found.labels[negatives] = 0
        own = found.ids[self._features[0]][negatives]
        # Sorted once: a draw looks its few rows up in the histories of all.
        taken = np.sort(self._taken(found, len(rows)))
        waiting = np.arange(len(negatives))
        for draw in range(DRAWS):
            places = negatives[waiting]
            drawn = self._drawn(split, rows[places], draw)
            good = (drawn[0] != 0) & (drawn[0] != own[waiting])
            good &= ~_is_in(_pairs(places, drawn[0]), taken)
            for feature, ids in zip(self._features, drawn, strict=True):
                found.ids[feature][places[good]] = ids[good]
            waiting = waiting[~good]
            if not len(waiting):
                return found
        row = rows[negatives[waiting[0]]] % EPOCH_ROWS // self._size
        raise ValueError(
            f"data.negatives: {DRAWS} draws gave no other item for row {row} of split '{split}'; lower the items that it must "
            "not have (data.negatives.history), or leave negatives out"
        )

    def _stored(self, split: str, runs: np.ndarray) -> tuple[str, np.ndarray]:
        """Return the rows of the source that rows are made of, as runs of one row each."""
        first = expand(runs) % EPOCH_ROWS // self._size
        return split, np.stack([first, first + 1], axis=1)

    def _taken(self, found: Columns, num_rows: int) -> np.ndarray:
        """Return the items of histories, as `_pairs`."""
        if self._history is None:
            return np.empty(0, np.int64)
        ids, lengths = found.ids[self._history], found.lengths[self._history]
        hotness = self.spec.categorical[self._history].hotness or 0
        counts = hotness if lengths is None else lengths[:num_rows]
        return _pairs(np.repeat(np.arange(num_rows), counts), ids)

    def _drawn(self, split: str, rows: np.ndarray, draw: int) -> list[np.ndarray]:
        """Return the ids of the features of the item that each row draws."""
        counters = rows.astype(np.uint64) * np.uint64(DRAWS) + np.uint64(draw)
        numbers = uniform(stream_key("negatives", self._seed, split), counters)
        if self._options.rule is DrawRule.uniform:
            (feature,) = self._features
            return [
                1 + (numbers * (self.spec.categorical[feature].cardinality - 1)).astype(np.int64)
            ]
        first = (numbers * self._source.num_rows(split)).astype(np.int64)
        other = self._source.read(split, np.stack([first, first + 1], axis=1))
        return [other.ids[feature] for feature in self._features]


def _is_in(values: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    at = np.searchsorted(ascending, values)
    found = at < len(ascending)
    found[found] = ascending[at[found]] == values[found]
    return found


def _pairs(rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return one number for each pair of a row of a batch and an id, int64."""
    return rows.astype(np.int64) << 40 | ids.astype(np.int64)
