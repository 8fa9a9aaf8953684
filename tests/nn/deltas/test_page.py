"""All commands of docs/deltas.md, as they stand there."""

import re
import shlex
from filecmp import cmpfiles
from pathlib import Path

import pytest

from tests.helpers.command import ROOT, run_command, run_module

pytestmark = pytest.mark.doors


def follow(words: list[str]) -> None:
    match words[1:]:
        case ["-m", module, *arguments]:
            ended = run_module(module, *arguments)
        case ["dlrm.py", *arguments]:
            ended = run_command(*arguments, "log.pictures=false", "device=cpu")
    assert not ended.exit_code, ended.err


def test_the_page_leads_from_a_run_to_its_tables_and_its_served_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "deltas.md").read_text()
    commands = re.findall(r"^python .*", page, flags=re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        follow(shlex.split(command))

    export = (
        "checkpoint=runs/a/checkpoints/step_256 output=last parts=[dense,tables] optimizer=false"
    )
    follow(["python", "-m", "nn.export", *export.split()])
    names = {path.name for path in Path("last").iterdir()} - {"export.json", "run.json"}
    same, *others = cmpfiles("last", "tables", names, shallow=False)
    assert (set(same), others) == (names, [[], []])
    assert {path.name for path in Path("models").iterdir() if path.is_dir()} == {"1", "2"}
