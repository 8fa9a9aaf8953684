"""A second implementation of S3, whose server is killed and started again in the middle of a training."""

import os
import shutil
import signal
import time
from collections.abc import Iterator

import pytest

from dataloading.storage.local_copy import local_path, local_paths
from dataloading.storage.object_store import ObjectStore
from dataloading.storage.upload import upload_folder
from tests.dataloading.storage.juicefs import COMMAND, INSTALL, Gateway, gateway
from tests.dataloading.storage.test_commands import OPTIONS, checkpoints_of, names_of
from tests.dataloading.storage.test_object_store import contents, write
from tests.helpers.command import run_command
from tests.helpers.datasets import write_clicks
from tests.helpers.runs import at_step, differences

pytestmark = pytest.mark.doors


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Gateway]:
    assert COMMAND, f"no juicefs here: {INSTALL}"
    with gateway(tmp_path_factory.mktemp("juicefs")) as started:
        yield started


def test_a_folder_comes_back_and_is_removed(server, tmp_path):
    folder = write(tmp_path / "folder", spec_yaml="spec", train__a_bin="a" * 10, train__b_bin="")
    store = ObjectStore("s3://bucket/round")
    upload_folder(folder, store, "spec.yaml")
    assert contents(local_path("s3://bucket/round")) == contents(folder)
    assert [path.name for path in local_paths("s3://bucket/round/train/*.bin")] == [
        "a.bin",
        "b.bin",
    ]
    assert store.folders("") == ["train"]
    store.remove("spec.yaml")
    store.remove_folder("train")
    with pytest.raises(ValueError, match="there is no such bucket, file or folder"):
        store.list_files()


@pytest.mark.parametrize(
    ("address", "variable", "message"),
    [
        ("s3://bucket/x", "AWS_ACCESS_KEY_ID", "ACCESS_DENIED"),
        ("s3://bucket/x", "AWS_SECRET_ACCESS_KEY", "ACCESS_DENIED"),
        ("s3://no-such-bucket/x", "", "there is no such bucket"),
    ],
)
def test_wrong_keys_and_buckets_are_refused_at_once(
    server, address, variable, message, monkeypatch
):
    if variable:
        monkeypatch.setenv(variable, "wrong-and-long-enough")
    began = time.monotonic()
    with pytest.raises(ValueError, match=f"^{address}: .*{message}") as error:
        local_path(address)
    assert "\n" not in str(error.value)
    assert time.monotonic() - began < 5


def test_a_server_that_is_killed_and_started_again_gets_every_checkpoint(
    server, tmp_path, monkeypatch
):
    root = write_clicks(tmp_path / "clicks")
    upload_folder(root, ObjectStore("s3://bucket/clicks"), "feature_spec.yaml")
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    options = [*OPTIONS, "train.epochs=4"]
    assert run_command(*options, f"data.path={root}", f"run_dir={whole}").exit_code == 0
    addresses = ["data.path=s3://bucket/clicks", "checkpoint.mirror=s3://bucket/runs/a"]
    run = [*options, *addresses, f"run_dir={run_dir}"]
    with monkeypatch.context() as patched:
        at_step(patched, 5, server.kill)  # while the checkpoint of step 4 is uploaded
        at_step(patched, 10, server.start)
        at_step(patched, 14, lambda: os.kill(os.getpid(), signal.SIGTERM))
        stopped = run_command(*run)
    assert stopped.exit_code == 75, stopped.err
    assert checkpoints_of("s3://bucket") == names_of(run_dir)
    shutil.rmtree(run_dir)
    with monkeypatch.context() as patched:
        at_step(patched, 18, lambda: (server.kill(), server.start()))
        again = run_command(*run)
    assert again.exit_code == 0, again.err
    assert "were copied from checkpoint.mirror" in again.out
    assert differences(whole, run_dir) == []
    assert checkpoints_of("s3://bucket") == names_of(run_dir)
