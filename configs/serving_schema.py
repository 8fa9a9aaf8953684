"""Every option of the commands of `serving`, in the style of `configs/schema.py`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from configs.options import Section, option, require

URL = "http://127.0.0.1:8000"
NAME = "..., its name at the server (curl URL/v2/models)"
MOST_REQUESTS = 512
"""At a time."""


TableType = StrEnum("TableType", "fp32 bf16 int8 int4")
Device = StrEnum("Device", "cpu cuda")
DenseType = StrEnum("DenseType", "fp32 bf16")
"""Dtypes of the dense component on a GPU."""


@dataclass(kw_only=True, slots=True)
class ModelExportConfig(Section):
    checkpoint: str | None = option(
        None,
        "checkpoint to export: a run's checkpoints/best or checkpoints/step_N",
        path=True,
        required="..., a run's checkpoints/best",
    )
    output: str | None = option(
        None,
        "model directory to write, which must not exist yet; MODELS/1, MODELS/2 and so on are versions that "
        "serving.run model=MODELS swaps in",
        path=True,
        required="..., a directory",
    )
    dtype: TableType = option(
        TableType.fp32,
        "of the tables: fp32, bf16, or int8 or int4 with a scale per row; int4 is served on CPUs",
    )
    fitted: str | None = option(
        None, "dataset whose fit turns raw values into features; null: ids are sent", path=True
    )
    data_path: str | None = option(
        None, "dataset whose rows prove the export; null: that of the training", path=True
    )
    split: str = option("test", "split of these rows")
    rows: int = option(4096, "rows to compare with the training path", most=1 << 24, gt=0)
    name: str | None = option(None, "name of the model in requests; null: that of model.name")
    onnx: bool = option(False, "write the dense component as ONNX too")
    aoti: Device | None = option(
        None, "cpu or cuda: write it as machine code of AOTInductor for this device too; null: no"
    )

    def check_relations(self) -> None:
        if self.name is not None:
            require_model_name(self.name)


def require_model_name(name: str) -> None:
    """Raise `ValueError` unless a model may have the name."""
    require(
        re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) is not None,
        f"name={name}: want letters, digits, '.', '_' and '-', for an address of requests and a folder of Triton",
    )


@dataclass(kw_only=True, slots=True)
class ServerConfig(Section):
    model: str | None = option(
        None, "model directory, or one of versions", path=True, required="..., a model directory"
    )
    others: list[str] = option(
        [], "further model directories, or ones of versions, of models with other names", path=True
    )
    device: Device = option(Device.cpu, "cpu, or cuda: the first GPU that is visible")
    dense_dtype: DenseType = option(
        DenseType.fp32, "of embeddings and matrix products: fp32, or bf16", only="device=cuda"
    )
    table_gib: float | None = option(
        None,
        "GiB of tables of each model in the GPU's memory; the first rows of each table, which are the most frequent values, "
        "lie there, the others in pinned host memory; null: 80 % of what is free",
        gt=0,
        only="device=cuda",
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = option(8000, "port to listen on; 0 takes a free one", most=65_535, ge=0)
    token_file: str | None = option(
        None, "file with a token that requests must bear (Authorization: Bearer TOKEN)", path=True
    )
    max_batch: int = option(
        4096, "rows of the largest batch; larger requests are split", most=65_536, gt=0
    )
    batch_delay_ms: float = option(
        0.0, "longest wait for others of a batch; 0: for those that came during the last", ge=0
    )
    max_queue: int = option(
        65_536, "rows that may wait; requests beyond them are refused with 429", most=1 << 28, gt=0
    )
    deadline_ms: float = option(
        1000.0, "a request that has waited longer is refused with 503, not scored too late", gt=0
    )
    max_body_mib: int = option(64, "largest body of a request in MiB", most=4096, gt=0)
    max_memory_mib: int = option(512, "bodies of all requests together in MiB", most=1 << 20)
    max_connections: int = option(
        1024, "connections at a time; further ones are refused with 503", most=65_536, gt=0
    )
    timeout_s: float = option(
        30.0, "longest time that a client may take to send a request or to read its answer", gt=0
    )
    drain_s: float = option(20.0, "time to answer accepted requests after SIGTERM", ge=0)
    poll_s: float = option(1.0, "time between two looks for a new version", gt=0)
    canary_share: float | None = option(
        None,
        "share of the requests that the newest version answers; the one before it answers the others, and those with one "
        "header Canary-Key are answered by the same; null: the newest answers all",
        gt=0,
        lt=1,
    )
    log_requests: str | None = option(
        None, "folder for served requests as rows of JSON lines (docs/serving.md)", path=True
    )
    log_share: float = option(0.01, "share of the requests that log_requests logs", gt=0, most=1)
    log_mib: int = option(
        1024, "MiB of all files of log_requests; the oldest one is removed", most=1 << 30, gt=0
    )
    verify: bool = option(
        True, "compare the SHA-256 of every file before a version serves; false: sizes"
    )
    threads: int | None = option(
        None, "threads of a batch; null: one per core, at most 4 with device=cuda", most=4096, gt=0
    )

    def check_relations(self) -> Iterator[str]:
        if self.max_memory_mib < self.max_body_mib:
            yield f"max_memory_mib={self.max_memory_mib} is less than max_body_mib={self.max_body_mib}"
        if self.others and self.log_requests is not None:
            yield f"log_requests={self.log_requests} is of one model, and others names further ones; start a server for each"


Layout = StrEnum("Layout", "monolithic ensemble")
DenseFormat = StrEnum("DenseFormat", "onnx pytorch")
"""Formats of the dense model of an ensemble."""


@dataclass(kw_only=True, slots=True)
class TritonConfig(Section):
    """A model repository for the Triton inference server."""

    model: str | None = option(
        None, "model directory", path=True, required="..., a model directory"
    )
    output: str | None = option(
        None, "repository to write, a new one", path=True, required="..., a directory"
    )
    layout: Layout = option(
        Layout.monolithic, "monolithic: one model; ensemble: tables, dense model, and both joined"
    )
    dense_format: DenseFormat = option(
        DenseFormat.onnx, "an ensemble's dense model: onnx, or pytorch for Triton's Python backend"
    )
    name: str | None = option(None, "name of the model; null: that of the model directory")
    max_batch: int = option(32_768, "rows of the largest batch", most=65_536, gt=0)
    batch_delay_ms: float = option(0.1, "longest time that a request waits for others", ge=0)
    instances: int = option(1, "processes per model", most=256, gt=0)
    threads: int = option(
        1, "threads of a process; where cores are busy, more wait for each other", most=4096, gt=0
    )
    device: Device = option(
        Device.cpu, "cuda: on GPUs; of an ensemble the dense model alone, which must be onnx"
    )
    dense_dtype: DenseType = option(
        DenseType.fp32, "as in serving.run", only="layout=monolithic device=cuda"
    )
    table_gib: float | None = option(
        None, "as in serving.run", only="layout=monolithic device=cuda"
    )
    python_path: str | None = option(
        None,
        "directories with this project and its packages where Triton runs, separated by ':'; null: those of this environment; "
        "empty if they are installed there",
    )

    def check_relations(self) -> Iterator[str]:
        is_on_gpu = self.layout is Layout.ensemble and self.device is Device.cuda
        if is_on_gpu and self.dense_format is not DenseFormat.onnx:
            yield "layout=ensemble device=cuda: the dense model must be of dense_format=onnx"


@dataclass(kw_only=True, slots=True)
class RollbackConfig(Section):
    model: str | None = option(
        None, "directory of versions", path=True, required="..., a directory of versions"
    )
    version: int | None = option(
        None, "version to return to; null: the one before the version that serves", most=1 << 62
    )
    before: int | None = option(
        None, "withdraw all before this one, so that it decides inputs and outputs", most=1 << 62
    )

    def check_relations(self) -> Iterator[str]:
        if self.version is not None and self.before is not None:
            yield "version and before are both set; version=N withdraws all after N, before=N all before it"


@dataclass(kw_only=True, slots=True)
class ApplyConfig(Section):
    model: str | None = option(
        None,
        "directory of versions, whose newest is the base, or a model directory",
        path=True,
        required="..., a directory of versions",
    )
    deltas: list[str] = option(
        [],
        "deltas (deltas/step_N) in order, or a run's deltas/ for all after the base",
        path=True,
        required="..., [a run's deltas/]",
    )
    output: str | None = option(
        None, "model directory to write; null: the next version of the directory", path=True
    )
    fitted: str | None = option(
        None, "dataset of the last delta's day, required if a table has grown", path=True
    )


@dataclass(kw_only=True, slots=True)
class ForgetConfig(Section):
    feature: str | None = option(
        None, "categorical feature that the values are of", required="..., a categorical feature"
    )
    keys: str | None = option(
        None, "file of the values, one a line as the logs have them", path=True, required="FILE"
    )
    directories: list[str] = option(
        [],
        "runs, checkpoints, exports, models and datasets, or directories of them: all that have the values, at once",
        path=True,
        required="[DIR,...], of runs, models and datasets",
    )


@dataclass(kw_only=True, slots=True)
class ClientConfig(Section):
    model: str | None = option(None, "name of the model at the server", required=NAME)
    data_path: str | None = option(
        None, "dataset with the model's features", path=True, required="..., a dataset directory"
    )
    url: str = option(URL, "address of the server: the embedded one, or Triton's HTTP")
    token_file: str | None = option(None, "file with the token that the server wants", path=True)
    split: str = option("test", "split of the rows that are sent")


@dataclass(kw_only=True, slots=True)
class AccuracyConfig(ClientConfig):
    split: str = option("test", "split to score; it needs labels")
    batch_size: int = option(4096, "rows per request", most=65_536, gt=0)
    concurrency: int = option(1, "requests at a time", most=MOST_REQUESTS, gt=0)
    max_steps: int | None = option(None, "requests at most; null: all rows", most=1 << 40, gt=0)
    output: str | None = option(None, "file for the numbers as JSON", path=True)


@dataclass(kw_only=True, slots=True)
class LatencyConfig(ClientConfig):
    metrics_url: str | None = option(
        None, "address of the server's metrics; null: url/metrics; Triton's is at port 8002"
    )
    batch_sizes: list[int] = option(
        [1, 256, 1024, 4096], "rows per request, one load each", most=65_536, filled=True, gt=0
    )
    concurrency: list[int] = option(
        [1, 4], "requests at a time, one load per number", most=MOST_REQUESTS, gt=0
    )
    rates: list[float] = option(
        [], "requests per second, one load per number; latencies begin when a request is due", gt=0
    )
    seconds: float = option(5.0, "time of each load", gt=0)
    warmup_s: float = option(1.0, "time before it that is not measured", ge=0)
    shared_memory: bool = option(
        False, "hand inputs over in shared memory; for Triton on this machine"
    )
    output: str | None = option(None, "folder for latency.csv and latency.png", path=True)

    def check_relations(self) -> Iterator[str]:
        if not (self.concurrency or self.rates):
            yield "concurrency and rates are empty; name a load"
