"""Speed of `mode=predict` from a dataset in the page cache, with the time that each part waited.

    python dlrm.py experiment=dlrm_criteo_t15 data.path=DATA train.max_steps=20 run_dir=DIR/run
    torchrun --nproc-per-node 1 -m benchmarks.predict --out DIR dlrm experiment=dlrm_criteo_t15 data.path=DATA
        predict.split=train checkpoint.restore=DIR/run/checkpoints/step_20

The scores are written to DIR/scores.parquet. The first line is of all batches after the first one, which captures the step:
rows/s, and the parts of the time that the scoring waited for rows (`data`) and for the writer (`file`). The second line is of
the writer alone, on scores that are in memory already. DIR/predict.json holds the numbers.
"""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.launch import held_output
from benchmarks.rows import compose_row, run_parser
from nn.distributed.process_group import process_rank
from nn.library_warnings import quiet_libraries
from nn.observability.console import make_console
from nn.scores.kept_scores import KeptScores
from nn.scores.named_rows import RowNumbers
from nn.scores.run import predict
from nn.scores.score_file import open_score_file, score_schema
from nn.scores.score_writer import ScoreWriter


def main() -> None:
    """Measure the scores of the command line."""
    args = run_parser(__doc__, out="for the scores and the result").parse_args()
    quiet_libraries()
    output = args.out / "scores.parquet"
    config = compose_row(args.recipe, *args.overrides, "mode=predict", f"output={output}")
    if process_rank():
        predict(config, make_console(1))
        return
    with held_output(args.out):
        output.unlink(missing_ok=True)
        written = predict(config, make_console(1))
        print(line_of(written, config.eval.batch_size), flush=True)
        alone = writer_speed(args.out, written["rows"], config.eval.batch_size)
        print(f"{alone:14,.0f} rows/s  the writer alone")
        text = json.dumps(written | {"writer_rows_per_s": alone}, indent=2)
        (args.out / "predict.json").write_text(text + "\n")


def line_of(written: dict[str, Any], batch_size: int) -> str:
    """Return one line with the speed of a pass behind its first batch, and where its time went."""
    seconds = written["seconds"] - written["first_batch_s"]
    parts = {"data": "data_wait_s", "file": "file_wait_s", "writer busy": "writer_s"}
    shares = ", ".join(f"{name} {written[key] / seconds:.0%}" for name, key in parts.items())
    speed = (written["scored_rows"] - batch_size) / seconds
    return f"{speed:14,.0f} rows/s  {shares}"


def writer_speed(directory: Path, num_rows: int, batch_size: int) -> float:
    """Return the rows/s of the writer, of one score per row, without any scoring."""
    scores = torch.rand(batch_size, 1, dtype=torch.float64)
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        path, named = Path(folder) / "scores.parquet", RowNumbers()
        schema = score_schema(named.fields, ["label"], {}, path)
        file = open_score_file(path, schema, 1)
        writer = ScoreWriter(file, schema, named, KeptScores(Path(folder), {}, 1))
        started = time.perf_counter()
        for _ in range(max(1, num_rows // batch_size)):
            writer.put(scores)
        writer.finish()
        return writer.num_rows / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
