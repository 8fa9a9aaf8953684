"""The code of docs/add_a_model.md runs as it is printed, in its order."""

import re
import runpy
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from string import Template
from unittest.mock import patch

import numpy as np
import pytest

from tests.helpers.command import ROOT, run_command, start_command
from tests.helpers.runs import summary

pytestmark = pytest.mark.doors

PAGE = (ROOT / "docs/add_a_model.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
BLOCKS = [block[1:] for block in PAGE.split("```")[1::2] if block.startswith("\n")]
LINES = [line for block in BLOCKS for line in block.splitlines()]
VARIABLES = dict(re.findall(r'^(\w+)="(.*)"$', "\n".join(LINES), re.MULTILINE))
COMMANDS = [line for line in LINES if line.partition("=")[0] not in VARIABLES]


@dataclass(frozen=True, slots=True)
class Followed:
    """The directory in which the page was followed, and the output of each command."""

    directory: Path
    outputs: dict[str, str]


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> Followed:
    """Run every command of the page in one directory."""
    directory = tmp_path_factory.mktemp("page")
    for name, source in FILES.items():
        (directory / name).write_text(source)
    (directory / "main.py").symlink_to(ROOT / "main.py")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(directory)
        patched.syspath_prepend(str(directory))
        patched.setenv("PYTHONPATH", f"{directory}:{ROOT}")
        yield Followed(directory, {command: output_of(command) for command in COMMANDS})
    # `main` was imported from the page's directory.
    for name in ("gates", "main"):
        sys.modules.pop(name, None)


def output_of(command: str) -> str:
    """Run a command of the page, in this process if it imports torch for one process."""
    program, *arguments = shlex.split(Template(command).substitute(VARIABLES))
    if program == "python" and arguments[0] == "main.py":
        ended = run_command(*arguments[1:], recipe="main")
        assert (ended.exit_code, ended.err) == (0, ""), command
    elif program == "python" and arguments[0] == "check_gates.py":
        with patch.object(sys, "argv", arguments), pytest.raises(SystemExit) as end:
            runpy.run_path(arguments[0], run_name="__main__")
        assert not end.value.code, command
        return ""
    else:
        module = ["-m", "torch.distributed.run"] if program == "torchrun" else []
        ended = start_command(*module, *arguments, directory=Path.cwd())
        assert ended.exit_code == 0, ended.err
    return ended.out


def test_the_page_has_a_model_and_its_comparison():
    assert set(FILES) == {"gates.py", "check_gates.py"}
    assert len(COMMANDS) == 9
    assert len(FILES["gates.py"].splitlines()) <= 150


def test_every_command_of_the_page_runs(followed):
    help_text, plan, plan_of_gpus, *_ = followed.outputs.values()
    assert "rate of the dropout after each hidden layer" in help_text
    assert "GatesOptions(" not in help_text
    (item,) = re.findall(r"^item .*$", plan, re.MULTILINE)
    assert item.split()[:4] == ["item", "500", "8", "6"]
    assert len(re.findall(r"table_wise +fused", plan)) == 5
    assert "GiB at its peak" in plan_of_gpus


def test_the_runs_of_the_page_agree(followed):
    one, two = (summary(followed.directory / "runs" / name) for name in ("gates", "gates_2"))
    assert one["steps"] == two["steps"] == 64
    assert two["test_auc"] == pytest.approx(one["test_auc"], abs=1e-4)
    assert np.load(followed.directory / "runs/gates_tables/item.weight.npy").shape == (500, 8)
    assert len(list((followed.directory / "runs/gates_tables").glob("*.weight.npy"))) == 5
