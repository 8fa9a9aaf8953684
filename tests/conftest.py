"""Settings of all tests: threads, the Triton interpreter, the fast subset, the number of processes."""

import gc
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

# Tests start some hundred processes. Without stored bytecode each would compile torch, TorchRec and the project again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Ranks and workers run beside each other; a second thread of one only waits for the first of another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from tests.helpers.forking.workers import run_files
from tests.helpers.forks import other_threads, start_servers

sys.dont_write_bytecode = False
torch.set_num_threads(1)

# Where no GPU compiles the kernels, Triton interprets them; it reads this once, when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

WORKERS = 4
"""At most, and two per core: tests wait half of their time for processes, disks and signals."""
LONG_S = 20.0
MEMORY_BYTES = 4 << 30
"""Free bytes of /dev/shm from which tests work there; they need a quarter."""
seconds_of_files: Counter[str] = Counter()
# Files of more than ten seconds, longest first. Workers begin with them; one that began late would keep a worker busy alone.
LONGEST_FIRST = (
    "end_to_end/test_slurm_cluster.py",
    "installs/test_installs.py",
    "preproc/table/test_spark_engine.py",
    "end_to_end/test_resume.py",
    "nn/tiers/test_host_tier.py",
    "preproc/criteo/test_restart.py",
    "nn/embedding/test_triton_embedding_bag.py",
    "nn/sharding/test_sharded_embeddings.py",
    "dataloading/test_reader_processes.py",
    "nn/distributed/test_step_watch.py",
    "configs/test_yaml_files.py",
    "nn/training/test_ragged.py",
    "serving/inference/test_missing_texts.py",
    "project/test_documented.py",
    "preproc/table/test_history.py",
    "serving/gpu/test_gpu_model.py",
    "nn/models/test_kinds_of_tables.py",
    "configs/test_option_values.py",
    "nn/planning/test_host_tables.py",
    "nn/scores/test_streamed_rows.py",
    "nn/library/test_own_training.py",
    "nn/test_raw_keys.py",
    "nn/models/test_models.py",
    "nn/planning/test_planner.py",
    "nn/models/test_family_training.py",
    "nn/test_next_day.py",
    "nn/checkpoint/test_reshard.py",
    "preproc/criteo/test_pipeline.py",
    "preproc/criteo/test_errors.py",
    "nn/export/test_import.py",
    "nn/distributed/test_node_launcher.py",
    "nn/training/test_pass_layers.py",
    "nn/checkpoint/test_partial_load.py",
    "nn/training/test_train_step.py",
    "nn/checkpoint/test_hostile_checkpoints.py",
    "nn/checkpoint/test_manager.py",
    "nn/checkpoint/test_state.py",
    "nn/deltas/test_raw_keys.py",
    "end_to_end/test_run.py",
    "preproc/table/test_pipeline.py",
    "preproc/table/test_properties.py",
    "end_to_end/test_nodes.py",
    "nn/distributed/test_process_group.py",
    "project/test_floors.py",
    "sweep/test_sweep.py",
    "serving/exporting/test_export.py",
    "serving/server/test_server.py",
)
# Something of every room: what `-m fast` selects.
FAST = {
    "helpers/forking/test_forked_python.py",
    "configs/test_schema.py",
    "compare/test_compare.py",
    "dataloading/storage/test_object_store.py",
    "dataloading/test_batch.py",
    "dataloading/keys/test_key_map.py",
    "nn/library/test_loaded_run.py",
    "nn/loggers/test_loggers.py",
    "nn/observers/test_observers.py",
    "nn/plots/test_curves.py",
    "nn/scores/test_unknown_values.py",
    "preproc/report/test_report.py",
    "status/test_status.py",
    "sweep/test_sweep.py",
    "dataloading/dataset/test_feature_spec.py",
    "dataloading/test_partition.py",
    "nn/checkpoint/test_tensor_index.py",
    "nn/deltas/test_replay.py",
    "nn/distributed/test_process_group.py",
    "nn/embedding/test_torch_optimizer.py",
    "nn/export/test_export.py",
    "nn/layers/test_cross_net.py",
    "nn/layers/test_dot_interaction.py",
    "nn/layers/test_mlp.py",
    "nn/metrics/test_ranking.py",
    "nn/models/test_family_options.py",
    "nn/observability/test_console.py",
    "nn/observability/test_run_directory.py",
    "nn/observability/test_throughput.py",
    "nn/observability/test_trace_breakdown.py",
    "nn/layers/test_bce_loss.py",
    "nn/ops/test_stochastic_rounding.py",
    "nn/sharding/test_id_all_to_all.py",
    "nn/planning/test_exchange.py",
    "nn/test_versions.py",
    "nn/tiers/test_slot_map.py",
    "nn/training/test_latency.py",
    "nn/training/test_lr_scheduler.py",
    "nn/training/test_clip_norm.py",
    "preproc/convert/test_convert.py",
    "preproc/describe/test_describe.py",
    "preproc/criteo/test_hash_table.py",
    "preproc/table/test_lists.py",
    "preproc/test_synthetic.py",
    "preproc/verify/test_verify.py",
    "serving/exporting/test_quantize.py",
    "serving/inference/test_raw_values.py",
    "serving/gpu/test_inputs.py",
    "serving/client/test_clients.py",
    "serving/triton/test_repository.py",
    "serving/server/test_protocol.py",
    "project/test_readme.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take the number of processes."""
    parser.addoption(
        "--workers",
        default="auto",
        help="processes that share the tests; 0: none beside this one; auto: four, and none for named files",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Put temporary directories into memory: half of the time of a small command is its syncs to the disk.

    Not those of doors, which install gigabytes and mount a /dev/shm of their own.
    """
    memory = Path("/dev/shm")
    is_large = memory.is_dir() and shutil.disk_usage(memory).free > MEMORY_BYTES
    if is_large and os.access(memory, os.W_OK) and "doors" not in config.option.markexpr:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no other file than those of the fast subset, if only that is asked for."""
    is_test = collection_path.name.startswith("test_") and collection_path.is_file()
    only_fast = config.option.markexpr == "fast" and is_test
    return True if only_fast and _name(collection_path) not in FAST else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the fast subset, leave `doors` out unless -m names it, and put long files first."""
    for item in items:
        if _name(item.path) in FAST:
            item.add_marker(pytest.mark.fast)
    if "doors" not in config.option.markexpr:
        doors = [item for item in items if item.get_closest_marker("doors")]
        items[:] = [item for item in items if item not in doors]
        config.hook.pytest_deselected(items=doors)
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(_name(item.path), len(ranks)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt what imports have made from garbage collection, which would otherwise visit some million objects each time."""
    gc.collect()
    gc.freeze()
    if not torch.cuda.is_available() and not session.config.option.collectonly:
        # After TRITON_INTERPRET was set: Triton reads it when something imports it.
        from tests.helpers.made_once import make_once

        make_once()
        # The first backward pass starts a thread per device, of the pretended GPU of `torch.export` and fake tensors too, and
        # torch then refuses one in any fork.
        torch.ones(1, requires_grad=True).backward()
        threads = other_threads()
        assert not threads, f"forks are not safe: an import of a test file starts {threads}"
        start_servers(session.config._tmp_path_factory.getbasetemp())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the time of each file."""
    seconds_of_files[report.nodeid.partition("::")[0].removeprefix("tests/")] += report.duration


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name the long files that begin late."""
    late = [
        f"{name} ({seconds:.0f} s)"
        for name, seconds in seconds_of_files.most_common()
        if seconds > LONG_S and name not in LONGEST_FIRST
    ]
    if late and _num_workers(config):
        terminalreporter.write_line(f"for LONGEST_FIRST of tests/conftest.py: {', '.join(late)}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in several processes."""
    number = _num_workers(session.config)
    if number == 0 or session.testsfailed or session.config.option.collectonly:
        return None
    run_files(session, number)
    return True


def _name(path: Path) -> str:
    """Return the path of a test's file below tests/."""
    return path.relative_to(Path(__file__).parent).as_posix()


def _num_workers(config: pytest.Config) -> int:
    """Several processes for all tests on CPUs; one for files that are named, and on a GPU, which tests would share."""
    if config.option.workers != "auto":
        return int(config.option.workers)
    names_files = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    if names_files or torch.cuda.is_available() or config.option.usepdb:
        return 0
    cores = os.cpu_count() or 1
    return cores if "doors" in config.option.markexpr else min(WORKERS, 2 * cores)


@pytest.fixture
def set_tf32() -> Iterator[Callable[[bool], None]]:
    """Set whether products of float32 may be TF32, until the test ends; `monkeypatch` would delete what torch only computes."""
    matmul = torch.backends.cuda.matmul
    kept = matmul.allow_tf32
    yield lambda allow: setattr(matmul, "allow_tf32", allow)
    matmul.allow_tf32 = kept
