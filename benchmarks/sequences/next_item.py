"""Next-item prediction by the layers of `sasrec` alone, beside published numbers.

    python -m benchmarks.sequences.next_item --source DIR toys --device cuda --seeds 1 2 3

`next` (ml-100k), `beauty` and `toys` are the lists of `datasets.py`. The last item of a list tests, the one before chooses the
epoch, every earlier one trains. Events are rows of a table and places from the oldest event, then two `TransformerBlock`s and a
norm; a score is the product of a state and an item's row (SASRec, arXiv:1808.09781, equation 7), and the loss the cross-entropy
over all items, where the paper has one negative. HR@10 and NDCG@10 rank the item among all, and among those that the user
has not had, as S3-Rec does.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout

from benchmarks.launch import command_parser
from benchmarks.sequences.datasets import FILES, read_lists
from nn.layers.interactions.transformer import BlockKind, TransformerBlock
from nn.ops.jagged import Positions, offsets

LENGTH = 50
COLUMNS = 64
RATE = 0.5
"""Of all dropouts; that of the authors on sparse data."""
BLOCK = BlockKind(heads=2, expansion=4, residual="pre_norm", dropout=0.0, causal=True)
"""Dropout follows a block instead of its layers, whose own reads the state of a training step."""
PUBLISHED = {
    "beauty": "S3-Rec's table of SASRec, one negative: HR@10 .0605, NDCG@10 .0318 without seen items",
    "toys": "S3-Rec's table of SASRec, one negative: HR@10 .0675, NDCG@10 .0374 without seen items",
}


class NextItem(nn.Module):
    """States of the events of samples, [C, D]."""

    def __init__(self, items: int) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, COLUMNS), nn.Embedding(LENGTH, COLUMNS)
        for table in (self.items, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.ModuleList(TransformerBlock(COLUMNS, BLOCK) for _ in range(2))
        self.norm = nn.LayerNorm(COLUMNS)

    def forward(self, ids: Tensor, at: Positions) -> Tensor:
        """Return the state of every event."""
        x = dropout(self.items(ids) + self.places(offsets(at)[0]), RATE, self.training)
        for block in self.blocks:
            x = x + dropout(block(x, at) - x, RATE, self.training)
        return self.norm(x)


def batch(lists: Sequence[np.ndarray], device: str) -> tuple[Tensor, Positions]:
    """Return the last items of lists, one list after another."""
    lists = [items[-LENGTH:] for items in lists]
    lengths = torch.tensor([len(items) for items in lists], device=device)
    samples = torch.arange(len(lists), device=device).repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    ids = torch.from_numpy(np.concatenate(lists)).to(device)
    return ids, Positions(starts, lengths, samples, LENGTH)


def windows(lists: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the training items of all lists, the longer ones in pieces, in which each item but the first has one before it."""
    training = [items[:-2] for items in lists]
    pieces = [
        items[max(end - LENGTH - 1, 0) : end]
        for items in training
        for end in range(len(items), 1, -LENGTH)
    ]
    return [piece for piece in pieces if len(piece) > 1]


@torch.no_grad()
def measure(
    model: NextItem, lists: Sequence[np.ndarray], behind: int, device: str
) -> dict[str, float]:
    """Return HR@10 and NDCG@10 of the item `behind` the end of each list, given those before it."""
    model.eval()
    ranks: dict[str, list[Tensor]] = {"all": [], "unseen": []}
    for first in range(0, len(lists), 512):
        part = [items[: len(items) - behind + 1] for items in lists[first : first + 512]]
        ids, at = batch([items[:-1] for items in part], device)
        scores = model(ids, at)[at.starts + at.lengths - 1] @ model.items.weight.T
        target = scores.gather(1, torch.tensor([[items[-1]] for items in part], device=device))
        ranks["all"].append((scores > target).sum(1))
        rows = np.arange(len(part)).repeat([len(items) - 1 for items in part])
        had = np.stack([rows, np.concatenate([items[:-1] for items in part])])
        scores[tuple(torch.from_numpy(had).to(device))] = -torch.inf
        ranks["unseen"].append((scores > target).sum(1))
    found = {}
    for name, parts in ranks.items():
        rank = torch.cat(parts).double()
        found[f"HR@10 {name}"] = (rank < 10).double().mean().item()
        found[f"NDCG@10 {name}"] = (1 / torch.log2(rank + 2)).where(rank < 10, 0).mean().item()
    return found


def train(
    lists: Sequence[np.ndarray], epochs: int, patience: int, size: int, device: str
) -> Iterator[tuple[int, dict[str, float], dict[str, float]]]:
    """Yield the epoch, validation and test, of each epoch that is the best so far."""
    model = NextItem(1 + max(items.max() for items in lists)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    pieces, best, since = windows(lists), 0.0, 0
    for epoch in range(1, epochs + 1):
        model.train()
        for rows in torch.randperm(len(pieces)).split(size):
            chosen = [pieces[row] for row in rows]
            ids, at = batch([items[:-1] for items in chosen], device)
            next_ids, _ = batch([items[1:] for items in chosen], device)
            loss = cross_entropy(model(ids, at) @ model.items.weight.T, next_ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        validation = measure(model, lists, 2, device)
        since += 1
        if validation["NDCG@10 all"] > best:
            best, since = validation["NDCG@10 all"], 0
            yield epoch, validation, measure(model, lists, 1, device)
        if since == patience:
            return


def main() -> None:
    """Train on the dataset of the command line, and print each epoch that validates best so far."""
    parser = command_parser(__doc__)
    parser.add_argument("dataset", choices=FILES)
    parser.add_argument("--source", type=Path, required=True, help="folder of raw files")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--epochs", type=int, default=200, help="at most")
    parser.add_argument("--patience", type=int, default=10, help="epochs without a better one")
    parser.add_argument("--batch", type=int, default=128, help="lists, or pieces of 50 items")
    args = parser.parse_args()
    lists = [items for items, _ in read_lists(args.source / FILES[args.dataset])]
    for seed in args.seeds:
        torch.manual_seed(seed)
        for epoch, validation, test in train(
            lists, args.epochs, args.patience, args.batch, args.device
        ):
            numbers = "; ".join(f"{name} {value:.4f}" for name, value in test.items())
            best = validation["NDCG@10 all"]
            print(f"seed {seed} epoch {epoch}: validation {best:.4f}; test {numbers}", flush=True)
    print(PUBLISHED.get(args.dataset, ""))


if __name__ == "__main__":
    main()
