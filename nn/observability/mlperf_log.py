"""The benchmark's log of a run, `mlperf.log`: lines of mllog, for the checkers of the package mlperf-logging.

A line is `:::MLLOG` and one JSON object. The keys are those that ruleset 6.1.0 requires of `dlrmv4`, and 6.0.0 of
`dlrm_dcnv2`; docs/mlperf.md describes the way from a log to a submission.
"""

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from configs.schema import Amp, Config, Fp8
from dataloading.dataset.durable_files import AppendedFile
from nn.observers.observer import Loop, Observer

MLPERF_LOG = "mlperf.log"
BENCHMARKS = {"hstu": "dlrmv4", "dcnv2": "dlrm_dcnv2"}

OPTIMIZERS = {"adam": "Adam", "rowwise_adagrad": "RowWiseAdagrad"}
"""Names that the rules of `dlrmv4` have for optimizers."""

POINT, START, STOP = "POINT_IN_TIME", "INTERVAL_START", "INTERVAL_END"

RESUMED = (
    "log.mlperf: this run starts from a checkpoint, and a benchmark's run is one contiguous period from new weights to "
    "the target; {path} therefore ends with status aborted and is no valid result"
)
"""Warning of a run that is no result of the benchmark, whatever AUC it reaches."""


def now_ms() -> int:
    """Return milliseconds since the epoch, the clock of all lines."""
    return time.time_ns() // 1_000_000


def settings_of(
    config: Config, *, machine: str, train_rows: int, eval_rows: int, on_gpu: bool, num_ranks: int
) -> dict[str, Any]:
    """Return the values of the keys that are known before training.

    `machine`: its name, unless `log.mlperf_platform` has one. `on_gpu`: whether the run uses GPUs, which may multiply in TF32.
    """
    log, optimizer, scheduler = config.log, config.effective_optimizer, config.scheduler
    is_hstu, batch_size = config.model.name == "hstu", config.train.batch_size
    names = dict.fromkeys([optimizer.name, optimizer.table_name])
    precision = _precision(config, on_gpu)
    values: dict[str, Any] = {
        "submission_benchmark": BENCHMARKS[config.model.name],
        "submission_division": log.mlperf_division.value,
        "submission_org": log.mlperf_org,
        "submission_platform": log.mlperf_platform or machine,
        "seed": config.seed,
        "global_batch_size": batch_size,
        "micro_batch_size": batch_size // num_ranks // config.train.accumulate,
        "gradient_accumulation_steps": config.train.accumulate,
        "train_samples": train_rows,
        "eval_samples": eval_rows,
        # DCNv2 has one optimizer for both components, thus one name and one rate.
        "opt_name": "/".join(str(name) for name in names),
        "opt_base_learning_rate": optimizer.lr,
        "opt_weight_decay": optimizer.weight_decay or optimizer.embedding_l2,
        "opt_learning_rate_warmup_steps": scheduler.warmup_steps,
        "opt_learning_rate_decay_start_step": scheduler.decay_start_step or 0,
        "opt_learning_rate_decay_steps": scheduler.decay_steps,
        "lowest_numerical_precision_in_linear": precision if config.train.fp8 is Fp8.off else "fp8",
        "lowest_numerical_precision_in_comm": "fp32",
        "config_filename": f"configs/experiment/{config.recipe}.yaml",
    }
    kinds = ("tensor", "pipeline", "context", "expert")
    values |= {f"{kind}_parallelism": 1 for kind in kinds}
    if is_hstu:
        every = config.eval.every or train_rows / batch_size / config.eval.per_epoch
        start = scheduler.first_step / max(scheduler.warmup_steps, 1)
        return values | {
            "opt_name": OPTIMIZERS.get(optimizer.name, str(optimizer.name)),
            "opt_adam_beta_1": optimizer.beta1,
            "opt_adam_beta_2": optimizer.beta2,
            "opt_adam_epsilon": optimizer.eps,
            "opt_gradient_clip_norm": config.train.clip_norm,
            "opt_sparse_name": OPTIMIZERS.get(optimizer.table_name, str(optimizer.table_name)),
            "opt_sparse_base_learning_rate": optimizer.table_lr,
            "opt_learning_rate_warmup_start_lr": optimizer.lr * start,
            # The rules round the steps between evaluations up.
            "eval_every_data_pct": round(every * batch_size / train_rows, 4),
            # The reference's bound; its longest sample, and ours, has 4,095 positions.
            "max_sequence_length": 4096,
            "lowest_numerical_precision_in_attn": precision,
        }
    if optimizer.table_lr != optimizer.lr:
        values["opt_sparse_base_learning_rate"] = optimizer.table_lr
    if "adagrad" in names:
        values |= {
            "opt_adagrad_epsilon": optimizer.eps,
            # Both are fixed: the rate has no decay of its own, and sums of squares start at zero.
            "opt_adagrad_learning_rate_decay": 0,
            "opt_adagrad_initial_accumulator_value": 0,
        }
    return values


def _precision(config: Config, on_gpu: bool) -> str:
    """Return mllog's name of the format of the dense component's matrix products that are not in 8 bits."""
    if config.train.amp is not Amp.off:
        return {Amp.bf16: "bfloat16", Amp.fp16: "fp16"}[config.train.amp]
    return "tf32" if config.train.tf32 and on_gpu else "fp32"


class MlperfLog(Observer, AbstractContextManager["MlperfLog"]):
    """Writer of the log; exists on rank 0 only. A context manager: a run that ends before its target has status aborted.

    Steps count updates from the start of the run; lines have them as the fraction of an epoch, as the rules number them.
    `restored_step`: updates of the checkpoint that the run starts from; None for new weights. Raises OSError: the file cannot
    be written; so do all methods.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        steps_per_epoch: int,
        target: float,
        restored_step: int | None = None,
    ) -> None:
        if restored_step is None:
            path.unlink(missing_ok=True)
        self._file = AppendedFile(path, is_text=True)
        self._settings = settings
        self._steps_per_epoch = steps_per_epoch
        self._target = target
        self._restored_step = restored_step
        self._num_steps = restored_step or 0
        self._block_epoch = self._epoch
        self._is_running = False

    def __exit__(self, *exception: object) -> None:
        if self._is_running:
            self._stop("aborted")
        self._file.close()

    def start(self, started_ms: int, *, is_cache_cleared: bool) -> None:
        """Write the lines up to the first step: initialisation ends, and the clock of the run starts.

        No row may have been read before. `is_cache_cleared`: whether the system's caches were cleared before the run.
        """
        self._write(POINT, "cache_clear", is_cache_cleared, time_ms=started_ms)
        self._write(START, "init_start", time_ms=started_ms)
        for key, value in self._settings.items():
            self._write(POINT, key, value)
        if self._restored_step is not None:
            self._write(POINT, "starts_from_checkpoint_of_step", self._restored_step)
        self._write(STOP, "init_stop")
        self._write(START, "run_start")
        self._is_running = True
        self._write(START, "epoch_start", epoch_num=0)
        self._start_block()

    def on_evaluation_begin(self, loop: Loop) -> None:
        self._num_steps = loop.num_steps
        self._write(STOP, "block_stop", first_epoch_num=self._block_epoch, **self._samples)
        self._write(START, "eval_start", epoch_num=self._epoch)

    def on_evaluation(self, loop: Loop, record: Mapping[str, Any], *, is_final: bool) -> None:
        """Write the result of an evaluation, and the end of the run if it is the last one; a final one follows that end."""
        if is_final:
            return
        auc = loop.auc_of(record)
        # JSON has no nan, which the AUC of a single class is.
        value = None if math.isnan(auc) else auc
        self._write(POINT, "eval_accuracy", value, epoch_num=self._epoch, **self._samples)
        self._write(STOP, "eval_stop", epoch_num=self._epoch)
        if not loop.ends_day:
            self._start_block()
            return
        self._write(STOP, "epoch_stop", epoch_num=0)
        is_valid = self._restored_step is None
        self._stop("success" if is_valid and auc >= self._target else "aborted")

    def _start_block(self) -> None:
        self._block_epoch = self._epoch
        self._write(START, "block_start", first_epoch_num=self._block_epoch, **self._samples)

    def _stop(self, status: str) -> None:
        self._is_running = False
        self._write(STOP, "run_stop", status=status, epoch_num=self._epoch)
        self._file.sync()

    @property
    def _epoch(self) -> float:
        return self._num_steps / self._steps_per_epoch

    @property
    def _samples(self) -> dict[str, int]:
        return {"samples_count": self._num_steps * self._settings["global_batch_size"]}

    def _write(
        self, kind: str, key: str, value: Any = None, time_ms: int | None = None, **metadata: Any
    ) -> None:
        # The checker of seeds wants the line of the source that wrote a line of the log.
        caller = sys._getframe(1)
        source = {"file": Path(__file__).name, "lineno": caller.f_lineno}
        line = {
            "namespace": "",
            "time_ms": now_ms() if time_ms is None else time_ms,
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": source | metadata,
        }
        self._file.append(f":::MLLOG {json.dumps(line)}\n".encode())
