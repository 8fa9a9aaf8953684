"""Training speed of TorchRec alone on the rows of the training benchmark, for a comparison in one machine's run.

    python -m benchmarks.peers.with_torchrec --data DIR --out DIR dlrm_t15_2_weak_ragged dlrm_t15_2_rows

Each row runs `benchmarks/peers/torchrec_job.py` under torchrun twice: with TorchRec's dense component as shipped (TF32), and
compiled in bf16. The datasets are those of `python -m benchmarks.train`, generated if they are missing. The command prints a
table for benchmarks/README.md and writes --out/ROW_DENSE.json.
"""

import json
import sys
from pathlib import Path

from benchmarks.launch import command_parser, ends_well, held_output
from benchmarks.rows import ROWS
from benchmarks.train import GIB, row_dataset

DENSE = ("shipped", "compiled")
HEAD = (
    "| row | GPUs | global batch | dense component | M samples/s, min / median / max | peak HBM GiB |\n"
    "|---|---|---|---|---|---|"
)


def main() -> None:
    """Run the rows of the command line."""
    parser = command_parser(__doc__)
    # TorchRec's job takes no log of listens.
    names = [name for name, row in ROWS.items() if not row.users]
    parser.add_argument("rows", nargs="+", choices=names, metavar="ROW", help=", ".join(names))
    parser.add_argument("--data", type=Path, required=True, help="folder of the datasets")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--dense", choices=DENSE, help="one of the two; otherwise both")
    parser.add_argument("--steps", type=int, default=250, help="measured steps per row")
    parser.add_argument("--timeout-s", type=float, default=300, help="time limit per row")
    args = parser.parse_args()
    failed = []
    print(HEAD, flush=True)
    with held_output(args.out):
        for row in args.rows:
            dataset = row_dataset(ROWS[row], args.data)
            for dense in (args.dense,) if args.dense else DENSE:
                out = args.out / f"{row}_{dense}.json"
                command = [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(ROWS[row].world_size)),
                    *("-m", "benchmarks.peers.torchrec_job", row, "--dense", dense),
                    *("--dataset", str(dataset), "--out", str(out), "--steps", str(args.steps)),
                ]
                if ends_well(command, out.with_suffix(".log"), args.timeout_s):
                    print(speed_line(json.loads(out.read_text())), flush=True)
                else:
                    failed.append(f"{row} ({dense})")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def speed_line(result: dict) -> str:
    """Return one row of the table."""
    low, median, high = (result["samples_per_s"][key] / 1e6 for key in ("min", "median", "max"))
    peak = result["peak_hbm_bytes"]
    return (
        f"| `{result['row']}` | {result['world_size']} | {result['global_batch_size']:,} | {result['dense']} "
        f"| {low:.2f} / **{median:.2f}** / {high:.2f} | {'none' if peak is None else f'{peak / GIB:.1f}'} |"
    )


if __name__ == "__main__":
    main()
