"""A few crash points of every command; `python -m tests.end_to_end.crash_points --all` tries all of them."""

from functools import partial

import pytest

from tests.end_to_end.crash_points import (
    JOBS,
    Point,
    directory_of_cases,
    prepare,
    run_points,
    spread,
    workers,
)
from tests.helpers.file_system_faults import unsupported

pytestmark = pytest.mark.doors

# Scenario: number of points per fault, spread evenly from the first change to the last.
SHARES = {
    "training": {"kill": 1, "torn": 1},
    "training_deltas": {"kill": 1},
    "training_2_ranks": {"kill": 1, "lost_rank": 1},
    "training_host_tier": {"kill": 1},
    "training_disk_tier": {"kill": 1},
    "training_keys": {"kill": 1},
    "training_resumed": {"kill": 1},
    "preprocessing": {"kill": 1, "full": 1},
    "preprocessing_table": {"kill": 1, "ENOSPC": 1},
    "preprocessing_extend": {"kill": 1},
    "preprocessing_overwrite": {"broken": 1},
    "export_npy": {"kill": 1, "full": 1},
}
# Points where a command once lost work or did not resume, by their call and file.
KNOWN = {
    "training": [
        ("kill", "openat run/.config.yaml.tmp"),
        ("kill", "symlink run/checkpoints/.best.tmp"),
        ("kill", "openat run/.curves.png.tmp"),
        ("ENOSPC", "openat run/tensorboard/events"),
        ("ENOSPC", "write run/.config.yaml.tmp"),
        ("full", "pwrite64 run/checkpoints/.step_N.unfinished/rank_N.bin"),
    ],
    "preprocessing_table": [
        ("kill", "unlinkat .out.preproc/vocabulary_N/N.parquet"),
        ("EIO", "write .out.preproc/staging.duckdb.wal"),
        ("EIO", "rmdir .out.preproc"),
    ],
    "preprocessing_overwrite": [
        ("kill", "rename out"),
        ("kill", "unlinkat .out.replaced-*/feature_spec.yaml"),
    ],
}


@pytest.fixture(scope="module")
def points() -> dict[str, list[Point]]:
    """Disturb every command at its points, on all cores; return the points per scenario."""
    reason = unsupported()
    if reason is not None:
        pytest.skip(reason)
    with directory_of_cases() as root, workers(JOBS) as pool:
        names = list(SHARES)
        prepared = pool.map(partial(prepare, root=root, with_reads=False), names)
        changes = dict(zip(names, prepared, strict=True))
        chosen = {
            (name, fault, at)
            for name, shares in SHARES.items()
            for fault, count in shares.items()
            for at in spread(len(changes[name][fault]), count)
        } | {
            (name, fault, changes[name][fault].index(what) + 1)
            for name, known in KNOWN.items()
            for fault, what in known
        }
        found = list(run_points(pool, root, sorted(chosen)))
    return {name: [point for point in found if point.scenario == name] for name in names}


@pytest.mark.parametrize("name", SHARES)
def test_a_disturbed_command_that_starts_again_ends_as_an_undisturbed_one(name, points):
    failed = [point for point in points[name] if point.problems]
    assert not failed, "\n".join(
        f"{point.fault} at {point.at}, {point.what}: {'; '.join(point.problems)}\n{point.output}"
        for point in failed
    )
    assert sum(point.what is not None for point in points[name]) >= len(SHARES[name])
