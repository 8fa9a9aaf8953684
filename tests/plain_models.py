"""Plain PyTorch formulas of the models beside DLRM and DCNv2, as a reference for the recipe.

No code of the recipe is imported: the formulas are written from the papers, with loops instead of batched products. A model is
a function of its parameters by name, the numerical features [B, N], and one tensor per lookup in the order of the tables: [B, D],
or [B, L * D] of a lookup without pooling. It returns logits [B], or [B, T] of several tasks.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

Parameters = dict[str, Tensor]


def linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    """Apply a linear layer; columns of its weight beyond those of x are padding."""
    product = x @ p[f"{name}.weight"][:, : x.shape[1]].T
    return product + p[f"{name}.bias"] if f"{name}.bias" in p else product


def mlp(p: Parameters, name: str, x: Tensor, *, final_relu: bool = False) -> Tensor:
    """Apply linear layers with ReLU between them."""
    count = sum(key.startswith(f"{name}.layers.") and key.endswith("weight") for key in p)
    for number in range(count):
        x = linear(p, f"{name}.layers.{number}", x)
        if final_relu or number < count - 1:
            x = normalised(p, f"{name}.norms.{number}", x).clamp(min=0)
    return x


def normalised(p: Parameters, name: str, x: Tensor) -> Tensor:
    """Normalise columns over all rows, if the model has that batch normalization."""
    if f"{name}.weight" not in p:
        return x
    rstd = 1 / torch.sqrt(x.var(0, unbiased=False) + 1e-5)
    return (x - x.mean(0)) * rstd * p[f"{name}.weight"] + p[f"{name}.bias"]


def encoded(p: Parameters, key: str, numerical: Tensor) -> list[Tensor]:
    """Return the vectors of numerical features by frequencies or buckets."""
    found = []
    for number, x in enumerate(numerical.unbind(1)):
        first = x[:, None] * p[f"{key}.first"][number]
        if f"{key}.bias" in p:
            waves = torch.cat([torch.sin(2 * math.pi * first), torch.cos(2 * math.pi * first)], 1)
            both = waves @ p[f"{key}.vectors"][number] + p[f"{key}.bias"][number]
            found.append(both.clamp(min=0))
        else:
            hidden = torch.where(first > 0, first, 0.01 * first)
            weights = torch.softmax(hidden @ p[f"{key}.mixing"][number] + hidden, 1)
            found.append(weights @ p[f"{key}.vectors"][number])
    return found


def numerical_vectors(p: Parameters, name: str, numerical: Tensor) -> list[Tensor]:
    """Scale the vector of every numerical feature by its value."""
    if f"{name}.first" in p:
        return encoded(p, name, numerical)
    if f"{name}.vectors" not in p:
        return []
    return [numerical[:, i : i + 1] * vector[None] for i, vector in enumerate(p[f"{name}.vectors"])]


def wide_deep(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor], *, num_wide: int):
    """Add the wide weights and the MLP of the other vectors."""
    deep, wide = lookups[: len(lookups) - num_wide], lookups[len(lookups) - num_wide :]
    logits = mlp(p, "deep", torch.cat([numerical, *deep], 1))[:, 0]
    for weight in wide:
        logits = logits + weight[:, 0]
    if "wide.weight" in p:
        logits = logits + numerical @ p["wide.weight"][0]
    return logits


def deepfm(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor]):
    """Add first-order weights, products of all pairs, and the MLP."""
    half = len(lookups) // 2
    vectors = numerical_vectors(p, "vectors.numerical", numerical) + list(lookups[:half])
    weights = numerical_vectors(p, "weights", numerical) + list(lookups[half:])
    logits = mlp(p, "deep", torch.cat(vectors, 1))[:, 0]
    for weight in weights:
        logits = logits + weight[:, 0]
    for i, first in enumerate(vectors):
        for second in vectors[i + 1 :]:
            logits = logits + (first * second).sum(1)
    return logits


def embedding_mlp(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor]):
    """Apply one MLP to everything."""
    return mlp(p, "mlp", torch.cat([numerical, *lookups], 1))[:, 0]


def finalmlp(
    p: Parameters, numerical: Tensor, lookups: Sequence[Tensor], *, gates: Sequence[Sequence[int]]
):
    """Fuse two gated streams; `gates` are the positions of the vectors that control each gate."""
    vectors = numerical_vectors(p, "vectors.numerical", numerical) + list(lookups)
    outputs = []
    for stream, gate in enumerate(gates):
        context = torch.cat([vectors[i] for i in gate], 1) if gate else None
        if context is None:
            context = p[f"gates.{stream}.constant"].expand(len(numerical), -1)
        weights = 2 / (1 + torch.exp(-mlp(p, f"gates.{stream}.gate", context)))
        outputs.append(
            mlp(p, f"streams.{stream}", weights * torch.cat(vectors, 1), final_relu=True)
        )
    logits = linear(p, "fusion.linear", torch.cat(outputs, 1))[:, 0]
    heads = p["fusion.product"]
    lefts, rights = (torch.chunk(output, len(heads), dim=1) for output in outputs)
    for weight, left, right in zip(heads, lefts, rights, strict=True):
        logits = logits + ((left @ weight) * right).sum(1)
    return logits


def layer_norm(x: Tensor) -> Tensor:
    """Normalise the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def masknet(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor], *, serial: bool):
    """Apply mask blocks one after another, or all to the normalised vectors."""
    vectors = numerical_vectors(p, "vectors.numerical", numerical) + list(lookups)
    start = torch.cat(
        [
            layer_norm(vector) * p["norm.weight"][i] + p["norm.bias"][i]
            for i, vector in enumerate(vectors)
        ],
        1,
    )
    plain = torch.cat(vectors, 1)
    outputs, x = [], start
    for number in range(sum(key.endswith("hidden.layers.0.weight") for key in p)):
        block = f"blocks.{number}"
        mask = linear(
            p, f"{block}.projection.layers.0", linear(p, f"{block}.aggregation.layers.0", plain)
        )
        hidden = linear(p, f"{block}.hidden.layers.0", mask * (x if serial else start))
        hidden = layer_norm(hidden) * p[f"{block}.norm.weight"] + p[f"{block}.norm.bias"]
        x = hidden.clamp(min=0)
        outputs.append(x)
    return mlp(p, "top", x if serial else torch.cat(outputs, 1))[:, 0]


def wukong(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor]):
    """Stack factorization machines, with the complete matrix of products before it is compressed."""
    vectors = list(lookups)
    if "bottom.layers.0.weight" in p:
        vectors.insert(0, mlp(p, "bottom", numerical, final_relu=True))
    x = torch.stack(vectors, 1)
    for number in range(sum(key.endswith("compression.weight") for key in p)):
        layer = f"layers.{number}"
        products = torch.stack([row @ row.T for row in x])
        compressed = (products @ p[f"{layer}.compression.weight"].T).flatten(1)
        normed = layer_norm(compressed) * p[f"{layer}.product_norm.weight"]
        fm = mlp(p, f"{layer}.fm", normed + p[f"{layer}.product_norm.bias"])
        recombined = torch.einsum("ov,bvd->bod", p[f"{layer}.linear.weight"], x)
        both = torch.cat([fm.reshape(len(x), -1, x.shape[2]), recombined], 1)
        if f"{layer}.residual.weight" in p:
            x = torch.einsum("ov,bvd->bod", p[f"{layer}.residual.weight"], x)
        x = layer_norm(both + x) * p[f"{layer}.norm.weight"] + p[f"{layer}.norm.bias"]
    return mlp(p, "top", x.flatten(1))[:, 0]


def din(
    p: Parameters,
    numerical: Tensor,
    lookups: Sequence[Tensor],
    *,
    pairs: int,
    length: int | None,
    pooling: str = "sum",
):
    """Attend row by row over the items before the true length."""
    items = torch.cat([lookups[2 * pair] for pair in range(pairs)], 1)
    histories = [
        lookups[2 * pair + 1].reshape(len(items), -1, lookups[2 * pair].shape[1])
        for pair in range(pairs)
    ]
    history = torch.cat(histories, 2)
    pooled = []
    for row, item in enumerate(items):
        count = history.shape[1] if length is None else math.ceil(numerical[row, length])
        weights = []
        for past in history[row, : max(count, 0)]:
            x = torch.cat([item, past, item - past, item * past])[None]
            layers = sum(key.startswith("attention.layers.") for key in p) // 2
            for number in range(layers - 1):
                x = 1 / (1 + torch.exp(-linear(p, f"attention.layers.{number}", x)))
            weights.append(linear(p, f"attention.layers.{layers - 1}", x)[0, 0])
        if pooling == "softmax":
            weights = [torch.exp(weight) for weight in weights]
        divisor = {"sum": 1, "mean": len(weights), "softmax": sum(weights)}[pooling]
        items_of_row = zip(weights, history[row], strict=False)
        pooled.append(sum((w / divisor * past for w, past in items_of_row), torch.zeros_like(item)))
    numbers = [column for column in range(numerical.shape[1]) if column != length]
    parts = [items, torch.stack(pooled), *lookups[2 * pairs :], numerical[:, numbers]]
    x = torch.cat(parts, 1)
    layers = sum(key.startswith("top.layers.") for key in p) // 2
    for number in range(layers - 1):
        x = normalised(p, f"top.norms.{number}", linear(p, f"top.layers.{number}", x))
        activation = f"top.activations.{number}"
        if f"{activation}.alpha" in p:
            deviation = (x.var(0, unbiased=False) + 1e-8).sqrt()
            chance = 1 / (1 + torch.exp(-(x - x.mean(0)) / deviation))
            x = chance * x + (1 - chance) * p[f"{activation}.alpha"] * x
        else:
            x = torch.where(x > 0, x, x * p[f"{activation}.weight"])
    return linear(p, f"top.layers.{layers - 1}", x)[:, 0]


def experts_of(p: Parameters, name: str, x: Tensor) -> list[Tensor]:
    """Apply all experts of a group."""
    numbers = {key.split(".")[-4] for key in p if key.startswith(f"{name}.experts.")}
    return [
        mlp(p, f"{name}.experts.{number}", x, final_relu=True)
        for number in sorted(numbers, key=int)
    ]


def gated(weight: Tensor, x: Tensor, experts: Sequence[Tensor]) -> Tensor:
    """Weigh experts by a softmax."""
    powers = torch.exp(x @ weight.T)
    weights = powers / powers.sum(1, keepdim=True)
    return sum(weights[:, i : i + 1] * expert for i, expert in enumerate(experts))


def towers(p: Parameters, inputs: Sequence[Tensor]) -> Tensor:
    """Apply a tower per task; a single task is a vector."""
    logits = [mlp(p, f"towers.towers.{task}", x) for task, x in enumerate(inputs)]
    return torch.cat(logits, 1) if len(logits) > 1 else logits[0][:, 0]


def shared_bottom(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor], *, tasks: int):
    """Apply all towers to one MLP."""
    x = mlp(p, "bottom", torch.cat([numerical, *lookups], 1), final_relu=True)
    return towers(p, [x] * tasks)


def mmoe(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor], *, tasks: int):
    """Weigh the experts for every task."""
    x = torch.cat([numerical, *lookups], 1)
    experts = experts_of(p, "experts", x)
    return towers(p, [gated(p[f"gates.{task}.linear.weight"], x, experts) for task in range(tasks)])


def ple(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor], *, tasks: int):
    """Extract level by level, with experts of every task and shared ones."""
    x = torch.cat([numerical, *lookups], 1)
    inputs = [x] * (tasks + 1)
    for number in range(len({key.split(".")[1] for key in p if key.startswith("levels.")})):
        level = f"levels.{number}"
        groups = [experts_of(p, f"{level}.experts.{i}", inputs[i]) for i in range(tasks + 1)]
        outputs = [
            gated(p[f"{level}.gates.{task}.linear.weight"], inputs[task], groups[task] + groups[-1])
            for task in range(tasks)
        ]
        if f"{level}.shared_gate.linear.weight" in p:
            every = [expert for group in groups for expert in group]
            outputs.append(gated(p[f"{level}.shared_gate.linear.weight"], inputs[-1], every))
        inputs = outputs
    return towers(p, inputs)


def per_token(p: Parameters, name: str, x: Sequence[Tensor]) -> list[Tensor]:
    """Apply a linear layer of its own to every token."""
    return [t @ p[f"{name}.weight"][i] + p[f"{name}.bias"][i] for i, t in enumerate(x)]


def gelu(x: Tensor) -> Tensor:
    """Weigh x by the normal distribution."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def rankmixer(
    p: Parameters,
    numerical: Tensor,
    lookups: Sequence[Tensor],
    *,
    tasks: int = 1,
    order: Sequence[int] = (),
    experts: int = 1,
    training: bool = True,
):
    """Mix tokens head by head, and compute every expert of every token by itself."""
    vectors = numerical_vectors(p, "vectors.numerical", numerical) + list(lookups)
    vectors = [vectors[i] for i in order or range(len(vectors))]
    count, piece = p["tokens.weight"].shape[:2]
    joined = torch.cat(vectors, 1)
    joined = torch.cat([joined, joined.new_zeros(len(joined), count * piece - joined.shape[1])], 1)
    x = per_token(p, "tokens", joined.split(piece, dim=1))
    for number in range(sum(key.endswith("network.up") for key in p)):
        block = f"blocks.{number}"
        heads = [token.chunk(count, dim=1) for token in x]
        mixed = [torch.cat([of[head] for of in heads], 1) for head in range(count)]
        norm = f"{block}.mixing_norm"
        s = [
            layer_norm(one + other) * p[f"{norm}.weight"] + p[f"{norm}.bias"]
            for one, other in zip(mixed, x, strict=True)
        ]
        gates = [torch.ones(len(joined), 1, dtype=joined.dtype)] * count
        if experts > 1:
            gates = [gate.clamp(min=0) for gate in per_token(p, f"{block}.router.router", s)]
        if experts > 1 and training:
            first = per_token(p, f"{block}.router.training_router", s)
            gates = [(gate + one.clamp(min=0)) / 2 for gate, one in zip(gates, first, strict=True)]
        x = []
        for i, token in enumerate(s):
            v = torch.zeros_like(token)
            up, up_bias, down, down_bias = (
                p[f"{block}.network.{name}"][i].chunk(experts, dim=dim)
                for name, dim in (("up", 1), ("up_bias", 1), ("down", 0), ("down_bias", 0))
            )
            for j in range(experts):
                hidden = gelu(token @ up[j] + up_bias[j])
                v = v + gates[i][:, j : j + 1] * (hidden @ down[j] + down_bias[j])
            norm = f"{block}.network_norm"
            x.append(layer_norm(v + token) * p[f"{norm}.weight"] + p[f"{norm}.bias"])
    return towers(p, [sum(x) / count] * tasks)


def fcn_branches(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor]) -> list[Tensor]:
    """Return the logits of the exponential and of the linear cross network."""
    vectors = numerical_vectors(p, "vectors.numerical", numerical) + list(lookups)
    split = [vector.chunk(2, dim=1) for vector in vectors]
    first = torch.cat([one for one, _ in split] + [other for _, other in split], 1)
    logits = []
    for branch in ("deep", "shallow"):
        x = first
        for number in range(
            sum(k.startswith(f"{branch}.") and k.endswith(".norm.bias") for k in p)
        ):
            layer = f"{branch}.layers.{number}"
            c = normalised(p, f"{layer}.batch_norm", x @ p[f"{layer}.linear.weight"].T)
            norm = layer_norm(c) * p[f"{layer}.norm.weight"] + p[f"{layer}.norm.bias"]
            crossed = torch.cat([c, c * norm.clamp(min=0)], 1) + p[f"{layer}.bias"]
            x = (x if branch == "deep" else first) * crossed + x
        logits.append(linear(p, f"{branch}.logit", x)[:, 0])
    return logits


def fcn(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor]):
    """Average both networks."""
    return sum(fcn_branches(p, numerical, lookups)) / 2


def fcn_loss(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor], labels: Tensor) -> Tensor:
    """Add the losses of both networks, as far as they are above that of their mean."""
    branches = fcn_branches(p, numerical, lookups)
    loss = bce(sum(branches) / 2, labels)
    own = [bce(logits, labels) for logits in branches]
    return loss + sum((one - loss).clamp(min=0) * one for one in own)


def autoint(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor], *, heads: int):
    """Attend head by head and feature by feature."""
    vectors = numerical_vectors(p, "vectors.numerical", numerical) + list(lookups)
    x = vectors
    for number in range(sum(key.endswith("projections") for key in p)):
        q, k, v, r = ([e @ w.T for e in x] for w in p[f"layers.{number}.projections"])
        outputs = []
        for m in range(len(x)):
            parts = []
            for head in range(heads):
                keys = [key.chunk(heads, dim=1)[head] for key in k]
                values = [value.chunk(heads, dim=1)[head] for value in v]
                query = q[m].chunk(heads, dim=1)[head]
                powers = [torch.exp((query * key).sum(1, keepdim=True)) for key in keys]
                pairs = zip(powers, values, strict=True)
                parts.append(sum(power * value for power, value in pairs) / sum(powers))
            outputs.append((torch.cat(parts, 1) + r[m]).clamp(min=0))
        x = outputs
    return (mlp(p, "logit", torch.cat(x, 1)) + mlp(p, "deep", torch.cat(vectors, 1)))[:, 0]


def xdeepfm(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor]):
    """Combine the products of all pairs, one output vector at a time."""
    half = len(lookups) // 2
    vectors = numerical_vectors(p, "vectors.numerical", numerical) + list(lookups[:half])
    weights = numerical_vectors(p, "weights", numerical) + list(lookups[half:])
    x, sums = vectors, []
    for number in range(sum(key.startswith("cross.") for key in p)):
        weight = p[f"cross.{number}.weight"]
        pairs = [one * other for one in x for other in vectors]
        x = [sum(w * pair for w, pair in zip(row, pairs, strict=True)) for row in weight]
        sums += [vector.sum(1) for vector in x]
    logits = mlp(p, "deep", torch.cat(vectors, 1))[:, 0] + sum(weight[:, 0] for weight in weights)
    return logits + torch.stack(sums, 1) @ p["logit.weight"][0]


def esmm(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor], *, tasks: int):
    """Multiply the probabilities of a click and of a conversion after it."""
    click, conversion = towers(p, [torch.cat([numerical, *lookups], 1)] * tasks).double().unbind(1)
    both = torch.sigmoid(click) * torch.sigmoid(conversion)
    return torch.stack([click, torch.log(both / (1 - both))], 1)


def pepnet(
    p: Parameters,
    numerical: Tensor,
    lookups: Sequence[Tensor],
    *,
    tasks: int,
    domain: Sequence[int],
    prior: Sequence[int],
):
    """Gate the embeddings, and every hidden layer of every tower."""

    def gate(name: str, features: Sequence[int], x: Tensor) -> Tensor:
        inputs = torch.cat([*(lookups[i] for i in features), x.detach()], 1)
        return 2 / (1 + torch.exp(-mlp(p, f"{name}.mlp", inputs)))

    x = torch.cat([numerical, *lookups], 1)
    x = gate("embedding_gate", domain, x) * x
    logits = []
    for task in range(tasks):
        tower, hidden = f"towers.towers.{task}.layers", x
        count = sum(key.startswith(tower) and key.endswith("weight") for key in p)
        for number in range(count - 1):
            width = len(p[f"{tower}.{number}.bias"])
            gates = gate(f"layer_gates.{number}", prior, x)[:, task * width : (task + 1) * width]
            hidden = linear(p, f"{tower}.{number}", hidden)
            norm = tower.replace("layers", f"norms.{number}")
            hidden = normalised(p, norm, hidden).clamp(min=0) * gates
        logits.append(linear(p, f"{tower}.{count - 1}", hidden))
    return torch.cat(logits, 1) if tasks > 1 else logits[0][:, 0]


def star(p: Parameters, numerical: Tensor, lookups: Sequence[Tensor], *, tasks: int, domain: int):
    """Take row after row through the network of its domain, normalised over the domain's rows."""

    def of_domain(name: str, number: int, x: Tensor) -> Tensor:
        if f"{name}.scale" not in p:
            return x
        x = (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + 1e-5)
        x = x * p[f"{name}.scale"] * p[f"{name}.domain_scale"][number]
        return x + p[f"{name}.bias"] + p[f"{name}.domain_bias"][number]

    others = [number for number in range(numerical.shape[1]) if number != domain]
    x = torch.cat([numerical[:, others], *lookups], 1)
    logits = torch.zeros(len(x), tasks, dtype=x.dtype)
    auxiliary = x.new_zeros(len(x), p["domain_vectors"].shape[1])
    for number in numerical[:, domain].unique().long().tolist():
        rows = numerical[:, domain] == number
        hidden = of_domain("norm", number, x[rows])
        count = sum(key.startswith("layers.") and key.endswith(".weight") for key in p)
        for layer in range(count):
            weight = p[f"layers.{layer}.weight"] * p[f"layers.{layer}.domain_weight"][number]
            bias = p[f"layers.{layer}.bias"] + p[f"layers.{layer}.domain_bias"][number, 0]
            hidden = hidden @ weight[: hidden.shape[1]] + bias
            if layer < count - 1:
                hidden = of_domain(f"norms.{layer}", number, hidden).clamp(min=0)
        logits = logits.index_put((rows.nonzero()[:, 0],), hidden)
        vectors = p["domain_vectors"][number].expand(len(hidden), -1)
        auxiliary = auxiliary.index_put((rows.nonzero()[:, 0],), vectors)
    inputs = torch.cat([x, auxiliary], 1)
    towers = [mlp(p, f"auxiliary.towers.{task}", inputs) for task in range(tasks)]
    logits = logits + torch.cat(towers, 1)
    return logits if tasks > 1 else logits[:, 0]


PLAIN: dict[str, Callable[..., Tensor]] = {
    "wide_deep": wide_deep,
    "deepfm": deepfm,
    "embedding_mlp": embedding_mlp,
    "finalmlp": finalmlp,
    "masknet": masknet,
    "wukong": wukong,
    "din": din,
    "shared_bottom": shared_bottom,
    "mmoe": mmoe,
    "ple": ple,
    "rankmixer": rankmixer,
    "fcn": fcn,
    "autoint": autoint,
    "xdeepfm": xdeepfm,
    "esmm": esmm,
    "pepnet": pepnet,
    "star": star,
}
LOSSES: dict[str, Callable[..., Tensor]] = {"fcn": fcn_loss}
"""Losses of models that add some of their own, instead of `bce` of the logits."""


def pooled(rows: Tensor, pooling: str) -> Tensor:
    """Map rows of a table [B, L, D] to [B, D], or to [B, L * D] without pooling."""
    if pooling == "none":
        return rows.flatten(1)
    return rows.sum(1) if pooling == "sum" else rows.mean(1)


def bce(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean binary cross entropy per task, summed over tasks."""
    losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses.mean(0).sum()
