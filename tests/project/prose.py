"""Read and wrap prose: `python -m tests.project.prose FILE.md ...` wraps Markdown, without a file it lists findings."""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.project.layout import ROOT, is_ours, parsed

WIDTH = 120
"""Of README and docs."""
LONGEST_LINE = 130
"""Of anything else, comments and docstrings included."""

WORDS = r"(What|Which|How|Whether|Where|When|Who|Why)\b"
QUESTION = re.compile(WORDS)
# What files must have to be parsed, which takes most of the time.
QUOTED_QUESTION = re.compile(rf"[\"'](?:\s|\\)*{WORDS}")


@dataclass(frozen=True, slots=True)
class Finding:
    """A line that breaks a rule, and the rule."""

    path: str
    line: int
    text: str
    rule: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text!r}; write: {self.rule}"


def files() -> list[Path]:
    """Everything that people read: code, tests, yaml, README and docs."""
    tops = (
        "configs",
        "dataloading",
        "preproc",
        "nn",
        "compare",
        "sweep",
        "serving",
        "status",
        "hybrid_parallel_recsys",
        "benchmarks",
        "tests",
        "docs",
    )
    below = [path for top in tops for path in (ROOT / top).rglob("*")]
    return sorted(
        path
        for path in [*ROOT.glob("*"), *below]
        if path.suffix in (".py", ".md", ".yaml", ".sh") and is_ours(path)
    )


def findings_in(path: Path) -> list[Finding]:
    """All findings of a file, by line."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    checks = {".md": [unwrapped_in], ".py": [questions_in, long_lines_in]}.get(
        path.suffix, [long_lines_in]
    )
    findings = [Finding(name, *finding) for check in checks for finding in check(text)]
    return sorted(findings, key=lambda finding: finding.line)


def questions_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Docstrings that begin as a question does."""
    if not QUOTED_QUESTION.search(source):
        return
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            title = (ast.get_docstring(node) or "").partition("\n")[0]
            if QUESTION.match(title):
                yield node.body[0].lineno, title[:60], "an imperative or a noun phrase"


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
    findings = [finding for path in files() for finding in findings_in(path)]
    print(*findings, sep="\n")
    print(f"{len(findings)} findings in {len({finding.path for finding in findings})} files")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
