"""The version of a directory that serves: decided by the directory alone, so a start decides as the server that ran."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.serving_schema import ApplyConfig, RollbackConfig
from serving.apply import places
from serving.inference.versions import Versions
from serving.manifest import MANIFEST, Manifest
from serving.versions import list_versions, note_of_others, withdraw, withdraw_before
from tests.serving.handmade_model import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", "fp32")


@pytest.fixture
def put(model, tmp_path):
    """Return a function that writes a version, with another name of its second output if one is given."""

    def put(name: str, output: str = "price") -> Path:
        path = tmp_path / "models" / name
        shutil.copytree(model, path)
        document = json.loads((path / MANIFEST).read_text())
        document["outputs"][1]["name"] = output
        (path / MANIFEST).write_text(json.dumps(document))
        return path

    return put


class Server:
    """A server's search for versions; `restart` is another process."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.log = directory, []
        self.restart()

    def restart(self) -> str:
        self.versions = Versions(self.directory, self.log.append, load=load)
        return self.versions.current.name

    def look(self) -> str:
        self.versions.update()
        return self.versions.current.name


def load(_: Path, manifest: Manifest) -> SimpleNamespace:
    return SimpleNamespace(manifest=manifest, scores=lambda *_: torch.zeros(1, 2))


def test_what_a_running_server_refuses_does_not_serve_after_a_restart(put, tmp_path):
    put("1")
    server = Server(tmp_path / "models")
    put("2", "cost")
    assert server.look() == "1"
    assert "2 has other outputs than version 1, which decides; serve it from" in server.log[-1]
    assert server.restart() == "1"
    # Others may follow it.
    put("3")
    assert server.look() == server.restart() == "3"
    assert server.log[-1] == "version 3 replaces 1"


def test_inputs_and_outputs_change_when_what_is_before_is_withdrawn(put, tmp_path):
    put("1"), put("2")
    server = Server(tmp_path / "models")
    put("3", "cost")
    assert server.look() == server.look() == "2"
    assert withdraw_before(tmp_path / "models", 3) == (["2", "1"], "3")
    assert server.look() == "3"
    assert server.log[-1] == "version 3 replaces 2, which has other outputs"
    assert server.restart() == "3"
    with pytest.raises(ValueError, match=r"before=3: .* has no version before it"):
        withdraw_before(tmp_path / "models", 3)
    with pytest.raises(ValueError, match=r"before=2: .* has no such version, only 3"):
        withdraw_before(tmp_path / "models", 2)


def test_a_version_that_is_not_complete_decides_nothing(put, tmp_path):
    put("2")
    (put("1", "cost") / "dense.pt2").unlink()
    server = Server(tmp_path / "models")
    assert server.look() == "2"
    assert withdraw_before(tmp_path / "models", 2) == (["1"], "2")


def test_a_version_that_is_copied_slowly_serves_when_it_is_complete(put, model, tmp_path):
    """In the order of the names, as rsync copies, the manifest comes before the tables."""
    put("1")
    server = Server(tmp_path / "models")
    target = tmp_path / "models" / "2"
    files = sorted(path.relative_to(model) for path in model.rglob("*") if path.is_file())
    assert files.index(Path(MANIFEST)) < len(files) - 1
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model / file, target / file)
        assert server.look() == "1"
    assert server.look() == "2"
    refusals = [line for line in server.log if line.startswith("version 2 is refused")]
    assert len(refusals) == server.versions.refused == 1


def test_a_refused_version_is_tried_again_when_a_file_has_changed(put, tmp_path):
    put("1")
    server = Server(tmp_path / "models")
    table = put("2") / "tables" / "own.bin"
    good = table.read_bytes()
    table.write_bytes(b"\xff" + good[1:])
    assert server.look() == server.look() == "1"
    assert "own.bin is damaged (its SHA-256 differs)" in server.log[-1]
    table.write_bytes(good)
    os.utime(table, (1, 1))
    assert server.look() == "1", "it may still be written"
    assert server.look() == "2"


def test_sizes_are_compared_without_checksums_too(put, tmp_path):
    put("1")
    with (put("2") / "tables" / "own.bin").open("ab") as stream:
        stream.write(b"\0")
    log: list[str] = []
    versions = Versions(tmp_path / "models", log.append, load=load, verify=False)
    assert versions.current.name == "1"
    assert "own.bin is damaged (2,561 bytes instead of 2,560)" in log[0]


def test_a_model_of_another_name_is_refused(put, tmp_path):
    """Its requests have another address."""
    put("1")
    manifest = put("2") / MANIFEST
    manifest.write_text(manifest.read_text().replace('"name": "m"', '"name": "n"', 1))
    server = Server(tmp_path / "models")
    assert server.look() == "1"
    assert "has other name than version 1" in server.log[0]


def test_a_rollback_returns_to_the_version_that_served_before(put, tmp_path):
    for name in ("1", "2", "10"):
        put(name)
    put("3", "cost")
    models = tmp_path / "models"
    (models / "4.withdrawn").mkdir()
    (models / "11").mkdir()
    assert list_versions(models) == ["11", "10", "3", "2", "1"]
    with pytest.raises(ValueError, match="has no such version, only 11, 10, 3, 2, 1"):
        withdraw(models, 4)
    assert withdraw(models, None) == (["11", "10", "3"], "2")
    assert withdraw(models, 1) == (["2"], "1")
    with pytest.raises(ValueError, match="nothing to return to; it has the versions 1, of which 1"):
        withdraw(models, None)
    assert list_versions(models) == ["1"]
    with pytest.raises(ValueError, match="version and before are both set"):
        RollbackConfig(model=str(models), version=1, before=1)


def test_deltas_are_applied_to_the_version_that_serves(put, tmp_path):
    put("1"), put("2", "cost")
    config = ApplyConfig(model=str(tmp_path / "models"), deltas=["deltas"])
    assert places(config) == (tmp_path / "models/1", tmp_path / "models/3")


def test_an_export_says_what_will_not_serve(put, tmp_path):
    put("2")
    assert note_of_others(tmp_path / "models/2") is None
    assert note_of_others(put("draft", "cost")) is None
    wanted = r"version 2 decides .* so 3 will not serve \(other outputs\); .* before=3"
    note = note_of_others(put("3", "cost"))
    assert note is not None
    assert re.search(wanted, note), note
