"""Raw values of a request to rows, by the fit of the dataset that the model was trained on.

It computes what `preproc.table.expressions` computes in SQL, without a database:
`tests/serving/inference/test_raw_values.py` compares both. A value that preprocessing would refuse as a bad row is refused
here too; unseen and missing values have id 0. What is missing depends on the column in the fit, not on a request's datatype.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from configs.messages import shown
from serving.inference.key_rows import KeyRows
from serving.inference.model_rows import RaggedIds, Rows
from serving.inference.raw_columns import RawColumns, Texts, split, without_end
from serving.inference.raw_events import Shapes, cut_lists, seen_of_log
from serving.inference.requests import keep_rates, refuse
from serving.manifest import Manifest, ModelError
from serving.raw_records import Key, RawCategorical, RawDescription, RawHistory
from serving.vocabulary import Vocabulary


class RawValues:
    """The transformation of a model, whose `inputs` are the columns, 1 or 2 of a list."""

    def __init__(
        self,
        raw: RawDescription,
        manifest: Manifest,
        vocabularies: Mapping[str, Vocabulary],
        keys: Mapping[str, KeyRows],
    ) -> None:
        self._raw, self._manifest = raw, manifest
        self._vocabularies, self._keys = vocabularies, keys
        self.inputs, self._by_feature = raw.inputs, raw.by_feature
        self._columns = RawColumns(raw)
        self._logs = [(sequence, RawColumns(sequence.events)) for sequence in raw.sequences]
        self._groups = {of.name: of.group for of in manifest.sequences}
        keeps_empty = {name for lists in raw.lists for name in lists.features}
        is_dropped = raw.empty_items == "dropped"
        self._drops_empty = {f.name for f in raw.categorical if is_dropped} - keeps_empty
        self._optional = {manifest.keep_rate} if manifest.keep_rate else set()
        self._hotness = {feature.name: feature.hotness for feature in manifest.categorical}

    @classmethod
    def load(cls, directory: Path, manifest: Manifest, keys: Mapping[str, KeyRows]) -> Self | None:
        """Map the vocabularies of a model directory, whose description `Manifest.read` has checked; None without one.

        `keys`: rows of raw keys by feature. Raises ModelError: the description is malformed, or a vocabulary is damaged.
        """
        if not manifest.raw:
            return None
        try:
            raw = RawDescription.of(manifest.raw)
            files = dict(f.vocabulary for f in raw.by_feature.values() if f.vocabulary)
            vocabularies = {file: Vocabulary(directory / file, files[file]) for file in files}
            return cls(raw, manifest, vocabularies, keys)
        except ModelError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, OSError) as error:
            raise ModelError(f"{directory}: raw values are malformed: {shown(error)}") from None

    def describe_inputs(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "datatype": "BYTES", "shape": [-1] * dimensions}
            for name, dimensions in self.inputs.items()
        ]

    def rows(self, inputs: Mapping[str, Any], shapes: Shapes, num_rows: int) -> Rows:
        """Return the features of raw values.

        `inputs`: by column: texts, None where one is missing, or an array of numbers. `shapes`: of the inputs. B is
        `num_rows`. Raises InputError: a column is missing or unknown, or a value is none that preprocessing accepts.
        """
        self._check(inputs, shapes, num_rows)
        columns: dict[Key, Any] = {name: inputs[name] for name in self.inputs}
        values = self._columns.with_expressions(columns)
        ids: dict[str, Any] = {}  # int64 [B * hotness], or `RaggedIds`
        numbers_of_events: dict[str, RaggedIds] = {}
        for sequence, of_events in self._logs:
            seen, numbers = seen_of_log(sequence, of_events, self._encode, values, shapes)
            ids |= seen
            numbers_of_events |= numbers
        lengths = []
        for feature in self._raw.categorical:
            ids[feature.name], counts = self._ids(feature, values, shapes, num_rows)
            if feature.length:
                lengths.append(counts)
        for history in self._raw.history:
            ids[history.name], counts = self._history(history, inputs, shapes, num_rows)
            lengths.append(counts)
        for lists in self._raw.lists:
            group = self._groups.get(lists.name)
            numbers_of_events |= cut_lists(lists, group, self._columns, values, shapes, ids)
        stored = [self._columns.numbers(feature, values) for feature in self._raw.numerical]
        stacked = np.zeros((num_rows, 0), np.float32)
        if stored or lengths:
            stacked = np.stack([*stored, *lengths], axis=1).astype(np.float32)
        rates = {name: np.asarray(inputs[name]) for name in self._optional & {*inputs}}
        fixed = [ids[feature.name].view(num_rows, -1) for feature in self._manifest.fixed]
        return Rows(
            torch.from_numpy(stacked),
            torch.cat(fixed, dim=1) if fixed else torch.zeros(num_rows, 0).long(),
            {feature.name: ids[feature.name] for feature in self._manifest.ragged},
            keep_rates(self._manifest, rates, num_rows),
            numbers_of_events,
        )

    def _check(self, inputs: Mapping[str, Any], shapes: Shapes, num_rows: int) -> None:
        wanted = ", ".join(self.inputs)
        for name in self.inputs.keys() - inputs.keys():
            refuse(f"there is no column {shown(name)}; want {wanted}")
        for name in inputs.keys() - self.inputs.keys() - self._optional:
            refuse(f"there is no column {shown(name)} in the model; want {wanted}")
        for name, dimensions in self.inputs.items():
            shape = shapes[name]
            if dimensions == 1 and shape not in ((num_rows,), (num_rows, 1)):
                refuse(f"column {shown(name)} has shape {list(shape)}; want {[num_rows]}")
            if dimensions == 2 and len(shape) != 2:
                refuse(f"list {shown(name)} has shape {list(shape)}; want [{num_rows}, values]")

    def _ids(
        self, feature: RawCategorical, inputs: Mapping[Key, Any], shapes: Shapes, num_rows: int
    ) -> tuple[Tensor | RaggedIds, np.ndarray]:
        """Return the ids of a feature, and how many of its items every row keeps, float32 [B]."""
        texts = self._columns.values(feature, inputs)
        if not feature.separator and not feature.list:
            return torch.from_numpy(self._encode(feature, texts)), np.ones(num_rows, np.float32)
        lists: list[list[str | None]]
        if feature.separator:
            lists = [[] if text is None else split(text, feature.separator) for text in texts]
        else:
            width = shapes[feature.column][1]
            lists = [without_end(texts[row * width : (row + 1) * width]) for row in range(num_rows)]
        if feature.name in self._drops_empty:
            lists = [[value for value in values if value is not None] for values in lists]
        return self._several(feature, lists)

    def _several(
        self, feature: RawCategorical, lists: list[list[str | None]]
    ) -> tuple[Tensor | RaggedIds, np.ndarray]:
        """Return the ids of lists, cut or filled with id 0 to fixed hotness, or ragged; and their items, float32 [B]."""
        hotness = self._hotness[feature.name]
        if hotness is not None:
            kept = slice(-hotness, None) if feature.take == "last" else slice(hotness)
            lists = [values[kept] for values in lists]
        lengths = [len(values) for values in lists]
        if hotness is not None:
            lists = [[*values, *[None] * (hotness - len(values))] for values in lists]
        ids = torch.from_numpy(
            self._encode(feature, [value for values in lists for value in values])
        )
        counts = np.array(lengths, np.float32)
        return (ids if hotness is not None else RaggedIds(ids, torch.tensor(lengths))), counts

    def _history(
        self, history: RawHistory, inputs: Mapping[str, Any], shapes: Shapes, num_rows: int
    ) -> tuple[Tensor | RaggedIds, np.ndarray]:
        """Return the ids of the last values, the most recent first, and their number, float32 [B]."""
        texts = self._columns.texts(history.name, inputs[history.name])
        width = shapes[history.name][1]
        rows = (texts[row * width : (row + 1) * width] for row in range(num_rows))
        present = ([value for value in values if value is not None] for values in rows)
        lists: list[list[str | None]] = [[*values[: history.length]] for values in present]
        feature = self._by_feature[history.name]
        return self._several(replace(feature, name=history.name, take="first"), lists)

    def _encode(self, feature: RawCategorical, texts: Texts) -> np.ndarray:
        if feature.is_key:
            keys = np.array([0 if text is None else key_of(text) for text in texts], np.int64)
            return self._keys[feature.name].rows(keys)
        if (buckets := feature.buckets) is not None:
            hashed = [0 if text is None else _bucket(text, buckets) for text in texts]
            return np.array(hashed, np.int64)
        assert feature.vocabulary is not None
        return self._vocabularies[feature.vocabulary[0]].ids(texts)


def _bucket(text: str, buckets: int) -> int:
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:15], 16) % buckets + 1


def key_of(text: str) -> int:
    """Return the key of a value, as `preproc.table.expressions.key` does."""
    digest = hashlib.md5(text.encode(), usedforsecurity=False).digest()
    key = int.from_bytes(digest[:8], "big", signed=True)
    return key if key not in (0, -1) else 1
