"""Reading of metrics.jsonl: complete lines, damaged lines, and what a resumed run keeps."""

import json
import math
import re
from pathlib import Path

import pytest

from nn.models.metric import METRICS
from nn.observability.records import (
    FINAL,
    baseline_text,
    has_records,
    read_records,
    read_run,
    records_until,
)
from nn.plots.curves import RunRecords

HEADER = {"recipe": "dlrm"}
LINES = [HEADER, {"step": 5, "loss": 0.5}, {"step": 10, "loss": 0.4}, {"step": 15, "loss": 0.3}]


def write(tmp_path: Path, *lines: bytes) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def encoded(*records: dict) -> list[bytes]:
    return [json.dumps(record).encode() + b"\n" for record in records]


def test_a_line_cut_short_at_the_end_is_left_out(tmp_path):
    path = write(tmp_path, *encoded(*LINES[:2]), b'{"step": 10, "lo')
    assert read_records(path) == (HEADER, LINES[1:2])


@pytest.mark.parametrize(
    ("damaged", "problem"),
    [
        (b'{"step": oops}\n', "not JSON: Expecting value"),
        (b'{"step": 1\xff}\n', "not UTF-8 text"),
        (b"[" * 5_000 + b"\n", "not JSON: nested "),
        (b'["step", 5]\n', "got ['step', 5], want a record with its step"),
        (b'{"loss": 5}\n', "got {'loss': 5}, want a record"),
        (b'{"step": "5"}\n', "got {'step': '5'}, want a record"),
        (b'{"step": -5}\n', "got {'step': -5}, want a record"),
    ],
)
def test_a_damaged_line_is_named_with_its_number(tmp_path, damaged, problem):
    header, first, second, third = encoded(*LINES)
    path = write(tmp_path, header, first, damaged, second, third)
    wanted = (
        f"^{re.escape(f'{path}, line 3: {problem}')}.*; restore the file from a copy, or remove"
    )
    with pytest.raises(ValueError, match=wanted) as caught:
        read_records(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=wanted):
        records_until(path, 10, last_record=10)
    # Whether the record of step 10 is the damaged line cannot be seen.
    with pytest.raises(ValueError, match=wanted):
        records_until(write(tmp_path, header, first, damaged, third), 10, last_record=10)


def test_damage_behind_the_records_of_the_checkpoint_costs_nothing(tmp_path):
    """A power cut may leave zeros before lines that were written after the latest sync."""
    header, first, second, third = encoded(*LINES)
    path = write(tmp_path, header, first, second, b"\0" * 100 + third, third)
    kept = records_until(path, 10, last_record=10)
    assert kept.lines == [line.decode() for line in (header, first, second)]
    assert (kept.step, kept.last_step, kept.has_training) == (10, 10, True)
    with pytest.raises(ValueError, match="line 4: "):
        records_until(path, 10, last_record=None)


def test_records_after_the_checkpoint_are_not_kept(tmp_path):
    path = write(tmp_path, *encoded(*LINES), b"{broken}\n")
    assert records_until(path, 14, last_record=10).last_step == 10
    assert records_until(path, 2, last_record=None).lines == [json.dumps(HEADER) + "\n"]
    assert records_until(tmp_path / "none", 2, last_record=None).lines == []


@pytest.mark.parametrize(
    ("num_lines", "tail", "wanted"), [(0, b"", False), (1, b'{"st', False), (2, b"", True)]
)
def test_a_start_without_a_record_has_none(tmp_path, num_lines, tail, wanted):
    assert has_records(write(tmp_path, *encoded(*LINES[:num_lines]), tail)) is wanted
    assert not has_records(tmp_path / "none")


def test_a_run_for_a_picture_has_its_restarts_and_no_final_evaluation(tmp_path):
    """The final one is recorded last, of other rows and of the model of an earlier step."""
    lines = [{"recipe": "x"}, {"step": 8, "test_auc": 0.7}, {"step": 4, "test_auc": 0.8, FINAL: 1}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    assert read_run(tmp_path) == RunRecords({"recipe": "x"}, [{"step": 8, "test_auc": 0.7}], [], [])
    (tmp_path / "restarts.jsonl").write_text('{"step": 3}\n{"st\n{"step": 3}\n{"step": 5}')
    assert read_run(tmp_path).restarts == [3, 3]


def test_a_baseline_has_what_is_defined():
    found = {"baseline_rows": 5, "baseline_test_auc": math.nan, "baseline_test_log_loss": 0.5}
    assert baseline_text(found, METRICS) == (
        "log loss 0.5000  (logistic regression on the ids of 5 rows)"
    )
    assert baseline_text({}, METRICS) == ""


def test_a_picture_has_the_data_of_the_latest_day_and_days_apart_from_restarts(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"data": "data/0"}\n')
    starts = ['{"step": 3, "data": "data/1", "day": 1}', '{"step": 5, "data": "data/1"}']
    (tmp_path / "restarts.jsonl").write_text("\n".join([*starts, ""]))
    assert read_run(tmp_path) == RunRecords({"data": "data/1"}, [], [5], [3])
