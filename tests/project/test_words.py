"""The words that the glossary replaced stay out, and prose is wrapped at one width."""

import pytest

from tests.project import prose
from tests.project.prose import (
    LONGEST_LINE,
    NAMES,
    PATTERNS,
    PHRASES,
    ROOT,
    WIDTH,
    files,
    findings_in,
    phrases_in,
    wrapped,
)

FILES = [str(path.relative_to(ROOT)) for path in files()]


@pytest.mark.parametrize("name", FILES)
def test_a_file_keeps_to_the_glossary(name):
    found = findings_in(ROOT / name)
    assert not found, "\n" + "\n".join(map(str, found))


PLANTED = [
    ("reads the file anew", "anew"),
    ("for whoever reads it", "whoever"),
    ("the one whomever it asks", "whomever"),
    ("it waits for ever", "for ever"),
    ("the run goes on from step 8", "goes on"),
    ("a checkpoint that cannot be gone on from", "gone on"),
    ("files that were put back", "put back"),
    ("loaded in halves", "in halves"),
    ("ranks owe each other a batch", "owe"),
    ("exit code 75: start me again", "start me again"),
    ("What may come from strangers", "strangers"),
    ("Not there yet: serving.", "Not there yet"),
    ("one rank speaks for its node", "speaks for"),
    ("a damaged one is said", "is said"),
    ("as the planner is told", "told"),
    ("16 ranks in all", "in all"),
    ("| batch in all |", "in all"),
    ("## Days and nodes", "Days and nodes"),
    ("it wants a fixed number of ids", "wants a fixed"),
    ("it has 3 ids a row, or more", "ids a row"),
    ("{speed} rows a second", "rows a second"),
    ("2 GiB a rank", "GiB a rank"),
    ("150 to 1,000 steps a row (140 counted)", "steps a row"),
    ("55 GB/s a GPU whichever way", "GB/s a GPU"),
    ("exchanged 4 times a second", "times a second"),
    ("12 launches a step", "launches a step"),
    ("16,384 a GPU", "16,384 a GPU"),
    ("ranks.call_on_main(plan)", "call_on_main"),
    ("ranks.is_main", "is_main"),
    ("if speaks_for_node():", "speaks_for_node"),
    ("with lost_ranks_told(ranks):", "lost_ranks_told"),
    ("print(last_words(ranks))", "last_words"),
    ("why_not_captured(config)", "why_not_captured"),
    ("why_not_static(config)", "why_not_static"),
    ("tables.bring_home(ids)", "bring_home"),
    ("ids.of_home", "of_home"),
    ("graph.give_up()", "give_up"),
    ("tables.sum_copies()", "sum_copies"),
    ("tables.update_copies()", "update_copies"),
    ("dense.head_columns", "head_columns"),
    ("class Feed:", "Feed"),
    ("class Readback:", "Readback"),
    ("class Agreement:", "Agreement"),
    ("class Captured:", "Captured"),
    ("class Start:", "class Start"),
    ("class Half(Enum):", "Half"),
    ("marks.lookup()", "marks."),
    ("alive()", "alive()"),
    ("moved()", "moved()"),
    ("with step.idle():", "idle()"),
]


@pytest.mark.parametrize(("text", "phrase"), PLANTED)
def test_a_planted_phrase_is_found(text, phrase):
    findings = [finding for _, finding, _ in phrases_in(f"\n{text}")]
    assert phrase in findings


def test_every_phrase_has_a_planted_one():
    used = {pattern.pattern for pattern in PATTERNS for text, _ in PLANTED if pattern.search(text)}
    assert set(PHRASES) - used == set()


@pytest.mark.parametrize(
    "text",
    [
        "the rows a rank reads are its own",
        "feed a GPU",
        "class LossReadback:",
        "a new file",
        "in all three places",
        "pytest.param(1, marks=gpu)",
        "thread.is_alive()",
        "Half a row",
    ],
)
def test_a_literal_use_is_accepted(text):
    assert list(phrases_in(text)) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "source", ["{} = 1", "def f({}): ...", "def _{}(): ...", "class {}: ...", "[0 for {} in x]"]
)
def test_a_planted_name_is_found(name, source):
    source = source.format(name)
    assert [line for line, *_ in prose.names_in(source)] == [1]
    assert list(prose.names_in(f"value = what.{name}")) == []


def test_a_planted_question_is_found_in_docstrings_and_headings():
    source = '"""What it is."""\n\n\ndef f():\n    """Whether it is."""\n'
    assert [line for line, *_ in prose.questions_in(source)] == [1, 5]
    assert list(prose.questions_in('"""Return what it is."""')) == []
    assert [line for line, *_ in prose.headings_in("# Words\n\n## How it works\n")] == [3]


def test_a_planted_loop_is_found():
    assert [line for line, *_ in prose.loops_in("\nfor each in x:\n    pass\n")] == [2]
    assert list(prose.loops_in('text = "for each in"')) == []


def test_a_planted_long_line_and_an_unwrapped_one_are_found():
    assert [line for line, *_ in prose.long_lines_in("x\n" + "word " * 40)] == [2]
    assert [line for line, *_ in prose.unwrapped_in("x\n\n" + "word " * 40)] == [3]


def test_markdown_is_wrapped_and_what_is_no_prose_stays():
    code = "```\n" + "x " * 100 + "\n```\n\n| a | b " + "c" * 200 + "|\n\n"
    text = "- " + "word " * 60 + "`some code`\n\n" + code + "short\nlines\n"
    lines = wrapped(text).splitlines()
    assert len(lines[0]) <= WIDTH < LONGEST_LINE
    assert lines[1].startswith("  word")
    assert code in wrapped(text)
    assert lines[-1] == "short lines"
    assert wrapped(wrapped(text)) == wrapped(text)
