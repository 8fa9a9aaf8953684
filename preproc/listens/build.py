"""Logs of listens as MLPerf's dlrm_v4 trains on them: one log of events, and rows by windows in time, the last one to evaluate.

A row sees the last events of each pool among its user's latest: listens of at least half, likes, and other listens.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from configs.preproc_schema import PreprocConfig
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.sequences import EventColumn, EventPools, SequenceGroup
from preproc.listens.events import ITEMS, POOLS, Sizes
from preproc.listens.figures import Figures
from preproc.listens.rows import CROSSES, columns_of, parts_of, rows_of, split_windows
from preproc.listens.synthetic import synthetic_listens, synthetic_maps
from preproc.listens.yambda_files import read_listens, read_maps
from preproc.report.console import LabelSum, Progress, SplitSummary, print_result, print_splits


def build_listens(config: PreprocConfig, progress: Progress) -> None:
    """Write the dataset of Yambda's files in `config.source`, or of a synthetic log, and print its figures beside Yambda's."""
    assert config.output is not None
    assert config.table_rows is not None
    output, options, sizes = Path(config.output), config.yambda, Sizes.of(config.table_rows)
    above = Path(config.temp_directory or output.resolve().parent)
    above.mkdir(parents=True, exist_ok=True)
    features, group = _features(sizes, options.history)
    figures = Figures(sizes.items)
    with (
        TemporaryDirectory(dir=above, prefix=f".{output.name}.") as work,
        write_dataset(
            output,
            categorical=features,
            numerical=["hours"],
            label="listen_plus",
            numerical_dtype="float32",
            metadata={"yambda": {"source": config.source is not None, "seed": config.seed}},
            overwrite=config.overwrite,
            sequences=[group],
        ) as dataset,
    ):
        if config.source is None:
            maps = synthetic_maps(sizes)
            chunks = synthetic_listens(options, sizes, config.seed)
        else:
            maps = read_maps(Path(config.source), sizes)
            chunks = read_listens(config, sizes, Path(work))
        unsorted, position = Path(work) / "rows", 0
        with progress.phase("write the events"), unsorted.open("wb") as stream:
            for events in chunks:
                dataset.append_events(
                    ids=dict(zip(group.features, maps.of(events.item), strict=True)),
                    events={"hist_time": events.time, "hist_action": events.action},
                )
                rows_of(events, position, options.history).tofile(stream)
                position += len(events.uid)
                figures.add(events)
        with progress.phase("put the rows into windows"):
            windows = split_windows(unsorted, Path(work))
            unsorted.unlink()
        summaries = {"train": SplitSummary(0), "test": SplitSummary(0)}
        for number, window in enumerate(windows):
            split = "test" if number == len(windows) - 1 else "train"
            for part in parts_of(window):
                dataset[split].append(**columns_of(part, maps, sizes))
                summary = summaries[split]
                summary.rows += len(part)
                summary.labels.setdefault("listen_plus", LabelSum()).add(part["label"])
    print_splits(progress.console, summaries)
    for line in figures.lines(FeatureSpec.load(output)):
        progress.say(line)
    print_result(progress, output, sum(s.rows for s in summaries.values()))


def _features(sizes: Sizes, history: int) -> tuple[list[CategoricalFeature], SequenceGroup]:
    """Return the features of rows and events, and the group of the events."""
    numbers = (
        EventColumn("hist_time", np.dtype(np.int64)),
        EventColumn("hist_action", np.dtype(np.int8)),
    )
    past = tuple(f"hist_{name}" for name in ITEMS)
    pools = EventPools("hist_action", tuple(POOLS))
    group = SequenceGroup("history", past, history, numbers, "hist_time", pools)
    rows = (
        *zip((*ITEMS, "uid"), sizes[:4], strict=True),
        *zip(CROSSES, sizes.crosses, strict=True),
    )
    features = [CategoricalFeature.of(name, count, table=name) for name, count in rows]
    features += [
        CategoricalFeature.of(f"hist_{f.name}", f.cardinality, None, f.name) for f in features[:3]
    ]
    return features, group
