"""The version of a directory that serves: decided by the directory alone, so a start decides as the server that ran."""

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.serving_schema import ApplyConfig, RollbackConfig
from serving.apply import directories
from serving.inference.versions import Versions
from serving.manifest import MANIFEST, Manifest, ModelError
from serving.versions import (
    list_versions,
    note_of_others,
    servable,
    withdraw,
    withdraw_before,
)
from serving.vocabulary import write_vocabulary
from tests.serving.handmade_model import write_manifest, write_model, write_raw_model


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


def test_the_version_before_answers_what_the_newest_does_not(put, tmp_path):
    put("1"), put("2")
    directory, log = tmp_path / "models", []
    versions = Versions(directory, log.append, load=load, canary_share=0.25)

    def served() -> list[tuple[str, float]]:
        return [(version.name, share) for version, share in versions.shares()]

    assert served() == [("2", 0.25), ("1", 0.75)]
    chosen = {str(key): versions.choose(str(key)).name for key in range(4000)}
    assert 0.2 < list(chosen.values()).count("2") / 4000 < 0.3
    assert all(versions.choose(key).name == name for key, name in chosen.items())
    drawn = [versions.choose(None).name for _ in range(4000)]
    assert 0.2 < drawn.count("2") / 4000 < 0.3
    # The next canary has other keys, and the last one is not loaded again.
    before = versions.current
    put("3")
    assert versions.update()
    assert log[-1] == "version 3 replaces 2 in 0.25 of the requests; 2 answers the others"
    assert versions.serving[1] is before
    assert (
        0.02 < sum(versions.choose(k).name == "3" for k in chosen if chosen[k] == "2") / 4000 < 0.11
    )
    # One that is refused is no canary; a withdrawn one leaves the two before it.
    put("4", "cost")
    assert not versions.update()
    assert served() == [("3", 0.25), ("2", 0.75)]
    withdraw(directory, 2)
    assert versions.update()
    assert served() == [("2", 0.25), ("1", 0.75)]
    assert versions.serving[0] is before
    withdraw(directory, 1)
    assert versions.update()
    assert served() == [("1", 1.0)]
    assert versions.choose("a").name == "1"


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
    assert directories(config) == (tmp_path / "models/1", tmp_path / "models/3")


def test_an_export_says_what_will_not_serve(put, tmp_path):
    put("2")
    assert note_of_others(tmp_path / "models/2") is None
    assert note_of_others(put("draft", "cost")) is None
    wanted = r"version 2 decides .* so 3 will not serve \(other outputs\); .* before=3"
    note = note_of_others(put("3", "cost"))
    assert note is not None
    assert re.search(wanted, note), note


def change_weights(path: Path, seed: int) -> Path:
    """Give a version other weights, and its files the time that copies of artifacts have."""
    table = path / "tables" / "own.bin"
    table.write_bytes(np.random.default_rng(seed).normal(size=640).astype("<f4").tobytes())
    write_manifest(path, json.loads((path / MANIFEST).read_text()))
    for file in path.rglob("*.*"):
        os.utime(file, (1, 1))
    return path


def test_a_number_that_is_used_again_serves_what_is_in_it_now(put, tmp_path):
    """Between two looks a version is withdrawn, and another one gets its number; sizes and times of all files are equal."""
    models = tmp_path / "models"
    change_weights(put("1"), 1)
    before = Manifest.read(change_weights(put("2"), 2)).identity
    server = Server(models)
    change_weights(put(".2.copy"), 3)
    assert withdraw(models, None) == (["2"], "1")
    (models / ".2.copy").rename(models / "2")
    now = Manifest.read(models / "2").identity
    assert server.look() == "2"
    assert server.versions.current.identity == now != before
    line = f"version 2 replaces 2: its number is used again, by the model {now} after {before}"
    assert server.log == [line]
    assert (server.look(), server.restart(), server.versions.current.identity) == ("2", "2", now)
    # One that cannot serve under the number: the version before it does, as after a restart.
    shutil.rmtree(models / "2")
    put("2", "cost")
    assert server.look() == server.restart() == "1"
    assert server.log[-3].startswith("version 2 is refused: ")


def test_a_version_that_serves_is_not_replaced_by_an_older_one_when_it_is_damaged(put, tmp_path):
    put("1")
    path = put("2")
    server = Server(tmp_path / "models")
    before, table = server.versions.current, path / "tables" / "own.bin"
    good = table.read_bytes()
    for damage in (table.unlink, lambda: table.write_bytes(b"\xff" + good[1:])):
        server.log.clear()
        damage()
        assert [server.look() for _ in range(4)] == ["2"] * 4
        assert server.versions.current is before
        (line,) = server.log
        assert line.startswith(f"version 2 cannot be loaded again: {table} ")
        assert "it serves on as it was loaded" in line
        table.write_bytes(good)
        assert [server.look() for _ in range(3)] == ["2"] * 3
    assert (len(server.log), server.versions.refused) == (1, 0)
    put("3")
    assert server.look() == "3"


def test_a_version_that_serves_decides_when_it_is_damaged(put, tmp_path):
    (put("1"), put("2", "cost"))
    server = Server(tmp_path / "models")
    (tmp_path / "models/1/dense.pt2").unlink()
    assert [server.look() for _ in range(3)] == ["1"] * 3
    put("3", "cost")
    assert server.look() == "1"
    assert server.log[-1].endswith("; 1 serves on")
    put("4")
    assert server.look() == "4"


def test_a_version_that_is_only_touched_serves_on(put, tmp_path):
    put("1")
    server = Server(tmp_path / "models")
    for file in (tmp_path / "models/1").rglob("*.*"):
        os.utime(file, (1, 1))
    before = server.versions.current
    assert (server.look(), server.versions.current, server.log) == ("1", before, [])


def test_a_withdrawn_number_is_not_given_again(put, tmp_path):
    put("1"), put("2"), put("3")
    models = tmp_path / "models"
    withdraw(models, 1)
    config = ApplyConfig(model=str(models), deltas=["deltas"])
    assert directories(config) == (models / "1", models / "4")


@pytest.fixture(scope="module")
def raw_model(tmp_path_factory) -> Path:
    return write_raw_model(tmp_path_factory.mktemp("raw") / "model")


def values_of(table: str, count: int) -> list[str | None]:
    return [f"{table} {number}" for number in range(count)]


def test_a_version_whose_values_have_other_ids_is_refused(raw_model, tmp_path):
    models = tmp_path / "models"
    shutil.copytree(raw_model, models / "1")
    server = Server(models)
    with_values(raw_model, models / "2", values_of("positions", 16)[::-1])
    assert server.look() == server.restart() == "1"
    assert "2 has other ids of values of 'several' than version 1, which decides" in server.log[-1]
    assert "(other ids of values of 'several')" in str(note_of_others(models / "2"))
    assert servable(models) == ["1"]
    # A later day has more values, and has retired some.
    later = values_of("positions", 20)
    later[3] = later[4] = later[15] = None
    with_values(raw_model, models / "3", later)
    assert server.look() == server.restart() == "3"
    # On purpose, as inputs and outputs are changed; a running server decides as one that starts.
    withdraw_before(models, 2)
    assert server.look() == server.restart() == "2"


def test_a_feature_that_became_a_history_has_its_ids(raw_model, tmp_path):
    """Clients see a list of its name in both."""

    def write(target: Path, *, is_history: bool) -> None:
        shutil.copytree(raw_model, target)
        document = json.loads((target / MANIFEST).read_text())
        # The last feature, of the vocabulary of `narrow`.
        raw, last = document["raw"], document["raw"]["categorical"][-1]
        last |= {"separator": "", "list": True}
        raw["columns"]["tags"] = 2
        raw["categorical"][1]["length"] = True
        document["numerical"] += ["three_length", "tags_length"]
        if is_history:
            raw["categorical"].pop()
            raw["history"] = [{"name": "tags", "of": "narrow", "length": 2}]
        else:
            last["length"] = True
        write_manifest(target, document)

    write(tmp_path / "1", is_history=False), write(tmp_path / "2", is_history=True)
    assert servable(tmp_path) == ["2", "1"]


@pytest.mark.parametrize(
    "values", [values_of("positions", 15), ["positions 00", *values_of("positions", 16)[1:]]]
)
def test_a_vocabulary_that_lacks_a_value_has_not_grown(raw_model, tmp_path, values):
    shutil.copytree(raw_model, tmp_path / "1")
    with_values(raw_model, tmp_path / "2", values)
    assert servable(tmp_path) == ["1"]


def with_values(model: Path, target: Path, values: list[str | None]) -> None:
    """Write a version with another vocabulary of the feature `several`, and as many rows more as it has values."""
    shutil.copytree(model, target)
    document = json.loads((target / MANIFEST).read_text())
    file = target / "vocabulary/positions.bin"
    file.unlink()
    write_vocabulary(file, [values])
    document["raw"]["categorical"][3]["vocabulary"] = ["vocabulary/positions.bin", len(values)]
    rows = max(17, len(values) + 1)
    document["categorical"][3]["cardinality"] = document["tables"][2]["rows"] = rows
    (target / "tables/positions.bin").write_bytes(bytes(4 * 16 * rows))
    write_manifest(target, document)


def test_without_raw_values_checksums_of_vocabularies_are_compared(put, tmp_path):
    def of(name: str, checksum: str | None) -> None:
        path = put(name) / MANIFEST
        document = json.loads(path.read_text())
        document["source"] = {} if checksum is None else {"vocabularies": {"one": checksum}}
        path.write_text(json.dumps(document))

    of("1", "a"), of("2", "b"), of("3", "a"), of("4", None)
    assert servable(tmp_path / "models") == ["4", "3", "1"]


@pytest.mark.parametrize("kind", ["directory", "circle", "fifo"])
def test_a_version_whose_manifest_is_no_file_hinders_no_other(put, tmp_path, kind):
    put("2")
    server = Server(tmp_path / "models")
    put("3")
    assert server.look() == "3"
    made = {
        "directory": lambda path: path.mkdir(),
        "circle": lambda path: path.symlink_to(path.name),
        "fifo": os.mkfifo,
    }
    for name in ("1", "4"):
        (tmp_path / "models" / name).mkdir()
        made[kind](tmp_path / "models" / name / MANIFEST)
    assert server.look() == "3"
    assert servable(tmp_path / "models") == ["3", "2"]
    assert withdraw(tmp_path / "models", None) == (["4", "3"], "2")
    assert server.look() == "2"
    assert server.restart() == "2"


@pytest.mark.parametrize("name", ["ids", "numerical", "rate"])
def test_an_input_is_read_as_one_thing(put, name):
    path = put("1")
    text = (path / MANIFEST).read_text().replace('"list"', f'"{name}"')
    (path / MANIFEST).write_text(text)
    with pytest.raises(ModelError, match=f"two inputs of a request are named '{name}'"):
        Manifest.read(path)
