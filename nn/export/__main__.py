"""Command `python -m nn.export`: export tables of a checkpoint as .npy, safetensors or NVIDIA's TF2 layout."""

if __name__ == "__main__":
    # First, since the imports below take a moment.
    from configs.stop_signals import end_at_once_on_signals

    end_at_once_on_signals()

from pathlib import Path

from omegaconf import DictConfig

from configs.command_line import composed_command, end_command
from configs.exit_codes import INTERRUPTED_EXIT_CODE
from configs.export_schema import ExportConfig
from configs.messages import on_one_line, os_error_text
from configs.overrides import to_config
from configs.stop_signals import INTERRUPTED, restore_signals
from nn.export.tables import export_tables


def run(composed: DictConfig) -> None:
    """Check the composed options and export the tables; report errors in one line."""
    try:
        config: ExportConfig = to_config(composed)
        assert config.checkpoint is not None, "ExportConfig refuses a configuration without"
        assert config.output is not None, "likewise"
        restore_signals()
        written = export_tables(
            Path(config.checkpoint),
            Path(config.output),
            config.tables,
            format=config.format,
            optimizer=config.optimizer,
        )
    except ValueError as error:
        end_command(f"error: {error}")
    except OSError as error:
        end_command(f"error: {os_error_text(error, f'output={composed.output}')}")
    except KeyboardInterrupt:
        end_command(
            f"{INTERRUPTED}: nothing was written to output; rerun the same command",
            INTERRUPTED_EXIT_CODE,
        )
    num_files = sum(map(len, written.values()))
    print(on_one_line(f"{len(written)} tables, {num_files} files, written to {config.output}"))


if __name__ == "__main__":
    try:
        composed_command(run, ExportConfig, "export_schema", "export")()
    except ValueError as error:
        end_command(f"error: {error}")
