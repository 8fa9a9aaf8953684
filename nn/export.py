"""`python -m nn.export`: tables of a checkpoint to .npy, safetensors or the layout of NVIDIA's TF2 recipe."""

import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig

from configs.export_schema import ExportConfig
from configs.help import register_option_help
from configs.schema import check_overrides, to_config
from nn.errors import USER_ERROR_EXIT_CODE
from nn.table_export import export_tables


@hydra.main(version_base="1.3", config_path="pkg://configs", config_name="export")
def run(composed: DictConfig) -> None:
    """Turn the composed yaml into checked options and export; say what is wrong in one line."""
    try:
        config: ExportConfig = to_config(composed)
        written = export_tables(
            Path(config.checkpoint),
            Path(config.output),
            config.tables,
            format=config.format,
            optimizer=config.optimizer,
        )
    except ValueError as error:
        _end(str(error))
    except OSError as error:
        _end(f"{error}, writing {composed.output}")
    num_files = sum(map(len, written.values()))
    print(f"{len(written)} tables, {num_files} files, written to {config.output}")


def _end(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(USER_ERROR_EXIT_CODE)


if __name__ == "__main__":
    ConfigStore.instance().store(name="export_schema", node=ExportConfig)
    register_option_help(ExportConfig)
    try:
        check_overrides(sys.argv[1:], ExportConfig, groups=())
    except ValueError as error:
        _end(str(error))
    run()
