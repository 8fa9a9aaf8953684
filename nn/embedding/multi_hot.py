"""Expansion of one-hot ids on the ranks of their tables: MLPerf's synthetic multi-hot Criteo from a one-hot dataset.

MLPerf's reference gives every row of a table `hotness - 1` further ids, drawn uniformly with numpy's legacy generator:
`np.random.seed(0)`, then for each table in order `randint(0, rows, size=(rows, hotness - 1))`. The ids of a sample are so
a pure function of its one-hot ids: the dataset stays one-hot on disk and on its way to the tables (160 bytes per row for
912), and the owner of a table expands what arrives.

`randint` masks 32-bit words of the Mersenne Twister to the next power of two and rejects what lies outside the table.
The words in bulk, masked and picked by numpy, give the same ids bit for bit in less than half of its time; threads that
start further down the stream divide what is left.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from configs.schema import MultiHotConfig
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from nn.embedding.mt19937 import Jump, State, generator_at, words

Picked = tuple[np.ndarray, int, State]
"""Ids picked, how many, and where the generator goes on."""

ID_BYTES = 4
"""Further ids are int32."""
CHUNK_WORDS = 1 << 17
"""Words drawn at a time: they and what is picked of them stay in the cache."""
SEGMENT_WORDS = 1 << 24
"""Words that a thread works on before it hands over; the ids that it picks of them take 64 MiB of the host at most."""
SURE = 0.995
"""Part of a table's words, as many as are expected, that it surely needs: 25 standard deviations for one segment."""


class MultiHot:
    """Multi-hot expansion of one dataset by the options `data.multi_hot`.

    Args:
        spec: feature spec of the stored dataset.
        config: hotness per feature, and the seed.
        threads: number of threads that draw additional ids.

    Attributes:
        hotness: hotness after expansion by feature; only features that are expanded.

    Raises:
        ValueError: not one entry a feature, or a feature to expand that is not stored one-hot.
    """

    def __init__(self, spec: FeatureSpec, config: MultiHotConfig, threads: int = 1) -> None:
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
        self._threads = threads
        # The generator's state where a table's words begin, known for the tables that were drawn or passed.
        self._starts = [np.random.RandomState(config.seed).get_state(legacy=False)]

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
        asked for included; host memory stays within 64 MiB a thread.
        """
        index = list(self.hotness).index(feature)
        for passed in range(len(self._starts) - 1, index):
            for _ in self._draw(passed, keep=False):
                pass
        rows, hotness = self._features[index][0].cardinality, self._features[index][1]
        table = torch.zeros(rows, hotness - 1, dtype=torch.int32, device=device)
        flat, start = table.view(-1), 0
        for ids in self._draw(index, keep=True):
            flat[start : start + len(ids)] = torch.from_numpy(ids)
            start += len(ids)
        return table

    def _draw(self, index: int, *, keep: bool) -> Iterator[np.ndarray]:
        """Draw the ids of table `index` and note where the next table's begin.

        Yields:
            Ids, int32, valid until the next are asked for; empty unless `keep`.
        """
        feature, hotness = self._features[index]
        rows, state = feature.cardinality, self._starts[index]
        # randint draws nothing where there is nothing to choose.
        count = rows * (hotness - 1) if rows > 1 else 0
        segments = int(SURE * count * _power_of_two(rows) / rows / SEGMENT_WORDS)
        threads = min(self._threads, segments) or 1
        buffers = [np.empty(SEGMENT_WORDS if keep else 0, np.int32) for _ in range(threads)]
        if segments:
            jump = _segment_jump(SEGMENT_WORDS)
            pending: deque[Future[Picked]] = deque()
            with ThreadPoolExecutor(threads) as pool:
                for number in range(segments + threads):
                    if number >= threads:
                        ids, found, _ = pending.popleft().result()
                        count -= found
                        yield ids
                    if number < segments:
                        buffer = buffers[number % threads]
                        pending.append(pool.submit(_pick, state, rows, SEGMENT_WORDS, buffer))
                        state = jump(state)
        assert count >= 0, "more ids than the table has, against all odds"
        while count:
            ids, found, state = _pick(state, rows, count, buffers[0])
            count -= found
            yield ids
        if index + 1 == len(self._starts):
            self._starts.append(state)


def expand(ids: Tensor, lookup_table: Tensor) -> Tensor:
    """Append the additional ids to every id: [n] to int32 [n, hotness].

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


def _power_of_two(rows: int) -> int:
    """Return the smallest power of two that is not below `rows`; `randint` masks words to it."""
    return 1 << (rows - 1).bit_length()


_segment_jump = cache(Jump)


def _pick(state: State, rows: int, most: int, buffer: np.ndarray) -> Picked:
    """Pick what `randint(0, rows)` would out of the next SEGMENT_WORDS words, `most` ids at most.

    Args:
        state: of the generator.
        rows: of the table, 2 or more.
        most: stop behind the word that gives the last of so many ids.
        buffer: int32 [SEGMENT_WORDS], where the ids go; of length 0 if they are only to be counted.
    """
    generator, found = generator_at(state), 0
    bound, mask = np.uint32(rows - 1), np.uint32(_power_of_two(rows) - 1)
    for _ in range(0, SEGMENT_WORDS, CHUNK_WORDS):
        before = generator.get_state(legacy=False)
        values = words(generator, CHUNK_WORDS) & mask
        accepted = values <= bound
        here = int(np.count_nonzero(accepted))
        is_last = found + here >= most
        if is_last:
            here = most - found
            end = int(np.flatnonzero(accepted)[here - 1]) + 1
            values, accepted = values[:end], accepted[:end]
            generator.set_state(before)
            words(generator, end)
        if len(buffer):
            buffer[found : found + here] = np.compress(accepted, values)
        found += here
        if is_last:
            break
    return buffer[:found], found, generator.get_state(legacy=False)
