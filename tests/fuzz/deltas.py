"""Chains of deltas, with some dropped, doubled, swapped, cut, flipped, foreign or newer; and the documents of a delta, mutated.

Every bad chain is refused, and every good one makes the export of the checkpoint that it leads to, byte for byte.
"""

import json
import shutil
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from configs.schema import Component
from nn.checkpoint.directory import RUN_FILE
from nn.checkpoint.tensor_index import INDEX_FILE
from nn.deltas.delta import FORMAT, KeyChange, Link, TableChange, identity
from nn.export.tables import Selection, export_tables
from tests.fuzz.commands import as_replay
from tests.fuzz.harness import Fuzzer
from tests.fuzz.mutations import JSON_LITERALS, Edit, apply_edits, as_json, document_edits
from tests.fuzz.runs import train, write_checkpoint
from tests.helpers.crash_scenarios import keyed_dataset

STEPS = 6
MORE = (
    "data.dynamic.admit_after=2",
    "data.shuffle_block=0",
    "checkpoint.delta_every=1",
    "checkpoint.save_every=1",
    "checkpoint.keep=99",
)
WHOLE = Selection(parts=list(Component), optimizer=False)
KINDS = ("drop", "double", "swap", "cut", "flip", "foreign", "newer")


@dataclass(frozen=True, slots=True)
class Chains:
    """Two runs with raw keys, and a delta and a checkpoint per step.

    Attributes:
        own: directory of the first one.
        foreign: of the second, of the same options and the same weights.
        wanted: export of every checkpoint of both runs, by run and step, bytes by name.
    """

    own: Path
    foreign: Path
    wanted: dict[tuple[str, int], dict[str, bytes]]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a chain: its kind, two positions in the chain, and a place in the bytes of a delta."""

    kind: str
    first: int
    second: int
    byte: int
    bit: int


@dataclass(frozen=True, slots=True)
class Mutation:
    """The step of the base, the length of the chain, whether the base is of the other run, and the changes."""

    base: int
    length: int
    foreign_base: bool
    changes: list[Change]


@dataclass(slots=True)
class Entry:
    """A delta of a chain: its step, the run that it is of, and its damage."""

    step: int
    run: str = "own"
    damage: Change | None = None


def _make(room: Path) -> Chains:
    keyed_dataset(room)
    data = f"data.path={room / 'input/keys'}"
    for name in ("own", "foreign"):
        train(room / name, data, f"train.max_steps={STEPS}", *MORE)
    wanted = {}
    for name, step in product(("own", "foreign"), range(STEPS + 1)):
        out = room / f"export_{name}_{step}"
        export_tables(room / name / f"checkpoints/step_{step}", out, WHOLE)
        wanted[name, step] = {path.name: path.read_bytes() for path in out.iterdir()}
    return Chains(room / "own", room / "foreign", wanted)


def _make_integers(room: Path) -> Chains:
    keyed_dataset(room)
    data = (f"data.path={room / 'input/keys'}", "train.max_steps=1", "checkpoint.delta_dtype=int8")
    train(room / "own", *data, *MORE)
    return Chains(room / "own", room / "own", {})


def _changed(mutation: Mutation) -> list[Entry]:
    last = min(mutation.base + mutation.length, STEPS)
    chain = [Entry(step) for step in range(mutation.base + 1, last + 1)]
    for change in mutation.changes:
        if not chain:
            break
        one, two = change.first % len(chain), change.second % len(chain)
        if change.kind == "drop":
            del chain[one]
        elif change.kind == "double":
            chain.insert(two, deepcopy(chain[one]))
        elif change.kind == "swap":
            chain[one], chain[two] = chain[two], chain[one]
        elif change.kind == "foreign":
            chain[one].run = "foreign"
        else:
            chain[one].damage = change
    return chain


def _is_good(mutation: Mutation, run: str, chain: list[Entry]) -> bool:
    steps = range(mutation.base + 1, mutation.base + 1 + len(chain))
    # All of the other run is a good chain too.
    intact = all(entry.run == run and entry.damage is None for entry in chain)
    in_order = [entry.step for entry in chain] == list(steps)
    return bool(chain) and intact and in_order


def _damage(path: Path, change: Change) -> None:
    files = sorted(path.iterdir())
    file = files[change.second % len(files)]
    data = bytearray(file.read_bytes())
    if change.kind == "newer":
        facts = json.loads((path / RUN_FILE).read_text())
        facts["delta"]["format"] = FORMAT + 1
        write_checkpoint(path, facts, (path / INDEX_FILE).read_text())
        return
    if change.kind == "cut":
        file.write_bytes(data[: change.byte % len(data)])
        return
    data[change.byte % len(data)] ^= 1 << change.bit
    file.write_bytes(data)


def _replay(made: Chains, mutation: Mutation, room: Path) -> None:
    chain = _changed(mutation)
    paths = []
    for position, entry in enumerate(chain):
        path = room / f"{position}"
        shutil.copytree(getattr(made, entry.run) / f"deltas/step_{entry.step}", path)
        paths.append(str(path))
        if entry.damage is not None:
            _damage(path, entry.damage)
    run = "foreign" if mutation.foreign_base else "own"
    shutil.copytree(getattr(made, run) / f"checkpoints/step_{mutation.base}", room / "base")
    out = room / "out"
    good = _is_good(mutation, run, chain)
    try:
        as_replay(base=str(room / "base"), deltas=paths, output=str(out))
    finally:
        found = {path.name: path.read_bytes() for path in out.iterdir()} if out.exists() else None
        wanted = made.wanted[run, chain[-1].step] if good else None
        assert found == wanted, "a bad chain was replayed" if found else "a good chain was refused"


def _mutations(made: Chains) -> st.SearchStrategy[Mutation]:
    positions = st.integers(0, STEPS - 1)
    change = st.builds(
        Change,
        st.sampled_from(KINDS),
        positions,
        positions,
        st.integers(0, 1 << 20),
        st.integers(0, 7),
    )
    # Some chains are good: none, or two swaps, or the last delta dropped.
    return st.builds(
        Mutation,
        positions,
        st.integers(1, STEPS),
        st.sampled_from([False] * 9 + [True]),
        st.lists(change, max_size=2),
    )


def _documents(made: Chains) -> dict[str, Any]:
    path = made.own / "deltas/step_1"
    facts = json.loads((path / RUN_FILE).read_text())
    return {
        "delta": facts["delta"],
        "chain": facts["chain"],
        "index": json.loads((path / INDEX_FILE).read_text()),
    }


def _changed_documents(made: Chains, edits: list[Edit], room: Path) -> None:
    """Read a delta whose documents say something else, with right checksums and the right identity of that."""
    path = shutil.copytree(made.own / "deltas/step_1", room / "delta")
    changed = apply_edits(_documents(made), edits)
    changed = changed if isinstance(changed, dict) else {}
    facts = json.loads((path / RUN_FILE).read_text())
    index = as_json(changed.get("index"))
    facts |= {name: changed.get(name) for name in ("delta", "chain")}
    try:
        tables = {n: TableChange(**t) for n, t in facts["delta"]["tables"].items()}
        keys = {n: KeyChange(**k) for n, k in facts["delta"].get("keys", {}).items()}
        parent = Link(**facts["delta"]["parent"])
        content = index.encode("utf-8", "surrogatepass")
        facts["chain"]["id"] = identity(parent, facts["chain"]["step"], tables, keys, content)
    except (TypeError, KeyError, AttributeError, ValueError):
        pass
    write_checkpoint(path, facts, index)
    shutil.copytree(made.own / "checkpoints/step_0", room / "base")
    as_replay(base=str(room / "base"), deltas=[str(path)], output=str(room / "out"))


FUZZERS = [
    Fuzzer("deltas: chains", _make, _mutations, _replay, 25),
    Fuzzer(
        "deltas: documents",
        _make_integers,
        lambda made: document_edits(_documents(made), JSON_LITERALS),
        _changed_documents,
        15,
    ),
]
