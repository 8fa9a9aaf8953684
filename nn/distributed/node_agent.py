"""torchrun's agent of a node, extended by preemption signals and exit codes of ranks; `node_launcher.py` runs it."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import api as rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError
from torch.distributed.launcher import api as launcher

from configs.exit_codes import (
    FAULT_EXIT_CODE,
    FINAL_EXIT_CODES,
    LOST_RANK_EXIT_CODE,
    RESUME_EXIT_CODE,
)
from nn.distributed.launcher import node_name, reserved_port

PREEMPTION_SIGNAL = signal.SIGUSR1


class NodeAgent(LocalElasticAgent):
    """Agent that forwards the preemption signal to the ranks, and restarts none that would fail again."""

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


def run_node(options: Sequence[str]) -> int:
    """Run the ranks of this node; return 0, or a code of `configs.exit_codes`. ValueError: torchrun refuses an option."""
    node = node_name()
    # Otherwise restarted ranks reuse the store of their first start with its stale entries, and hang (torch 2.13).
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # Until the first rank has imported torch and listens, another process could take torch's own choice of its port.
    rendezvous.get_free_port = reserved_port
    # torchrun has no option for the class of its agent.
    launcher.LocalElasticAgent = NodeAgent  # type: ignore[misc]
    try:
        torchrun.main([*options])
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            print(f"{node}: rank {rank} ended with {reason}", file=sys.stderr)
        return exit_code(list(codes.values()), was_preempted=NodeAgent.was_preempted)
    except SignalException as error:
        print(f"{node}: ended by {error.sigval.name}", file=sys.stderr)
        return RESUME_EXIT_CODE
    except RendezvousConnectionError as error:
        print(
            f"{node}: the ranks cannot meet ({error.__cause__ or error}); on the first node another process holds the port, and "
            "the next start takes another; on others the first node cannot be reached, and its log has the reason",
            file=sys.stderr,
        )
        return LOST_RANK_EXIT_CODE
    except RendezvousError:
        # The store is on one node. It closes only when that node has failed, and that node's log has the reason.
        print(f"{node}: ended because another node has ended; see its log", file=sys.stderr)
        return LOST_RANK_EXIT_CODE
    return 0


def exit_code(codes: Sequence[int], *, was_preempted: bool) -> int:
    """Return the exit code of a node from those of its ranks, of which a negative one is a signal.

    SLURM reports the largest exit code of all nodes. A node whose ranks only lost ranks of another node exits with 1, so
    that the exit code of the other node is reported.
    """
    final = [code for code in codes if code in FINAL_EXIT_CODES]
    if final:
        return final[0]
    if FAULT_EXIT_CODE in codes:
        return FAULT_EXIT_CODE
    return RESUME_EXIT_CODE if was_preempted else LOST_RANK_EXIT_CODE


def has_gpus() -> bool:
    return torch.cuda.is_available()


def _send(number: int, pid: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
