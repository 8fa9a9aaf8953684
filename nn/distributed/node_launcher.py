"""One node of a batch job: torchrun, and what torchrun lacks for one.

    python -m nn.distributed.node_launcher LOG_DIR NUMA_BINDING [torchrun's options] dlrm.py [options]

`slurm_multinode.sh` starts it once a node. Beside torchrun it does three things:

- It ends with a code that says why the ranks ended, where torchrun ends with 1 whatever happened.
- It does not start ranks again that said, by their code, that they would end the same way.
- It hands SLURM's warning on to the ranks and waits for them, where torchrun would die of it. (Which processes of a node
  get the signal depends on the cluster: all of them with proctrack/linuxproc, only this one with proctrack/cgroup.)
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
    INTERRUPTED_EXIT_CODE,
    LOST_RANK_EXIT_CODE,
    RESUME_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
)
from nn.distributed.process_group import node_name

WARNING = signal.SIGUSR1
# A rank that ended with one of these would do so again.
FINAL_EXIT_CODES = (USER_ERROR_EXIT_CODE, DIVERGED_EXIT_CODE, INTERRUPTED_EXIT_CODE)
NO_BINDING = "none"
USAGE = """\
usage: python -m nn.distributed.node_launcher LOG_DIR NUMA_BINDING [torchrun's options] dlrm.py [options]

LOG_DIR       where each rank's output goes, in a folder of this node
NUMA_BINDING  torchrun's --numa-binding of each rank to the CPUs near its GPU, or none

slurm_multinode.sh starts it once a node; on one machine torchrun is enough (docs/operations.md)."""


class NodeAgent(LocalElasticAgent):
    """torchrun's supervisor of a node's ranks, which also hears warnings and what ranks say when they end."""

    was_warned = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        signal.signal(WARNING, self._pass_on)

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        codes = [each.exitcode for each in result.failures.values()]
        if NodeAgent.was_warned or any(each in FINAL_EXIT_CODES for each in codes):
            self._remaining_restarts = 0
        return result

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        NodeAgent.was_warned = True
        ranks = self._pcontext.pids().values() if self._pcontext else ()
        if not any([_send(number, pid) for pid in ranks]):
            # They are being started, and have nothing to save.
            sys.exit(RESUME_EXIT_CODE)


def main(arguments: Sequence[str]) -> int:
    """Run the ranks of this node.

    Args:
        arguments: directory of the logs, kind of NUMA binding or `none`, then those of torchrun.

    Returns:
        0, or a code of `nn.distributed.errors` that says why the ranks ended, or 1 for any other end.
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
    # Otherwise ranks that are started again meet in the store of their first start, find what they wrote there, and
    # wait for ever (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # torchrun has no option for the class of its agent.
    launcher.LocalElasticAgent = NodeAgent  # type: ignore[misc]
    try:
        torchrun.main([*options, *rest])
    except ChildFailedError as error:
        codes = {rank: each.exitcode for rank, each in error.failures.items()}
        for rank, code in codes.items():
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            print(f"{node}: rank {rank} ended with {end}", file=sys.stderr)
        return exit_code(list(codes.values()), was_warned=NodeAgent.was_warned)
    except SignalException as error:
        print(f"{node}: ended by {error.sigval.name}", file=sys.stderr)
        return RESUME_EXIT_CODE
    except RendezvousError:
        # The store lies on one node; a node that closes it has failed itself, and says why.
        print(f"{node}: ended, since another node has; its log says why", file=sys.stderr)
        return LOST_RANK_EXIT_CODE
    return 0


def exit_code(codes: Sequence[int], *, was_warned: bool) -> int:
    """Return the code of a node whose ranks ended with `codes`; one by a signal is negative.

    SLURM reports the largest code of all nodes. So a node whose ranks only lost those of another says 1: what the
    other has to say counts.
    """
    final = [each for each in codes if each in FINAL_EXIT_CODES]
    if final:
        return final[0]
    return RESUME_EXIT_CODE if was_warned else LOST_RANK_EXIT_CODE


def numa_options(binding: str, node: str) -> list[str]:
    """Bind ranks to the CPUs near their GPUs, where there are GPUs and the command that torchrun needs for it."""
    if binding == NO_BINDING or not torch.cuda.is_available():
        return []
    if shutil.which("numactl") is None:
        print(f"{node}: no numactl here, so ranks are not bound to CPUs", file=sys.stderr)
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
