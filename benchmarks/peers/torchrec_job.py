"""Training speed of what a user builds from TorchRec alone, on a row's tables, ids and batch size; one process per rank.

    torchrun --nproc-per-node 1 -m benchmarks.peers.torchrec_job ROW --dataset DIR --out FILE --dense compiled

Nothing of the recipe is measured: TorchRec's planner, DistributedModelParallel, TrainPipelineSparseDist, its DLRM or DLRM_DCN,
and FBGEMM's fused optimizers. The recipe only reads the row's configuration and `BATCHES` batches of its dataset, which then
lie in pinned memory, so no loader is measured either. Learning rates are constant, and no metric is computed. Of a row with
events the dense component is the recipe's (`torchrec_events.py`).
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.dlrm import DLRM, DLRM_DCN
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.launch import spread
from benchmarks.peers.torchrec_events import EventModel
from benchmarks.rows import ROWS
from configs.schema import Config
from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.source import Source

BATCHES = 8
WARM_UP_STEPS = 30
STEPS_PER_RECORD = 50
RULES = {
    "sgd": (torch.optim.SGD, torch.optim.SGD),
    "adam": (torch.optim.Adam, torch.optim.Adam),
    "adagrad": (torch.optim.Adagrad, torch.optim.Adagrad),
    "rowwise_adagrad": (RowWiseAdagrad, torch.optim.Adagrad),
}
"""Optimizer of the recipe: that of the tables, that of the dense component."""


class Trained(nn.Module):
    """TorchRec's model with its loss, the dense component in bf16 and compiled, or as shipped (TF32)."""

    def __init__(
        self, model: DLRM | EventModel, device: torch.device, *, is_compiled: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_compiled)
        if isinstance(model, EventModel):  # it has kernels
            model.rest.to(device)
            return
        for part in (model.dense_arch, model.inter_arch, model.over_arch):
            part.to(device)
            if is_compiled:
                part.compile()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the mean loss of a batch, and it again, detached, as TorchRec's pipeline wants it."""
        with self.autocast:
            logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.labels)
        return loss, (loss.detach(),)


def main() -> None:
    """Train a row for some steps and write its speed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("row", choices=[*ROWS])
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dense", choices=["compiled", "shipped"], required=True)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch-size", type=int, help="over all ranks; otherwise the row's")
    args = parser.parse_args()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
    # The device is named for NCCL alone, which otherwise guesses it.
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    config = ROWS[args.row].config()
    spec = FeatureSpec.load(args.dataset)
    source = open_dataset(spec)
    num_rows = (args.batch_size or config.train.batch_size) // num_ranks
    batches = [
        read_batch(source, (num_ranks * at + rank) * num_rows, num_rows) for at in range(BATCHES)
    ]
    model, optimizer = build(config, spec, num_rows, device, is_compiled=args.dense == "compiled")
    if on_gpu:
        batches = [batch.pin_memory() for batch in batches]
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    speeds = measure(pipeline, cycle(batches), num_rows, args.steps)
    if rank == 0:
        result = {
            "row": args.row,
            "dense": args.dense,
            "world_size": num_ranks,
            "global_batch_size": num_rows * num_ranks,
            "samples_per_s": spread([speed * num_ranks for speed in speeds]),
            "peak_hbm_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def read_batch(source: Source, start: int, num_rows: int) -> Batch:
    """Return rows `start` to `start + num_rows` of the train split as TorchRec's batch, beginning again at its end."""
    start %= source.num_rows("train") - num_rows + 1
    columns = source.read("train", np.array([[start, start + num_rows]]))
    lengths = [
        np.full(num_rows, feature.hotness) if of_rows is None else of_rows
        for feature, of_rows in zip(source.spec.categorical, columns.lengths, strict=True)
    ]
    ids = np.concatenate(columns.ids)
    return Batch(
        torch.from_numpy(np.array(columns.events or columns.numerical)),
        KeyedJaggedTensor(
            keys=[feature.name for feature in source.spec.categorical],
            values=torch.from_numpy(ids).long(),
            lengths=torch.from_numpy(np.concatenate(lengths)).long(),
            stride=num_rows,
        ),
        torch.from_numpy(np.array(columns.labels)),
    )


def build(
    config: Config,
    spec: FeatureSpec,
    num_rows: int,
    device: torch.device,
    *,
    is_compiled: bool,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Return the sharded model and the optimizer of all its parameters; `num_rows` per rank and batch."""
    rule = config.optimizer.embedding_name or config.optimizer.name
    tables, dense = RULES[rule][0], RULES[config.optimizer.name][1]
    inner = EventModel(config, spec) if spec.sequences else dlrm(config.model, spec)
    model = Trained(inner, device, is_compiled=is_compiled)
    # As in the first steps of a warm-up: nothing diverges, and the speed is the same.
    rate = config.optimizer.lr / 1000
    of_tables = [p for p in inner.parameters() if p.is_meta]
    apply_optimizer_in_backward(tables, of_tables, {"lr": rate})
    is_bf16 = is_compiled and device.type == "cuda"
    lookup = {
        "output_dtype": SparseType.BF16 if is_bf16 else SparseType.FP32,
        "bounds_check_mode": BoundsCheckMode.NONE,
    }
    kinds = EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
    sharders = [kind(fused_params=lookup) for kind in kinds]
    topology: dict[str, Any] = {"compute_device": device.type}
    if device.type == "cuda":
        topology["hbm_cap"] = int(0.9 * torch.cuda.get_device_properties(device).total_memory)
    num_ranks = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=num_ranks, local_world_size=num_ranks, **topology),
        batch_size=num_rows,
        constraints=constraints(config, spec),
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    parameters = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    of_dense = KeyedOptimizerWrapper(parameters, lambda parameters: dense(parameters, lr=rate))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, of_dense])


def dlrm(options: Any, spec: FeatureSpec) -> DLRM:
    """Return TorchRec's model of the recipe's sizes, one table per feature."""
    tables = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"t_{feature.name}",
                embedding_dim=options.embedding_dim,
                num_embeddings=feature.cardinality,
                feature_names=[feature.name],
            )
            for feature in spec.categorical
        ],
        device=torch.device("meta"),
    )
    sizes = (tables, len(spec.numerical), list(options.bottom_mlp), list(options.top_mlp))
    if options.name == "dlrm":
        return DLRM(*sizes)
    cross = options.cross
    return DLRM_DCN(*sizes, dcn_num_layers=cross.num_layers, dcn_low_rank_dim=cross.projection_dim)


def constraints(config: Config, spec: FeatureSpec) -> dict[str, ParameterConstraints]:
    """Return the row's sharding types and the mean number of ids per table, for TorchRec's planner."""
    single = config.sharding.tables
    types = [kind.value for kind in config.sharding.types]
    return {
        f"t_{feature.name}": ParameterConstraints(
            sharding_types=[single[feature.name].value] if feature.name in single else types,
            compute_kernels=["fused"] if "data_parallel" not in types else None,
            pooling_factors=[feature.hotness or feature.mean_hotness],
        )
        for feature in spec.categorical
    }


def measure(
    pipeline: TrainPipelineSparseDist,
    batches: Iterator[Batch],
    num_rows: int,
    steps: int,
    warm_up: int = WARM_UP_STEPS,
) -> list[float]:
    """Return samples per second of this rank, one value per `STEPS_PER_RECORD` steps after the warm-up."""

    def train(num_steps: int) -> float:
        start = time.perf_counter()
        for _ in range(num_steps):
            pipeline.progress(batches)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return num_steps * num_rows / (time.perf_counter() - start)

    train(warm_up)
    return [train(STEPS_PER_RECORD) for _ in range(steps // STEPS_PER_RECORD)]


if __name__ == "__main__":
    main()
