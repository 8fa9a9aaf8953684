"""Tensors of a request to rows: names, shapes and every id and number are checked before anything is looked up."""

from collections.abc import Container, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from configs.messages import shown
from serving.inference.key_rows import KeyRows
from serving.inference.model_rows import RaggedIds, Rows
from serving.manifest import IDS, NUMERICAL, PADDING, Feature, Manifest, Sequence

COMPARED_ROWS = 64
"""Whose ids are compared with the rows of tables at once: one comparison per row takes twice as long."""


class InputError(ValueError):
    """An input that a model cannot score; the message names it."""


def takes_ids(manifest: Manifest, names: Container[str]) -> bool:
    """Return whether inputs of these names are features; else they are raw values.

    A ragged feature does not decide it, since its column may have the same name.
    """
    return not manifest.raw or NUMERICAL in names or IDS in names


class IdInputs:
    """Inputs of features of one model.

    `with_numerical`: whether the numerical features are among the inputs.
    """

    def __init__(
        self,
        manifest: Manifest,
        keys: Mapping[str, KeyRows] | None = None,
        *,
        with_numerical: bool = True,
    ) -> None:
        self._keys = keys or {}
        self._keyed = [
            (columns, self._keys[name])
            for name, columns in manifest.id_slices().items()
            if name in self._keys
        ]
        self._manifest = manifest
        self._numerical = manifest.numerical if with_numerical else []
        fixed = [f for f in manifest.fixed for _ in range(f.hotness or 0)]
        self._names = [feature.name for feature in fixed]
        rows = [feature.cardinality for feature in fixed] * COMPARED_ROWS
        self._rows: dict[np.dtype, np.ndarray] = {
            np.dtype(np.int32): np.array([min(count, 1 << 31) for count in rows], np.uint32),
            np.dtype(np.int64): np.array(rows, np.uint64),
        }
        self._optional = {of.name for of in manifest.sequences if of.time is not None}
        self._optional |= {manifest.keep_rate} if manifest.keep_rate else set()
        self._wanted = {entry["name"] for entry in manifest.inputs}
        if not with_numerical:
            self._wanted.discard(NUMERICAL)

    def rows(self, inputs: Mapping[str, np.ndarray], num_rows: int) -> Rows:
        """Return the rows of the inputs `numerical` [B, N], `ids` [B, H], each ragged feature and number of events [B, L].

        With the moments of a group's rows, integers [B], its times are whole seconds, else ages. Raises InputError: an input
        is missing, unknown, of another shape, or has an id or number that is not valid.
        """
        for name in self._wanted - set(inputs):
            got = ", ".join(shown(other) for other in list(inputs)[:8])
            refuse(
                f"there is no input {shown(name)}, only {got}; want {', '.join(sorted(self._wanted))}"
            )
        for name in set(inputs) - self._wanted - self._optional:
            refuse(f"the model has no input {shown(name)}; want {', '.join(sorted(self._wanted))}")
        manifest = self._manifest
        if self._numerical:
            shape = (num_rows, len(self._numerical))
            numerical = numbers(NUMERICAL, inputs[NUMERICAL], shape, self._numerical)
        else:
            numerical = torch.zeros(num_rows, 0)
        if self._names:
            ids = self._fixed_ids(inputs[IDS], num_rows)
        else:
            ids = torch.zeros(num_rows, 0, dtype=torch.int64)
        ragged = {
            f.name: _ragged_ids(f, inputs[f.name], self._keys.get(f.name)) for f in manifest.ragged
        }
        numbers_of = {
            name: of_events
            for sequence in manifest.sequences
            for name, of_events in _numbers_of_events(sequence, ragged, inputs).items()
        }
        return Rows(numerical, ids, ragged, keep_rates(manifest, inputs, num_rows), numbers_of)

    def _fixed_ids(self, values: np.ndarray, num_rows: int) -> Tensor:
        matrix = _integers(IDS, values)
        wanted = (num_rows, len(self._names))
        if matrix.shape != wanted:
            refuse(f"input {IDS} has shape {list(matrix.shape)}; want {list(wanted)}")
        if self._keyed:
            matrix = matrix.astype(np.int64)
            for columns, rows in self._keyed:
                matrix[:, columns] = rows.rows(matrix[:, columns])
        limits = self._rows[matrix.dtype]
        # Taken as unsigned, negative ids are beyond every table: one comparison for both ends.
        ids = matrix.reshape(-1).view(limits.dtype)
        whole = ids.size - ids.size % limits.size
        is_bad = (ids[:whole].reshape(-1, limits.size) >= limits).any()
        if is_bad or (ids[whole:] >= limits[: ids.size - whole]).any():
            most = limits[: wanted[1]]
            row, column = (int(index) for index in np.argwhere(ids.reshape(wanted) >= most)[0])
            _refuse_id(self._names[column], row, matrix[row, column], most[column])
        return torch.from_numpy(matrix)


def _ragged_ids(feature: Feature, values: np.ndarray, keys: KeyRows | None) -> RaggedIds:
    matrix = torch.from_numpy(_integers(feature.name, values))
    if matrix.dim() == 1:
        matrix = matrix[:, None]
    is_id = matrix != PADDING
    if keys is not None:
        matrix = torch.from_numpy(np.where(is_id, keys.rows(matrix.numpy()), PADDING))
    bad = is_id & ((matrix < 0) | (matrix >= feature.cardinality))
    # Padding before an id would change nothing of a sum, but is a mistake of the client.
    bad[:, 1:] |= is_id[:, 1:] & ~is_id[:, :-1]
    if bad.any():
        row, column = (int(index) for index in bad.nonzero()[0])
        _refuse_id(feature.name, row, matrix[row, column], feature.cardinality)
    return RaggedIds(matrix[is_id].long(), is_id.sum(1))


def _numbers_of_events(
    sequence: Sequence, ragged: Mapping[str, RaggedIds], inputs: Mapping[str, np.ndarray]
) -> dict[str, RaggedIds]:
    group, first = sequence.group, sequence.features[0]
    lengths = ragged[first].lengths
    counts = lengths.numpy()
    if (row := group.wrong_length(counts)) is not None:
        refuse(
            f"feature {shown(first)}, row {row}: {counts[row]} events; want at most {group.max_length}, the latest ones"
        )
    for name in sequence.features[1:]:
        own = ragged[name].lengths.numpy()
        if (own != counts).any():
            row = int((own != counts).argmax())
            refuse(
                f"feature {shown(name)}, row {row}: {own[row]} events, and {shown(first)} has {counts[row]}; want equally many "
                f"in all inputs of {shown(group.name)}"
            )
    moments = None
    if group.name in inputs:
        moments = _integers(group.name, inputs[group.name]).reshape(-1)
        if len(moments) != len(counts):
            refuse(f"input {shown(group.name)} has {len(moments)} moments; want {len(counts)}")
    found = {}
    for column in group.numbers:
        matrix = inputs[column.name]
        if moments is not None and column.name == group.time:
            matrix = _integers(column.name, matrix)
        if matrix.dtype.kind not in "fiu":
            refuse(f"input {shown(column.name)} has no numbers; want FP32")
        matrix = matrix.reshape(len(counts), -1)
        if matrix.shape[1] < counts.max():
            refuse(
                f"input {shown(column.name)} has shape {list(matrix.shape)}, and {shown(first)} {counts.max()} events in a row; "
                "want a number for each"
            )
        values = matrix[np.arange(matrix.shape[1]) < counts[:, None]]
        try:
            values = group.checked(column, values, counts, moments, lambda row: f"row {row}")
        except ValueError as error:
            refuse(str(error))
        found[column.name] = RaggedIds(torch.from_numpy(_own(values, np.float32)), lengths)
    return found


def keep_rates(
    manifest: Manifest, inputs: Mapping[str, np.ndarray], num_rows: int
) -> Tensor | None:
    """Return the keep rates of rows, if the model knows them and the inputs have them."""
    if manifest.keep_rate is None or manifest.keep_rate not in inputs:
        return None
    name = manifest.keep_rate
    rates = numbers(name, inputs[name].reshape(num_rows, -1), (num_rows, 1), [name])[:, 0]
    if not ((rates > 0) & (rates <= 1)).all():
        refuse(f"input {shown(name)} has a rate that is not above 0 and at most 1")
    return rates


def numbers(name: str, values: np.ndarray, shape: tuple[int, ...], columns: list[str]) -> Tensor:
    """Return finite numbers as float32, booleans as 0 and 1; `columns` are named in messages."""
    if values.dtype.kind not in "fiub":
        refuse(f"input {shown(name)} has no numbers; want FP32")
    if values.shape != shape:
        refuse(f"input {shown(name)} has shape {list(values.shape)}; want {list(shape)}")
    narrow = _own(values, np.float32)
    is_finite = np.isfinite(narrow)
    if not is_finite.all():
        row, column = (int(index) for index in np.argwhere(~is_finite)[0])
        refuse(
            f"input {shown(name)}, row {row}: {shown(columns[column])} is {values[row, column]}; want a finite number"
        )
    return torch.from_numpy(narrow)


def _integers(name: str, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "iu":
        refuse(f"input {shown(name)} has no integers; want INT32 or INT64")
    return _own(values, np.int32 if values.dtype == np.int32 else np.int64)


def _own(values: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """Return an array that torch takes as it is; the same one where it is such."""
    if values.dtype == dtype and values.flags.carray:
        return values
    with np.errstate(over="ignore"):
        return np.require(values, dtype, ("C", "A", "W"))


def _refuse_id(feature: str, row: int, value: Any, cardinality: Any) -> NoReturn:
    refuse(
        f"feature {shown(feature)}, row {row}: id {int(value)} is not in the table; want 0 to {int(cardinality) - 1}"
    )


def refuse(message: str) -> NoReturn:
    raise InputError(message)
