"""Launcher of one node of a batch job: torchrun with exit codes, final failures and preemption signals.

    python -m nn.distributed.node_launcher LOG_DIR NUMA_BINDING [torchrun's options] dlrm.py [options]

`slurm_multinode.sh` starts it once per node. It differs from torchrun in three points:

- Its exit code is the reason why the ranks exited; torchrun always exits with 1.
- It does not restart ranks whose exit code says that they would fail again.
- It forwards SLURM's preemption signal to the ranks and waits for them; torchrun would die. (Which processes of a node
  receive the signal depends on the cluster: all of them with proctrack/linuxproc, only this one with proctrack/cgroup.)
"""

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher

from configs.exit_codes import (
    DIVERGED_EXIT_CODE,
    FAULT_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    LOST_RANK_EXIT_CODE,
    RESUME_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
)
from nn.distributed.process_group import node_name

PREEMPTION_SIGNAL = signal.SIGUSR1
# A restarted rank would exit with the same code again.
FINAL_EXIT_CODES = (USER_ERROR_EXIT_CODE, DIVERGED_EXIT_CODE, INTERRUPTED_EXIT_CODE)
NO_BINDING = "none"
USAGE = """\
usage: python -m nn.distributed.node_launcher LOG_DIR NUMA_BINDING [torchrun's options] dlrm.py [options]

LOG_DIR       directory of the logs, one folder per node and one file per rank
NUMA_BINDING  torchrun's --numa-binding of each rank to the CPUs near its GPU, or none

slurm_multinode.sh starts it once per node; on one machine torchrun is sufficient (docs/operations.md)."""


class NodeAgent(LocalElasticAgent):
    """torchrun's agent of a node, extended by preemption signals and exit codes of ranks."""

    was_preempted = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        signal.signal(PREEMPTION_SIGNAL, self._forward)

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        codes = [failure.exitcode for failure in result.failures.values()]
        if NodeAgent.was_preempted or any(code in FINAL_EXIT_CODES for code in codes):
            self._remaining_restarts = 0
        return result

    def _forward(self, number: int, frame: FrameType | None) -> None:
        NodeAgent.was_preempted = True
        ranks = self._pcontext.pids().values() if self._pcontext else ()
        if not any([_send(number, pid) for pid in ranks]):
            # The ranks are still starting and have nothing to save.
            sys.exit(RESUME_EXIT_CODE)


def main(arguments: Sequence[str]) -> int:
    """Run the ranks of this node.

    Args:
        arguments: directory of the logs, NUMA binding or `none`, arguments of torchrun.

    Returns:
        0 on success, an exit code of `configs.exit_codes` for a known reason, 1 for any other failure.
    """
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if len(arguments) < 3:
        print(f"error: got {len(arguments)} arguments, want at least 3\n{USAGE}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    log_dir, binding, *rest = arguments
    node = node_name()
    options = [f"--log-dir={Path(log_dir) / node}", "--tee=3", *numa_options(binding, node)]
    # Otherwise restarted ranks reuse the store of their first start with its stale entries, and hang (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # torchrun has no option for the class of its agent.
    launcher.LocalElasticAgent = NodeAgent  # type: ignore[misc]
    try:
        torchrun.main([*options, *rest])
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            print(f"{node}: rank {rank} ended with {reason}", file=sys.stderr)
        return exit_code(list(codes.values()), was_preempted=NodeAgent.was_preempted)
    except SignalException as error:
        print(f"{node}: ended by {error.sigval.name}", file=sys.stderr)
        return RESUME_EXIT_CODE
    except RendezvousError:
        # The store is on one node. It closes only when that node has failed, and that node's log has the reason.
        print(f"{node}: ended because another node has ended; see its log", file=sys.stderr)
        return LOST_RANK_EXIT_CODE
    return 0


def exit_code(codes: Sequence[int], *, was_preempted: bool) -> int:
    """Return the exit code of a node from the exit codes of its ranks.

    SLURM reports the largest exit code of all nodes. A node whose ranks only lost ranks of another node exits with 1, so
    that the exit code of the other node is reported.

    Args:
        codes: exit codes of the ranks; a negative code is a signal.
        was_preempted: whether the node received the preemption signal.
    """
    final = [code for code in codes if code in FINAL_EXIT_CODES]
    if final:
        return final[0]
    if FAULT_EXIT_CODE in codes:
        return FAULT_EXIT_CODE
    return RESUME_EXIT_CODE if was_preempted else LOST_RANK_EXIT_CODE


def numa_options(binding: str, node: str) -> list[str]:
    """Return torchrun's options that bind ranks to the CPUs near their GPUs; none without GPUs or numactl."""
    if binding == NO_BINDING or not torch.cuda.is_available():
        return []
    if shutil.which("numactl") is None:
        print(f"{node}: numactl is not installed, so ranks are not bound to CPUs", file=sys.stderr)
        return []
    return [f"--numa-binding={binding}"]


def _send(number: int, pid: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
