"""Docstrings begin with an imperative or a noun phrase, lines are not too long, and pages are wrapped at one width."""

from tests.project.prose import (
    LONGEST_LINE,
    WIDTH,
    files,
    findings_in,
    long_lines_in,
    questions_in,
    unwrapped_in,
    wrapped,
)


def test_all_files_keep_to_the_rules():
    found = [finding for path in files() for finding in findings_in(path)]
    assert not found, "\n" + "\n".join(map(str, found))


def test_a_planted_question_is_found_in_docstrings():
    source = '"""What it is."""\n\n\ndef f():\n    """Whether it is."""\n'
    assert [line for line, *_ in questions_in(source)] == [1, 5]
    assert list(questions_in('"""Return what it is."""')) == []


def test_a_planted_long_line_and_an_unwrapped_one_are_found():
    assert [line for line, *_ in long_lines_in("x\n" + "word " * 40)] == [2]
    assert [line for line, *_ in unwrapped_in("x\n\n" + "word " * 40)] == [3]


def test_markdown_is_wrapped_and_what_is_no_prose_stays():
    code = "```\n" + "x " * 100 + "\n```\n\n| a | b " + "c" * 200 + "|\n\n"
    text = "- " + "word " * 60 + "`some code`\n\n" + code + "short\nlines\n"
    lines = wrapped(text).splitlines()
    assert len(lines[0]) <= WIDTH < LONGEST_LINE
    assert lines[1].startswith("  word")
    assert code in wrapped(text)
    assert lines[-1] == "short lines"
    assert wrapped(wrapped(text)) == wrapped(text)
