"""A delta: what a run changed since its parent, in a directory that is complete or absent, like a checkpoint.

    deltas/step_N/
      run.json          facts of the run at step N, as in a checkpoint, with `chain` and `delta`
      tensors.json      index of the tensors (`nn.checkpoint.tensor_index`)
      rank_00000.bin    bare arrays without gaps, a file per rank

Tensors: `tables.<table>.ids` (`nn.deltas.row_ids`), the rows that changed; `tables.<table>.weight`, these rows, [n, columns];
`tables.<table>.tombstones`, encoded like ids, the rows whose values are retired; `dense.<name>` and `dense_ema.<name>`, the
dense component, complete. With `checkpoint.delta_dtype=int8` or `int4` the rows are integers, int8 [n, columns] or two int4 a
byte, uint8 [n, (columns + 1) // 2], and `tables.<table>.scale`, float32 [n], multiplies them. Of a model with raw keys also
`keys.<table>.rows`, encoded like ids, the rows that got other keys, and `keys.<table>.keys`, their keys, int64 [n].

`chain` names the state that the delta leads to: its step, and an identity, a hash of the parent's identity and of all that the
delta holds. A checkpoint of the same step has the same `chain`. So a state has one name, and a chain cannot be mended.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from configs.messages import shown
from dataloading.dataset.documents import read_regular
from nn.checkpoint.directory import DELTA, NewerFormatError, find_damage, read_facts
from nn.checkpoint.run_facts import is_count
from nn.checkpoint.tensor_index import INDEX_FILE, StoredTensor, TensorIndex, read_index

FORMAT = 3
"""Of deltas with integers; those without are of format 2, and without keys of format 1, which earlier versions read too."""
CHAIN = "chain"
"""Entry of run.json that names the state, of checkpoints of a run with deltas too."""
KEYS = "keys."
"""Prefix of the tensors of raw keys."""
TABLE_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Link:
    """A state of a chain: its identity, and the updates before it."""

    id: str
    step: int


@dataclass(frozen=True, slots=True)
class TableChange:
    """A table of a delta: its rows and columns, the dtype that it is trained in, and how many rows changed or were retired."""

    rows: int
    columns: int
    dtype: str
    touched: int
    tombstones: int = 0


@dataclass(frozen=True, slots=True)
class KeyChange:
    """Keys of a table for raw keys in a delta: its rows, and how many got another key."""

    rows: int
    changed: int


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta whose facts and index were read and checked."""

    path: Path
    facts: dict[str, Any]
    index: TensorIndex
    parent: Link
    end: Link
    tables: dict[str, TableChange]
    keys: dict[str, KeyChange]

    def ids_of(self, table: str) -> StoredTensor | None:
        """Return the encoded numbers of a table's rows that changed; None if there are none."""
        return self.index.tensors.get(f"tables.{table}.ids")

    def rows_of(self, table: str) -> StoredTensor:
        return self.index.tensors[f"tables.{table}.weight"]

    def scales_of(self, table: str) -> StoredTensor | None:
        """Return the scales of a table's rows; None unless these are integers."""
        return self.index.tensors.get(f"tables.{table}.scale")

    def rekeyed_rows_of(self, keys: str) -> StoredTensor | None:
        """Return the encoded numbers of the rows that got other keys of a map; None if there are none."""
        return self.index.tensors.get(f"{KEYS}{keys}.rows")

    def keys_of(self, keys: str) -> StoredTensor | None:
        return self.index.tensors.get(f"{KEYS}{keys}.keys")

    @property
    def dense(self) -> dict[str, StoredTensor]:
        tensors = self.index.tensors.items()
        return {name: t for name, t in tensors if not name.startswith(("tables.", KEYS))}


def size_of(chain: Sequence[Delta]) -> str:
    """Return how large deltas are together, for people."""
    tensors = (tensor for delta in chain for tensor in delta.index.tensors.values())
    return f"{sum(tensor.num_bytes for tensor in tensors) / 2**20:,.1f} MiB"


def identity(
    parent: Link,
    step: int,
    tables: Mapping[str, TableChange],
    keys: Mapping[str, KeyChange],
    index_bytes: bytes,
) -> str:
    """Return the identity of the state after a delta, 32 hex digits."""
    described = [asdict(parent), step, _described(tables)] + [_described(keys)] * bool(keys)
    digest = hashlib.sha256(json.dumps(described).encode())
    digest.update(index_bytes)
    return digest.hexdigest()[:32]


def delta_facts(
    parent: Link,
    tables: Mapping[str, TableChange],
    keys: Mapping[str, KeyChange],
    *,
    has_integers: bool,
) -> dict[str, Any]:
    """Return the entry `delta` of run.json."""
    format = FORMAT if has_integers else 2 if keys else 1
    facts = {"format": format, "parent": asdict(parent), "tables": _described(tables)}
    return facts | {"keys": _described(keys)} if keys else facts


def _described(changes: Mapping[str, TableChange | KeyChange]) -> dict[str, dict[str, Any]]:
    return {name: asdict(change) for name, change in changes.items()}


def chain_of(facts: Mapping[str, Any]) -> Link | None:
    """Return the state that a checkpoint, an export or a delta names; None if it was saved without deltas.

    Raises ValueError: it is malformed.
    """
    return None if CHAIN not in facts else _link(facts[CHAIN], CHAIN)


def read_delta(path: Path) -> Delta:
    """Read and check a delta, every byte of it.

    Raises ValueError: it is no delta, of a newer format, damaged or malformed; UnreadableError: a file exists and cannot be read.
    """
    facts = read_facts(path, of_delta=True)
    info = facts[DELTA]
    if not isinstance(info, dict) or type(info.get("format")) is not int:
        raise ValueError("its delta has no format")
    if info["format"] > FORMAT:
        raise NewerFormatError(
            f"it is a delta of format {shown(info['format'])}, and this version reads up to {FORMAT}; use the version of this "
            "software that wrote it, or a later one"
        )
    damage = find_damage(path, facts, 0, 1)
    if damage is not None:
        raise ValueError(damage)
    parent, end = _link(info.get("parent"), "parent"), chain_of(facts)
    tables = _changes(info.get("tables"), TableChange, "tables")
    keys = _changes(info.get("keys", {}), KeyChange, "keys")
    if end is None or end.step != facts["num_steps"] or parent.step >= end.step:
        raise ValueError(f"it leads from step {parent.step} to {shown(facts.get(CHAIN))}")
    if end.id != identity(parent, end.step, tables, keys, read_regular(path / INDEX_FILE)):
        raise ValueError("its identity is not that of its content")
    delta = Delta(path, facts, read_index(path), parent, end, tables, keys)
    _check_tensors(delta)
    return delta


def _link(value: Any, name: str) -> Link:
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("id"), str)
        or not is_count(value.get("step"))
    ):
        raise ValueError(f"{name} is {shown(value)}, want id and step")
    return Link(value["id"], value["step"])


Change = TypeVar("Change", TableChange, KeyChange)


def _changes(value: Any, kind: type[Change], name: str) -> dict[str, Change]:
    try:
        changes = {key: kind(**entry) for key, entry in value.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"its {name} are malformed ({shown(error)})") from None
    for key, change in changes.items():
        facts = asdict(change)
        if facts.pop("dtype", "float32") not in TABLE_DTYPES or not all(
            map(is_count, facts.values())
        ):
            raise ValueError(f"its {name} of {shown(key)} are malformed")
    return changes


def _layouts(table: TableChange, scales: StoredTensor | None) -> list[tuple[str, tuple[int, int]]]:
    """Return the dtypes and sizes that the changed rows of a table may have; none if its scales are malformed."""
    size = (table.touched, table.columns)
    if scales is None:
        return [(table.dtype, size), ("bfloat16", size)]
    if (scales.dtype, scales.size) != ("float32", size[:1]):
        return []
    return [("int8", size), ("uint8", (table.touched, (table.columns + 1) // 2))]


def _check_tensors(delta: Delta) -> None:
    """Raise ValueError unless every table has the rows, and every map the keys, that its entry says."""
    if list(delta.index.tables) != list(delta.tables):
        raise ValueError("its index has other tables than its run.json")
    for name, table in delta.tables.items():
        weight = delta.index.tensors.get(f"tables.{name}.weight")
        ids, scales = delta.ids_of(name), delta.scales_of(name)
        if (weight is None) != (ids is None) or (ids is None) != (table.touched == 0):
            raise ValueError(f"table {shown(name)} has no rows, or no numbers of them")
        if weight is None and scales is not None:
            raise ValueError(f"table {shown(name)} has scales without rows")
        if weight is not None and (weight.dtype, weight.size) not in _layouts(table, scales):
            raise ValueError(f"table {shown(name)} has rows of {weight.dtype} {list(weight.size)}")
        for encoded in (ids, delta.index.tensors.get(f"tables.{name}.tombstones")):
            if encoded is not None and (encoded.dtype != "uint8" or len(encoded.size) != 1):
                raise ValueError(f"table {shown(name)} has malformed numbers of rows")
    for name, change in delta.keys.items():
        rows, keys = delta.rekeyed_rows_of(name), delta.keys_of(name)
        found = None if keys is None else (keys.dtype, keys.size)
        if (rows is None) != (keys is None) or found != (
            ("int64", (change.changed,)) if change.changed else None
        ):
            raise ValueError(f"the keys of {shown(name)} are not {change.changed:,}")
        if rows is not None and (rows.dtype != "uint8" or len(rows.size) != 1):
            raise ValueError(f"the keys of {shown(name)} have malformed numbers of rows")
