"""`mode=predict predict.average=[...]`: the mean of the scores of several runs, each scored by a command of its own."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.options import refuse
from configs.schema import Config
from dataloading.dataset.durable_files import replace_file
from dataloading.storage.object_store import is_remote
from nn.checkpoint.directory import BEST, CHECKPOINTS, list_checkpoints
from nn.distributed.launcher import is_launched
from nn.scores.score_file import SCORE, open_score_file

OWN = ("config", "checkpoint.restore")
"""Options that each run has of its own."""
BLOCK_ROWS = 1 << 16


def average(config: Config, arguments: Sequence[str]) -> None:
    """Score rows with each run of `predict.average`, which gets the arguments of this command, and write the means.

    Raises ValueError: a run is named twice, has no checkpoint, could not score the rows or has other labels, or the command
    has an option that each run has of its own.
    """
    runs, output = [Path(run) for run in config.predict.average], Path(str(config.output))
    options = [(text.partition("=")[0].lstrip("+~"), text) for text in arguments]
    for name, text in options:
        refuse(name in OWN, f"{text} and predict.average exclude each other; leave {name} out")
    twice = len({run.resolve() for run in runs}) < len(runs)
    refuse(twice, f"predict.average names a run twice: {', '.join(map(str, runs))}; name each once")
    if is_launched() or is_remote(str(config.output)):
        raise ValueError(
            "predict.average starts one process per run and writes a local file; leave the launcher out, and name a file"
        )
    checkpoints = [_checkpoint(run) for run in runs]
    others = [text for name, text in options if name not in ("predict.average", "output")]
    with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as work:
        files: list[pq.ParquetFile] = []
        for run, checkpoint in zip(runs, checkpoints, strict=True):
            path = Path(work) / f"{len(files)}.parquet"
            own = (f"config={run}/config.yaml", f"checkpoint.restore={checkpoint}")
            if code := run_command([*others, *own, f"output={path}"]):
                raise ValueError(f"{run} could not score the rows (exit code {code}), see above")
            files.append(pq.ParquetFile(path))
        schema = files[0].schema_arrow.remove_metadata()
        if any(file.schema_arrow.names != schema.names for file in files):
            raise ValueError(
                "predict.average: the runs have other labels; name runs on the same data"
            )
        rows = {(file.schema_arrow.metadata or {}).get(b"data") for file in files}
        if len(rows) > 1 or len({file.metadata.num_rows for file in files}) > 1:
            raise ValueError(
                "predict.average: the runs have scored other rows; set data.path and predict.split, or source"
            )
        columns = [
            field.name
            for field in schema
            if (field.name == SCORE or field.name.startswith(f"{SCORE}_"))
            and field.type == pa.float64()
        ]
        target = open_score_file(Path(work) / output.name, schema, len(columns))
        for batches in zip(*(file.iter_batches(BLOCK_ROWS) for file in files), strict=True):
            table = pa.Table.from_batches(batches[:1]).replace_schema_metadata()
            for name in columns:
                mean = np.mean([batch[name].to_numpy() for batch in batches], axis=0)
                table = table.set_column(schema.get_field_index(name), name, pa.array(mean))
            target.write_table(table)
        target.close()
        replace_file(Path(work) / output.name, output)
    print(f"mean of {len(runs)} runs written to {output}")


def run_command(arguments: Sequence[str]) -> int:
    return subprocess.run([sys.executable, sys.argv[0], *arguments], check=False).returncode


def _checkpoint(run: Path) -> Path:
    folder = run / CHECKPOINTS
    found = list_checkpoints(folder) if folder.is_dir() else []
    if not found:
        raise ValueError(f"predict.average: {run} has no checkpoint; name runs that saved one")
    return folder / BEST if (folder / BEST).exists() else found[0]
