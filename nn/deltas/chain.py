"""The order of deltas: each begins where the one before it ends, and the first one at the base."""

from collections.abc import Sequence
from pathlib import Path

from nn.checkpoint.directory import NewerFormatError, list_checkpoints, step_of
from nn.checkpoint.tensor_index import UnreadableError
from nn.deltas.delta import Delta, Link, read_delta


def open_chain(base: Link, paths: Sequence[str], named: str) -> list[Delta]:
    """Read deltas and check that they follow a state without a gap.

    `paths`: deltas in order; a directory of deltas stands for all of them after the base. Raises ValueError: one is damaged,
    missing, twice, in another order, of another base or of a newer format; one line.
    """
    deltas = []
    for path in _listed(base, paths):
        try:
            deltas.append(read_delta(path))
        except UnreadableError:
            raise
        except NewerFormatError as error:
            raise ValueError(f"deltas: {path} cannot be used: {error}") from None
        except ValueError as error:
            raise ValueError(
                f"deltas: {path} cannot be used: {error}; name intact deltas of the run, or begin at a newer base"
            ) from None
    if not deltas:
        raise ValueError(
            f"deltas={list(paths)}: there are none after step {base.step:,} of {named}; name a run's deltas/, or some of its "
            "deltas/step_N"
        )
    check_order(base, deltas, named)
    return deltas


def _listed(base: Link, paths: Sequence[str]) -> list[Path]:
    """Return the deltas that are named, with those of a directory after the base in their order."""
    listed: list[Path] = []
    for path in map(Path, paths):
        if (path / "run.json").exists() or not path.is_dir():
            listed.append(path)
            continue
        inside = list_checkpoints(path)
        if not inside:
            raise ValueError(
                f"deltas: {path} is no delta and holds none; name a run's deltas/, or some of its deltas/step_N"
            )
        listed += [one for one in reversed(inside) if step_of(one) > base.step]
    return listed


def check_order(base: Link, deltas: Sequence[Delta], named: str) -> None:
    """Raise ValueError unless every delta begins where the one before it ends; see `open_chain`."""
    here, before = base, named
    for position, delta in enumerate(deltas):
        if delta.parent == here:
            here, before = delta.end, str(delta.path)
            continue
        begins = f"{delta.path} begins at step {delta.parent.step:,}"
        ends = f"{before} ends at step {here.step:,}"
        seen = {earlier.end.id for earlier in deltas[:position]}
        later = {other.end for other in deltas[position + 1 :]}
        if delta.end.id in seen or delta.end == base:
            raise ValueError(f"deltas: {delta.path} is a duplicate; name each delta once")
        if delta.parent in later or delta.parent.step < here.step:
            raise ValueError(
                f"deltas: wrong order, or another run: {begins}, and {ends}; name the deltas of one run in order"
            )
        if delta.parent.step > here.step:
            raise ValueError(
                f"deltas: a gap: {begins}, and {ends}; name the deltas between them, or begin at a newer base"
            )
        raise ValueError(
            f"deltas: another base: {begins}, but of another state than that of {before}; name deltas of the same run, or begin "
            "at a newer base"
        )
