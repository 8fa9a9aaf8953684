"""Read and wrap prose: `python -m tests.project.prose FILE.md ...` wraps Markdown, without a file it lists findings."""

import ast
import io
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 120
"""Of README and docs."""
LONGEST_LINE = 130
"""Of anything else, comments and docstrings included."""

UNITS = "row|rank|step|batch|epoch|second|minute|hour|day|node|GPU|CPU|core|device|feature|table|column|sample|checkpoint"
UNITS = f"(?:{UNITS}|split|file|host|process|id|pass|run|block|layer)"
COUNTED = "ids|bytes|[KMGT]i?B|rows|samples|steps|batches|processes|threads|workers|lookups|numbers|values"
COUNTED = f"(?:{COUNTED}|lines?|copies|launches|columns|columns|times|ms|µs|s|us|once|{{[^}}]*}}|[0-9][0-9.,]*)"

# Phrase -> what to write. Only what is wrong wherever it stands: "whole" or "home" may be meant literally.
PHRASES = {
    r"\banew\b": "again, from the beginning",
    r"\bwho(m)?ever\b": "the one that, every caller that",
    r"\bfor ever\b": "forever, without end",
    r"\b(go|goes|going|gone|went) on from\b": "resume from",
    r"\bgone on\b": "resumed, continued",
    r"\bput back\b": "restored",
    r"\bin halves\b": "one component only",
    r"\bowe[sd]?\b": "say what is sent or awaited",
    r"\bstart me again\b": "rerun the same command",
    r"\bstrangers?\b": "untrusted",
    r"\bnot there yet\b": "not implemented yet",
    r"\bspeaks? for\b": "the node's leader, rank 0",
    r"\bis said\b": "is reported",
    rf"\b{COUNTED} an? {UNITS}(?=\s*(?:[.,;:)\]|\"'}}]|$|and\b|or\b|of\b|on\b|in\b|for\b|with\b|at\b|by\b|is\b|are\b))": "per",
    r"\bcall_on_main\b": "run_on_rank0",
    r"\bis_main\b": "is_rank0",
    r"\bspeaks_for_node\b": "is_node_leader",
    r"\blost_ranks_told\b": "report_lost_rank",
    r"\blast_words\b": "lost_rank_message",
    r"\bwhy_not_captured\b": "capture_blocker",
    r"\bwhy_not_static\b": "static_blocker",
    r"\b(bring|of)_home\b": "output_dist, local",
    r"\bgive_up\b": "release",
    r"\b(sum|update)_copies\b": "sum_replicated, update_replicated",
    r"\bhead_columns\b": "prefix_columns",
    r"\bFeed\b": "Prefetcher",
    r"(?<!Loss)\bReadback\b": "LossReadback",
    r"\bAgreement\b": "PreemptionSync",
    r"\bCaptured\b": "CudaGraph",
    r"\bidle\(\)": "without_updates()",
}
PATTERNS = {
    re.compile(phrase, re.IGNORECASE if phrase.islower() else 0): better
    for phrase, better in PHRASES.items()
}
QUESTION = re.compile(r"(What|Which|How|Whether|Where|When|Who|Why)\b")
LOOP = re.compile(r"\bfor each in\b")


@dataclass(frozen=True, slots=True)
class Finding:
    """One phrase to replace."""

    path: str
    line: int
    text: str
    better: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}; write: {self.better}"


def files() -> list[Path]:
    """Everything that people read: code, tests, yaml, README and docs."""
    tops = ("configs", "dataloading", "preproc", "nn", "benchmarks", "tests", "docs")
    below = [path for top in tops for path in (ROOT / top).rglob("*")]
    found = [*ROOT.glob("*"), *below]
    return sorted(
        path
        for path in found
        if path.suffix in (".py", ".md", ".yaml", ".sh")
        and path.name not in ("prose.py", "test_words.py")
    )


def findings_in(path: Path) -> list[Finding]:
    """All findings of a file, by line."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    found = [Finding(name, *each) for each in phrases_in(text)]
    if path.suffix == ".py":
        found += [Finding(name, *each) for each in questions_in(text)]
        if not name.startswith("tests/"):
            found += [Finding(name, *each) for each in loops_in(text)]
    if path.suffix == ".md":
        found += [Finding(name, *each) for each in unwrapped_in(text)]
    else:
        found += [Finding(name, *each) for each in long_lines_in(text)]
    return sorted(found, key=lambda finding: finding.line)


def phrases_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, phrase and better words of all phrases of the list."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, better in PATTERNS.items():
            for match in pattern.finditer(line):
                yield number, match[0], better


def questions_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Docstrings that begin as a question does."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            title = (ast.get_docstring(node) or "").partition("\n")[0]
            if QUESTION.match(title):
                yield node.body[0].lineno, title[:60], "an imperative or a noun phrase"


def loops_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Loops whose variable says nothing."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if (before.string, token.string, after.string) == ("for", "each", "in"):
            yield token.start[0], "for each in", "a name of what the variable holds"


def long_lines_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Lines beyond the longest."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > LONGEST_LINE and " " in line.strip():
            yield number, f"{line.strip()[:40]}...", f"lines of at most {LONGEST_LINE} characters"


def unwrapped_in(markdown: str) -> Iterator[tuple[int, str, str]]:
    """The first line of a Markdown text that is not as `wrapped` leaves it."""
    lines, wanted = markdown.splitlines(), wrapped(markdown).splitlines()
    for number, (line, other) in enumerate(zip(lines, [*wanted, *lines], strict=False), 1):
        if line != other:
            yield (
                number,
                f"{line.strip()[:40]}...",
                "python -m tests.project.prose FILE.md wraps it",
            )
            return


def wrapped(markdown: str) -> str:
    """Markdown with its prose wrapped at `WIDTH`; code, tables, headings, pictures and HTML as they are."""
    out: list[str] = []
    paragraph: list[str] = []
    fence = False
    for line in [*markdown.splitlines(), ""]:
        is_fence = line.lstrip().startswith("```")
        stays = fence or is_fence or re.match(r"\s*(\||#|<|!\[|\[\w+\]:|---|    \S)", line)
        if paragraph and (stays or not line.strip() or re.match(r"\s*([-*]|\d+\.) ", line)):
            out += _fill(paragraph)
            paragraph = []
        fence ^= is_fence
        if stays or not line.strip():
            out.append(line)
        else:
            paragraph.append(line)
    return "\n".join(out[:-1]) + "\n"


def _fill(paragraph: list[str]) -> list[str]:
    first = paragraph[0]
    bullet = re.match(r"\s*(?:(?:[-*]|\d+\.) +|> )?", first)
    assert bullet is not None
    quote = bullet[0].strip() == ">"
    texts = [line.strip().removeprefix("> ") if quote else line.strip() for line in paragraph]
    text = " ".join(texts)[0 if quote else len(bullet[0].lstrip()) :]
    # Code stays on one line: it may be something to copy.
    text = re.sub(r"`[^`]{1,80}`", lambda code: code[0].replace(" ", "\0"), text)
    after = bullet[0] if quote else " " * len(bullet[0])
    lines = textwrap.wrap(
        text,
        WIDTH,
        initial_indent=bullet[0],
        subsequent_indent=after,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def main(paths: list[str]) -> int:
    """Wrap the files given, or list every finding."""
    for name in paths:
        path = Path(name)
        path.write_text(wrapped(path.read_text()))
    if paths:
        return 0
    found = [finding for path in files() for finding in findings_in(path)]
    print(*found, sep="\n")
    print(f"{len(found)} findings in {len({finding.path for finding in found})} files")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
