"""Processes that start at once: forks of one process that has imported what the commands need."""

import multiprocessing as mp
from multiprocessing.context import ForkServerContext

IMPORTS = [
    "nn.run",
    "preproc.criteo.pipeline",
    "preproc.table.pipeline",
    "tests.helpers.preproc_command",
]
"""Python has one such process, whose imports are those of its first user; so all users name the same."""


def fork_context() -> ForkServerContext:
    """Return the start method of processes that are forks."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context
