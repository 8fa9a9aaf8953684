"""`python -m preproc`: compose and check the options, then make, verify or convert a dataset directory."""

if __name__ == "__main__":
    # First, since the imports below take a moment, and make no garbage that is worth looking for.
    import atexit
    import gc
    import sys

    from configs.stop_signals import end_at_once_on_signals

    end_at_once_on_signals()
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)  # nor at the end
    # Seconds after which a thread that draws lets others have the interpreter's lock: those that write files need it often.
    sys.setswitchinterval(0.0002)

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from configs.command_line import NO_OUTPUT, RERUN, composed_command, end_command, errors_end_command
from configs.console import command_console
from configs.messages import require_package
from configs.options import refuse, require
from configs.overrides import options_text, texts_of, to_config
from configs.preproc_schema import EngineName, Layout, Mode, PreprocConfig, Split, topic_of
from configs.stop_signals import restore_signals
from configs.table_schema import TableConfig
from dataloading.dataset.dataset_directory import check_output
from dataloading.dataset.feature_spec import SPEC_NAME
from dataloading.storage.local_copy import local_path
from dataloading.storage.object_store import is_remote
from dataloading.storage.upload import writable
from preproc.report.console import Progress


def build(config: PreprocConfig) -> None:
    """Write the dataset of `config`; user errors are raised as ValueError or OSError."""
    assert config.output is not None
    if config.engine is EngineName.spark:
        require_package("pyspark", "engine=spark")
        # Under spark-submit Java runs already.
        java = shutil.which("java") or os.environ.keys() & {"JAVA_HOME", "PYSPARK_GATEWAY_PORT"}
        require(
            bool(java),
            "engine=spark needs Java 17 or later, and there is no command java and no JAVA_HOME; install it, or take "
            "engine=duckdb",
        )
    output = Path(config.output)
    progress = Progress(command_console())
    if not config.overwrite and (output / SPEC_NAME).exists():
        require(
            _was_complete(config, output),
            f"{output} holds a dataset already; set overwrite=true to replace it, or another output",
        )
        progress.console.print(
            f"{output} is complete: the run that wrote it was killed while it removed its work directory, which is removed now"
        )
        return
    check_output(output, config.overwrite)
    write = _writer(config)
    restore_signals()
    write(progress)


def _writer(config: PreprocConfig) -> Callable[[Progress], object]:
    """Return the function that writes the dataset; each branch imports its own dependencies."""
    # So the synthetic one also runs without DuckDB.
    if config.layout is Layout.synthetic:
        from preproc.synthetic import build_synthetic

        return partial(build_synthetic, config)
    if config.layout is Layout.yambda:
        from preproc.listens.build import build_listens

        return partial(build_listens, config)
    if config.layout is Layout.mlperf:
        from preproc.criteo.mlperf import build_mlperf

        return partial(build_mlperf, config)
    is_table = config.layout is Layout.table
    is_fit = config.mode is Mode.fit and not config.rare_counts
    if not is_table and config.engine is EngineName.duckdb and is_fit:
        from preproc.criteo.pipeline import build_criteo

        return partial(build_criteo, config)
    from preproc.criteo.as_table import criteo_table
    from preproc.table.pipeline.build import build_table

    return partial(
        build_table, config, TableConfig.of(config.table) if is_table else criteo_table(config)
    )


def _was_complete(config: PreprocConfig, output: Path) -> bool:
    """Finish what a killed run of the same command left to do after it had completed `output`, if there was one."""
    if config.layout in (Layout.synthetic, Layout.yambda):
        return False
    from preproc.work_directory import finish_killed_run

    return finish_killed_run(config, output.resolve())


def execute(config: PreprocConfig) -> None:
    """Run `config.mode` on local copies of what lies on object stores, and upload an output that belongs there."""
    if given := config.temp_directory:
        refuse(is_remote(given), f"temp_directory={given} must be a local directory")
        Path(given).mkdir(parents=True, exist_ok=True)
    if config.mode is Mode.describe:
        from preproc.describe.command import run_describe

        restore_signals()
        run_describe(config, command_console())
        return
    read = {key: getattr(config, key) for key in ("path", "fitted") if getattr(config, key)}
    read = {key: str(local_path(path)) for key, path in read.items()}
    config = replace(config, **read)
    if config.output is None:
        _execute(config)
        return
    if topic_of(config.source) is not None:
        from preproc.kafka_parts import follow_topic

        restore_signals()
        follow_topic(config)
        return
    for key, path in read.items():
        require(
            is_remote(config.output)
            or not Path(path).resolve().is_relative_to(Path(config.output).resolve()),
            f"output={config.output} would replace {key}={path}, which the run reads; name another output",
        )
    with writable(config.output, SPEC_NAME, config.overwrite) as output:
        # What an upload that failed has left in the cache may be of other options.
        overwrite = config.overwrite or is_remote(config.output)
        _execute(replace(config, output=str(output), overwrite=overwrite))


def _execute(config: PreprocConfig) -> None:
    """Run `config.mode`; each mode imports its own dependencies."""
    if config.mode is Mode.verify:
        from preproc.verify.run import run_verify

        restore_signals()
        run_verify(config, Progress(command_console()))
    elif config.mode is Mode.convert:
        from preproc.convert.run import run_convert

        restore_signals()
        run_convert(config, Progress(command_console()))
    else:
        build(config)


def run(composed: DictConfig) -> None:
    """Convert the composed yaml to checked options and execute them; end with one message after an error."""
    writes = OmegaConf.is_interpolation(composed, "output") or bool(composed.output)
    more = " (it resumes), or move output or temp_directory"
    interrupted = f"{NO_OUTPUT} to resume" if writes else RERUN
    typed = texts_of(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    with errors_end_command(
        options_text(composed, "output" if writes else "path"), more, interrupted
    ):
        config = to_config(composed)
        refuse_idle_split(config, typed)
        execute(config)


def refuse_idle_split(config: PreprocConfig, typed: Sequence[str]) -> None:
    """Raise ValueError if an option of the command line divides no rows; one of a description may (`one_split`)."""
    by_files = "split=last_file" if config.split is Split.last_file else None
    if config.test_source is not None:
        by_files = "test_source"
    for text in typed:
        key, _, value = text.lstrip("+").partition("=")
        if value == "null":
            continue
        divides = key in ("split", "train_fraction") or f"{key}.".startswith("table.split.")
        require(
            config.one_split is None or not divides,
            f"{text} divides no rows, as mode=transform makes all of them one split ({config.one_split}); set split_name=null "
            f"to divide them, or leave {key} out",
        )
        require(
            by_files is None or key != "train_fraction",
            f"{text} divides no rows: with {by_files} the test rows are those of files; leave train_fraction out",
        )


if __name__ == "__main__":
    try:
        composed_command(run, PreprocConfig, "preproc_schema", "preproc", groups=("dataset",))()
    except ValueError as error:
        end_command(f"error: {error}")
