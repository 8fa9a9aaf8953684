"""Values and texts in messages: short, on one line, without control characters, at a cost that does not follow the value."""

import errno
import time
from pathlib import Path

import numpy as np
import pytest

from configs.messages import (
    MAX_SHOWN_CHARS,
    first_line,
    on_one_line,
    os_error_text,
    printable,
    shortened,
    shown,
)


def laughing(depth: int) -> list:
    """Return a list of 10 ** `depth` items, of which only 10 * `depth` exist."""
    value: list = ["lol"] * 10
    for _ in range(depth - 1):
        value = [value] * 10
    return value


class LongRepr(dict):
    """A subclass, of which `reprlib` knows nothing."""


CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    "value",
    [
        laughing(30),
        {"a": laughing(30), "b": {"c": laughing(30)}},
        LongRepr(a=laughing(30)),
        (laughing(30),),
        CYCLE,
        "x" * 10**6,
        b"x" * 10**6,
        10**100_000,
        -(10**100_000),
        list(range(10**6)),
        {number: number for number in range(10**5)},
        set(range(10**5)),
        np.zeros(10**6),
        ValueError("x" * 10**6),
        Path("x" * 10**5),
        ["\n" * 1000],
        float("nan"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_value_is_shown_on_one_short_line_at_once(value):
    start = time.perf_counter()
    text = shown(value)
    assert time.perf_counter() - start < 1
    assert 0 < len(text) <= MAX_SHOWN_CHARS
    assert text.isprintable()


def test_a_value_whose_representation_fails_is_shown_by_its_type():
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "Broken" in shown(Broken())


@pytest.mark.parametrize("value", [1, -7, 1.5, None, True, "a'b", "ü", [1, "x"], {"a": [1]}, ()])
def test_a_plain_value_is_shown_as_by_repr(value):
    assert shown(value) == repr(value)


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain ü 日本 🙂", "plain ü 日本 🙂"),
        ("a\nb", r"a\nb"),
        ("a\rb\tc", r"a\rb\tc"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("a\u2028b\u2029c\x85d", r"a\u2028b\u2029c\x85d"),
        ("\ud800", r"\ud800"),
        ("\0", r"\x00"),
        ("\u200b", r"\u200b"),
        ("no break\u00a0space", "no break\u00a0space"),
        ("back\\slash'\"", "back\\slash'\""),
    ],
)
def test_control_characters_are_escaped_and_letters_are_not(text, escaped):
    assert printable(text) == escaped
    assert len(printable(text).splitlines()) == 1


def test_a_shortened_text_keeps_its_start_and_its_end():
    text = "start" + "x" * 1000 + "end"
    assert shortened("short") == "short"
    assert len(shortened(text)) == MAX_SHOWN_CHARS
    assert shortened(text).startswith("start")
    assert shortened(text).endswith("end")
    assert shortened(text, 100).count("...") == 1


def test_a_message_leaves_the_process_on_one_line_of_limited_length():
    assert on_one_line("an error: got 'x', want 'y'") == "an error: got 'x', want 'y'"
    assert on_one_line("feature a\nerror: all is well") == r"feature a\nerror: all is well"
    flood = on_one_line("data.path=/x: " + "x" * 10**7 + "; copy it again")
    assert len(flood) < 10_000
    assert flood.endswith("; copy it again")


def test_a_path_of_any_length_fits_in_a_line():
    error = FileExistsError(errno.EEXIST, "File exists", "/data/run")
    assert os_error_text(error).startswith("File exists: /data/run; move it or choose another")
    error = OSError(errno.ENAMETOOLONG, "File name too long", f"/data/{'x' * 100_000}/end")
    text = os_error_text(error)
    assert len(text) < 500
    assert text.startswith("File name too long: /data/xxx")
    assert text.endswith("xxx/end")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n  no file\nat 3", "no file"),
        ("cannot read '1\r2' as a number", "cannot read '1\r2' as a number"),
        ("", "ValueError('')"),
    ],
)
def test_the_first_line_of_an_error_has_text_and_whole_values(text, line):
    assert first_line(ValueError(text)) == line
