"""A pass of the trained model over batches, without training: evaluation and scores are made by it."""

from collections.abc import Generator, Iterator

import torch
from torch import Tensor

from dataloading.batch import Batch
from nn.training.prefetch import Prefetcher
from nn.training.train_step import TrainStep


def predictions(
    step: TrainStep, batches: Iterator[Batch], device: torch.device
) -> Generator[tuple[Batch, Tensor], None, None]:
    """Yield each batch, on the device, with its logits [B] or [B, T]; the next batch overwrites them.

    All ranks must iterate alike, to the end. The step is in evaluation mode meanwhile, and uses the average of the dense
    component if there is one.
    """
    step.set_training(False)
    prefetcher = Prefetcher(batches, step.runner, device)
    for batch, rows in prefetcher:
        logits = step.predict(batch, rows)
        prefetcher.start_next()
        yield batch, logits
    step.set_training(True)
