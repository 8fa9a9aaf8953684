"""Terminal output of a model: its components with shapes, parameters and operations, and one line of their sums."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from nn.observability.layout import bare_table

UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))


def size_line(description: Mapping[str, Any]) -> str:
    parameters = description["parameters"]
    tables = len(description["tables"])
    return (
        f"{parameters['tables']:,} parameters in {tables} {'table' if tables == 1 else 'tables'}, {parameters['dense']:,} in "
        f"the dense component, {_short(description['flops_per_sample'])}FLOP per sample forward"
    )


def print_model(console: Console, description: Mapping[str, Any]) -> None:
    """Print one line per component of the dense component, and the sums; model.json lists every layer."""
    table = bare_table(["component", "layers"], ["in", "out", "parameters", "FLOP per sample"])
    components: dict[str, list[Mapping[str, Any]]] = {}
    for layer in description["layers"]:
        components.setdefault(layer["name"].partition(".")[0], []).append(layer)
    for name, layers in components.items():
        counts = Counter(layer["type"] for layer in layers)
        table.add_row(
            name,
            ", ".join(kind if n == 1 else f"{n} {kind}" for kind, n in counts.items()),
            " + ".join(map(_shape, layers[0]["input"])),
            _shape(layers[-1]["output"]),
            f"{sum(layer['parameters'] for layer in layers):,}",
            _short(sum(layer["flops_per_sample"] for layer in layers)),
        )
    console.print(table)
    console.print()
    console.print(
        f"model  {description['model']['name']}: {size_line(description)}", soft_wrap=True
    )


def _shape(size: list[int] | None) -> str:
    """Return a shape per sample, such as `6 x 16`; a number per sample has none."""
    return "" if size is None else " x ".join(map(str, size)) or "1"


def _short(count: int) -> str:
    for size, unit in UNITS:
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} "
