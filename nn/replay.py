"""Command `python -m nn.replay`: apply deltas to a checkpoint or an export, and write the export of the state they lead to.

The result is byte for byte that of `nn.export` of a checkpoint of that step, with parts=[dense,tables] optimizer=false.
"""

if __name__ == "__main__":
    # First, since the imports below take a moment.
    from configs.stop_signals import end_at_once_on_signals

    end_at_once_on_signals()

from collections.abc import Sequence
from pathlib import Path

from configs.command_line import NO_OUTPUT, command
from configs.export_schema import ExportFormat, ReplayConfig
from configs.messages import on_one_line
from configs.schema import Component
from configs.stop_signals import restore_signals
from dataloading.dataset.durable_files import require_absent
from nn.checkpoint.directory import DELTA
from nn.checkpoint.saved import SavedModel
from nn.checkpoint.tensor_index import TensorIndex
from nn.deltas.chain import open_chain
from nn.deltas.delta import KEYS, Delta, chain_of, size_of
from nn.deltas.table_rows import Replayed, replayed_keys, replayed_table
from nn.export.array_files import ArraySource
from nn.export.tables import Exported, Selection, write_export


def replay(
    base: Path, deltas: Sequence[str], output: Path, format: ExportFormat = ExportFormat.npy
) -> list[Delta]:
    """Write the export of the state that deltas lead to; it is complete or absent, and takes a few blocks of memory.

    `base`: a checkpoint or an export, whose tables are read; its dense component and its optimizer state are not.
    `deltas`: in order; a directory of deltas stands for all of them after the base.
    Returns the deltas. Raises ValueError: a directory cannot be used, or the deltas do not follow the base; one line.
    """
    require_absent(output)
    saved = SavedModel.open(base, "base")
    index, link = saved.index, chain_of(saved.facts)
    if link is None:
        raise ValueError(
            f"base={base} was saved by a run without deltas, so none can follow it; train with checkpoint.delta_every=N"
        )
    chain = open_chain(link, deltas, str(base))
    last = chain[-1]
    tensors: dict[str, ArraySource] = dict(last.dense)
    for name in last.tables:
        tensors[f"tables.{name}.weight"] = _table(name, index, chain, base)
    tensors |= _keys(index, chain, base)
    facts = {name: value for name, value in last.facts.items() if name != DELTA}
    exported = Exported(f"step_{last.end.step}", list(last.tables), tensors, facts)
    is_tf2 = format is ExportFormat.tf2
    parts = [Component.tables] if is_tf2 else [Component.dense, Component.tables]
    write_export(exported, output, Selection(parts=parts, optimizer=False), format=format)
    return chain


def _table(name: str, index: TensorIndex, chain: Sequence[Delta], base: Path) -> Replayed:
    stored = index.tensors.get(f"tables.{name}.weight")
    lacking = next((delta.path for delta in chain if name not in delta.tables), None)
    if stored is None or lacking is not None:
        raise ValueError(
            f"base={base}: {lacking or base} has no table {name}; name the base and the deltas of one model, with all tables"
        )
    return replayed_table(name, stored, chain)


def _keys(index: TensorIndex, chain: Sequence[Delta], base: Path) -> dict[str, Replayed]:
    """Return the raw keys of rows after all deltas, by the name of the tensor."""
    found = {}
    for name, stored in index.tensors.items():
        if name.startswith(KEYS) and name.endswith(".keys"):
            of_map = name.removeprefix(KEYS).removesuffix(".keys")
            found[name] = replayed_keys(of_map, stored, chain)
    lacking = next((keys for keys in chain[-1].keys if f"{KEYS}{keys}.keys" not in found), None)
    if lacking is not None:
        raise ValueError(
            f"base={base} has no raw keys of {lacking}; name the base and the deltas of one model"
        )
    return found


def summary(chain: Sequence[Delta], output: str) -> str:
    touched = sum(table.touched for delta in chain for table in delta.tables.values())
    retired = sum(table.tombstones for delta in chain for table in delta.tables.values())
    steps = f"steps {chain[0].parent.step:,} to {chain[-1].end.step:,}"
    plural = "" if len(chain) == 1 else "s"
    also = f", {retired:,} retired" if retired else ""
    return f"{len(chain)} delta{plural}, {steps}, {touched:,} changed rows{also}, {size_of(chain)}, written to {output}"


def run(config: ReplayConfig) -> None:
    assert config.base is not None, "checked by the options"
    assert config.output is not None, "likewise"
    restore_signals()
    chain = replay(Path(config.base), config.deltas, Path(config.output), config.format)
    print(on_one_line(summary(chain, config.output)))


if __name__ == "__main__":
    command(run, ReplayConfig, "replay", interrupted=NO_OUTPUT)
