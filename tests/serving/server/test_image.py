"""The image of the server holds what the server imports: no more of ours is copied, no more of others installed."""

import json
import re
import subprocess
import sys
from urllib.error import HTTPError

import pytest

from tests.helpers.command import ROOT
from tests.serving.handmade_model import write_model
from tests.serving.served_models import serving

TEXT = (ROOT / "Dockerfile.serving").read_text()
COPIED = re.findall(r"^COPY --chown=server (\S+) ", TEXT, re.MULTILINE)
OURS = ("benchmarks", "compare", "configs", "dataloading", "nn", "preproc", "serving", "sweep")
MODULES = {"hydra-core": "hydra", "pyyaml": "yaml"}
CODE = """
import sys
from pathlib import Path
allowed, path = sys.argv[1].split(","), Path(sys.argv[2])
class Blocked:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in allowed:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from configs.serving_schema import ServerConfig
from serving import rollback, run
service = run.open_service(ServerConfig(model=str(path), port=0), None)
print(service.title)
"""


def test_the_image_is_healthy_while_the_server_is_ready(tmp_path):
    port = re.search(r"^EXPOSE (\d+)", TEXT, re.MULTILINE)[1]
    command = json.loads(re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", TEXT, re.MULTILINE)[1])
    assert command[:2] == ["python", "-c"]
    assert f"127.0.0.1:{port}/" in command[2]
    (tmp_path / "token").write_text("secret\n")
    path = write_model(tmp_path / "1", "fp32")
    with serving(path, token_file=str(tmp_path / "token")) as client:
        check = command[2].replace(f":{port}/", f":{client.port}/")
        exec(check)
        client.service._is_ready = False
        with pytest.raises(HTTPError, match="503"):
            exec(check)


@pytest.mark.doors
def test_the_image_has_what_the_server_imports(tmp_path):
    packages = set(re.findall(r'"([a-z-]+)[=<>]', TEXT))
    assert {"torch", "hydra-core", "omegaconf", "uvicorn", "prometheus-client"} <= packages
    missing = [name for name in OURS if name not in COPIED]
    missing += ["torchrec", "fbgemm_gpu", "duckdb", "pyarrow", "numba", "isal"]
    # What torch's own loader of an export would import, which takes two seconds.
    missing += ["sympy", "triton"]
    model = write_model(tmp_path / "1", "int8")
    done = subprocess.run(
        [sys.executable, "-c", CODE, ",".join(missing), str(model)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "model m, version 1\n"
