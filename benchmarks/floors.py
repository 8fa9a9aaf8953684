"""Lower bound of the time of a training step on an H200 for each row of the benchmark.

    python -m benchmarks.floors                          all rows as a table
    python -m benchmarks.floors dlrm_t15_4 --explain     all terms of the count

What is counted, `nn/step_floor.py` says.
"""

import argparse

from benchmarks.rows import ROWS, Row
from nn.build import model_spec, open_source
from nn.step_floor import Floor, floor_of, power_law_shares


def floor_of_row(row: Row) -> Floor:
    """Count a step of a row of the benchmark."""
    config = row.config()
    spec = model_spec(config, open_source(config))
    return floor_of(config, spec, row.world_size, power_law_shares(row.exponent))


def main() -> None:
    """Print the floors of the rows of the command line; of all rows by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"any of {', '.join(ROWS)}")
    parser.add_argument("--explain", action="store_true", help="print every term")
    args = parser.parse_args()
    unknown = [name for name in args.rows if name not in ROWS]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    print("| row | GPUs | global batch | FLOPs ms | HBM ms | all-to-all ms | M samples/s at most |")
    print("|---|---|---|---|---|---|---|")
    floors = {name: floor_of_row(ROWS[name]) for name in args.rows or ROWS}
    for name, floor in floors.items():
        times = [
            f"**{ms:.2f}**" if resource == floor.bound else f"{ms:.2f}"
            for resource, ms in floor.times_ms.items()
        ]
        print(
            f"| `{name}` | {ROWS[name].world_size} | {floor.global_batch_size:,} | "
            f"{' | '.join(times)} | {floor.samples_per_s / 1e6:.1f} |"
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
