"""Imports that the runs of one command share: days, jobs of --multirun and trials of a sweep are forks that have them."""

import os

from configs.command_line import lasting_imports
from nn.library_warnings import quiet_libraries
from nn.versions import require_stack

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"


def import_for_runs() -> None:
    """Import what runs need, and neither start a thread nor open a GPU, which no fork could use then.

    Raises ValueError: the installed versions do not work together.
    """
    require_stack()
    quiet_libraries()
    # FBGEMM asks for GPUs when it is imported; torch would open CUDA for that.
    before = os.environ.get(NVML_CHECK)
    os.environ[NVML_CHECK] = "1"
    try:
        with lasting_imports():
            from nn import run  # noqa: F401
    finally:
        os.environ.pop(NVML_CHECK)
        if before is not None:
            os.environ[NVML_CHECK] = before
