"""From the command line to a run: compose the configuration, check it, hand it over, say plainly what went wrong."""

import os
import signal
import sys
import time
from typing import NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from configs.help import register_option_help
from configs.schema import Config, check_overrides, to_config
from nn.errors import (
    DIVERGED_EXIT_CODE,
    INTERRUPTED_EXIT_CODE,
    LOST_RANK_EXIT_CODE,
    RESUME_EXIT_CODE,
    USER_ERROR_EXIT_CODE,
    DivergedError,
    LostRankError,
    RankError,
    SharedError,
    StoppedError,
)

# A launcher ends all ranks when it sees the first one fail; the rank that speaks must not be ended before it has.
SILENT_RANK_WAIT_S = 2.0
STARTED_BY = os.getppid()


def launch(config_name: str) -> None:
    """Run the recipe `configs/<config_name>.yaml` with the overrides of the command line."""
    # OpenMP's threads otherwise spin while they wait, and starve the loader's where cores are few. Read when torch is
    # imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        check_overrides(sys.argv[1:], Config, groups=("experiment", "data"))
    except ValueError as error:
        _end(str(error) if _speaks_for_node() else None, USER_ERROR_EXIT_CODE)
    ConfigStore.instance().store(name="schema", node=Config)
    register_option_help(Config)
    hydra.main(version_base="1.3", config_path="configs", config_name=config_name)(_run)()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _leave_launcher()


def _run(composed: DictConfig) -> None:
    # Only now: torch and TorchRec take seconds to import, and `--help` and typing errors need neither.
    from nn.quiet import quiet_libraries
    from nn.stack import require_stack

    try:
        config = to_config(composed)
        require_stack()
        quiet_libraries()
        if sys.stdout.isatty() and _speaks_for_node():
            # Five to ten seconds; the next line overwrites it.
            print("loading torch and TorchRec ...", end="\r", flush=True)
        from nn.run import run

        run(config, OmegaConf.to_yaml(composed, resolve=True))
    except RankError as error:
        _end(str(error), USER_ERROR_EXIT_CODE)
    except LostRankError as error:
        _end(str(error) or None, LOST_RANK_EXIT_CODE)
    except (ValueError, SharedError) as error:
        # Every rank of a node, if not of all nodes, has met the same error; one of them says it.
        _end(str(error) if _speaks_for_node() else None, USER_ERROR_EXIT_CODE)
    except OSError as error:
        _end(f"{error.strerror or error}: {error.filename}", USER_ERROR_EXIT_CODE)
    except DivergedError as error:
        _end(str(error) if _speaks_for_node() else None, DIVERGED_EXIT_CODE)
    except StoppedError as error:
        _end(str(error) if _speaks_for_node() else None, RESUME_EXIT_CODE)
    except KeyboardInterrupt:
        text = (
            "interrupted; what was recorded so far is in the run directory, and the model as of the latest "
            "checkpoint, if there is one"
        )
        _end(text if _speaks_for_node() else None, INTERRUPTED_EXIT_CODE)


def _leave_launcher(exit_code: int = 0) -> NoReturn:
    """End a rank that torchrun started, all of whose files are closed.

    Torch's own threads may still run when Python takes itself down, and then abort the process ("terminate called without
    an active exception", 2 of 14 two-rank CPU runs), which torchrun would report as a failure of the whole run. After a
    failure, a thread may wait for ranks that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _speaks_for_node() -> bool:
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def _end(message: str | None, exit_code: int) -> NoReturn:
    if message is None:
        time.sleep(SILENT_RANK_WAIT_S)
    else:
        sign = "" if exit_code == RESUME_EXIT_CODE else "error: "
        print(f"{sign}{message}", file=sys.stderr)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if exit_code == RESUME_EXIT_CODE and os.getppid() == STARTED_BY:
            # Otherwise the launcher, if it is still there, would take this for a failure, and use up a restart.
            os.kill(STARTED_BY, signal.SIGTERM)
        _leave_launcher(exit_code)
    sys.exit(exit_code)


if __name__ == "__main__":
    launch("dlrm")
