"""Console scripts: `recsys-preproc` is `python -m preproc` of a checkout, from anywhere."""

import runpy
import sys
from pathlib import Path

from configs.messages import report_load_errors
from hybrid_parallel_recsys import ROOT

MODULES = {
    "recsys-train": "main",
    "recsys-dlrm": "dlrm",
    "recsys-dcnv2": "dcnv2",
    "recsys-preproc": "preproc",
    "recsys-compare": "compare",
    "recsys-status": "status",
    "recsys-sweep": "sweep",
    "recsys-export-tables": "nn.export",
    "recsys-replay": "nn.replay",
    "recsys-export": "serving.export",
    "recsys-apply": "serving.apply",
    "recsys-serve": "serving.run",
    "recsys-rollback": "serving.rollback",
    "recsys-forget": "serving.forget",
    "recsys-triton": "serving.triton",
    "recsys-evaluate-accuracy": "serving.evaluate_accuracy",
    "recsys-evaluate-latency": "serving.evaluate_latency",
}
"""Module of each script, as `python -m` takes it."""


def run() -> None:
    """Run the module that the script of this process names."""
    # A `main.py` or a `serving` where the user works, or in the environment, is not ours.
    sys.path.insert(0, str(ROOT))
    report_load_errors()
    runpy.run_module(MODULES[Path(sys.argv[0]).name], run_name="__main__", alter_sys=True)
