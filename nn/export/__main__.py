"""Command `python -m nn.export`: export tables and dense component of a checkpoint as .npy, safetensors or for TF2."""

if __name__ == "__main__":
    # First, since the imports below take a moment.
    from configs.stop_signals import end_at_once_on_signals

    end_at_once_on_signals()

from pathlib import Path
from typing import Any

from configs.command_line import NO_OUTPUT, command
from configs.export_schema import ExportConfig
from configs.messages import on_one_line
from configs.stop_signals import restore_signals
from nn.export.tables import Selection, export_tables


def run(config: ExportConfig) -> None:
    assert config.checkpoint is not None, "ExportConfig refuses a configuration without"
    assert config.output is not None, "likewise"
    restore_signals()
    record = export_tables(
        Path(config.checkpoint),
        Path(config.output),
        Selection(config.tables, config.parts, config.optimizer),
        format=config.format,
        fitted=None if config.fitted is None else Path(config.fitted),
    )
    print(on_one_line(f"{_summary(record, config)} written to {config.output}"))


def _summary(record: dict[str, Any], config: ExportConfig) -> str:
    tables, dense = record["tables"], record.get("dense", [])
    num_files = sum(map(len, tables.values())) + len(dense)
    parts = [f"{len(tables)} tables"] * bool(tables) + ["the dense component"] * bool(dense)
    text = f"{', '.join(parts)}, {num_files} files,"
    without = [t for t, files in tables.items() if not files[-1].endswith(".value.parquet")]
    if config.fitted is not None and without:
        text = f"no vocabulary for table {', '.join(without)}; {text}"
    return text


if __name__ == "__main__":
    command(run, ExportConfig, "export", interrupted=NO_OUTPUT)
