"""Training speed of the recipe as a user runs it: dataset directory in page cache, loader, schedule, loss, metrics.

    python -m benchmarks.train --data DIR --out DIR dlrm_t15_1 dlrm_t15_1_uniform

Each row runs `torchrun ... dlrm.py experiment=...` and prints million samples a second as min / median / max over the
records after the first, the peak of GPU memory and what the plan had said. Rows and their commands: `ROWS` below;
results with date, machine and commit: benchmarks/README.md.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
TRAIN_ROWS = 192 * 65_536


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Attributes:
        script: recipe to start.
        world_size: GPUs.
        experiment: configs/experiment/<experiment>.yaml.
        tables: configs/data/<tables>.yaml, whose tables the dataset gets.
        exponent: of the ids' power law; 0 is uniform.
        overrides: further options.
    """

    script: str
    world_size: int
    experiment: str
    tables: str
    exponent: float = 1.05
    overrides: tuple[str, ...] = ()


ROWS = {
    "dlrm_t15_1": Row("dlrm.py", 1, "dlrm_criteo_t15", "criteo_t15"),
    "dlrm_t15_1_uniform": Row("dlrm.py", 1, "dlrm_criteo_t15", "criteo_t15", exponent=0),
    "dlrm_t15_1_eager": Row(
        "dlrm.py", 1, "dlrm_criteo_t15", "criteo_t15", overrides=("train.compile=false",)
    ),
    "dlrm_t15_1_fp32": Row(
        "dlrm.py", 1, "dlrm_criteo_t15", "criteo_t15", overrides=("train.amp=off",)
    ),
    "dlrm_t15_1_fp16": Row(
        "dlrm.py", 1, "dlrm_criteo_t15", "criteo_t15", overrides=("train.amp=fp16",)
    ),
    "dlrm_t15_2": Row("dlrm.py", 2, "dlrm_criteo_t15", "criteo_t15"),
    "dlrm_t15_4": Row("dlrm.py", 4, "dlrm_criteo_t15", "criteo_t15"),
    "dlrm_t15_4_replicas": Row(
        "dlrm.py",
        4,
        "dlrm_criteo_t15",
        "criteo_t15",
        overrides=("sharding.types=[table_wise,column_wise,data_parallel]",),
    ),
    "dlrm_t15_4_weak": Row(
        "dlrm.py", 4, "dlrm_criteo_t15", "criteo_t15", overrides=("train.batch_size=262144",)
    ),
    "dlrm_t3_1": Row("dlrm.py", 1, "dlrm_criteo_t3", "criteo_t3"),
    "dlrm_t3_2": Row("dlrm.py", 2, "dlrm_criteo_t3", "criteo_t3"),
    "dlrm_t0_4": Row("dlrm.py", 4, "dlrm_criteo_t0", "criteo_t0"),
    "dcnv2_t15_1": Row("dcnv2.py", 1, "dcnv2_criteo_t15", "criteo_t15"),
    "dcnv2_t15_1_eager": Row(
        "dcnv2.py", 1, "dcnv2_criteo_t15", "criteo_t15", overrides=("train.compile=false",)
    ),
    "dcnv2_t15_1_fp32": Row(
        "dcnv2.py", 1, "dcnv2_criteo_t15", "criteo_t15", overrides=("train.amp=off",)
    ),
    "dcnv2_t15_2": Row("dcnv2.py", 2, "dcnv2_criteo_t15", "criteo_t15"),
    "dcnv2_t3_4": Row("dcnv2.py", 4, "dcnv2_criteo_t3", "criteo_t3"),
}


def main() -> None:
    """Run the rows named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", choices=[*ROWS], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--data", type=Path, required=True, help="where datasets are made and kept")
    parser.add_argument("--out", type=Path, required=True, help="where run directories go")
    parser.add_argument("--steps", type=int, default=400, help="steps of each row")
    parser.add_argument("--timeout-s", type=float, default=300, help="limit of each row")
    args = parser.parse_args()
    print(
        "| row | million samples/s, min / median / max | step ms | data wait ms | HBM GiB | planned |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    failed = [name for name in args.rows if not _run(name, ROWS[name], args)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def _run(name: str, row: Row, args: argparse.Namespace) -> bool:
    run_dir = args.out / name
    command = [
        *("torchrun", "--nproc-per-node", str(row.world_size), str(ROOT / row.script)),
        f"experiment={row.experiment}",
        f"data.path={_dataset(row, args.data)}",
        f"run_dir={run_dir}",
        *("train.epochs=100", f"train.max_steps={args.steps}", "log.every=50"),
        *("checkpoint.save=false", "log.tensorboard=false"),
        *row.overrides,
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / f"{name}.log"
    with log.open("w") as stream:
        stream.write(shlex.join(command) + "\n")
        stream.flush()
        try:
            done = subprocess.run(
                command, stdout=stream, stderr=subprocess.STDOUT, timeout=args.timeout_s
            )
        except subprocess.TimeoutExpired:
            print(f"| {name} | took more than {args.timeout_s:g} s | | | | |", flush=True)
            return False
    if done.returncode:
        print(f"| {name} | exit code {done.returncode}, see {log.name} | | | | |", flush=True)
        print("\n".join(log.read_text().splitlines()[-15:]), file=sys.stderr)
        return False
    print(_result(name, run_dir), flush=True)
    return True


def _result(name: str, run_dir: Path) -> str:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    records = [line for line in lines if "samples_per_s" in line][1:]
    rates = [record["samples_per_s"] / 1e6 for record in records]
    plan = json.loads((run_dir / "plan.json").read_text())
    planned: dict[int, int] = {}
    for table in plan:
        for rank, size in zip(table["ranks"], table["bytes_per_rank"], strict=True):
            planned[rank] = planned.get(rank, 0) + size
    median = {
        key: statistics.median(record[key] for record in records)
        for key in ("step_ms", "data_wait_ms")
    }
    hbm = records[-1]["hbm_bytes"]
    return (
        f"| {name} | {min(rates):.2f} / {statistics.median(rates):.2f} / {max(rates):.2f} "
        f"| {median['step_ms']:.2f} | {median['data_wait_ms']:.2f} "
        f"| {hbm / GIB if hbm else float('nan'):.1f} | {planned.get(0, 0) / GIB:.1f} |"
    )


def _dataset(row: Row, root: Path) -> Path:
    """Make the row's dataset directory, unless it is there already."""
    path = root / f"{row.tables}_{row.exponent:g}"
    if (path / "feature_spec.yaml").exists():
        return path
    tables = yaml.safe_load((ROOT / "configs/data" / f"{row.tables}.yaml").read_text())["synthetic"]
    cardinalities = ",".join(str(each) for each in tables["cardinalities"])
    root.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(sys.executable, "-m", "preproc", "dataset=synthetic", f"output={path}"),
            f"data.synthetic.cardinalities=[{cardinalities}]",
            f"data.synthetic.exponent={row.exponent}",
            f"data.synthetic.train_rows={TRAIN_ROWS}",
            "data.synthetic.test_rows=131072",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return path


if __name__ == "__main__":
    main()
