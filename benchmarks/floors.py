"""Lower bounds of the time of a training step for each row of the benchmark, on an H200 or an H100.

    python -m benchmarks.floors                          all rows as a table
    python -m benchmarks.floors dlrm_t15_4 --explain     all terms of the count
    python -m benchmarks.floors dlrm_t15_1 --gpu H100    of another card

What is counted, and what burst and sustained are, `nn/step_floor.py` says. Tables that the row's plan replicates are not sent.
"""

from pathlib import Path

from benchmarks.launch import command_parser
from benchmarks.rows import ROWS, Row
from nn.build import build_plan, model_spec, open_source
from nn.planning.plan import Hardware, replicated_tables
from nn.step_floor import HBM_BYTES_PER_S, Floor, floor_of, power_law_shares

H200_BYTES, HOST_BYTES = 139 * 2**30, 512 * 2**30
"""Memory of the machines of the benchmark: of a GPU, and of the host."""


def floor_of_row(row: Row, gpu: str = "", data_path: Path | None = None) -> Floor:
    """Count a step of a row of the benchmark on a card of this name; see `Row.config`."""
    config = row.config(data_path)
    source = open_source(config)
    replicated: list[str] = []
    if row.world_size > 1:
        hardware = Hardware("cuda", row.world_size, row.world_size, H200_BYTES, HOST_BYTES)
        _, plan = build_plan(config, source, hardware)
        replicated = replicated_tables(plan)
    spec = model_spec(config, source)
    return floor_of(config, spec, row.world_size, power_law_shares(row.exponent), replicated, gpu)


def main() -> None:
    """Print the floors of the rows of the command line; of all rows by default."""
    parser = command_parser(__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"any of {', '.join(ROWS)}")
    parser.add_argument("--explain", action="store_true", help="print every term")
    parser.add_argument("--gpu", default="H200", choices=[*HBM_BYTES_PER_S], help="the card")
    parser.add_argument("--data", type=Path, help="dataset of a row that needs one")
    args = parser.parse_args()
    unknown = [name for name in args.rows if name not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    if args.data is None and (needing := [name for name in args.rows if ROWS[name].needs_data]):
        parser.error(f"{', '.join(needing)}: --data must name their dataset")
    print(
        "| row | GPUs | global batch | FLOPs ms: burst | sustained | HBM ms | all-to-all ms | M samples/s at most: burst | "
        "sustained |\n|---|---|---|---|---|---|---|---|---|"
    )
    floors = {
        name: floor_of_row(ROWS[name], args.gpu, args.data)
        for name in args.rows or (name for name, row in ROWS.items() if not row.needs_data)
    }
    for name, floor in floors.items():
        flops, *others = (
            f"**{ms:.2f}**" if resource == floor.bound else f"{ms:.2f}"
            for resource, ms in floor.times_ms.items()
        )
        sustained = floor.sustained_times_ms["FLOPs"]
        speeds = [floor.global_batch_size / ms / 1e3 for ms in (floor.ms, floor.sustained_ms)]
        print(
            f"| `{name}` | {ROWS[name].world_size} | {floor.global_batch_size:,} | {flops} | {sustained:.2f} | "
            f"{' | '.join(others)} | {speeds[0]:.4g} | {speeds[1]:.4g} |"
        )
    if args.explain:
        for name, floor in floors.items():
            print(f"\n{name}, one step of one GPU")
            for title, unit, terms in (
                ("FLOPs", "GFLOP", floor.flops),
                ("HBM", "GB", floor.hbm),
                ("all-to-all", "GB", floor.all_to_all),
            ):
                for term, amount in terms.items():
                    print(f"  {title:10}  {term:18} {amount / 1e9:12,.3f} {unit}")


if __name__ == "__main__":
    main()
