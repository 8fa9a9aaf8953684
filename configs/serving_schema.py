"""Every option of `python -m serving.export`, `serving.run` and `serving.rollback`, in the style of `configs/schema.py`."""

from dataclasses import dataclass
from enum import Enum

from configs.schema import option, require


class TableType(Enum):
    """Dtypes of served tables."""

    fp32 = "fp32"
    bf16 = "bf16"
    int8 = "int8"


@dataclass(kw_only=True, slots=True)
class ModelExportConfig:
    """Export of a checkpoint as a model directory."""

    checkpoint: str | None = option(
        None,
        "checkpoint to export: a run's checkpoints/best or checkpoints/step_N (required)",
        path=True,
    )
    output: str | None = option(
        None,
        "model directory to write, which must not exist yet; MODELS/1, MODELS/2 and so on are versions that "
        "serving.run model=MODELS swaps in (required)",
        path=True,
    )
    dtype: TableType = option(
        TableType.fp32,
        "of the tables: fp32, bf16 (half of the bytes) or int8 with a scale per row (a quarter)",
    )
    fitted: str | None = option(
        None,
        "dataset whose fit (vocabularies, statistics) turns raw values into features; null: the model takes ids only",
        path=True,
    )
    data: str | None = option(
        None,
        "dataset whose rows prove the export; null: the one that the run was trained on",
        path=True,
    )
    split: str = option("test", "split of these rows")
    rows: int = option(4096, "rows to compare with the training path", most=1 << 24)
    name: str | None = option(None, "name of the model in requests; null: that of model.name")
    onnx: bool = option(False, "write the dense component as ONNX too")

    def __post_init__(self) -> None:
        _require_set(self, checkpoint="a run's checkpoints/best", output="a directory")
        require(self.rows > 0, f"rows must be positive, got {self.rows}")


@dataclass(kw_only=True, slots=True)
class ServerConfig:
    """The embedded server."""

    model: str | None = option(
        None, "model directory, or a directory of versions 1, 2, ... (required)", path=True
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = option(8000, "port to listen on; 0 takes a free one", most=65_535)
    token_file: str | None = option(
        None, "file with a token that requests must bear (Authorization: Bearer TOKEN)", path=True
    )
    max_batch: int = option(
        4096, "rows of the largest batch; larger requests are split", most=65_536
    )
    batch_delay_ms: float = option(
        0.0,
        "longest time that a request waits for others to share its batch; 0: only those that came while the last was scored",
    )
    max_queue: int = option(
        65_536, "rows that may wait; a request that finds more is refused with 429", most=1 << 28
    )
    deadline_ms: float = option(
        1000.0,
        "a request that has waited longer is refused with 503 instead of being scored too late",
    )
    max_body_mib: int = option(64, "largest body of a request in MiB", most=4096)
    max_memory_mib: int = option(512, "bodies of all requests together in MiB", most=1 << 20)
    max_connections: int = option(
        1024, "connections at a time; further ones are refused with 503", most=65_536
    )
    timeout_s: float = option(
        30.0, "longest time that a client may take to send a request or to read its answer"
    )
    drain_s: float = option(20.0, "time to answer accepted requests after SIGTERM")
    poll_s: float = option(1.0, "time between two looks for a new version")
    verify: bool = option(
        True,
        "compare the SHA-256 of every file before a version serves; false: sizes alone, for tables of many GiB",
    )
    threads: int | None = option(None, "threads of a batch; null: one per core", most=4096)

    def __post_init__(self) -> None:
        _require_set(self, model="a model directory")
        for name in ("max_batch", "max_queue", "max_body_mib", "max_connections"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        require(
            self.max_memory_mib >= self.max_body_mib,
            f"max_memory_mib={self.max_memory_mib} is less than max_body_mib={self.max_body_mib}",
        )
        for name in ("deadline_ms", "timeout_s", "poll_s"):
            require(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        for name in ("batch_delay_ms", "drain_s", "port"):
            require(
                getattr(self, name) >= 0, f"{name} must not be negative, got {getattr(self, name)}"
            )
        require(
            self.threads is None or self.threads > 0,
            f"threads must be positive or null, got {self.threads}",
        )


@dataclass(kw_only=True, slots=True)
class RollbackConfig:
    """Return to an earlier version."""

    model: str | None = option(None, "directory of versions (required)", path=True)
    version: int | None = option(
        None, "version to return to; null: the one before the newest", most=1 << 62
    )

    def __post_init__(self) -> None:
        _require_set(self, model="a directory of versions")


def _require_set(config: object, **meanings: str) -> None:
    for name, meaning in meanings.items():
        require(bool(getattr(config, name)), f"no {name}: set {name}=..., {meaning}")
