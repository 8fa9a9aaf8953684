"""Search of files for values of a feature: their texts, and the raw keys of them."""

import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from configs.messages import shown
from dataloading.dataset.feature_spec import SPEC_NAME, FeatureSpec
from nn.checkpoint.tensor_index import INDEX_FILE, read_index
from preproc.line_blocks import blocks
from preproc.raw_files import MAGIC, OTHER_TABLES, PACKED_OTHERWISE, PARQUET, RawFile
from serving.inference.key_rows import KeyRows
from serving.inference.raw_columns import SEPARATOR
from serving.inference.raw_values import key_of
from serving.manifest import DENSE, Manifest
from serving.raw_records import RawDescription
from serving.vocabulary import Vocabulary

if TYPE_CHECKING:
    import pyarrow as pa

SHORTEST = 6
"""Characters of a text that is looked for everywhere; shorter ones are in many files by chance."""
KINDS = {**MAGIC, **PACKED_OTHERWISE, **OTHER_TABLES}
ARRAYS = {".bin", ".npy", ".safetensors", ".pt2", ".onnx"}
"""Files of which the index of their directory tells where keys are."""


@dataclass(frozen=True, slots=True)
class Values:
    feature: str
    texts: list[str]
    keys: np.ndarray  # int64: those of the texts, and texts that are whole numbers themselves

    @classmethod
    def read(cls, feature: str, path: Path) -> Self:
        """Read a file of values, one a line. Raises ValueError: it has none, or is no text; OSError: it cannot be read."""
        try:
            lines = path.read_text("utf-8-sig").split("\n")
        except UnicodeDecodeError:
            raise ValueError(f"keys={path} is no UTF-8; want one value a line") from None
        # White space at an end is seldom of the value.
        texts = [line for line in dict.fromkeys([*lines, *map(str.strip, lines)]) if line]
        if not texts:
            raise ValueError(f"keys={path} has no values; want one a line")
        # A dataset of a user's own may have whole numbers as keys; 0 and -1 are none.
        whole = {int(text) for text in texts if re.fullmatch(r"-?[0-9]{1,19}", text)} - {0, -1}
        keys = {*map(key_of, texts), *(key for key in whole if abs(key) < 2**63)}
        return cls(feature, texts, np.array(sorted(keys), np.int64))


def holders(directory: Path, values: Values) -> Iterator[tuple[Path, str]]:
    """Yield what has a value below a directory, and as what. Links to directories are not followed."""
    for folder, _, names in os.walk(directory):
        path = Path(folder)
        search = {INDEX_FILE: _in_tensors, DENSE: _in_model, SPEC_NAME: _in_dataset}
        for name, find in search.items():
            try:
                yield from find(path, values) if name in names else ()
            except (ValueError, OSError) as error:
                yield path, f"or nobody knows: {error}"
        files = [path / name for name in sorted(names)]
        for file in (file for file in files if file.is_file() and file.suffix not in ARRAYS):
            try:
                kind = _in_file(file, values)
            except (ValueError, OSError) as error:
                kind = f"or nobody knows: {error}"
            if kind:
                yield file, kind


def vocabulary_of(
    directory: Path, manifest: Manifest, feature: str
) -> tuple[str, Vocabulary | None]:
    """Return the file and the content of the vocabulary of a feature in a model; None without."""
    features = RawDescription.of(manifest.raw).by_feature if manifest.raw else {}
    if feature not in features or features[feature].vocabulary is None:
        return "", None
    name, size = features[feature].vocabulary
    return name, Vocabulary(directory / name, size)


def _in_tensors(path: Path, values: Values) -> Iterator[tuple[Path, str]]:
    for name, stored in read_index(path).tensors.items():
        are_keys = name.startswith("keys.") and name.endswith("keys")
        if are_keys and np.isin(stored.array(), values.keys).any():
            yield path, name


def _in_model(path: Path, values: Values) -> Iterator[tuple[Path, str]]:
    manifest = Manifest.read(path)
    file = manifest.keys.get(values.feature)
    if file is not None and KeyRows(path / file.name, file.count).rows(values.keys).any():
        yield path / file.name, "keys"
    name, vocabulary = vocabulary_of(path, manifest, values.feature)
    if vocabulary is not None and vocabulary.ids(values.texts).any():
        yield path / name, "vocabulary"
    features = RawDescription.of(manifest.raw).by_feature if manifest.raw else {}
    column = str(features[values.feature].column).lower() if values.feature in features else ""
    for of in features.values():
        columns = [name.lower() for name in of.cross]
        if of.vocabulary is not None and column in columns:
            name, size = of.vocabulary
            at, wanted = columns.index(column), {*values.texts}
            batches = Vocabulary(path / name, size).texts_without(())
            if any(text and text.split(SEPARATOR)[at] in wanted for of in batches for text in of):
                yield path / name, f"a part of values of the cross {shown(of.name)}"


def _in_dataset(path: Path, values: Values) -> Iterator[tuple[Path, str]]:
    """Yield the binary columns of raw keys; those of Parquet are found in its files."""
    spec = FeatureSpec.load(path, measure=False)
    names = [feature.name for feature in spec.categorical if feature.is_dynamic]
    columns = [files.ids[n] for files in spec.splits.values() for n in names if n in files.ids]
    for column in filter(lambda column: column.stat().st_size, columns):
        if np.isin(np.memmap(column, "<i8", "r"), values.keys).any():
            yield column, "keys of rows"


def _in_file(path: Path, values: Values) -> str:
    """Return as what a file has one of the values, by its first bytes; empty if it has none."""
    long = [re.escape(text.encode()) for text in values.texts if len(text) >= SHORTEST]
    pattern = rb"(?<![0-9A-Za-z_])(?:%b)(?![0-9A-Za-z_])" % b"|".join(long)
    with path.open("rb") as stream:
        head = stream.read(max(map(len, KINDS)))
        if head.startswith(PARQUET) or path.suffix == ".parquet":
            return _in_parquet(path, values)
        if not long or not head:
            return ""
        kind = next((KINDS[magic] for magic in KINDS if head.startswith(magic)), "")
        if not kind:
            with mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as data:
                return "text" if re.search(pattern, data) else ""
    if kind not in MAGIC.values():
        raise ValueError(f"it is {kind}")
    pieces = blocks(RawFile(path, kind), 0)
    return "text" if any(re.search(pattern, piece) for piece in pieces) else ""


def _in_parquet(path: Path, values: Values) -> str:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    all_texts = [*values.texts, *map(str, values.keys.tolist())]
    long = [text for text in all_texts if len(text) >= SHORTEST]
    own = {values.feature, *(["value"] if path.stem == values.feature else [])}
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                wanted = pa.array(all_texts if name in own else long, pa.string()).cast(pa.binary())
                if any(pc.any(pc.is_in(of, wanted)).as_py() for of in _texts(column)):
                    return f"column {name}"
    return ""


def _texts(column: "pa.Array") -> "Iterator[pa.Array]":
    """Yield the texts and whole numbers of a column and of the fields within it, as bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_nested(column.type):
        inner = column.flatten()
        for part in inner if isinstance(inner, list) else [inner]:
            yield from _texts(part)
        return
    if pa.types.is_floating(column.type):  # whole numbers, where some are missing
        column = column.filter(pc.equal(pc.round(column), column)).cast(pa.int64(), safe=False)
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
    if any(is_kind(column.type) for is_kind in kinds):
        column = column.cast(pa.binary())
        yield column
        yield pc.list_flatten(pc.split_pattern(column, SEPARATOR))  # of crosses
