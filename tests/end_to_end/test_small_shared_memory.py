"""A run where /dev/shm has no room at all, as in containers with a small one: nothing of a run on CPUs lies there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A full file system of one page in the place of /dev/shm, seen by this command alone.
FULL = "mount -t tmpfs -o size=4k none /dev/shm && head -c 4096 /dev/zero > /dev/shm/full && exec "
IN_ANOTHER_NAMESPACE = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
OPTIONS = [
    *("data.synthetic.train_rows=512", "data.synthetic.test_rows=64", "data.workers=2"),
    *("data.synthetic.cardinalities=[50,20]", "data.synthetic.num_numerical=2"),
    *("model.embedding_dim=4", "model.bottom_mlp=[4]", "model.top_mlp=[4,1]"),
    *("train.batch_size=32", "eval.batch_size=64", "train.max_steps=4", "checkpoint.save_every=2"),
    *("log.pictures=false", "log.loggers=[]", "device=cpu"),
]


@pytest.mark.doors
def test_two_ranks_train_without_room_in_shared_memory(tmp_path):
    allowed = shutil.which("unshare") and subprocess.run(
        [*IN_ANOTHER_NAMESPACE, FULL + "true"], check=False, capture_output=True
    )
    if not allowed or allowed.returncode:
        pytest.fail("this user may not mount a file system in a namespace")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "dlrm.py"]
    command = [*launch, *OPTIONS, f"run_dir={tmp_path / 'run'}"]
    ended = subprocess.run(
        [*IN_ANOTHER_NAMESPACE, FULL + '"$@"', "sh", *command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "run/summary.json").read_text())["steps"] == 4
