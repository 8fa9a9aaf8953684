"""The examples of docs/contributing.md run as they are printed."""

import re
from pathlib import Path

import pytest
import torch

from tests.helpers.command import ROOT, run_command
from tests.helpers.composed import TINY
from tests.helpers.gpus import needs_no_gpu
from tests.nn.embedding.test_triton_embedding_bag import compare

PAGE = (ROOT / "docs/contributing.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = re.findall(r"^PYTHONPATH=\. python dlrm.py (.*)$", PAGE, re.MULTILINE)


@pytest.fixture
def examples(tmp_path, monkeypatch) -> Path:
    """Write the files of the page into a directory that is imported from."""
    for name, source in FILES.items():
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_page_has_an_optimizer():
    assert set(FILES) == {"momentum.py"}
    assert len(COMMANDS) == 1


@pytest.mark.doors
@pytest.mark.parametrize("command", COMMANDS)
def test_an_example_trains(examples, command):
    options = [option.strip('"') for option in command.split()]
    ended = run_command(*TINY, *options, "train.max_steps=4", f"run_dir={examples / 'run'}")
    assert (ended.exit_code, ended.err) == (0, "")
    assert (examples / "run/checkpoints/step_4").exists()


@pytest.mark.doors
@needs_no_gpu
def test_the_kernel_of_the_optimizer_equals_its_update(examples):
    pytest.importorskip("triton")
    compare("momentum:MOMENTUM", 40, "cpu", torch.float32)
