"""The words that the glossary replaced stay out, and prose is wrapped at one width."""

import pytest

from tests.project.prose import LONGEST_LINE, ROOT, WIDTH, files, findings_in, phrases_in, wrapped

# Files that still hold such words; a file that is rewritten leaves the list, and none comes in.
NOT_DONE = {
    "nn/build.py",
    "nn/distributed/preemption.py",
    "nn/embedding/adjacent_tables.py",
    "nn/embedding/local_tables.py",
    "nn/embedding/triton_launcher.py",
    "nn/ops/triton/embedding_bag.py",
    "nn/resume.py",
    "nn/run.py",
    "nn/sharding/plan.py",
    "nn/sharding/planner.py",
    "nn/sharding/sharded_embeddings.py",
    "nn/sharding/static_embeddings.py",
    "nn/training/metrics.py",
    "nn/training/trainer.py",
    "nn/versions.py",
    "tests/end_to_end/test_faults.py",
    "tests/end_to_end/test_resume.py",
    "tests/end_to_end/test_run.py",
    "tests/nn/checkpoint/test_state.py",
    "tests/nn/embedding/test_adjacent_tables.py",
    "tests/nn/embedding/test_multi_hot.py",
    "tests/nn/embedding/test_table_dtype.py",
    "tests/nn/embedding/test_triton_embedding_bag.py",
    "tests/nn/sharding/test_memory_estimate.py",
    "tests/nn/sharding/test_planner.py",
    "tests/nn/training/test_metrics.py",
    "tests/nn/training/test_train_step.py",
    "tests/project/layout.py",
}
NAMES = [str(path.relative_to(ROOT)) for path in files()]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_DONE])
def test_a_file_keeps_to_the_glossary(name):
    found = findings_in(ROOT / name)
    assert not found, "\n" + "\n".join(map(str, found))


def test_files_that_are_done_leave_the_list():
    done = [name for name in NOT_DONE if not (ROOT / name).exists() or not findings_in(ROOT / name)]
    assert sorted(done) == []


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("reads the file anew", "anew"),
        ("it has 3 ids a row, or more", "ids a row"),
        ("{speed} rows a second", "rows a second"),
        ("16,384 a GPU", "16,384 a GPU"),
        ("ranks.is_main", "is_main"),
        ("class Feed:", "Feed"),
    ],
)
def test_a_phrase_is_found(text, phrase):
    assert [each for _, each, _ in phrases_in(f"\n{text}")] == [phrase]


@pytest.mark.parametrize(
    "text", ["the rows a rank reads are its own", "feed a GPU", "class LossReadback:", "a new file"]
)
def test_what_only_looks_like_a_phrase_is_let_through(text):
    assert list(phrases_in(text)) == []


def test_markdown_is_wrapped_and_what_is_no_prose_stays():
    code = "```\n" + "x " * 100 + "\n```\n\n| a | b " + "c" * 200 + "|\n\n"
    text = "- " + "word " * 60 + "`some code`\n\n" + code + "short\nlines\n"
    lines = wrapped(text).splitlines()
    assert len(lines[0]) <= WIDTH < LONGEST_LINE
    assert lines[1].startswith("  word")
    assert code in wrapped(text)
    assert lines[-1] == "short lines"
    assert wrapped(wrapped(text)) == wrapped(text)
