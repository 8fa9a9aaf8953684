"""`python -m tests.installs.constraints`: write the newest versions that work together, for pip and for uv.

constraints.txt has a version for every package that the project, an extra or a group of pyproject.toml may bring, on every Python
that it allows. `pip install -c constraints.txt` reads it, `uv sync` and `uv run` read the same lines in pyproject.toml.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "constraints.txt"
PYPROJECT = ROOT / "pyproject.toml"
LIST = re.compile(r"constraint-dependencies = \[\n.*?\]\n", re.DOTALL)


def resolved(constraints: Path | None = None, *options: str) -> list[str]:
    """Return `name==version` of every package, with a marker where the version depends on Python; needs uv and an index.

    Args:
        constraints: file of versions to keep to.
        options: of `uv pip compile`, beside these.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Without the list of pyproject.toml, which would hold all versions.
        project = Path(folder) / "pyproject.toml"
        project.write_text(LIST.sub("", PYPROJECT.read_text()))
        (project.parent / "README.md").touch()
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11"]
        command += [
            "--all-extras",
            "--group=dev",
            "--group=doors",
            "--no-header",
            "--no-annotate",
            *options,
        ]
        command += ["--no-emit-index-url"]
        command += [f"--constraint={constraints}"] if constraints else []
        done = subprocess.run(
            [*command, str(project)], capture_output=True, text=True, cwd=folder, check=False
        )
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    lines = [line for line in done.stdout.splitlines() if "==" in line]
    counts = Counter(line.partition("==")[0] for line in lines)
    # A package of another platform needs no marker here: a constraint installs nothing.
    lines = [line if counts[line.partition("==")[0]] > 1 else line.split()[0] for line in lines]
    # [tool.uv] leaves out the CUDA build of FBGEMM, which pip installs.
    [cpu] = [line for line in lines if line.startswith("fbgemm-gpu-cpu==")]
    return sorted([*lines, cpu.replace("-cpu", "")])


def main() -> None:
    """Write both."""
    lines = resolved()
    FILE.write_text("".join(f"{line}\n" for line in lines))
    quoted = "".join(f'    "{line}",\n' for line in lines)
    text, count = LIST.subn(f"constraint-dependencies = [\n{quoted}]\n", PYPROJECT.read_text())
    if count != 1:
        sys.exit(f"{PYPROJECT} has no constraint-dependencies")
    PYPROJECT.write_text(text)
    print(f"{len(lines)} versions")


if __name__ == "__main__":
    main()
