"""Object stores: copies and uploads that are complete or absent, and messages without credentials."""

import os
import socket
import time
from pathlib import Path

import pytest

from dataloading.dataset.durable_files import share_directory
from dataloading.storage import local_copy, object_store
from dataloading.storage.local_copy import cache_directory, local_path, local_paths
from dataloading.storage.object_store import ObjectStore, is_remote, shown_address
from dataloading.storage.upload import upload_folder, writable
from nn.distributed.launcher import reserved_port
from tests.dataloading.storage.s3_server import SECRET


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_addresses_are_told_from_paths():
    assert [is_remote(path) for path in ("s3://b/x", "gs://b", "data/s3", "C://x", "/a://b")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert shown_address("s3://key:secret@bucket/a?endpoint_override=x") == "s3://bucket/a"


def test_a_folder_comes_back_as_it_was_uploaded(bucket, tmp_path):
    folder = write(tmp_path / "folder", spec_yaml="spec", train__a_bin="a" * 10, train__b_bin="")
    upload_folder(folder, ObjectStore(f"{bucket}/round"), "spec.yaml")
    copy = local_path(f"{bucket}/round/")
    assert contents(copy) == contents(folder)
    assert local_path(f"{bucket}/round/train/a.bin").read_text() == "a" * 10
    assert local_path(str(folder)) == folder


def test_a_changed_source_makes_a_new_copy_and_an_equal_one_is_made_once(bucket, tmp_path):
    store, address = ObjectStore(f"{bucket}/changing"), f"{bucket}/changing"
    upload_folder(write(tmp_path / "one", x_txt="one"), store, "x.txt")
    first = local_path(address)
    stamp = (first / "x.txt").stat()
    local_copy._local_copy.cache_clear()
    assert local_path(address) == first
    assert (first / "x.txt").stat() == stamp
    upload_folder(write(tmp_path / "two", x_txt="other"), store, "x.txt")
    local_copy._local_copy.cache_clear()
    assert contents(local_path(address)) == {"x.txt": "other"}
    assert contents(first) == {"x.txt": "one"}


def copies() -> set[str]:
    return {path.name[0] for path in cache_directory().iterdir() if path.is_dir()}


def test_the_copies_that_were_used_last_longest_ago_make_room(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RECSYS_CACHE_GIB", str(45 / 2**30))
    for age, name in enumerate(["a", "b", "c", "outputs"]):
        path = write(cache_directory() / name, x_txt="x" * 10)
        os.utime(path, (-age, -age))
    ObjectStore(f"{bucket}/lru/d").upload(write(tmp_path, x_txt="x" * 30) / "x.txt", "")
    # The oldest copy, c, is used by this process; the output is no copy, and is never removed.
    os.utime(cache_directory() / "c", (-9, -9))
    held = share_directory(cache_directory() / "c")
    assert local_path(f"{bucket}/lru/d").read_text() == "x" * 30
    assert copies() == {"c", "d", "o"}
    # Now d is used too, and an interrupted copy counts.
    ObjectStore(f"{bucket}/lru/e").upload(tmp_path / "x.txt", "")
    with pytest.raises(ValueError, match="copies of running commands stay; set RECSYS_CACHE_GIB"):
        local_path(f"{bucket}/lru/e")
    assert copies() == {"c", "d", "o", "."}
    os.close(held)
    monkeypatch.setenv("RECSYS_CACHE_GIB", str(61 / 2**30))
    assert local_path(f"{bucket}/lru/e").read_text() == "x" * 30
    assert copies() == {"d", "e", "o"}


def test_a_copy_that_is_used_again_is_the_last_to_go(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("RECSYS_CACHE_GIB", str(25 / 2**30))
    for name in "ab":
        os.utime(write(cache_directory() / name, x_txt="x" * 10), (-1, -1))
    assert local_copy._use(cache_directory() / "a")
    assert not local_copy._use(cache_directory() / "none")
    local_copy._make_room(10, "s3://bucket/c")
    assert copies() == {"a"}


def test_what_is_larger_than_the_bound_removes_no_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("RECSYS_CACHE_GIB", str(25 / 2**30))
    write(cache_directory() / "a", x_txt="x" * 10)
    with pytest.raises(ValueError, match="set RECSYS_CACHE_GIB"):
        local_copy._make_room(26, "s3://bucket/c")
    assert copies() == {"a"}


def test_patterns_name_several_files(bucket, tmp_path):
    folder = write(tmp_path / "raw", day_1_csv="1", day_10_csv="10", other_txt="x")
    upload_folder(folder, ObjectStore(f"{bucket}/raw"), "other.txt")
    names = [path.name for path in local_paths(f"{bucket}/raw/day.*.csv")]
    assert sorted(names) == ["day.1.csv", "day.10.csv"]
    with pytest.raises(ValueError, match=r"s3://bucket/raw/\*\.gz: no file matches"):
        local_paths(f"{bucket}/raw/*.gz")


def test_an_interrupted_upload_does_not_look_complete(bucket, tmp_path, monkeypatch):
    store = ObjectStore(f"{bucket}/cut")
    folder = write(tmp_path / "folder", spec_yaml="new", a_bin="a", b_bin="b")
    upload_folder(write(tmp_path / "old", spec_yaml="old"), store, "spec.yaml")
    upload = ObjectStore.upload

    def fails_at_b(self: ObjectStore, source: Path, name: str) -> None:
        if name == "b.bin":
            raise ValueError("no more")
        upload(self, source, name)

    monkeypatch.setattr(ObjectStore, "upload", fails_at_b)
    with pytest.raises(ValueError, match="no more"):
        upload_folder(folder, store, "spec.yaml")
    assert not store.has("spec.yaml")
    monkeypatch.undo()
    upload_folder(folder, store, "spec.yaml")
    assert sorted(store.list_files()) == ["a.bin", "b.bin", "spec.yaml"]


def test_an_interrupted_copy_is_continued(bucket, tmp_path, monkeypatch):
    folder = write(tmp_path / "folder", a_bin="a", b_bin="b", spec_yaml="spec")
    upload_folder(folder, ObjectStore(f"{bucket}/torn"), "spec.yaml")
    download = ObjectStore.download
    fetched = []

    def fails_at_b(self: ObjectStore, file, target: Path) -> None:
        fetched.append(file.path)
        if file.path.endswith("b.bin") and len(fetched) < 4:
            raise ValueError("torn")
        download(self, file, target)

    monkeypatch.setattr(ObjectStore, "download", fails_at_b)
    monkeypatch.setattr(local_copy, "THREADS", 1)
    with pytest.raises(ValueError, match="torn"):
        local_path(f"{bucket}/torn")
    assert not [path for path in cache_directory().glob("torn-*")]
    fetched += [""] * 4
    assert contents(local_path(f"{bucket}/torn")) == contents(folder)
    assert sum(path.endswith("a.bin") for path in fetched) == 1


def test_errors_of_local_files_are_not_those_of_the_store(bucket, tmp_path, monkeypatch):
    store = ObjectStore(f"{bucket}/local")
    with pytest.raises(FileNotFoundError, match="gone"):
        store.upload(tmp_path / "gone", "gone")
    store.upload(write(tmp_path, a_txt="one") / "a.txt", "a.txt")
    with pytest.raises(OSError, match="No space left on device"):
        store.download(store.list_files()["a.txt"], Path("/dev/full"))


def test_an_output_is_uploaded_at_the_end_only(bucket):
    def fails() -> None:
        with writable(f"{bucket}/out", "spec.yaml") as path:
            write(path, spec_yaml="half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert not ObjectStore(f"{bucket}/out").has("spec.yaml")
    with writable(f"{bucket}/out", "spec.yaml") as path:
        write(path, spec_yaml="complete")
    assert contents(local_path(f"{bucket}/out")) == {"spec.yaml": "complete"}
    with writable(f"{bucket}/scores.csv", "") as path:
        path.write_text("1,0.5")
    assert local_path(f"{bucket}/scores.csv").read_text() == "1,0.5"
    for address in ("out", "scores.csv"):
        message = rf"s3://bucket/{address} exists already; choose another output"
        with pytest.raises(ValueError, match=message), writable(f"{bucket}/{address}", "spec.yaml"):
            pass


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://bucket/nothing", "s3://bucket/nothing: there is no such bucket, file or folder"),
        ("s3://", "s3:// names no bucket; write it as s3://BUCKET/FOLDER"),
        ("s3://other/x", "s3://other/x: there is no such bucket"),
        ("s3://UPPER CASE/x", "s3://UPPER CASE/x: .*; check the address, the credentials"),
    ],
)
def test_wrong_addresses_are_named_in_one_line(address, message, bucket):
    with pytest.raises(ValueError, match=message) as error:
        local_path(address)
    assert "\n" not in str(error.value)
    assert "Request ID" not in str(error.value)


def test_credentials_of_an_address_and_of_the_environment_are_not_shown(bucket):
    address = f"s3://somebody:{SECRET}@bucket/nothing?endpoint_override=" + os.environ[
        "AWS_ENDPOINT_URL"
    ].removeprefix("http://")
    with pytest.raises(ValueError, match="nothing") as error:
        local_path(f"{address}&scheme=http")
    assert SECRET not in str(error.value)
    assert "somebody" not in str(error.value)


@pytest.fixture(params=["refused", "silent"])
def nobody(request, monkeypatch):
    """Point the environment to a port that nobody listens to, or that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = reserved_port() if request.param == "refused" else listener.getsockname()[1]
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield request.param


def gives_up(action) -> float:
    """Check that an action fails with one line; return the seconds that it took."""
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"^s3://bucket/away: ") as error:
        action()
    assert "\n" not in str(error.value)
    return time.monotonic() - began


def test_a_server_that_is_away_is_said_and_given_up(nobody, monkeypatch, tmp_path, capsys):
    limits = {"SAY_AFTER_S": 0.1, "REPEAT_FOR_S": 0.2, "GIVE_UP_AFTER_S": 2.0, "ATTEMPTS": 1}
    limits["TIMEOUTS_S"] = {"connect_timeout": 1.0, "request_timeout": 1.0}
    for name, value in limits.items():
        monkeypatch.setattr(object_store, name, value)
    store = ObjectStore("s3://bucket/away")
    assert gives_up(store.list_files) < 10
    assert gives_up(lambda: store.upload(write(tmp_path, a_txt="one") / "a.txt", "a")) < 10
    line = "s3://bucket/away: no answer yet; waiting 2 s at most\n"
    assert capsys.readouterr().err == line, "said once"


@pytest.mark.doors
def test_a_server_that_is_away_is_given_up_within_30_seconds(nobody, capsys):
    assert gives_up(lambda: local_path("s3://bucket/away")) < 30
    assert capsys.readouterr().err == "s3://bucket/away: no answer yet; waiting 25 s at most\n"
