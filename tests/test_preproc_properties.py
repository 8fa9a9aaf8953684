"""Any table of strings gives the ids that ten lines of Python give."""

import math
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dataloading.feature_spec import FeatureSpec
from tests.preproc_command import preproc, raw_line, write_lines
from tests.test_preproc_table import _hydra

pytest.importorskip("hypothesis", reason="hypothesis is not installed (group `dev`)")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preproc.fields import NO_INTEGER, BadBlockError, find_fields, hexadecimal, integers

SETTINGS = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Fields of raw text: anything but what separates fields and lines; hexadecimals often.
TEXT = st.text(
    st.characters(codec="utf-8", exclude_characters="\t\r\n\0", exclude_categories=["Cs"]),
    max_size=9,
)
HEX = st.integers(0, 2**32 - 1).map("{:08x}".format)
FEW = st.sampled_from(["", "00000000", "ffffffff", "fffffffe", "0000000A", "a", "é", "NULL", " "])
FIELD = st.one_of(FEW, FEW, HEX, TEXT)


def reference_ids(values: list[str], num_train: int, frequency_limit: int) -> list[int]:
    """The semantics, in plain Python."""
    counts = Counter(value for value in values[:num_train] if value)
    ranked = sorted(counts, key=lambda value: (-counts[value], value.encode()))
    kept = [value for value in ranked if counts[value] >= frequency_limit]
    ids = {value: number for number, value in enumerate(kept, start=1)}
    return [ids.get(value, 0) for value in values]


def reference_number(field: str) -> float:
    return math.log(int(field) + 3) if field and int(field) > -3 else 0.0


@SETTINGS
@given(
    rows=st.lists(
        st.tuples(FIELD, FIELD, st.integers(-(10**18) + 1, 10**18 - 1)), min_size=5, max_size=40
    ),
    frequency_limit=st.integers(0, 4),
)
def test_any_raw_logs_give_the_ids_and_numbers_of_the_reference(rows, frequency_limit):
    lines = [raw_line(i % 2, i1=n, c1=a, c2=b) for i, (a, b, n) in enumerate(rows)]
    with tempfile.TemporaryDirectory() as directory:
        source, output = write_lines(Path(directory) / "raw.tsv", lines), Path(directory) / "out"
        preproc(f"source={source}", f"output={output}", f"frequency_limit={frequency_limit}")
        num_train = FeatureSpec.load(output).rows_of("train")
        for number in (0, 1):
            wanted = reference_ids([row[number] for row in rows], num_train, frequency_limit)
            assert read(output, f"cat_{number}") == wanted
        numbers = np.concatenate(
            [np.fromfile(output / s / "numerical.bin", "<f2").reshape(-1, 13)[:, 0] for s in SPLITS]
        )
        wanted = np.array([reference_number(str(n)) for *_, n in rows], np.float32).astype("<f2")
        assert numbers.tolist() == wanted.tolist()


SPLITS = ("train", "test")


def read(output: Path, name: str) -> list[int]:
    spec = FeatureSpec.load(output)
    dtype = next(f.dtype for f in spec.categorical if f.name == name)
    return np.concatenate([np.fromfile(output / s / f"{name}.bin", dtype) for s in SPLITS]).tolist()


def csv_field(value: str) -> str:
    return '"' + value.replace('"', '""') + '"' if value else ""


@SETTINGS
@given(
    rows=st.lists(st.tuples(FIELD, FIELD), min_size=5, max_size=40),
    frequency_limit=st.integers(0, 3),
)
def test_any_csv_gives_the_ids_of_the_reference(rows, frequency_limit):
    directory = Path(tempfile.mkdtemp())
    try:
        lines = [
            "y,a,b",
            *(f"{i % 2},{csv_field(a)},{csv_field(b)}" for i, (a, b) in enumerate(rows)),
        ]
        source = write_lines(directory / "t.csv", lines)
        table = {
            "sources": {"t": {"files": str(source)}},
            "label": {"name": "y"},
            "categorical": ["a", "b", {"name": "ab", "cross": ["a", "b"]}],
        }
        preproc(
            "dataset=any",
            f"table={_hydra(table)}",
            f"output={directory / 'out'}",
            f"frequency_limit={frequency_limit}",
        )
        num_train = FeatureSpec.load(directory / "out").rows_of("train")
        crossed = [f"{a}\x1f{b}" if a and b else "" for a, b in rows]
        for name, values in (
            ("a", [a for a, _ in rows]),
            ("b", [b for _, b in rows]),
            ("ab", crossed),
        ):
            wanted = reference_ids(values, num_train, frequency_limit)
            assert read(directory / "out", name) == wanted
    finally:
        shutil.rmtree(directory)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(FIELD, st.sampled_from(["0000001g", "-", "x", "12345678"])),
        min_size=1,
        max_size=30,
    )
)
def test_a_field_is_a_code_if_and_only_if_it_is_eight_digits(values):
    fields = (
        find_fields("".join(f"{value}\n" for value in values).encode(), 1) if all(values) else None
    )
    if fields is None:  # a line of one empty field is a blank line
        return
    digits = set("0123456789abcdef")
    wanted = [
        int(value, 16)
        if len(value) == 8 and set(value) <= digits and int(value, 16) < 2**32 - 2
        else 2**32 - 2
        for value in values
    ]
    assert hexadecimal(fields, slice(0, 1))[0].tolist() == wanted


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.integers(-(10**18) + 1, 10**18 - 1).map(str),
            st.integers(0, 10**6).map("+{:09}".format),
            st.sampled_from(
                [
                    "",
                    "-",
                    "+",
                    "--1",
                    "-0",
                    "1.0",
                    "1e3",
                    "٣",
                    "9" * 19,
                    " 1",
                    "12:4",
                    "+-123456789",
                ]
            ),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_a_field_is_an_integer_if_and_only_if_it_reads_as_one(values):
    fields = find_fields("".join(f"x\t{value}\n" for value in values).encode(), 2)

    def good(value: str) -> bool:
        unsigned = value[1:] if value[:1] in ("+", "-") else value
        return not value or (0 < len(unsigned) <= 18 and set(unsigned) <= set("0123456789"))

    if all(map(good, values)):
        wanted = [int(value) if value else NO_INTEGER for value in values]
        assert integers(fields, slice(1, 2))[0].tolist() == wanted
    else:
        with pytest.raises(BadBlockError):
            integers(fields, slice(1, 2))
