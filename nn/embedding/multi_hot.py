"""Expansion of one-hot ids on the ranks of their tables: MLPerf's synthetic multi-hot Criteo from a one-hot dataset.

MLPerf's reference gives every row of a table `hotness - 1` additional ids, drawn uniformly with numpy's legacy generator:
`np.random.seed(0)`, then `randint(0, rows, size=(rows, hotness - 1))` for each table in order. The ids of a sample are
therefore a pure function of its one-hot ids. The dataset stays one-hot on disk and in the id exchange (160 bytes per row
instead of 912), and the rank of a table expands the ids.

`randint` masks 32-bit words of the Mersenne Twister to the next power of two and rejects ids outside the table. Drawing the
words in bulk and masking them with numpy gives the same ids in less than half of the time. Threads that start at later
positions of the stream share the work.
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
from dataloading.dataset.feature_spec import FeatureSpec
from nn.embedding.mt19937 import Jump, State, generator_at, words

Picked = tuple[np.ndarray, int, State]
"""Ids, their number, and the state of the generator after them."""

ID_BYTES = 4
"""Additional ids are int32."""
CHUNK_WORDS = 1 << 17
"""Words drawn at a time: they and the ids picked from them fit in the cache."""
SEGMENT_WORDS = 1 << 24
"""Words per task of a thread; the ids picked from them take at most 64 MiB of host memory."""
SURE = 0.995
"""Fraction of the expected number of words that a table needs with certainty: 25 standard deviations for one segment."""


class MultiHot:
    """Multi-hot expansion of one dataset by the options `data.multi_hot`.

    `threads` draw additional ids. `hotness` is that after expansion, of features that are expanded. Raises ValueError: the number
    of entries differs from that of features, or a feature to expand is not stored one-hot.
    """

    def __init__(self, spec: FeatureSpec, config: MultiHotConfig, threads: int = 1) -> None:
        entries = config.hotness or [1] * len(spec.categorical)
        if len(entries) != len(spec.categorical):
            raise ValueError(
                f"data.multi_hot.hotness has {len(entries)} entries for {len(spec.categorical)} categorical "
                "features; give one per feature, 1 for features that are not expanded"
            )
        self._features = [
            (feature, hotness)
            for feature, hotness in zip(spec.categorical, entries, strict=True)
            if hotness > 1
        ]
        for feature, hotness in self._features:
            problem = ""
            if feature.hotness != 1:
                problem = "which is not stored one-hot, as only expanded features are"
            elif feature.cardinality > 2**31:
                problem = f"which has {feature.cardinality} rows, and additional ids are int32"
            if problem:
                raise ValueError(
                    f"data.multi_hot.hotness is {hotness} for '{feature.name}', {problem}; set its entry to 1"
                )
        self.hotness = {feature.name: hotness for feature, hotness in self._features}
        self._threads = threads
        # State of the generator at the first word of each table, for the tables drawn or skipped so far and the next one.
        self._starts = [np.random.RandomState(config.seed).get_state(legacy=False)]

    def expanded_spec(self, spec: FeatureSpec) -> FeatureSpec:
        """Return the feature spec for planner, tables and model: `spec` with the hotness after expansion."""
        categorical = tuple(
            replace(feature, hotness=hotness, mean_hotness=hotness)
            if (hotness := self.hotness.get(feature.name))
            else feature
            for feature in spec.categorical
        )
        return replace(spec, categorical=categorical)

    def expansion_bytes(self) -> dict[str, int]:
        """Return the bytes of each feature's lookup table; every rank with a shard of the feature's table holds one."""
        return {
            feature.name: feature.cardinality * (hotness - 1) * ID_BYTES
            for feature, hotness in self._features
        }

    def lookup_table(self, feature: str, device: torch.device) -> Tensor:
        """Return the additional ids of `feature`, int32 [num_embeddings, hotness - 1]; features in order take one pass."""
        index = list(self.hotness).index(feature)
        for skipped in range(len(self._starts) - 1, index):
            for _ in self._draw(skipped, keep=False):
                pass
        rows, hotness = self._features[index][0].cardinality, self._features[index][1]
        table = torch.zeros(rows, hotness - 1, dtype=torch.int32, device=device)
        flat, start = table.view(-1), 0
        for ids in self._draw(index, keep=True):
            flat[start : start + len(ids)] = torch.from_numpy(ids)
            start += len(ids)
        return table

    def _draw(self, index: int, *, keep: bool) -> Iterator[np.ndarray]:
        """Draw the ids of a table, int32, valid until the next iteration, empty unless `keep`; store the state after them."""
        feature, hotness = self._features[index]
        rows, state = feature.cardinality, self._starts[index]
        # randint draws nothing for a table of one row.
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
                        ids, num_ids, _ = pending.popleft().result()
                        count -= num_ids
                        yield ids
                    if number < segments:
                        buffer = buffers[number % threads]
                        pending.append(pool.submit(_pick, state, rows, SEGMENT_WORDS, buffer))
                        state = jump(state)
        assert count >= 0, "drew more ids than the table has"
        while count:
            ids, num_ids, state = _pick(state, rows, count, buffers[0])
            count -= num_ids
            yield ids
        if index + 1 == len(self._starts):
            self._starts.append(state)


def expand(ids: Tensor, lookup_table: Tensor) -> Tensor:
    """Append the additional ids to every id: [n] to int32 [n, hotness]."""
    return torch.cat([ids.int().unsqueeze(1), lookup_table.index_select(0, ids)], dim=1)


def _power_of_two(rows: int) -> int:
    """Return the smallest power of two that is not below `rows`; `randint` masks words to it."""
    return 1 << (rows - 1).bit_length()


_segment_jump = cache(Jump)


def _pick(state: State, rows: int, most: int, buffer: np.ndarray) -> Picked:
    """Return the ids that `randint(0, rows)` would take from the next SEGMENT_WORDS words, at most `most`.

    `rows` are 2 or more. `buffer`, int32 [SEGMENT_WORDS], is overwritten with the ids; of length 0 they are counted only. The
    generator stops after the word of the last id.
    """
    generator, num_ids = generator_at(state), 0
    bound, mask = np.uint32(rows - 1), np.uint32(_power_of_two(rows) - 1)
    for _ in range(0, SEGMENT_WORDS, CHUNK_WORDS):
        before = generator.get_state(legacy=False)
        values = words(generator, CHUNK_WORDS) & mask
        accepted = values <= bound
        here = int(np.count_nonzero(accepted))
        is_last = num_ids + here >= most
        if is_last:
            here = most - num_ids
            end = int(np.flatnonzero(accepted)[here - 1]) + 1
            values, accepted = values[:end], accepted[:end]
            generator.set_state(before)
            words(generator, end)
        if len(buffer):
            buffer[num_ids : num_ids + here] = np.compress(accepted, values)
        num_ids += here
        if is_last:
            break
    return buffer[:num_ids], num_ids, generator.get_state(legacy=False)
