"""Several ids out of one, made where the table lies: MLPerf's synthetic multi-hot Criteo from a one-hot dataset.

MLPerf's reference gives every row of a table `hotness - 1` further ids, drawn uniformly with numpy's legacy generator:
`np.random.seed(0)`, then for each table in order `randint(0, rows, size=(rows, hotness - 1))`. The ids of a sample are so
a pure function of its one-hot ids: the dataset stays one-hot on disk and on its way to the tables (160 bytes a row for
912), and the owner of a table expands what arrives.

`randint` masks 32-bit words of the Mersenne Twister to the next power of two and rejects what lies outside the table.
The words in bulk, masked and picked by numpy, give the same ids bit for bit in less than half of its time.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from configs.schema import MultiHotConfig
from dataloading.feature_spec import CategoricalFeature, FeatureSpec

ID_BYTES = 4
"""Further ids are int32."""
CHUNK_WORDS = 1 << 16
"""Words drawn at a time: they and what is picked of them stay in the cache."""
STAGED_IDS = 1 << 22
"""Ids gathered on the host before they are copied to the device."""


class MultiHot:
    """What data.multi_hot asks for, of one dataset.

    Args:
        spec: the dataset as it is stored.
        config: ids a stored id stands for, and the seed.

    Attributes:
        hotness: feature -> ids to look up for its stored one; only of features that are expanded.

    Raises:
        ValueError: not one entry a feature, or a feature to expand that is not stored one-hot.
    """

    def __init__(self, spec: FeatureSpec, config: MultiHotConfig) -> None:
        given = config.hotness or [1] * len(spec.categorical)
        if len(given) != len(spec.categorical):
            raise ValueError(
                f"data.multi_hot.hotness has {len(given)} entries for {len(spec.categorical)} categorical "
                "features; give one a feature, 1 for those that stay as they are stored"
            )
        self._features = [
            (feature, hotness)
            for feature, hotness in zip(spec.categorical, given, strict=True)
            if hotness > 1
        ]
        for feature, hotness in self._features:
            _check_expandable(feature, hotness)
        self.hotness = {feature.name: hotness for feature, hotness in self._features}
        self._words = _Words(config.seed)
        # Where the words of a table begin, known for the tables that were drawn or passed.
        self._starts = [self._words.position()]

    def expanded_spec(self, spec: FeatureSpec) -> FeatureSpec:
        """Return the dataset as planner, tables and model see it: the same, with the hotness after expansion."""
        categorical = tuple(
            replace(feature, hotness=hotness, mean_hotness=hotness)
            if (hotness := self.hotness.get(feature.name))
            else feature
            for feature in spec.categorical
        )
        return replace(spec, categorical=categorical)

    def expansion_bytes(self) -> dict[str, int]:
        """Return feature -> bytes of its lookup table, on every rank that holds a part of the feature's table."""
        return {
            feature.name: feature.cardinality * (hotness - 1) * ID_BYTES
            for feature, hotness in self._features
        }

    def lookup_table(self, feature: str, device: torch.device) -> Tensor:
        """Return the further ids of every id of `feature`: int32 [num_embeddings, hotness - 1].

        Asked for in the spec's order, all tables together take one pass over the random stream, those that are not
        asked for included; host memory stays within a few times STAGED_IDS.
        """
        index = next(i for i, (each, _) in enumerate(self._features) if each.name == feature)
        self._go_to(index)
        rows, hotness = self._features[index][0].cardinality, self._features[index][1]
        table = torch.zeros(rows, hotness - 1, dtype=torch.int32, device=device)
        flat, staged, start, filled = table.view(-1), np.empty(STAGED_IDS, np.int32), 0, 0
        for values, accepted in self._words.draws(rows, len(flat)):
            ids = np.compress(accepted, values)
            if filled + len(ids) > STAGED_IDS:
                flat[start : start + filled] = torch.from_numpy(staged[:filled])
                start, filled = start + filled, 0
            staged[filled : filled + len(ids)] = ids
            filled += len(ids)
        flat[start : start + filled] = torch.from_numpy(staged[:filled])
        self._note_start(index + 1)
        return table

    def _go_to(self, index: int) -> None:
        """Set the stream to the first word of table `index`, past those before it."""
        known = min(index, len(self._starts) - 1)
        self._words.seek(self._starts[known])
        for passed in range(known, index):
            feature, hotness = self._features[passed]
            for _ in self._words.draws(feature.cardinality, feature.cardinality * (hotness - 1)):
                pass
            self._note_start(passed + 1)

    def _note_start(self, index: int) -> None:
        if index == len(self._starts):
            self._starts.append(self._words.position())


def expand(ids: Tensor, lookup_table: Tensor) -> Tensor:
    """Put the further ids behind each id: [n] to int32 [n, hotness].

    Args:
        ids: one-hot ids of a feature.
        lookup_table: of the feature, from `MultiHot.lookup_table`.
    """
    return torch.cat([ids.int().unsqueeze(1), lookup_table.index_select(0, ids)], dim=1)


def _check_expandable(feature: CategoricalFeature, hotness: int) -> None:
    if feature.hotness != 1:
        stored = "ragged" if feature.hotness is None else f"stored with hotness {feature.hotness}"
        raise ValueError(
            f"data.multi_hot.hotness is {hotness} for '{feature.name}', which is {stored}; only one-hot "
            "features can be expanded, so set its entry to 1"
        )
    if feature.cardinality > 2**31:
        raise ValueError(
            f"data.multi_hot.hotness is {hotness} for '{feature.name}' with {feature.cardinality} rows; "
            "further ids are int32, so set its entry to 1"
        )


class _Words:
    """The 32-bit words behind numpy's legacy `randint`, read in chunks.

    Args:
        seed: as for `np.random.seed`.
    """

    def __init__(self, seed: int) -> None:
        self._generator = np.random.RandomState(seed)
        self._refill()

    def _refill(self) -> None:
        self._state = self._generator.get_state(legacy=False)
        self._chunk = self._generator.randint(0, 2**32, size=CHUNK_WORDS, dtype=np.uint32)
        self._read = 0

    def position(self) -> tuple[dict, int]:
        """Where the next word is read, for `seek`."""
        return self._state, self._read

    def seek(self, position: tuple[dict, int]) -> None:
        """Read on from a `position`."""
        state, read = position
        self._generator.set_state(state)
        self._refill()
        self._read = read

    def draws(self, rows: int, count: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Read what `randint(0, rows, size=count)` would, and no word more.

        Yields:
            Masked words, uint32 [n], and which of them `randint` returns, bool [n]; nothing for one row, for which it
            draws nothing.
        """
        bound = rows - 1
        mask = np.uint32((1 << bound.bit_length()) - 1)
        while count and bound:
            if self._read == len(self._chunk):
                self._refill()
            values = self._chunk[self._read :] & mask
            accepted = values <= np.uint32(bound)
            found = np.count_nonzero(accepted)
            if found >= count:
                found, end = count, np.flatnonzero(accepted)[count - 1] + 1
                values, accepted = values[:end], accepted[:end]
            self._read += len(values)
            count -= found
            yield values, accepted
