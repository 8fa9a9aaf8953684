"""Loading of `dense.pt2` without trust: torch's loader unpickles some entries of an archive and evaluates expressions in it.

Everything that the loader would execute is compared with what an export of this project holds: no entry is a pickle, symbols
are plain, and every operation is one of ATen's. A model directory is then numbers, as a checkpoint is.
"""

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor
from torch.export import ExportedProgram

from configs.messages import shown
from dataloading.dataset.documents import parse_json, read_regular
from serving.inference.program import Program
from serving.manifest import ModelError

MOST_BYTES = 4 << 30
ENTRY = re.compile(
    r"[^/]+/(data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)|data/sample_inputs/model\.pt|models/model\.json"
    r"|archive_format|archive_version|byteorder|\.data/(version|serialization_id))"
)
OPERATION = re.compile(
    r"torch\.ops\.aten\.\w+\.\w+|_operator\.(add|sub|mul|floordiv|mod|eq|ge|le|gt|lt)|torch\.sym_(max|min|sum)"
)
WORDS = frozenset(
    {"Symbol", "Integer", "Add", "Mul", "Max", "Min", "positive", "integer", "True", "False"}
)
CONTAINERS = (None, "builtins.tuple", "builtins.dict", "builtins.list")
SYMBOL = re.compile(r"[su]?\d+")
ATEN = "torch.ops.aten."
Loaded = TypeVar("Loaded")


def import_loader() -> None:
    """Import what torch's loader imports at its first call, which takes longer than loading a model."""
    import torch._inductor.cpp_builder
    import torch.export.pt2_archive._package  # noqa: F401


def load_dense(path: Path) -> Callable[..., Tensor]:
    """Return forward(numerical [B, N], embeddings [B, T], ...) -> logits on the CPU. Raises ModelError: as `load_program`."""
    return _loaded(path, lambda file: Program(ZipFile(file))).forward


def load_program(path: Path) -> ExportedProgram:
    """Return the program of forward(numerical [B, N], embeddings [B, T]) -> logits, which a GPU's is made of.

    Raises ModelError: the archive is damaged, or holds what no export of this project holds.
    """
    return _loaded(path, torch.export.load)


def _loaded(path: Path, load: Callable[[BinaryIO], Loaded]) -> Loaded:
    data = read_regular(path, MOST_BYTES)
    try:
        check_archive(data)
        return load(io.BytesIO(data))
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, BadZipFile) as error:
        raise ModelError(f"{path} is no exported dense component: {shown(str(error))}") from None


def check_archive(data: bytes) -> None:
    """Raise ValueError if torch's loader would unpickle or evaluate something of an archive."""
    with ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            if not ENTRY.fullmatch(entry.filename) or entry.compress_type != ZIP_STORED:
                raise ValueError(f"it holds {shown(entry.filename)}")
            name = entry.filename.partition("/")[2]
            if name == "data/sample_inputs/model.pt" and entry.file_size:
                raise ValueError("it holds pickled example inputs")
            if name.endswith("config.json"):
                config = parse_json(archive.read(entry), name)
                if any(value for key, value in _items(config) if key == "use_pickle"):
                    raise ValueError("it holds a pickled tensor")
            if name == "models/model.json":
                _check_program(parse_json(archive.read(entry), name))


def _check_program(program: Any) -> None:
    if program.get("guards_code"):
        raise ValueError("it holds guards, which are code")
    for key, value in _items(program):
        if key == "target" and not _is_operation(value):
            raise ValueError(f"it calls {shown(value)}, which is no operation of ATen")
        if key == "expr_str" and not _is_plain(value):
            raise ValueError(f"it has the expression {shown(value)}")
        if key in ("in_spec", "out_spec") and isinstance(value, str):
            for kind, name in _items(parse_json(value, key)):
                if kind == "type" and name not in CONTAINERS:
                    raise ValueError(f"its inputs are {shown(name)}")


def _is_operation(target: object) -> bool:
    """Return whether a target is arithmetic of sizes, or an operation of ATen on numbers: nothing else of Python or of torch."""
    if not isinstance(target, str) or not OPERATION.fullmatch(target):
        return False
    if not target.startswith(ATEN):
        return True
    name, overload = target.removeprefix(ATEN).split(".")
    found = getattr(getattr(torch.ops.aten, name, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        return False
    # Texts of an operation that gives numbers choose a mode, but for that of `aten::from_file`; `aten::save` gives none.
    texts = {of.name for of in found._schema.arguments if "str" in str(of.type)} - {"assert_msg"}
    gives_numbers = any("Tensor" in str(of.type) for of in found._schema.returns)
    return not texts or (gives_numbers and "filename" not in texts)


def _is_plain(expression: object) -> bool:
    """Return whether an expression is arithmetic of symbols and integers."""
    if not isinstance(expression, str) or re.search(r"[^\w '(),=+*/-]", expression):
        return False
    return all(word in WORDS or SYMBOL.fullmatch(word) for word in re.findall(r"\w+", expression))


def _items(document: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(document, dict):
        for key, value in document.items():
            yield key, value
            yield from _items(value)
    elif isinstance(document, list):
        for value in document:
            yield from _items(value)
