"""Training of a run and of the plain reference on the same batches, and resuming of a run, with any number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from nn.distributed.sharded_tensor import local_tensors
from tests.helpers.composed import Built, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.nn.checkpoint.test_state import restored, save
from tests.nn.training.test_train_step import parts, reference_of, whole
from tests.reference import Reference

NUM_STEPS = 6
TOLERANCE = 1e-6
RESUMED_STEPS = 6


class Updates(Protocol):
    """Optimizer of some parameters of the reference."""

    def step(self) -> object:
        """Update them by their gradients."""


MakeUpdates = Callable[[list[nn.Parameter], list[nn.Parameter]], list[Updates]]
"""Returns optimizers for the tables, whose gradients are sparse, and for the dense parameters; called in order."""


def train_and_compare(overrides: list[str], make_updates: MakeUpdates, num_ranks: int) -> None:
    """Assert that a run trains as plain PyTorch does: every loss, and all weights at the end.

    Args:
        overrides: options of a run whose features have one id.
        make_updates: optimizers of the reference.
        num_ranks: ranks of the run.
    """
    with ranks_of_cpu():
        built = build(compose_config(*overrides))
        reference = reference_of(built)
        batches = list(built.train_loader.batches(0, NUM_STEPS))
        losses = built.train(0, NUM_STEPS)
        trained, alone = reference_of(built), whole([parts(built)])
    wanted = _train(reference, batches, make_updates)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=TOLERANCE)
    for (name, ours), theirs in zip(
        trained.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE, msg=name)
    if num_ranks > 1:
        results = run_distributed(_losses_and_weights, num_ranks, overrides)
        assert results[0][0] == results[1][0]
        torch.testing.assert_close(results[0][0], losses, rtol=0, atol=TOLERANCE)
        together = whole([weights for _, weights in results])
        torch.testing.assert_close(together, alone, rtol=0, atol=TOLERANCE)


def _train(reference: Reference, batches: list, make_updates: MakeUpdates) -> list[float]:
    tables = list(reference.tables.parameters())
    dense = [p for name, p in reference.named_parameters() if not name.startswith("tables.")]
    updates, losses = make_updates(tables, dense), []
    for batch in batches:
        ids = batch.ids.values().view(-1, len(batch.labels)).T.long()
        loss = binary_cross_entropy_with_logits(reference(batch.numerical, ids), batch.labels)
        reference.zero_grad()
        loss.backward()
        for update in updates:
            update.step()
        losses.append(loss.item())
    return losses


def _losses_and_weights(overrides: list[str]) -> tuple[list[float], dict]:
    with ranks_of_cpu():
        built = build(compose_config(*overrides))
        return built.train(0, NUM_STEPS), parts(built)


class RowUpdates:
    """Optimizer of tables that updates the rows of a batch only; the reference of a table optimizer derives from it.

    Args:
        tables: with sparse gradients.
    """

    def __init__(self, tables: list[nn.Parameter]) -> None:
        self.tables = tables

    @torch.no_grad()
    def step(self) -> None:
        """Update each row that the batch looked up, by the sum of its gradients."""
        for index, table in enumerate(self.tables):
            gradient = table.grad.coalesce()
            (rows,) = gradient.indices()
            table[rows] = self.new_rows(index, rows, table[rows], gradient.values())

    def new_rows(self, index: int, rows: Tensor, weights: Tensor, gradients: Tensor) -> Tensor:
        """Return the updated weights [n, D] of `rows` [n] of a table."""
        raise NotImplementedError


def resumes_bit_by_bit(directory: Path, overrides: list[str], num_ranks: int) -> bool:
    """Return whether a restored run has the losses and the complete state of an uninterrupted one, bit by bit."""
    if num_ranks == 1:
        return _resumes(directory, overrides)
    return all(run_distributed(_resumes, num_ranks, directory, overrides))


def _resumes(directory: Path, overrides: list[str]) -> bool:
    half = RESUMED_STEPS // 2
    with ranks_of_cpu():
        uninterrupted = build(compose_config(*overrides))
        losses = uninterrupted.train(0, RESUMED_STEPS)
        first = build(compose_config(*overrides))
        first.train(0, half)
        second = restored(save(directory, first, half), *overrides)
        rest = second.train(half, RESUMED_STEPS - half)
        wanted, got = local_state(uninterrupted), local_state(second)
    return (
        rest == losses[half:]
        and wanted.keys() == got.keys()
        and all(torch.equal(wanted[name], got[name]) for name in wanted)
    )


def local_state(built: Built) -> dict[str, Tensor]:
    """Return copies of this rank's weights and optimizer states."""
    return {
        f"{name} {index}": tensor.detach().clone()
        for name, value in built.step.state_dict().items()
        for index, tensor in enumerate(local_tensors(value))
    }
