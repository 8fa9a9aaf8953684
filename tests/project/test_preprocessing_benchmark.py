"""The preprocessing benchmark: bytes of the peers, and detection of differences and failures."""

import sys
from pathlib import Path

import pytest

from benchmarks.day_files import write_days
from benchmarks.preprocessing import count_lines, differing, measure, parse
from tests.helpers.preproc_command import data_files, preproc, raw_line, write_lines

CRITEO = Path(__file__).resolve().parents[3] / "shared/data/criteo_kaggle_137k.tsv.gz"


def peer(name: str, source: Path, output: Path, dataset: str, limit: int) -> dict[str, bytes]:
    """Run a peer as a command and return the files that it wrote."""
    pytest.importorskip(name)
    command = [sys.executable, "-m", f"benchmarks.peers.with_{name}", str(source), str(output)]
    result = measure([*command, str(limit), dataset, "1"], output.parent, 4)
    assert result.outcome == "ok"
    assert result.memory_bytes > 0
    return data_files(output)


def ours(source: Path, output: Path, dataset: str, limit: int) -> dict[str, bytes]:
    preproc(
        f"dataset={dataset}", f"source={source}", f"output={output}", f"frequency_limit={limit}"
    )
    return data_files(output)


@pytest.fixture(scope="module", params=["criteo_1tb", "criteo_kaggle"])
def of_days(request, tmp_path_factory) -> tuple[str, Path, dict[str, bytes]]:
    """Return a dataset, its logs and our files of them."""
    folder = tmp_path_factory.mktemp("days")
    list(write_days(folder / "logs", 3, 501))
    source = folder / "logs/day_*"
    return request.param, source, ours(source, folder / "ours", request.param, 3)


@pytest.mark.doors
def test_a_peer_writes_the_same_bytes(of_days, tmp_path):
    dataset, source, want = of_days
    assert peer("polars", source, tmp_path / "work/out", dataset, 3) == want
    assert len(want) == 28 * (3 if dataset == "criteo_1tb" else 2)


@pytest.fixture(scope="module")
def of_odd_values(tmp_path_factory) -> tuple[Path, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("odd")
    values = ["b", "a", "B", "é", "NA", "null", "\U0001f600", "\uffee", "0", "-0", "00"]
    lines = [
        raw_line(i % 2, c1=values[i % 11], c2=values[i % 5], i1=[-4, -3, -2, 0, 10**7][i % 5])
        for i in range(110)
    ]
    source = write_lines(folder / "raw.tsv", lines)
    return source, ours(source, folder / "ours", "criteo_kaggle", 1)


def test_a_peer_agrees_on_ties_odd_values_and_negative_numbers(of_odd_values, tmp_path):
    source, want = of_odd_values
    assert peer("polars", source, tmp_path / "work/out", "criteo_kaggle", 1) == want


@pytest.mark.skipif(not CRITEO.exists(), reason=f"{CRITEO} is not here")
def test_polars_writes_the_same_bytes_from_real_logs(tmp_path):
    want = ours(CRITEO, tmp_path / "ours", "criteo_kaggle", 20)
    assert peer("polars", CRITEO, tmp_path / "work/out", "criteo_kaggle", 20) == want


def test_files_that_differ_are_named(tmp_path):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.bin").write_bytes(b"1")
    (tmp_path / "ours/other.bin").write_bytes(b"1")
    (tmp_path / "theirs/other.bin").write_bytes(b"2")
    (tmp_path / "ours/missing.bin").write_bytes(b"1")
    assert differing(tmp_path / "ours", tmp_path / "theirs") == ["missing.bin", "other.bin"]


def test_a_command_that_exceeds_the_memory_limit_is_stopped(tmp_path):
    command = [sys.executable, "-c", "x = bytearray(300 << 20); import time; time.sleep(60)"]
    result = measure(command, tmp_path / "work", 0.2)
    assert result.outcome == "stopped: over 0.2 GiB"
    assert result.seconds < 30


def test_a_command_that_fails_is_not_measured_as_fast(tmp_path, capsys):
    result = measure([sys.executable, "-c", "1 / 0"], tmp_path / "work", 1)
    assert result.outcome == "failed with 1"
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_options_behind_preproc_are_passed_on():
    options, passed_on = parse(["rows=5", "peers=", "preproc.memory_limit=1GB"])
    assert (options["rows"], options["peers"]) == ("5", "")
    assert passed_on == ["memory_limit=1GB"]


@pytest.mark.parametrize("wrong", ["row=5", "peers=dask", "rows"])
def test_a_mistyped_option_is_refused(wrong):
    with pytest.raises(SystemExit):
        parse([wrong])


def test_lines_are_counted_in_plain_and_compressed_files(tmp_path):
    for compress in (False, True):
        path = write_lines(tmp_path / ("a.gz" if compress else "a"), ["x", "y"], compress)
        assert count_lines(str(path)) == 2
