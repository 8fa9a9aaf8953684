"""Hidden model that draws the labels of the synthetic click stream.

    logit = bias + numericals . w + sum_f a_f[id_f] + sum over some pairs (f, g) of <v_f[id_f], v_g[id_g]>

`a` and `v` fade with the frequency rank of the id, so most of the signal is in ids that occur often enough to
be learned. The pairs are the gain of a model with interactions over logistic regression. Multi-hot features
use the mean over their ids. A history adds, of each of its features with ids h_0 (the latest), h_1 and so on,

    sum_k DECAY^k (b[h_k] + <u[h_k], w[id of the row]>)

so the order of events matters, and which of them is like the row's own id.
"""

from collections.abc import Sequence

import numpy as np

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.randomness import stream_key, uniform
from dataloading.synthetic_history import Events

KNOWN_IDS = 4096
"""Ids from this one have no effect, since they are too rare to be learned from a small stream."""
FADE_RANK = 32
"""The effect of an id falls with the square root of (1 + id / FADE_RANK)."""
NUM_PAIRS = 8
PAIR_DIM = 4
DEVIATIONS = {"numerical": 0.8, "ids": 1.1, "pairs": 0.9}
"""Standard deviation of each part of the logit."""
HISTORY_DEVIATION = 1.2
POSITIVE_RATE = 0.27
RECENT = 16
"""Events that have an effect, the latest ones."""
DECAY = 0.7


class Teacher:
    """Model that returns logits of rows."""

    def __init__(self, spec: FeatureSpec, seed: int) -> None:
        num_features = sum(spec.group_of(feature.name) is None for feature in spec.categorical)

        def weights(count: int, *names: object) -> np.ndarray:
            """Return float32 [count] of mean 0 and variance 1."""
            numbers = uniform(
                stream_key(seed, "teacher", *names), np.arange(count, dtype=np.uint64)
            )
            return ((numbers - 0.5) * np.sqrt(12)).astype(np.float32)

        def effects(feature: int, *names: object) -> np.ndarray:
            """Return one hidden number per id, the last one for all rare ids."""
            rows = min(spec.categorical[feature].cardinality, KNOWN_IDS)
            fade = 1 / np.sqrt(1 + np.arange(rows, dtype=np.float32) / FADE_RANK)
            return np.append(weights(rows, feature, *names) * fade, np.float32(0))

        self._numerical = weights(len(spec.numerical), "numerical")
        self._ids = [effects(feature, "ids") for feature in range(num_features)]
        order = np.argsort(weights(num_features, "pairs"), kind="stable").tolist()
        self._pairs = [
            [(effects(f, g, d), effects(g, f, d), f, g) for d in range(PAIR_DIM)]
            for f, g in list(zip(order[::2], order[1::2], strict=False))[:NUM_PAIRS]
        ]
        names = [feature.name for feature in spec.categorical]
        self._deviations = DEVIATIONS | ({"history": HISTORY_DEVIATION} if spec.sequences else {})
        # Of each feature of the history: effects of its ids, of pairs with the row's own id, and the feature that has that.
        self._history = [
            (
                effects(index, "history"),
                [(effects(index, "like", d), effects(f, "liked", d)) for d in range(PAIR_DIM)],
                f,
            )
            for index, f in (
                (index, names.index(spec.categorical[index].table or ""))
                for index in range(num_features, len(names))
            )
        ]
        self._scales = dict.fromkeys(self._deviations, np.float32(1))
        self._bias = np.float32(0)

    def calibrate(
        self, numerical: np.ndarray, ids: Sequence[np.ndarray], events: Events | None = None
    ) -> None:
        """Set scales and bias so that these rows have DEVIATIONS and POSITIVE_RATE."""
        for name, values in self._parts(numerical, ids, events).items():
            deviation = float(values.std(dtype=np.float64))
            # With uniform draws from a huge table few ids are known; scaling would amplify them, so the part is left out.
            self._scales[name] = np.float32(
                self._deviations[name] / deviation if deviation > 0.01 else 0
            )
        self._bias = np.float32(0)
        logits = self.logits(numerical, ids, events).astype(np.float64)
        low, high = -20.0, 20.0
        for _ in range(50):
            middle = (low + high) / 2
            above = (1 / (1 + np.exp(-(logits + middle)))).mean() > POSITIVE_RATE
            low, high = (low, middle) if above else (middle, high)
        self._bias = np.float32(low)

    def logits(
        self, numerical: np.ndarray, ids: Sequence[np.ndarray], events: Events | None = None
    ) -> np.ndarray:
        """Return float32 [n].

        `numerical`: float32 [n, num_numerical]. `ids`: integers [n, hotness], one array per feature.
        """
        total = np.full(len(numerical), self._bias)
        for name, values in self._parts(numerical, ids, events).items():
            total += self._scales[name] * values
        return total

    def _parts(
        self, numerical: np.ndarray, ids: Sequence[np.ndarray], events: Events | None
    ) -> dict[str, np.ndarray]:
        """Return the parts of the logit; sums are elementwise, so a row does not depend on its neighbours."""
        parts = {name: np.zeros(len(numerical), np.float32) for name in self._deviations}
        for column, weight in enumerate(self._numerical):
            parts["numerical"] += numerical[:, column] * weight
        for effects, bag in zip(self._ids, ids, strict=True):
            parts["ids"] += _pooled(effects, bag)
        for pair in self._pairs:
            for left, right, f, g in pair:
                parts["pairs"] += _pooled(left, ids[f]) * _pooled(right, ids[g])
        if events is not None:
            ends = np.cumsum(events.lengths)
            held = [np.flatnonzero(events.lengths > k) for k in range(RECENT)]
            for flat, (own, pairs, f) in zip(events.ids, self._history, strict=True):
                recent = [flat[ends[rows] - 1 - k] for k, rows in enumerate(held)]
                parts["history"] += _decayed(own, recent, held, len(numerical))
                for left, right in pairs:
                    parts["history"] += _decayed(left, recent, held, len(numerical)) * _pooled(
                        right, ids[f]
                    )
        return parts


def _decayed(
    effects: np.ndarray, recent: Sequence[np.ndarray], held: Sequence[np.ndarray], num_rows: int
) -> np.ndarray:
    """Return the sum of the effects of each row's `recent` ids, which decay with their age, float32 [n].

    `held`: the rows of each of `recent`, the latest first.
    """
    total = np.zeros(num_rows, np.float32)
    for k, (ids, rows) in enumerate(zip(recent, held, strict=True)):
        total[rows] += np.float32(DECAY**k) * effects.take(ids, mode="clip")
    return total


def _pooled(effects: np.ndarray, bag: np.ndarray) -> np.ndarray:
    """Return the mean effect of each row's ids, float32 [n]."""
    total = effects.take(bag[:, 0], mode="clip")
    for column in range(1, bag.shape[1]):
        total += effects.take(bag[:, column], mode="clip")
    return total / np.float32(bag.shape[1]) if bag.shape[1] > 1 else total
