"""Plain single-process PyTorch versions of DLRM and DCNv2, as a reference for the recipe.

No code of the recipe is imported. The formulas are written independently from the papers, with pairs by `itertools`, no
padding, `nn.Embedding` and `torch.optim`. The dataset directory is read with numpy alone. Tests copy weights and compare
logits. The command trains on a dataset directory and prints the test AUC:

    python -m tests.reference --data DIR --model dlrm --seed 1
"""

import argparse
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional


class ReferenceMLP(nn.Sequential):
    """Linear layers with ReLU after all of them, or after all but the last."""

    def __init__(self, widths: list[int], *, final_relu: bool) -> None:
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layer = nn.Linear(inputs, outputs)
            # Keras: GlorotNormal truncates a normal with this standard deviation at two deviations. The deviation of the
            # result is sqrt(2 / (in + out)).
            std = math.sqrt(2 / (inputs + outputs)) / 0.8796256610342398
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
            nn.init.normal_(layer.bias, std=outputs**-0.5)
            layers += [layer, nn.ReLU()]
        super().__init__(*(layers if final_relu else layers[:-1]))


@dataclass(frozen=True, slots=True)
class ReferenceCross:
    """Cross network of DCNv2.

    Attributes:
        num_layers: cross layers.
        rank: rank of each cross layer's weight; None or 0 for full rank.
        parallel: cross and deep networks side by side, otherwise stacked.
    """

    num_layers: int
    rank: int | None
    parallel: bool = False


class Reference(nn.Module):
    """Both models: DLRM if `cross` is None, else DCNv2."""

    def __init__(
        self,
        cardinalities: list[int],
        num_numerical: int,
        dim: int,
        bottom: list[int],
        top: list[int],
        cross: ReferenceCross | None = None,
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim, sparse=True) for rows in cardinalities)
        for table in self.tables:
            bound = table.num_embeddings**-0.5
            nn.init.uniform_(table.weight, -bound, bound)
        self.bottom = ReferenceMLP([num_numerical, *bottom], final_relu=True)
        self.structure = cross
        if cross is None:
            vectors = len(cardinalities) + 1
            self.top = ReferenceMLP([dim + math.comb(vectors, 2), *top], final_relu=False)
            return
        width = bottom[-1] + dim * len(cardinalities)
        rank = cross.rank
        shapes = [(width, rank), (rank, width)] if rank else [(width, width)]
        self.cross = nn.ModuleList(
            nn.ParameterList(nn.Parameter(torch.empty(after, before)) for before, after in shapes)
            for _ in range(cross.num_layers)
        )
        for weight in self.cross.parameters():
            nn.init.trunc_normal_(weight, std=0.05, a=-0.1, b=0.1)
        self.cross_bias = nn.Parameter(torch.zeros(cross.num_layers, width))
        if cross.parallel:
            self.deep = ReferenceMLP([width, *top[:-1]], final_relu=True)
            self.top = ReferenceMLP([width + top[-2], 1], final_relu=False)
        else:
            self.top = ReferenceMLP([width, *top], final_relu=False)

    def forward(self, numerical: Tensor, ids: Tensor) -> Tensor:
        """Map numerical [B, N] and single-hot ids [B, F] to logits [B]."""
        vectors = [table(column) for table, column in zip(self.tables, ids.T, strict=True)]
        return self.head(numerical, vectors)

    def head(self, numerical: Tensor, vectors: list[Tensor]) -> Tensor:
        """Map numerical [B, N] and F embeddings [B, D] to logits [B]."""
        vectors = [self.bottom(numerical), *vectors]
        if self.structure is None:
            # Combinations come as (0, 1), (0, 2), ...; the recipe sorts pairs by the larger index.
            pairs = sorted(itertools.combinations(range(len(vectors)), 2), key=lambda p: p[::-1])
            first, second = map(list, zip(*pairs, strict=True))
            stack = torch.stack(vectors, dim=1)
            products = (stack[:, first] * stack[:, second]).sum(dim=2)
            return self.top(torch.cat([vectors[0], products], dim=1)).flatten()
        start = x = torch.cat(vectors, dim=1)
        for weights, bias in zip(self.cross, self.cross_bias, strict=True):
            y = x
            for weight in weights:
                y = y @ weight.T
            x = start * (y + bias) + x
        if self.structure.parallel:
            x = torch.cat([x, self.deep(start)], dim=1)
        return self.top(x).flatten()


def read_split(root: Path, split: str) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Read a single-hot split binary directory: cardinalities, numerical [N, n], ids [N, F], labels [N]."""
    spec = yaml.safe_load((root / "feature_spec.yaml").read_text())
    features, channels = spec["feature_spec"], spec["channel_spec"]
    files = {tuple(c["features"]): root / c["files"][0] for c in spec["source_spec"][split]}

    def column(*names: str) -> np.ndarray:
        return np.fromfile(files[names], dtype=features[names[0]]["dtype"])

    numerical = column(*channels["numerical"]).reshape(-1, len(channels["numerical"]))
    ids = np.stack([column(name).astype(np.int64) for name in channels["categorical"]], axis=1)
    return (
        [features[name]["cardinality"] for name in channels["categorical"]],
        torch.from_numpy(numerical.astype(np.float32)),
        torch.from_numpy(ids),
        torch.from_numpy(column(*channels["label"]).astype(np.float32)),
    )


def roc_auc(labels: Tensor, scores: Tensor) -> float:
    """Return the probability that a click outranks a non-click; ties count half."""
    _, inverse, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0) - (counts - 1) / 2)[inverse].double()
    positives = labels.sum().double()
    negatives = len(labels) - positives
    outranked = ranks[labels > 0].sum() - positives * (positives + 1) / 2
    return (outranked / (positives * negatives)).item()


def train(args: argparse.Namespace, seed: int) -> dict[str, float]:
    """Train one model and return its AUC and log loss on the test split."""
    torch.manual_seed(seed)
    cardinalities, numerical, ids, labels = read_split(args.data, "train")
    cross = ReferenceCross(args.cross_layers, args.rank, args.parallel)
    model = Reference(
        cardinalities,
        numerical.shape[1],
        args.dim,
        args.bottom,
        args.top,
        cross if args.model == "dcnv2" else None,
    )
    tables = list(model.tables.parameters())
    dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
    # SparseAdam updates the rows of the batch only, as the fused optimizers do.
    optimizers = [
        torch.optim.SparseAdam(tables, lr=args.lr, eps=args.eps),
        torch.optim.Adam(dense, lr=args.lr, eps=args.eps),
    ]
    generator = torch.Generator().manual_seed(seed)
    num_steps = args.epochs * math.ceil(len(labels) / args.batch_size)
    step = 0
    for _ in range(args.epochs):
        for rows in torch.randperm(len(labels), generator=generator).split(args.batch_size):
            step += 1
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = (
                    args.lr * (1 - step / num_steps) ** args.decay_power
                )
            logits = model(numerical[rows], ids[rows])
            loss = functional.binary_cross_entropy_with_logits(logits, labels[rows])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    _, numerical, ids, labels = read_split(args.data, "test")
    with torch.no_grad():
        batches = zip(numerical.split(4096), ids.split(4096), strict=True)
        logits = torch.cat([model(*batch) for batch in batches])
    loss = functional.binary_cross_entropy_with_logits(logits, labels).item()
    return {"test_auc": roc_auc(labels, logits), "test_log_loss": loss}


def main() -> None:
    """Train once per seed of the command line, and print one line per seed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="dataset directory")
    parser.add_argument("--model", choices=["dlrm", "dcnv2"], default="dlrm")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--bottom", type=int, nargs="+", default=[64, 32, 16])
    parser.add_argument("--top", type=int, nargs="+", default=[128, 64, 1])
    parser.add_argument("--cross-layers", type=int, default=3)
    parser.add_argument("--rank", type=int, default=64, help="0 for full rank")
    parser.add_argument("--parallel", action="store_true", help="parallel cross and deep networks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay-power", type=float, default=0.0, help="0 keeps the rate constant")
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    aucs = []
    for seed in args.seed:
        result = train(args, seed)
        aucs.append(result["test_auc"])
        print(f"seed {seed}: " + " ".join(f"{k}={v:.5f}" for k, v in result.items()))
    print(f"mean test_auc over {len(aucs)} seeds: {np.mean(aucs):.5f}")


if __name__ == "__main__":
    main()
