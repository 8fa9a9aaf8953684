"""Launcher of one node of a batch job: torchrun with exit codes, final failures and preemption signals.

    python -m nn.distributed.node_launcher LOG_DIR NUMA_BINDING [torchrun's options] dlrm.py [options]

`slurm_multinode.sh` starts it once per node. It differs from torchrun in four points:

- Its exit code is the reason why the ranks exited; torchrun always exits with 1.
- It does not restart ranks whose exit code says that they would fail again.
- It forwards SLURM's preemption signal to the ranks and waits for them; torchrun would die. (Which processes of a node
  receive the signal depends on the cluster: all of them with proctrack/linuxproc, only this one with proctrack/cgroup.)
- It refuses in one line what cannot heal, such as a node without GPUs.
"""

import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from configs.exit_codes import FINAL_EXIT_CODES, RESUME_EXIT_CODE, USER_ERROR_EXIT_CODE
from nn.distributed.launcher import node_name
from nn.versions import require_stack

NO_BINDING = "none"
BINDINGS = ("node", "socket", "exclusive", "core-complex", NO_BINDING)
ENDED_WITH = "ended_with"
"""File of LOG_DIR with the exit code of a node that ends the job; srun reports the largest code of all nodes instead."""
USAGE = """\
usage: python -m nn.distributed.node_launcher LOG_DIR NUMA_BINDING [torchrun's options] dlrm.py [options]

LOG_DIR       directory of the logs, one folder per node and one file per rank
NUMA_BINDING  torchrun's --numa-binding of each rank to the CPUs near its GPU, or none

slurm_multinode.sh starts it once per node; on one machine torchrun is sufficient (docs/operations.md)."""


def main(arguments: Sequence[str]) -> int:
    """Run the ranks of this node; return 0, a code of `configs.exit_codes` for a known reason, or 1."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if len(arguments) < 3:
        print(f"error: got {len(arguments)} arguments, want at least 3\n{USAGE}", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    log_dir, binding, *rest = arguments
    # Without a handler the signal would kill this process; the agent installs its own, when there are ranks to warn.
    signal.signal(signal.SIGUSR1, _end_at_once)
    logs, node = Path(log_dir), node_name()
    try:
        code = _run(logs, node, binding, rest)
    except ValueError as error:
        print(f"error: node {node}: {error}", file=sys.stderr)
        code = USER_ERROR_EXIT_CODE
    if code in FINAL_EXIT_CODES:
        logs.mkdir(parents=True, exist_ok=True)
        (logs / ENDED_WITH).write_text(f"{code}\n")
    return code


def _run(logs: Path, node: str, binding: str, arguments: Sequence[str]) -> int:
    """Check what the node has, and run its ranks as `main`; ValueError if they cannot be started, now or later."""
    require_stack()
    for module in ("hydra", "omegaconf"):
        if find_spec(module) is None:
            raise ValueError(f"{sys.executable} has no module {module}; install the project for it")
    is_first = os.environ.get("SLURM_NODEID") == "0"
    if is_first and shows_progress(arguments):
        # Before torch is imported: a warning during that counts too.
        requeues = int(os.environ.get("MAX_REQUEUES", "10"))
        count_start(logs.parent, newest_step(arguments), requeues)
    options = [f"--log-dir={logs / node}", "--tee=3", *numa_options(binding, node)]
    if "SLURM_NODEID" in os.environ:
        # Otherwise the first node would take any process that holds the port for its store, and wait for an answer.
        options.append(f"--rdzv-conf=is_host={int(is_first)}")

    from nn.distributed.node_agent import has_gpus, run_node

    if "--nproc-per-node=gpu" in arguments and not has_gpus():
        raise ValueError(
            "no GPU is visible; ask for GPUs (sbatch --gpus-per-node 8), or set RANKS_PER_NODE to train on CPUs"
        )
    return run_node([*options, *arguments])


def shows_progress(arguments: Sequence[str]) -> bool:
    """Return whether a recipe leaves newer checkpoints in its `run_dir`, as only a training does that has no mirror."""
    named = dict(argument.lstrip("+-").partition("=")[::2] for argument in arguments)
    saved = ""
    with suppress(OSError):  # the recipe reports a file that cannot be read
        saved = Path(named.get("config", "").strip("'\"")).read_text(errors="replace")

    def chosen(name: str, line: str, default: str) -> str:
        found = re.search(line, saved, re.MULTILINE)
        return named.get(name, found[1] if found else default).strip("'\"")

    mirror = chosen("checkpoint.mirror", r"^ +mirror: *(\S+)", "null")
    return chosen("mode", r"^mode: *(\S+)", "train") == "train" and mirror == "null"


def newest_step(arguments: Sequence[str]) -> int:
    """Return the step of the newest checkpoint in the `run_dir` of a recipe's arguments; 0 without one."""
    pairs = [argument.lstrip("+-").partition("=")[::2] for argument in arguments]
    named = [value.strip("'\"") for key, value in pairs if key == "run_dir"]
    found = Path(named[-1], "checkpoints").glob("step_*") if named else ()
    return max((int(step) for path in found if (step := path.name[5:]).isdecimal()), default=0)


def count_start(folder: Path, step: int, max_requeues: int) -> None:
    """Record that a start of the job begins at `step`; ValueError if more than `max_requeues` have trained nothing."""
    folder.mkdir(parents=True, exist_ok=True)
    record = folder / "starts.txt"
    steps = record.read_text().split() if record.exists() else []
    useless = len(steps) - max(
        (at for at, began in enumerate(steps, 1) if began != str(step)), default=0
    )
    if useless > max_requeues:
        raise ValueError(
            f"{useless} starts in a row ended at step {step}, at which they began, by a failure or the warning before the time "
            "limit (--time); see their logs, and submit again with this run_dir"
        )
    with record.open("a") as file:
        print(step, file=file)


def numa_options(binding: str, node: str) -> list[str]:
    """Return torchrun's options that bind ranks to the CPUs near their GPUs, if there are any; ValueError for other bindings."""
    if binding not in BINDINGS:
        raise ValueError(f"NUMA_BINDING={binding}: expected one of {', '.join(BINDINGS)}")
    from nn.distributed.node_agent import has_gpus

    if binding == NO_BINDING or not has_gpus():
        return []
    if shutil.which("numactl") is None:
        print(f"{node}: numactl is not installed, so ranks are not bound to CPUs", file=sys.stderr)
        return []
    return [f"--numa-binding={binding}"]


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """End before there are ranks, which could save something."""
    os.write(sys.stderr.fileno(), b"stopped by SIGUSR1 before the ranks were started\n")
    os._exit(RESUME_EXIT_CODE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
