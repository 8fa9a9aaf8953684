"""Files of columns that are being written, their names, and the events of a sequence group in them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from configs.messages import shown
from dataloading.dataset.counted_file import CountedFile
from dataloading.dataset.feature_spec import CategoricalFeature
from dataloading.dataset.row_columns import RowColumn
from dataloading.dataset.sequences import SequenceGroup, row_of


class GrowingFile(CountedFile):
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        super().__init__(path)
        self.num_rows = 0

    def append(self, values: np.ndarray, num_rows: int) -> None:
        """Append the items of `num_rows` rows, which are checked and cast already."""
        self.write(np.ascontiguousarray(values).data if values.size else b"")
        self.num_rows += num_rows


class EventWriter:
    """Appends the events of one group to the files of its columns.

    `path_of`: path of a file by its name. `file_type`: of the files.
    """

    def __init__(
        self,
        group: SequenceGroup,
        features: Mapping[str, CategoricalFeature],
        path_of: Callable[[str], Path],
        file_type: type[GrowingFile] = GrowingFile,
    ) -> None:
        self.group, self.num_events = group, 0
        self._features = features
        self.files = {name: file_type(path_of(file_name(name))) for name in group.columns}

    def append(
        self,
        ids: Mapping[str, np.ndarray],
        events: Mapping[str, np.ndarray],
        lengths: np.ndarray,
        moments: np.ndarray | None,
        where: Callable[[int], str],
    ) -> None:
        """Append ids and numbers of the events of rows of `lengths` and `moments`; ValueError if one cannot be held.

        `where`: of a row, for messages.
        """
        group, stored = self.group, {}
        missing = [name for name in group.features if name not in ids]
        missing += [column.name for column in group.numbers if column.name not in events]
        if missing:
            raise ValueError(
                f"group '{group.name}': no {', '.join(missing)}; append all its columns at once"
            )
        for name in group.features:
            values = given_numbers(f"feature '{name}'", ids[name])
            checked_lengths(name, values, lengths)
            stored[name] = checked_ids(self._features[name], values, lengths, where)
        for column in group.numbers:
            values = given_numbers(f"'{column.name}'", events[column.name])
            checked_lengths(column.name, values, lengths)
            with np.errstate(over="ignore", invalid="ignore"):
                numbers = values.astype(column.dtype)
            if column.dtype.kind == "i" and (numbers != values).any():
                at = int((numbers != values).argmax())
                raise ValueError(
                    f"'{column.name}': {values[at]} at {where(row_of(lengths, at))} is no {column.dtype.name}"
                )
            # The times of a log are compared with moments when rows are read.
            if column.name != group.time or moments is not None:
                group.checked(column, numbers, lengths, moments, where)
            stored[column.name] = numbers
        for name, values in stored.items():
            little = values.dtype.newbyteorder("<")
            self.files[name].append(values.astype(little, copy=False), len(lengths))
        self.num_events += int(lengths.sum())

    def append_log(self, ids: Mapping[str, np.ndarray], events: Mapping[str, np.ndarray]) -> None:
        """Append events that are of no row yet."""
        first = self.num_events
        each = np.ones(np.size(ids.get(self.group.features[0], ())), np.int64)
        self.append(ids, events, each, None, lambda at: f"event {first + at}")


def checked_ids(
    feature: CategoricalFeature,
    values: np.ndarray,
    lengths: np.ndarray | None,
    where: Callable[[int], str],
) -> np.ndarray:
    """Return ids as they are stored; ValueError if they are no integers, one lies outside its table, or a key is none.

    `lengths`: ids per row of a ragged feature. `where`: of a row, for messages.
    """
    if values.dtype.kind not in "iu":
        raise ValueError(
            f"feature '{feature.name}': got ids of dtype {values.dtype}, want integers"
        )
    if feature.has_wrong(values):
        at = int(feature.wrong(values).argmax())
        row = at // (feature.hotness or 1) if lengths is None else row_of(lengths, at)
        raise ValueError(feature.wrong_text(values.flat[at], where(row)))
    return values.astype(feature.dtype.newbyteorder("<"), casting="unsafe")


def given_numbers(what: str, values: object, *, whole: bool = False) -> np.ndarray:
    """Return numbers as an array in this machine's order of bytes; with `whole` as int64.

    Raises ValueError: some are masked, or they are of another kind.
    """
    array = np.asarray(values)
    if array.dtype == object:
        array = np.array(array.tolist())  # as pandas holds numbers
    kinds, wanted = ("iu", "integers") if whole else ("biuf", "numbers")
    if np.ma.is_masked(values):
        raise ValueError(f"{what}: some are masked; fill them")
    if array.size and array.dtype.kind not in kinds:
        raise ValueError(f"{what}: got dtype {array.dtype}, want {wanted}")
    if array.dtype == np.uint64 and whole and array.max(initial=0) > np.iinfo(np.int64).max:
        raise ValueError(f"{what}: got {array.max()}, which int64 does not hold")
    return array.astype(np.int64 if whole else array.dtype.newbyteorder("="), copy=False)


def checked_lengths(name: str, values: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """Return the lengths of rows of flat `values`; ValueError unless they add up to them."""
    if lengths is None:
        raise ValueError(f"feature '{name}' is ragged: want lengths beside its ids")
    lengths = given_numbers(f"lengths of '{name}'", lengths, whole=True)
    # Lengths of at most all values cannot add up beyond int64.
    outside = ((lengths < 0) | (lengths > values.size)).any()
    if values.ndim != 1 or lengths.ndim != 1 or outside or lengths.sum() != len(values):
        raise ValueError(
            f"feature '{name}': got ids of shape {values.shape} for {lengths.size} lengths that sum to "
            f"{lengths.sum()}; want flat ids and one length per row that add up to them"
        )
    return lengths


def file_name(name: str) -> str:
    """Return the file name of a feature; NVIDIA's feature names end in `.bin` already."""
    if "/" in name or "\0" in name or name.startswith("."):
        raise ValueError(f"feature name {shown(name)} cannot name a file: no slash, no leading dot")
    return name if name.endswith(".bin") else f"{name}.bin"


def group_file_name(group: str, kind: str) -> str:
    return f"{file_name(group).removesuffix('.bin')}.{kind}.bin"


def column_file_name(labels: Sequence[RowColumn], column: RowColumn) -> str:
    """Return the file name of a label, of the weight or of the keep rate; NVIDIA's recipes have one label, `label.bin`."""
    return "label.bin" if list(labels) == [column] else file_name(column.name)
