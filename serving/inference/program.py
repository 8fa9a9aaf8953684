"""Forward of a checked `dense.pt2` on the CPU: the operations that the export has written, one after another.

torch's own loader imports SymPy and the compiler: two seconds, of three that a server needs for all else.
"""

import operator
import zipfile
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from dataloading.dataset.documents import parse_json

# By their numbers in torch's schema of exports, which are not ATen's.
DTYPES = {
    **{1: torch.uint8, 2: torch.int8, 3: torch.int16, 4: torch.int32, 5: torch.int64},
    **{6: torch.float16, 7: torch.float32, 8: torch.float64, 12: torch.bool, 13: torch.bfloat16},
}
MEMORY_FORMATS = {
    **{1: torch.contiguous_format, 2: torch.channels_last},
    **{3: torch.channels_last_3d, 4: torch.preserve_format},
}
NAMESPACES = {"torch": torch, "_operator": operator}
OF_TYPES = tuple(
    f"torch.ops.aten.{of}.default" for of in ("_assert_tensor_metadata", "promote_types")
)
"""Questions about types, which do not depend on the inputs: nothing reads the answer."""


class _Name(str):
    __slots__ = ()


# Of the kinds of arguments that JSON has not as they are.
VALUES: dict[str, Callable[[Any], Any]] = {
    "as_none": lambda _: None,
    "as_name": _Name,
    "as_float": float,  # infinities are texts
    "as_floats": lambda values: tuple(map(float, values)),
    "as_scalar_type": DTYPES.__getitem__,
    "as_memory_format": MEMORY_FORMATS.__getitem__,
    "as_layout": {7: torch.strided}.__getitem__,
    "as_device": lambda device: torch.device(device["type"]),
}


class Program:
    """forward(numerical [B, N], embeddings [B, T], ...) -> logits, by the operations of the exported module.

    Raises LookupError, TypeError, ValueError, AttributeError: the archive holds something else.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._files = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        self._archive = archive
        weights = dict(self._tensors("weights")) | dict(self._tensors("constants"))
        module = self._json("models/model.json")["graph_module"]
        self._constants: dict[str, Tensor] = {}
        self._inputs: list[str] = []
        for spec in module["signature"]["input_specs"]:
            ((kind, content),) = spec.items()
            name = _template(content["arg"])
            if kind == "user_input":
                self._inputs.append(name)
            else:
                self._constants[name] = weights[content[f"{kind}_name"]]
        (output,) = module["graph"]["outputs"]
        self._output = _template(output)
        self._calls: list[tuple] = []
        read = {self._output, *self._constants}
        for node in reversed(module["graph"]["nodes"]):
            if node["target"] in OF_TYPES:
                continue
            positional = [_template(item["arg"]) for item in node["inputs"] if item["kind"] == 1]
            named = {
                item["name"]: _template(item["arg"]) for item in node["inputs"] if item["kind"] != 1
            }
            outputs = [*_names([_template(item) for item in node["outputs"]])]
            is_single = len(outputs) == 1 and "as_tensors" not in node["outputs"][0]
            names = {*outputs, *_names(positional), *_names([*named.values()])}
            root, *path = node["target"].split(".")
            function = reduce(getattr, path, NAMESPACES[root])
            # What no later operation reads is freed, as in the exported module.
            freed = names - read
            self._calls.insert(0, (function, positional, named, outputs, is_single, freed))
            read |= names

    def _json(self, name: str) -> Any:
        return parse_json(self._archive.read(self._files[name]), name)

    def _tensors(self, folder: str) -> Iterator[tuple[str, Tensor]]:
        for name, item in self._json(f"data/{folder}/model_{folder}_config.json")["config"].items():
            meta, path = item["tensor_meta"], f"data/{folder}/{item['path_name']}"
            size, strides = (
                [length["as_int"] for length in meta[key]] for key in ("sizes", "strides")
            )
            data = bytearray(self._archive.read(self._files[path]))
            flat = torch.frombuffer(data, dtype=DTYPES[meta["dtype"]]) if data else torch.empty(0)
            # A copy lies where torch's tensors do.
            yield name, flat.clone().as_strided(size, strides, meta["storage_offset"]["as_int"])

    def forward(self, *inputs: Tensor) -> Tensor:
        values = self._constants | dict(zip(self._inputs, inputs, strict=True))
        for function, positional, named, outputs, is_single, freed in self._calls:
            result = function(
                *[_filled(item, values) for item in positional],
                **{name: _filled(item, values) for name, item in named.items()},
            )
            if is_single:
                values[outputs[0]] = result
            else:
                values.update(zip(outputs, result or (), strict=True))
            for name in freed:
                del values[name]
        return values[self._output]


def _template(item: Any) -> Any:
    """Return a serialized argument as its value, with a `_Name` for each value that is read; a list only if it has some."""
    if isinstance(item, list):
        items = [_template(part) for part in item]
        return items if any(_names(items)) else tuple(items)
    if not isinstance(item, dict):
        return item
    if "name" in item:
        return _Name(item["name"])
    ((kind, value),) = item.items()
    return VALUES.get(kind, _template)(value)


def _names(template: Any) -> Iterator[_Name]:
    if isinstance(template, _Name):
        yield template
    elif isinstance(template, list):
        for item in template:
            yield from _names(item)


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(template, _Name):
        return values[template]
    return [_filled(item, values) for item in template] if isinstance(template, list) else template
