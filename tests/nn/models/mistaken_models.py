"""Models with usual mistakes, for `test_own_layers.py`; not in that file, whose functions are on the stack of every call."""

import torch
from torch import nn

from configs.schema import ModelConfig
from nn.layers.pass_state import PassLayer
from nn.models.model import Model


class Linear(Model):
    """A logistic regression on the embeddings."""

    Options = ModelConfig

    def __init__(self, options, spec) -> None:
        super().__init__()
        self.columns = len(spec.categorical) * options.embedding_dim
        self.out = nn.Linear(self.columns, 1)
        self.more()

    def more(self) -> None:
        """Make further parts."""

    def forward(self, numerical, embeddings):
        return self.out(self.changed(self.join_inputs(numerical, embeddings))).squeeze(1).float()

    def changed(self, x):
        return x


class InAList(Linear):
    def more(self):
        self.hidden = [nn.Linear(self.columns, self.columns)]

    def changed(self, x):
        return self.hidden[0](x)


class InADict(Linear):
    def more(self):
        self.scales = {"one": torch.ones(self.columns, requires_grad=True)}


class PlainTensor(Linear):
    def more(self):
        self.scale = torch.rand(self.columns)


class ListedTwice(Linear):
    """Registered layers may stand in a list too."""

    def more(self):
        self.order = [self.out]


class Frozen(Linear):
    def more(self):
        self.out.weight.requires_grad_(False)


class Double(Linear):
    def more(self):
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))


class Tied(Linear):
    def more(self):
        self.other = self.out


class NoSuper(Model):
    Options = ModelConfig

    def __init__(self, options, spec) -> None:
        self.width = 3


class FailingTables(Linear):
    @classmethod
    def tables(cls, options, spec):
        return [spec.nothing]


class Drawn(Linear):
    """Random features."""

    def more(self):
        self.register_buffer("scale", self.drawn(), persistent=False)

    def drawn(self):
        return torch.rand(self.columns)

    def changed(self, x):
        return x * self.scale


class DrawnOnce(Drawn):
    def drawn(self):
        return torch.rand(
            self.columns, generator=torch.Generator("cpu").manual_seed(0), device="cpu"
        )


class Moving(Linear):
    def more(self):
        self.register_buffer("mean", torch.zeros(self.columns), persistent=False)

    def changed(self, x):
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - self.mean


class Rebound(Moving):
    def changed(self, x):
        self.mean = self.mean + x.detach().mean(0)
        return x


class Detached(Linear):
    def forward(self, numerical, embeddings):
        return super().forward(numerical, embeddings).detach()


class InPlace(Linear):
    def changed(self, x):
        gate = x.sigmoid()
        square = gate * gate
        return square + gate.add_(1)


class VectorLoss(Linear):
    def extra_losses(self):
        return {"penalty": self.out.weight.flatten()}


class NoisyScores(Linear):
    def changed(self, x):
        return nn.functional.dropout(x, 0.5)


class Codes(PassLayer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4))


class DrawnAndSaved(Linear):
    def more(self):
        self.state = Codes()
