"""Every command that writes a directory refuses one that another process is writing, and names that process."""

import os
import socket
import sys
from pathlib import Path

import pytest

from benchmarks import day_files, train
from benchmarks.rows import ROWS
from dataloading.dataset.durable_files import exclusive
from tests.helpers.handwritten import write_handwritten
from tests.helpers.preproc_command import Refused, preproc, raw_line, write_lines
from tests.preproc.table.test_pipeline import _hydra


def table(source: Path) -> str:
    columns = [f"x{i}" for i in range(40)]
    rows = {"files": str(source), "format": "tsv", "header": False, "columns": columns}
    description = {"sources": {"t": rows}, "label": {"name": "x0"}, "categorical": ["x14"]}
    return f"table={_hydra(description)}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("inputs")
    lines = [raw_line(i % 2, c1=f"{i % 3:08x}") for i in range(20)]
    source = write_lines(directory / "raw.tsv", lines)
    write_handwritten(directory / "nvidia")
    preproc("dataset=any", table(source), f"output={directory / 'fit'}")
    return directory


COMMANDS = {
    "fit": lambda at: [f"source={at}/raw.tsv"],
    "fit a table": lambda at: ["dataset=any", table(at / "raw.tsv")],
    "transform": lambda at: [
        "dataset=any",
        table(at / "raw.tsv"),
        "mode=transform",
        f"fitted={at}/fit",
    ],
    "synthetic": lambda at: ["dataset=synthetic", "data.synthetic.cardinalities=[5]"],
    "convert": lambda at: ["mode=convert", f"path={at}/nvidia"],
    "convert to parquet": lambda at: ["mode=convert", f"path={at}/nvidia", "to=parquet"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("overwrite", ["false", "true"])
def test_an_output_that_is_being_written_is_refused(tmp_path, inputs, command, overwrite):
    output = tmp_path / "deep" / "out"
    with exclusive(output, ""), pytest.raises(Refused) as refused:
        preproc(*COMMANDS[command](inputs), f"output={output}", f"overwrite={overwrite}")
    assert refused.value.exit_code == 2
    assert refused.value.message == (
        f"error: process {os.getpid()} on {socket.gethostname()} is writing {output}; wait for it, or choose another output"
    )
    assert os.listdir(output.parent) == []


def test_runs_to_outputs_of_one_name_do_not_share_a_work_directory(tmp_path, inputs):
    output, work = tmp_path / "deep" / "out", tmp_path / "work" / ".out.preproc"
    with exclusive(work, ""), pytest.raises(Refused) as refused:
        preproc(f"source={inputs}/raw.tsv", f"output={output}", f"temp_directory={work.parent}")
    assert f"is staging {output} in {work}; wait for it, or choose another" in refused.value.message


@pytest.mark.parametrize("benchmark", [day_files, train])
def test_benchmarks_refuse_it_too(tmp_path, monkeypatch, benchmark):
    options = {
        day_files: [f"output={tmp_path / 'out'}"],
        train: [next(iter(ROWS)), f"--out={tmp_path / 'out'}", f"--data={tmp_path}"],
    }
    monkeypatch.setattr(sys, "argv", ["benchmark", *options[benchmark]])
    with (
        exclusive(tmp_path / "out", ""),
        pytest.raises(SystemExit, match=rf"process {os.getpid()} on"),
    ):
        benchmark.main()
    assert os.listdir(tmp_path) == []
