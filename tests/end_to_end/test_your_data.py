"""All commands of docs/your_data.md, run in order."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.kept_columns import KeptColumns

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "your_data.md").read_text()


def test_the_page_runs_from_the_csv_to_the_trained_model(tmp_path):
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert [kind for kind, _ in blocks] == [
        *("python", "yaml", "bash", "bash", "bash"),
        *("python", "bash"),
    ]
    for kind, block in blocks:
        if kind == "yaml":
            assert "`mine/dataset/shop.yaml`" in PAGE
            (tmp_path / "mine" / "dataset").mkdir(parents=True)
            (tmp_path / "mine" / "dataset" / "shop.yaml").write_text(block)
            continue
        command = [sys.executable, "-c", block]
        if kind == "bash":
            words = shlex.split(block.replace("dlrm.py", str(ROOT / "dlrm.py")))
            assert words[0] == "python"
            command = [sys.executable, *words[1:]]
        environment = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    (summary,) = tmp_path.glob("runs/dlrm/*/summary.json")
    assert json.loads(summary.read_text())["test_auc"] > 0.7
    fitted, *applied = (
        FeatureSpec.load(tmp_path / "data" / name) for name in ("shop", "next", "new")
    )
    assert {spec.fingerprint() for spec in applied} == {fitted.fingerprint()}
    assert KeptColumns(tmp_path / "data/new", "test", 20_000).names == ["item"]
    assert (tmp_path / "data" / "shop" / "report.png").stat().st_size > 10_000
