"""Training speed of the recipe as a user runs it: dataset in the page cache, loader, learning rate schedule, loss, metrics.

    python -m benchmarks.train --data DIR --out DIR dlrm_t15_1 dlrm_t15_1_ragged

Each row runs `torchrun ... dlrm.py experiment=...`. Its dataset is generated first, unless --data holds it already. The speed is
that of the records after the first. The last steps run under the profiler and count in no speed.

The command prints two tables for benchmarks/README.md and writes --out/ROW.json. The rows are in benchmarks/rows.py; results
with date, machine and commit are in benchmarks/README.md.
"""

import json
import statistics
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.dataset import preprocess, ragged_dataset
from benchmarks.floors import floor_of_row
from benchmarks.launch import command_parser, ends_well, held_output, spread
from benchmarks.rows import ROOT, ROWS, Row
from nn.observability.environment import git_commit
from nn.observability.trace_breakdown import DATA_WAIT, KERNEL_PHASES
from nn.step_floor import Floor

GIB = 2**30
DLRMV4_SAMPLES = 69.3e6
"""That MLPerf's reference needs at batch 8,192, mean of 20 runs."""
TEST_ROWS = 131_072
PROFILED_STEPS = 10
RECORD_EVERY = 50
FLOOR_TIMES = ("ms", "sustained_ms", "bound", "times_ms")


def main() -> None:
    """Run the rows of the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("rows", nargs="+", choices=[*ROWS], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--data", type=Path, required=True, help="folder of the datasets")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and runs")
    parser.add_argument("--steps", type=int, default=300, help="steps per row, a multiple of 50")
    parser.add_argument("--timeout-s", type=float, default=300, help="time limit per row")
    args = parser.parse_args()
    if args.steps % RECORD_EVERY or args.steps < 3 * RECORD_EVERY:
        parser.error(
            f"--steps={args.steps} must be a multiple of {RECORD_EVERY}, {3 * RECORD_EVERY} or more; the first record "
            "is not measured, and no evaluation may coincide with the profiled steps"
        )
    results, failed = [], []
    print(HEAD, flush=True)
    with held_output(args.out):
        for name in args.rows:
            run_dir = args.out / name
            dataset = row_dataset(ROWS[name], args.data)
            command = command_of(ROWS[name], dataset, run_dir, args.steps)
            if not ends_well(command, args.out / f"{name}.log", args.timeout_s):
                failed.append(name)
                continue
            result = read_result(name, ROWS[name], run_dir, data_path=dataset)
            (args.out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
            results.append(result)
            print(speed_line(result), flush=True)
    print("\n" + breakdown_table(results))
    for result in results:
        if result["memory"]:
            print(f"\n`{result['row']}`: {result['memory']}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def command_of(row: Row, data_path: Path, run_dir: Path, steps: int) -> list[str]:
    """Return the command of a row."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(row.world_size)),
        str(ROOT / f"{row.recipe}.py"),
        f"experiment={row.experiment}",
        f"data.path={data_path}",
        f"run_dir={run_dir}",
        *("train.epochs=1000", f"train.max_steps={steps}", f"log.every={RECORD_EVERY}"),
        *(f"profile.steps={PROFILED_STEPS}", f"profile.start_step={steps - PROFILED_STEPS}"),
        *("eval.per_epoch=1", "eval.final_max_steps=null", "eval.auc_threshold=null"),
        *("checkpoint.save=false", "log.loggers=[]", "log.pictures=false"),
        *row.overrides,
    ]


def read_result(
    name: str,
    row: Row,
    run_dir: Path,
    floor: Floor | None = None,
    data_path: Path | None = None,
) -> dict[str, Any]:
    """Read the result of a finished run on the dataset at `data_path`."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    floor = floor or floor_of_row(row, lines[0].get("gpu") or "", data_path)
    # The first record includes compilation and capture. A record of profiled steps only has no speed.
    records = [line for line in lines if line.get("samples_per_s") is not None][1:]
    breakdown = json.loads((run_dir / "profile/summary.json").read_text())
    trained = [line for line in lines if "tier_disk_bytes_in" in line]
    memory = run_dir / "memory.json"
    planned = json.loads(memory.read_text())[0] if memory.exists() else None
    speeds = spread([record["samples_per_s"] for record in records])
    step_ms = floor.global_batch_size / speeds["median"] * 1e3
    return {
        "row": name,
        **{key: getattr(row, key) for key in ("recipe", "experiment", "world_size", "exponent")},
        "global_batch_size": floor.global_batch_size,
        "command": lines[0]["command"],
        "commit": git_commit(ROOT),
        "environment": lines[0],
        "num_records": len(records),
        "samples_per_s": speeds,
        "step_ms": step_ms,
        "data_wait_ms": statistics.median(record["data_wait_ms"] for record in records),
        "tflops_per_s": sum(floor.flops.values()) / step_ms / 1e9,
        "peak_hbm_bytes": records[-1]["hbm_bytes"],
        "planned_hbm_bytes": planned,
        "memory": trained and memory_of(trained, floor.global_batch_size, run_dir),
        "floor": asdict(floor) | {key: getattr(floor, key) for key in FLOOR_TIMES},
        "times_the_floor": step_ms / floor.ms,
        "times_the_sustained_floor": step_ms / floor.sustained_ms,
        "breakdown": breakdown,
    }


def memory_of(records: list[dict[str, Any]], batch: int, run_dir: Path) -> str:
    """Return the peaks of a run with tables on disk, and the bytes of their rows that it read, now and after `DLRMV4_SAMPLES`.

    Host memory keeps the rows of so short a run: each is read once. New ones become rarer, so the rate of the second half is
    the most that comes.
    """
    summary = json.loads((run_dir / "summary.json").read_text())
    read = [record["tier_disk_bytes_in"] for record in records]
    now, samples = RECORD_EVERY * sum(read), RECORD_EVERY * len(read) * batch
    rate = statistics.mean(read[len(read) // 2 :]) / batch
    later = min(now + rate * (DLRMV4_SAMPLES - samples), summary["tier_disk_full_bytes"])
    peaks = summary["peak_hbm_bytes"] or 0, summary["peak_host_bytes"]
    sizes = (*peaks, summary["tier_disk_peak_bytes"], now, later)
    gpu, host, disk, now, later = (f"{size / GIB:,.1f}" for size in sizes)
    return (
        f"GiB at the peak: GPU {gpu}, host {host}, disk {disk}; of tables on disk the rows of {now} were read in {samples:,} "
        f"samples, and those of at most {later} in {DLRMV4_SAMPLES:,.0f}"
    )


HEAD = (
    "| row | GPUs | global batch | M samples/s, min / median / max | step ms | data wait ms | floor ms: burst, sustained "
    "| times the floors | TFLOP/s a GPU | peak HBM GiB | planned GiB |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def speed_line(result: dict[str, Any]) -> str:
    """Return one row of the table of speeds."""
    low, median, high = (result["samples_per_s"][key] / 1e6 for key in ("min", "median", "max"))
    digits = 2 if median > 0.1 else 5
    peak, planned = result["peak_hbm_bytes"], result["planned_hbm_bytes"]
    if planned is not None and peak is not None:
        error = planned["total"] / peak - 1
        memory = f"{peak / GIB:.1f} | {planned['total'] / GIB:.1f} ({error:+.1%})"
    else:
        memory = "none | none"
    floor = result["floor"]
    return (
        f"| `{result['row']}` | {result['world_size']} | {result['global_batch_size']:,} "
        f"| {low:.{digits}f} / **{median:.{digits}f}** / {high:.{digits}f} | {result['step_ms']:.2f} "
        f"| {result['data_wait_ms']:.2f} | {floor['ms']:.2f} ({floor['bound']}), {floor['sustained_ms']:.2f} "
        f"| {result['times_the_floor']:.1f}, {result['times_the_sustained_floor']:.1f} | {result['tflops_per_s']:.3g} "
        f"| {memory} |"
    )


def breakdown_table(results: list[dict[str, Any]]) -> str:
    """Return the breakdown of rank 0's step as a table: ms of kernels, exposed ms in brackets.

    The all-to-all has also its minimum over ranks: the time of the rank that arrived last and therefore waited for no other.
    """
    on_gpu = [result for result in results if result["breakdown"][0]["on_gpu"]]
    if not on_gpu:
        return "no breakdown by kernels: no GPU"
    present = {phase["phase"] for result in on_gpu for phase in result["breakdown"][0]["phases"]}
    phases = [phase for phase in (DATA_WAIT, *KERNEL_PHASES) if phase in present]
    columns = ["row", "step ms (profiled)", *phases, "several at once", "GPU idle"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for result in on_gpu:
        breakdown = result["breakdown"]
        ranks = [{phase["phase"]: phase for phase in rank["phases"]} for rank in breakdown]
        first = breakdown[0]
        cells = [f"`{result['row']}`", f"{first['step_ms']:.2f}"]
        for phase in phases:
            time = ranks[0].get(phase)
            if time is None:
                cells.append("")
                continue
            cell = f"{time['ms']:.2f} ({time['exposed_ms']:.2f})"
            if phase == "all-to-all" and len(ranks) > 1:
                cell += f", least {min(rank[phase]['ms'] for rank in ranks):.2f}"
            cells.append(cell)
        cells += [f"{first['overlap_ms']:.2f}", f"{first['idle_ms']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def row_dataset(row: Row, root: Path) -> Path:
    """Return the row's dataset directory; generate it if it does not exist."""
    if row.ragged or row.tasks > 1:
        plain = row_dataset(replace(row, ragged=0, tasks=1), root)
        return ragged_dataset(plain, row.ragged, row.exponent, row.tasks)
    if row.users:
        path = root / f"listens_{row.users}"
        settings = ["dataset=yambda", f"yambda.users={row.users}"]
    else:
        more = "".join(f"_{value}" for _, value in row.synthetic)
        path = root / f"{row.tables}_{row.exponent:g}_{row.train_rows}{more}"
        tables = yaml.safe_load((ROOT / f"configs/data/{row.tables}.yaml").read_text())["synthetic"]
        tables |= {"exponent": row.exponent, "train_rows": row.train_rows, "test_rows": TEST_ROWS}
        values = {key: json.dumps(value) for key, value in tables.items()} | dict(row.synthetic)
        of_tables = (f"data.synthetic.{key}={value}" for key, value in values.items())
        settings = ["dataset=synthetic", *of_tables]
    if not (path / "feature_spec.yaml").exists():
        root.mkdir(parents=True, exist_ok=True)
        preprocess(f"output={path}", *settings)
    return path


if __name__ == "__main__":
    main()
