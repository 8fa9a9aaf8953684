"""Evaluation of the model on a split: exact AUC and log loss over all ranks."""

import time

from dataloading.loader import Loader
from nn.distributed.preemption import Heartbeat
from nn.distributed.process_group import Ranks
from nn.models.tasks import metrics_of
from nn.training.metrics import RankingMetrics
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep


class Evaluator:
    """Evaluation of a split; every row is scored once, for any number of ranks.

    Args:
        step: tables and dense component.
        loader: of the split.
        ranks: this process.
        max_steps: batches to score; None scores all.
        heartbeat: updated after every batch.
    """

    def __init__(
        self,
        step: TrainStep,
        loader: Loader,
        ranks: Ranks,
        max_steps: int | None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self._step = step
        self._loader = loader
        self._ranks = ranks
        self._heartbeat = heartbeat or Heartbeat()
        available = loader.steps_per_epoch
        self._num_batches = available if max_steps is None else min(max_steps, available)

    def run(self) -> dict[str, float | int]:
        """Return the metrics (`test_auc`, `test_log_loss`), `test_rows` and `eval_s`.

        All but `eval_s` are the same numbers on all ranks.
        """
        started = time.perf_counter()
        metrics = RankingMetrics(self._ranks.device, self._ranks)
        self._step.set_training(False)
        batches = self._loader.batches(0, self._num_batches)
        prefetcher = Prefetcher(batches, self._step.path, self._ranks.device)
        for batch, ids in prefetcher:
            logits = self._step.predict(batch, ids)
            prefetcher.start_next()
            metrics.update(logits, batch.labels, batch.num_valid)
            self._heartbeat.beat()
        self._step.set_training(True)
        measured = metrics.compute()
        return {
            **{metric.test_key: measured[metric.name] for metric in metrics_of(self._step.tasks)},
            "test_rows": measured["rows"],
            "eval_s": time.perf_counter() - started,
        }
