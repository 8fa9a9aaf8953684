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

from tests.project.layout import ROOT, is_ours, parsed

WIDTH = 120
"""Of README and docs."""
LONGEST_LINE = 130
"""Of anything else, comments and docstrings included."""

UNITS = "row|rank|step|batch|epoch|second|minute|hour|day|node|GPU|CPU|core|device|feature|table|column|sample|checkpoint"
UNITS = f"(?:{UNITS}|split|file|host|process|id|pass|run|block|layer)"
COUNTED = "ids|bytes|[KMGT]i?B(?:/s)?|rows|samples|steps|batches|processes|threads|workers|lookups|numbers|values"
COUNTED = f"(?:{COUNTED}|lines?|copies|launches|columns|state|times|ms|µs|s|us|once|{{[^}}]*}}|[0-9][0-9.,]*)"
# After "the rows a rank" a verb may follow, which makes it no rate; these do not follow as verbs.
AFTER_RATE = (
    "and|or|of|on|in|for|with|at|by|is|are|from|to|than|when|where|while|which|whichever|instead"
)

# Phrase -> what to write. Only phrases that are wrong everywhere: "whole" or "home" may be meant literally.
PHRASES = {
    r"\banew\b": "again, from the beginning",
    r"\bwho(m)?ever\b": "the one that, every caller that",
    r"\bfor ever\b": "forever, without end",
    r"\b(go|goes|going|gone|went) on\b": "resume, continue",
    r"\bput back\b": "restored",
    r"\bin halves\b": "one component only",
    r"\bowe[sd]?\b": "say what is sent or awaited",
    r"\bstart me again\b": "rerun the same command",
    r"\bstrangers?\b": "untrusted",
    r"\bnot there yet\b": "not implemented yet",
    r"\bspeaks? for\b": "the node's leader, rank 0",
    r"\bis said\b": "is reported",
    r"\btold\b": "given, passed, reported",
    r"\bin all\b(?=\s*(?:[.,;:|)]|$))": "total",
    r"\bdays and nodes\b": "long and multi-node runs",
    r"\bwants a fixed\b": "requires fixed hotness",
    rf"\b{COUNTED} an? {UNITS}(?=\s*(?:[.,;:)(\]|\"'}}]|$|(?:{AFTER_RATE})\b))": "per",
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
    r"\bclass Start\b": "ResumePoint",
    r"\bHalf(?=[(:.])": "Component",
    r"(?<![.\w])marks\.(?=\w)": "annotations",
    r"(?<![.\w])(alive|moved)\(\)": "heartbeat.beat()",
    r"\bidle\(\)": "without_updates()",
}
PATTERNS = {
    re.compile(phrase, re.IGNORECASE if phrase.islower() else 0): better
    for phrase, better in PHRASES.items()
}
# Found in the small letters of every file with the phrase: a search for a literal takes a tenth of one for a boundary.
ROUGH = {
    pattern: re.compile(re.sub(r"^(\(\?<!.*?\))?(\\b)?", "", pattern.pattern).lower(), re.MULTILINE)
    for pattern in PATTERNS
}
WORDS = r"(What|Which|How|Whether|Where|When|Who|Why)\b"
QUESTION = re.compile(WORDS)
# What files must have to be parsed, which takes most of the time.
QUOTED_QUESTION = re.compile(rf"[\"'](?:\s|\\)*{WORDS}")
EACH_IN = re.compile(r"\beach(?:\s|\\|#.*)*in\b")
HEADING = re.compile(r"#+ (.*)")
# Names that say how a value came, and not what it is.
NAMES = {
    "given": "a name of what the variable holds",
    "home": "local",
    "marks": "annotations",
    "odd": "non_hex",
    "said": "a name of what the variable holds",
    "staged": "column_store",
    "stands": "is_intact",
    "told": "a name of what the variable holds",
}
NAMED = re.compile(rf"\b_*(?:{'|'.join(NAMES)})_*\b")


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
        if path.suffix in (".py", ".md", ".yaml", ".sh")
        and is_ours(path)
        and path.name not in ("prose.py", "test_words.py")
    )


def findings_in(path: Path) -> list[Finding]:
    """All findings of a file, by line."""
    name, text = str(path.relative_to(ROOT)), path.read_text()
    checks = [phrases_in]
    if path.suffix == ".py":
        checks += [questions_in, names_in]
        if not name.startswith("tests/"):
            checks.append(loops_in)
    checks += [headings_in, unwrapped_in] if path.suffix == ".md" else [long_lines_in]
    findings = [Finding(name, *finding) for check in checks for finding in check(text)]
    return sorted(findings, key=lambda finding: finding.line)


def phrases_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, phrase and better words of all phrases of the list."""
    lines = text.splitlines()
    small = "\n".join(lines).lower()
    likely = [pattern for pattern, rough in ROUGH.items() if rough.search(small)]
    for number, line in enumerate(lines if likely else (), 1):
        for pattern in likely:
            for match in pattern.finditer(line):
                yield number, match[0], PATTERNS[pattern]


def questions_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Docstrings that begin as a question does."""
    if not QUOTED_QUESTION.search(source):
        return
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            title = (ast.get_docstring(node) or "").partition("\n")[0]
            if QUESTION.match(title):
                yield node.body[0].lineno, title[:60], "an imperative or a noun phrase"


def headings_in(markdown: str) -> Iterator[tuple[int, str, str]]:
    """Headings that begin as a question does."""
    for number, line in enumerate(markdown.splitlines(), 1):
        heading = HEADING.match(line)
        if heading and QUESTION.match(heading[1]):
            yield number, line[:60], "a noun phrase"


def names_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Variables, arguments, functions and classes that have a name of the list."""
    if not NAMED.search(source):
        return
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                pass
            case ast.arg(arg=name):
                pass
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                pass
            case ast.ClassDef(name=name):
                pass
            case _:
                continue
        if name.strip("_") in NAMES:
            yield node.lineno, name, NAMES[name.strip("_")]


def loops_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Loops with the variable `each`."""
    if not EACH_IN.search(source):
        return
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
    findings = [finding for path in files() for finding in findings_in(path)]
    print(*findings, sep="\n")
    print(f"{len(findings)} findings in {len({finding.path for finding in findings})} files")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
