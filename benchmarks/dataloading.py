"""Speed of the loader: from a dataset directory in the page cache to batches.

    python -m benchmarks.dataloading rows=4194304 batch_size=65536 workers=4

The rows are random and written to a temporary directory. Their layout is that of Criteo 1TB at frequency limit 15: 13
float16 numericals, 26 ids of 1, 2 or 4 bytes, 89 bytes per row. The binary files are read for some epochs with and without
the check of ids, and the same rows from Parquet. Rows/s and GB/s (bytes on disk) are printed as min / median / max over the
epochs. With processes=1 reader processes read, as in training on a GPU; their CPU time is not printed. It is the default on
a machine with a GPU. `--data DIR` reads the training rows of a dataset instead, such as one that `benchmarks.train` has
generated, and counts its events too.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch

from benchmarks.launch import command_parser
from benchmarks.rows import compose_row
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.source import Source
from dataloading.loader import Loader, LoaderSettings

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
"""Of the batches."""
WRITE_ROWS = 262_144
PEER = (
    "16.5 M rows/s: NVIDIA's PyTorch DLRM on 8 A100 (AMP, CUDA graphs), the fastest they published"
)


def write_rows(root: Path, num_rows: int, file_format: str) -> None:
    """Write `num_rows` training rows, and a few for the test split."""
    generator = np.random.default_rng(0)
    tables = compose_row("dlrm", "data=criteo_t15").data.synthetic.cardinalities
    features = [CategoricalFeature.of(f"cat_{i}.bin", rows) for i, rows in enumerate(tables)]
    numerical = [f"num_{i}" for i in range(13)]
    with write_dataset(
        root, categorical=features, numerical=numerical, file_format=file_format
    ) as dataset:
        for split, rows in (("train", num_rows), ("test", 1)):
            for start in range(0, rows, WRITE_ROWS):
                count = min(WRITE_ROWS, rows - start)
                dataset[split].append(
                    numerical=generator.random((count, 13), np.float32),
                    labels=generator.integers(0, 2, count),
                    ids={
                        f.name: generator.integers(0, f.cardinality, count, f.dtype)
                        for f in features
                    },
                )


def read_epoch(loader: Loader, epoch: int) -> tuple[float, float]:
    """Read one epoch; return rows/s, and the CPU time of this process in ns per row.

    Other jobs disturb CPU time less than rows/s.
    """
    started, worked = perf_counter(), process_time()
    for _ in loader.batches(epoch * loader.steps_per_epoch, loader.steps_per_epoch):
        pass
    seconds, worked = perf_counter() - started, process_time() - worked
    return loader.num_rows / seconds, worked / loader.num_rows * 1e9


def report(
    name: str, rates: Sequence[float], cpu_ns: Sequence[float], row_bytes: float, events: float
) -> None:
    """Print one line of a measurement; `rates` in rows/s, `cpu_ns` and `events` per row."""
    numbers = (min(rates), statistics.median(rates), max(rates))
    rows = " / ".join(f"{rate / 1e6:6.2f}" for rate in numbers)
    volume = " / ".join(f"{rate * row_bytes / 1e9:5.2f}" for rate in numbers)
    volume += " GB/s"
    if events:
        volume += "   " + " / ".join(f"{rate * events / 1e6:5.1f}" for rate in numbers)
        volume += " M events/s"
    cpu = f"   {statistics.median(cpu_ns):5.1f} ns CPU per row" if cpu_ns else ""
    print(f"{name:36s} {rows} M rows/s   {volume}   (min / median / max){cpu}", flush=True)


def parse() -> tuple[dict[str, int], Path | None]:
    """Return the options of the command line, and the dataset to read instead of random rows."""
    options = {
        "rows": 4_194_304,
        "batch_size": 65_536,
        "workers": 4,
        "prefetch": 0,
        "shuffle_block": 1024,
        "epochs": 5,
        "processes": int(torch.cuda.is_available()),
    }
    parser = command_parser(__doc__)
    parser.add_argument(
        "option", nargs="*", help=" ".join(f"{key}={value}" for key, value in options.items())
    )
    parser.add_argument("--data", type=Path, help="a dataset directory")
    args = parser.parse_args()
    for option in args.option:
        key, _, value = option.partition("=")
        if key not in options or not value.isdigit():
            parser.error(f"got {option!r}, want KEY=NUMBER with one of {', '.join(options)}")
        options[key] = int(value)
    return options, args.data


def open_rows(root: Path, name: str) -> tuple[Source, float]:
    """Open a dataset; return it with its bytes per training row."""
    source = open_dataset(FeatureSpec.load(root))
    size = sum(path.stat().st_size for path in (root / "train").iterdir())
    row_bytes = size / source.num_rows("train")
    print(f"{name}: {row_bytes:.0f} bytes per row on disk")
    return source, row_bytes


def write_sources(folder: Path, num_rows: int) -> tuple[dict[str, Source], dict[str, float]]:
    """Write the rows in both formats; return the sources to read, and the bytes per row of each."""
    sources: dict[str, Source] = {}
    row_bytes: dict[str, float] = {}
    for file_format in ("binary", "parquet"):
        root = folder / file_format
        write_rows(root, num_rows, file_format)
        sources[file_format], row_bytes[file_format] = open_rows(root, file_format)
    return sources, row_bytes


def make_loaders(
    sources: dict[str, Source], options: dict[str, int], shuffle_block: int
) -> dict[str, Loader]:
    """Return a loader per source; with processes=1 its readers are forked already."""
    loaders = {
        name: Loader(
            source,
            "train",
            LoaderSettings(
                batch_size=options["batch_size"],
                shuffle_block=shuffle_block,
                prefetch=options["prefetch"] or 2 * options["workers"],
                workers=options["workers"],
            ),
            device=DEVICE,
        )
        for name, source in sources.items()
    }
    if options["processes"]:
        for loader in loaders.values():
            loader.fork_readers()
    return loaders


def compare(
    order: str, loaders: dict[str, Loader], row_bytes: dict[str, float], num_epochs: int
) -> None:
    """Read the epochs with each loader in turn, and print its speed.

    Turns let a busy machine slow all loaders. The first epoch is not counted: it warms caches and maps.
    """
    turns = [
        {name: read_epoch(loader, epoch) for name, loader in loaders.items()}
        for epoch in range(num_epochs + 1)
    ][1:]
    for name, loader in loaders.items():
        rates, cpu_ns = zip(*(turn[name] for turn in turns), strict=True)
        spec = loader.source.spec
        means = {feature.name: feature.mean_hotness for feature in spec.categorical}
        events = sum(means[group.features[0]] for group in spec.sequences)
        cpu_ns = () if loader.reader_pids else cpu_ns
        report(f"{order}, {name}", rates, cpu_ns, row_bytes[name], events)
    if "parquet" not in loaders:
        return
    speed = statistics.median(turn["parquet"][0] / turn["binary"][0] for turn in turns)
    print(f"{order}: parquet at {speed:.2f} of the speed of binary")


def main() -> None:
    """Run the benchmark of the command line."""
    options, data = parse()
    print(f"{options}; destination memory for {DEVICE}")
    with tempfile.TemporaryDirectory() as folder:
        if data is None:
            sources, row_bytes = write_sources(Path(folder), options["rows"])
        else:
            try:
                source, size = open_rows(data, data.name)
            except ValueError as error:
                print(f"error: --data={data}: {error}", file=sys.stderr)
                sys.exit(2)
            sources, row_bytes = {"dataset": source}, {"dataset": size}
        for order, block in (("order on disk", 0), ("shuffled", options["shuffle_block"])):
            loaders = make_loaders(sources, options, block)
            compare(order, loaders, row_bytes, options["epochs"])
            for loader in loaders.values():
                loader.close()
    if data is None:
        print(f"peer: {PEER}")


if __name__ == "__main__":
    main()
