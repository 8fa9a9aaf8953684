"""Trainings on a directory that grows: killed at any moment, they end with the tensors of a training on all rows at once."""

import os
import signal
from pathlib import Path

import pytest

from nn.training import stream_rows
from tests.helpers import rank_processes
from tests.helpers.datasets import write_rows
from tests.helpers.gpus import needs_one_gpu
from tests.helpers.rank_processes import wait_until
from tests.helpers.runs import records, stored_bytes, summary

BATCH = 32
ENDS = [150, 250, 287, 480, 640]
"""Rows up to the end of the first dataset, and of each part: batches lie across their borders."""
RUN = [
    *("model.embedding_dim=8", "model.bottom_mlp=[16,8]", "model.top_mlp=[16,1]"),
    *(f"train.batch_size={BATCH}", "eval.batch_size=64", "eval.every=7", "log.every=1"),
    *("optimizer.name=adam", "optimizer.lr=0.005", "log.loggers=[]", "log.pictures=false"),
    *("checkpoint.save_every=3", "data.shuffle_block=0", "train.tf32=false"),
]
PARTS = [f"hour_{number:02}" for number in range(1, len(ENDS))]


def look_often(rank: int) -> None:
    stream_rows.LOOK_S = 0.05


class Stream:
    """A dataset, a directory that grows, and the starts of one training on them."""

    def __init__(self, root: Path, num_ranks: int, device: str = "cpu") -> None:
        self.root, self.num_ranks, self.run = root, num_ranks, [*RUN, f"device={device}"]
        self.run_dir, self.parts = root / "run", root / "parts"
        self.parts.mkdir()
        write_rows(root / "first", 0, ENDS[0])
        for name, first, last in zip(PARTS, ENDS[:-1], ENDS[1:], strict=True):
            write_rows(root / "written" / name, first, last, test_rows=0)
        self.starts = 0

    def start(self, *options: str) -> rank_processes.Ranks:
        self.starts += 1
        arguments = [
            *(*self.run, f"data.path={self.root / 'first'}", f"data.watch_dir={self.parts}"),
            *(f"run_dir={self.run_dir}", *options),
        ]
        log = self.root / f"log_{self.starts}"
        return rank_processes.start(arguments, self.num_ranks, log, prepare=look_often)

    def add(self, name: str) -> None:
        os.rename(self.root / "written" / name, self.parts / name)

    def reaches(self, step: int) -> bool:
        def is_there() -> bool:
            path = self.run_dir / "metrics.jsonl"
            return path.exists() and any(
                line.get("step", 0) >= step for line in records(self.run_dir)
            )

        return wait_until(is_there, 60)

    def differing(self, name: str = "wanted") -> list[str]:
        """Return the files of the last checkpoint that differ from those of a training on all rows at once."""
        whole = write_rows(self.root / "whole", 0, ENDS[-1])
        arguments = [*self.run, f"data.path={whole}", f"run_dir={self.root / name}"]
        log = self.root / "log_wanted"
        ranks = rank_processes.start(arguments, self.num_ranks, log)
        assert ranks.wait(60) == [0] * self.num_ranks, log.read_text()
        wanted, got = stored_bytes(self.root / name), stored_bytes(self.run_dir)
        return [file for file in wanted | got if wanted.get(file) != got.get(file)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rows_that_come_while_a_run_is_killed_are_trained_once(tmp_path, num_ranks):
    stream = Stream(tmp_path, num_ranks)
    # All rows but 22 are trained, and the ranks wait.
    ranks = stream.start()
    assert stream.reaches(ENDS[0] // BATCH), ranks.log.read_text()
    stream.add(PARTS[0])
    assert stream.reaches(ENDS[1] // BATCH)
    ranks.kill()
    # Two parts are there at the start, and the kill comes in the middle of them.
    stream.add(PARTS[1])
    stream.add(PARTS[2])
    ranks = stream.start()
    assert stream.reaches(ENDS[1] // BATCH + 2)
    ranks.kill()
    # A signal while it waits; what was trained may be gone.
    ranks = stream.start()
    assert stream.reaches(ENDS[3] // BATCH)
    assert ranks.processes[0].is_alive()
    os.kill(ranks.processes[0].pid, signal.SIGTERM)
    assert ranks.wait(30) == [75] * num_ranks, ranks.log.read_text()
    for name in PARTS[:2]:
        os.rename(stream.parts / name, tmp_path / f"{name}_trained")
    stream.add(PARTS[3])
    ranks = stream.start("data.watch_idle_s=0.3")
    assert ranks.wait(60) == [0] * num_ranks, ranks.log.read_text()
    assert summary(stream.run_dir)["stopped"] == "no new rows for data.watch_idle_s"
    assert summary(stream.run_dir)["steps"] == ENDS[-1] // BATCH
    assert stream.differing() == []


@needs_one_gpu
def test_parts_on_a_gpu_are_trained_as_one_dataset(tmp_path):
    stream = Stream(tmp_path, 1, "cuda")
    for name in PARTS:
        stream.add(name)
    ranks = stream.start("data.watch_idle_s=0.3")
    assert ranks.wait(120) == [0], ranks.log.read_text()
    assert "step: a CUDA graph" in ranks.log.read_text()
    assert stream.differing() == []
