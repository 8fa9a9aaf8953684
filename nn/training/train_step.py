"""A training step: a pass over a batch, the check of its loss, and the updates. It knows no epochs, files or terminals."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from configs.messages import shown
from configs.schema import Amp, Component, Config
from dataloading.batch import Batch
from dataloading.keys.rekeyed import KEYS
from nn.distributed.errors import DivergedError
from nn.distributed.process_group import Ranks, open_channel
from nn.distributed.sharded_tensor import ShardedTensor, State, local_tensors
from nn.layers.parameter_average import ParameterAverage
from nn.layers.pass_state import PassLayer, PassState, attach
from nn.models.model import Model
from nn.models.tasks import Task
from nn.observability.annotations import annotate
from nn.sharding.batch_rows import BatchRows
from nn.sharding.sharded_tables import ShardedTables
from nn.tiers.initial_rows import InitialRows
from nn.training.dense_optimizer import DenseUpdate
from nn.training.gradient_bucket import GradientBucket
from nn.training.loss_readback import LossReadback
from nn.training.lr_scheduler import learning_rate_factor
from nn.training.pass_context import PassContext
from nn.training.prefetch import Prefetcher
from nn.training.step_runner import StepRunner

if TYPE_CHECKING:
    # Numba is imported only where there are keys.
    from dataloading.keys.key_maps import KeyMaps

KEYS_PREFIX = "keys."
"""Prefix of the state of maps of raw keys."""
AMP_DTYPES = {Amp.bf16: torch.bfloat16, Amp.fp16: torch.float16}


@dataclass(frozen=True, slots=True)
class StepResult:
    """Batch, loss and logits of a training step.

    On a GPU the next step overwrites the batch and this rank's logits, [B] or [B, T] of T tasks: queue what reads them before.
    The loss is the mean over the global batch, before the update.
    """

    batch: Batch
    loss: float
    logits: Tensor


def loss_scale(config: Config) -> float:
    """Return the factor on the loss before the backward pass; only fp16 needs one."""
    return config.train.loss_scale if config.train.amp is Amp.fp16 else 1.0


def chunk_rows(config: Config, world_size: int) -> int | None:
    """Return the rows of a rank that the dense component takes at once, or None for all of them."""
    if config.train.accumulate == 1:
        return None
    return math.ceil(config.train.batch_size // world_size / config.train.accumulate)


def capture_blocker(config: Config, ranks: Ranks) -> str | None:
    """Return the reason why the step is no CUDA graph, or None."""
    if ranks.device.type != "cuda":
        return "no GPU"
    return None if config.train.capture else "train.capture=false"


def autocast(amp: Amp, device_type: str) -> AbstractContextManager:
    dtype = AMP_DTYPES.get(amp)
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype)


def _pass_state(dense: Model, seed: int, ranks: Ranks, step: Tensor) -> PassState:
    """Return the state of the layers that depend on the `step`; their sums over ranks have a communicator of their own.

    The loss is summed beside them, behind the sort of the ids, for which they need not wait.
    """
    reductions: list[Callable[[Tensor], Tensor]] = []
    if any(isinstance(layer, PassLayer) and layer.reduces_over_ranks for layer in dense.modules()):
        channel = open_channel(ranks, "layers")
        reduce = ranks.all_reduce_sum, ranks.all_reduce_max
        reductions = [partial(function, channel=channel) for function in reduce]
    return PassState(seed, ranks.device, ranks.rank, *reductions, step=step)


class TrainStep:
    """Tables and dense component with their optimizers.

    `schedule` maps the number of earlier updates to the factor of the learning rates. `watch` is the context of all that waits
    for other ranks, but for saves and evaluations; `loading` returns that of a wait for the loader. `frozen` are components
    that keep their weights; `capture_blocker` is the reason why the step is no CUDA graph, or None.
    """

    def __init__(
        self,
        tables: ShardedTables,
        dense: Model,
        tasks: Sequence[Task],
        config: Config,
        ranks: Ranks,
        key_maps: "KeyMaps | None" = None,
    ) -> None:
        self.tables, self.table_names = tables, tables.names
        self.initial_rows: Mapping[str, InitialRows] = {
            f"tables.{name}": of for name, of in tables.initial_rows().items()
        }
        self.key_maps = key_maps
        self.dense = dense
        self.tasks = tasks
        if config.train.compile:
            # In place, so that parameters keep their names; a wrapper module would rename them.
            dense.compile()
        # Derived once: its options are checked anew each time, which takes half as long as all else of a step on the host.
        self._optimizer = config.effective_optimizer
        self._dense_update = DenseUpdate(
            dense.parameters(), self._optimizer, on_gpu=ranks.device.type == "cuda"
        )
        self.frozen = frozenset(config.train.freeze)
        dense.requires_grad_(Component.dense not in self.frozen)
        decay = config.train.ema_decay
        self._average = (
            None if decay is None else ParameterAverage(dict(dense.named_parameters()), decay)
        )
        self.schedule: Callable[[int], float] = partial(
            learning_rate_factor, config=config.scheduler
        )
        self._config, self._ranks = config, ranks
        self._readback = LossReadback(ranks.device)
        # The pass copies it to the device for the tables' updates: a launch of its own between two graphs is slow.
        self._pass_state = _pass_state(dense, config.seed, ranks, tables.scalars.step)
        self._pass_layers = attach(dense, self._pass_state)
        # By name: buffers that checkpoints do not hold, and their versions until the first step has left them so.
        self._constants = {
            name: (buffer, buffer._version)
            for name, buffer in dense.named_buffers()
            if not isinstance(dense.get_submodule(name.rpartition(".")[0]), PassLayer)
        }
        self._gradients = GradientBucket(
            dense.parameters(), tables.replicated_shapes, config.train.clip_norm
        )
        context = PassContext(
            dense=dense,
            tasks=tasks,
            gradients=self._gradients,
            readback=self._readback,
            ranks=ranks,
            autocast=partial(autocast, config.train.amp, ranks.device.type),
            loss_scale=loss_scale(config),
            update_tables=Component.tables not in self.frozen,
            update_replicated_in_pass=tables.update_replicated_in_pass,
            dense_update=self._dense_update if self._updates_dense_in_pass else None,
            table_scalars=tables.scalars,
            chunk_rows=chunk_rows(config, ranks.world_size),
            layers=self._pass_state if self._pass_layers else None,
        )
        self.capture_blocker = capture_blocker(config, ranks)
        self.runner = StepRunner(tables, context, config, capture=self.capture_blocker is None)
        self.watch: AbstractContextManager = nullcontext()
        self.loading: Callable[[], AbstractContextManager] = nullcontext

    def train(self, step: int, prefetcher: Prefetcher) -> StepResult:
        """Train on the next batch of `prefetcher`.

        `step` updates were made so far; it sets the learning rate.

        Raises DivergedError: on all ranks, before any update, if the loss or a gradient in fp16 is not finite. Raises
        ValueError: the schedule is not a finite number.
        """
        # Before the batch is taken: a schedule of the caller's own may be corrected.
        factor = self._factor_of(step)
        with self.watch:
            batch, rows = next(prefetcher)
            rekeyed = None
            if self.key_maps is not None and Component.tables not in self.frozen:
                rekeyed = self.key_maps.take_rekeyed()
            self._set_learning_rate(step, factor)
            if self._pass_layers:
                sizes = batch.layout.rows, batch.num_valid, batch.global_valid
                several = self._ranks.world_size > 1
                self._pass_state.set(step, *sizes, batch.global_rows if several else None)
            with annotate("pass"):
                logits = self.runner.train(batch, rows, rekeyed)
            prefetcher.start_next()
            # On a GPU it is known before the backward pass has run, with fp16 behind it.
            loss, is_good = self._readback.wait()
            if not is_good:
                raise DivergedError(self._what_diverged(step, loss))
            with annotate("update"):
                self._update(step)
            if self._constants:
                self._check_constants()
            return StepResult(batch, loss, logits)

    def _check_constants(self) -> None:
        """Raise `ValueError` if a pass has changed a buffer that checkpoints do not hold; at the first step alone."""
        now = dict(self.dense.named_buffers())
        for name, (buffer, version) in self._constants.items():
            if now.get(name) is not buffer or buffer._version != version:
                raise ValueError(
                    f"the model's forward() changes its buffer {name}, which checkpoints do not hold; let a layer that is "
                    "derived from nn.layers.pass_state.PassLayer have it, persistent, and change it in update()"
                )
        self._constants = {}

    def _factor_of(self, step: int) -> float:
        """Return the schedule's factor; numbers of NumPy could not be written to records."""
        factor = self.schedule(step)
        if isinstance(factor, Real):
            with suppress(OverflowError):
                if 0 <= (value := float(factor)) < math.inf:
                    return value
        raise ValueError(
            f"the schedule returned {shown(factor)} for step {step:,}; want a finite number from 0 on, by which the learning "
            "rates are multiplied"
        )

    @torch.no_grad()
    def predict(self, batch: Batch, rows: BatchRows) -> Tensor:
        """Return the logits, [B] or [B, T], of a batch, without training; the next call overwrites them."""
        return self.runner.predict(batch, rows)

    def set_training(self, mode: bool) -> None:
        """Switch tables and dense component between training and evaluation, which uses the average if there is one."""
        self.tables.train(mode)
        self.dense.train(mode)
        if self._average is not None:
            self._average.use(not mode)

    def close(self) -> None:
        """Release the CUDA graphs with their memory, and the files of tables on disk."""
        self.runner.builder.close()
        self.tables.close()

    def state_dict(self, *, with_optimizer: bool = True) -> State:
        """Return this rank's shards of weights and optimizer state, without copying them.

        Names do not depend on the sharding: `tables.<table>.weight`, `tables.<table>.momentum1`, `dense.<parameter>`,
        `dense.<buffer>`, `dense_ema.<parameter>` if there is an average,
        `dense_optimizer.<parameter>.<state>`, `dense_state.<layer>.<state>`.
        """
        state: State = {f"tables.{name}": value for name, value in self.tables.weights().items()}
        state |= self.dense_weights()
        state |= self._keys(with_counts=with_optimizer and Component.tables not in self.frozen)
        if not with_optimizer:
            return state
        state |= {f"tables.{name}": value for name, value in self.tables.optimizer_state().items()}
        for name, parameter in self.dense.named_parameters():
            for key, value in self.dense_optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    state[f"dense_optimizer.{name}.{key}"] = value
        for name, layer in self.dense.named_modules():
            if isinstance(layer, PassLayer):
                of_layer = layer.training_state().items()
                state |= {f"dense_state.{name}.{key}": value for key, value in of_layer}
        return state

    def _keys(self, *, with_counts: bool) -> State:
        """Return `keys.<table>.<name>` of raw keys: those of rows and, to train on, their facts; copies if this rank maps."""
        if self.key_maps is None:
            return {}
        state: State = {
            f"{KEYS_PREFIX}{name}": torch.from_numpy(values)
            for name, values in self.key_maps.state().items()
            if with_counts or name.endswith(f".{KEYS}")
        }
        if self.key_maps.maps_all:
            return state
        return {name: ShardedTensor(of.shape, of.dtype, []) for name, of in state.items()}

    def dense_weights(self) -> dict[str, Tensor]:
        """Return `dense.<name>` of weights and buffers and, if there is an average, `dense_ema.<name>`, without copies."""
        state = {f"dense.{name}": value.detach() for name, value in self.dense.named_parameters()}
        state |= {f"dense.{name}": value for name, value in self.dense.saved_buffers().items()}
        if self._average is not None:
            state |= {f"dense_ema.{name}": value for name, value in self._average.state().items()}
        return state

    def load_state_dict(self, state: State) -> None:
        """Copy values into weights and optimizer state; tensors that `state_dict` returned are in place already."""
        own = self.state_dict()
        keys = {
            name.removeprefix(KEYS_PREFIX): values.numpy()
            for name, value in state.items()
            if name.startswith(KEYS_PREFIX)
            for values in local_tensors(value)
        }
        if self.key_maps is not None and any(name.startswith(KEYS_PREFIX) for name in state):
            self.key_maps.load(keys)
        for name, value in state.items():
            if name.startswith(KEYS_PREFIX):
                continue
            for target, source in zip(local_tensors(own[name]), local_tensors(value), strict=True):
                if target.data_ptr() != source.data_ptr():
                    target.detach().copy_(source)
        self.tables.reload()

    def state_shapes(self, *, with_optimizer: bool = True) -> dict[str, torch.Size]:
        """Return the complete shape of every tensor of the state, for tables that only other ranks hold too."""
        shapes = {
            name: value.shape for name, value in self.state_dict(with_optimizer=False).items()
        }
        if with_optimizer:
            optimizer = self.tables.optimizer_shapes().items()
            shapes |= {f"tables.{name}": size for name, size in optimizer}
            for name, value in self.state_dict().items():
                shapes.setdefault(name, value.shape)
        return shapes

    def allocate_optimizer_state(self) -> None:
        """Create the dense optimizer's state, which torch does in the first step: here in a step that changes nothing."""
        self.dense_optimizer.zero_grad(set_to_none=False)
        rate = self.learning_rate
        self._dense_update.set_learning_rate(0.0)
        self.dense_optimizer.step()
        self._dense_update.set_learning_rate(rate)

    def extra_losses(self) -> dict[str, float]:
        """Return the latest step's sums over ranks of the model's further losses, for records; all ranks must call it."""
        shares = self.dense.logged_losses
        if not shares:
            return {}
        sums = self._ranks.all_reduce_sum(torch.stack([*shares.values()])).tolist()
        return {f"extra_loss.{name}": value for name, value in zip(shares, sums, strict=True)}

    @property
    def learning_rate(self) -> float:
        """The dense component's learning rate in the latest step."""
        return self._dense_update.learning_rate

    @property
    def dense_optimizer(self) -> torch.optim.Optimizer:
        return self._dense_update.optimizer

    @property
    def _updates_dense_in_pass(self) -> bool:
        return self._dense_update.is_in_pass and Component.dense not in self.frozen

    def _set_learning_rate(self, step: int, factor: float) -> None:
        self._dense_update.write_learning_rate(self._optimizer.lr * factor)
        self.tables.prepare_update(step, self._optimizer.table_lr * factor)

    def _update(self, step: int) -> None:
        if Component.tables not in self.frozen:
            self.tables.update_replicated_after_pass(self._gradients.further)
        if Component.dense not in self.frozen:
            if not self._updates_dense_in_pass:
                self.dense_optimizer.step()
            for layer in self._pass_layers:
                layer.update()
            if self._average is not None:
                self._average.update(step)

    def _what_diverged(self, step: int, loss: float) -> str:
        if math.isfinite(loss):
            return (
                "a gradient overflowed fp16; nothing was updated with it. Lower train.loss_scale, now "
                f"{self._config.train.loss_scale:g}, or train with train.amp=bf16, which needs no scale"
            )
        return (
            f"the loss is {loss} at step {step} (learning rate {self.learning_rate:g}); nothing was updated with it. Lower "
            "optimizer.lr, lengthen scheduler.warmup_steps, or look for bad numerical values in the data"
        )
