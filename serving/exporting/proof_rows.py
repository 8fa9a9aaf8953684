"""Rows of a proof in a model directory, with which the versions that deltas make of it are proved without the dataset.

The file holds, little-endian, int64: the number of rows B, whether they have keep rates, and the number of ids of each ragged
feature; the ids [B, H]; lengths [B] and ids of each ragged feature. Then float32: the numericals [B, N], the keep rates [B], and
the numbers of events.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dataloading.dataset.documents import read_regular
from serving.inference.model_rows import RaggedIds, Rows
from serving.manifest import PROOF_ROWS, Manifest, ModelError

DRAWN = "drawn"
"""In place of the split of rows that a directory of an earlier version has none of."""
DRAWN_ROWS = 1024
LONGEST = 3
"""Ids of a drawn row in a ragged feature."""


def write_proof_rows(directory: Path, rows: Rows) -> None:
    ragged = list(rows.ragged.values())
    has_rates = rows.keep_rates is not None
    head = torch.tensor([len(rows), has_rates, *(len(ids.values) for ids in ragged)])
    integers = [head, rows.ids, *(part for ids in ragged for part in (ids.lengths, ids.values))]
    floats = [rows.numerical, *([] if rows.keep_rates is None else [rows.keep_rates])]
    floats += [numbers.values for numbers in rows.numbers.values()]
    with (directory / PROOF_ROWS).open("xb") as stream:
        for kind, tensors in (("<i8", integers), ("<f4", floats)):
            for tensor in tensors:
                stream.write(tensor.contiguous().numpy().astype(kind, copy=False).data)


def read_proof_rows(directory: Path, manifest: Manifest) -> tuple[str, Rows]:
    """Return the rows of a model directory and their split; drawn ones if it has none.

    Raises ModelError: they are not of the model.
    """
    if PROOF_ROWS not in manifest.files:
        return DRAWN, _drawn(manifest)
    path = directory / PROOF_ROWS
    data, offset = read_regular(path), 0

    def take(dtype: str, *shape: int) -> Tensor:
        nonlocal offset
        count = int(np.prod(shape, dtype=object))
        size = count * int(dtype[-1])
        if min(shape) < 0 or size > len(data) - offset:
            raise ModelError(f"{path} has {len(data):,} bytes, too few for its rows")
        found = np.frombuffer(data, dtype, count, offset).reshape(shape)
        offset += size
        return torch.from_numpy(found.copy())

    num_rows, has_rates, *counts = take("<i8", 2 + len(manifest.ragged)).tolist()
    ids = take("<i8", num_rows, manifest.id_columns)
    ragged = {
        feature.name: RaggedIds(lengths=take("<i8", num_rows), values=take("<i8", count))
        for feature, count in zip(manifest.ragged, counts, strict=True)
    }
    numerical = take("<f4", num_rows, len(manifest.numerical))
    rates = take("<f4", num_rows) if has_rates else None
    numbers = {}
    for sequence in manifest.sequences:
        ids_of_events = ragged[sequence.features[0]]
        for name in sequence.numbers:
            numbers[name] = RaggedIds(take("<f4", len(ids_of_events.values)), ids_of_events.lengths)
    good = offset == len(data) and num_rows > 0 and bool(numerical.isfinite().all())
    good &= all(bool(of.values.isfinite().all()) for of in numbers.values())
    good &= rates is None or bool(((rates > 0) & (rates <= 1)).all())
    for feature in manifest.categorical:
        found = ragged.get(feature.name)
        values = ids[:, manifest.id_slices()[feature.name]] if found is None else found.values
        good &= bool(((values >= 0) & (values < feature.cardinality)).all())
        if found is not None:
            good &= bool((found.lengths >= 0).all()) and int(found.lengths.sum()) == len(values)
    if not good:
        raise ModelError(f"{path} has rows that are not of the model; export it again")
    return str(manifest.proof.get("split", DRAWN)), Rows(numerical, ids, ragged, rates, numbers)


def _drawn(manifest: Manifest) -> Rows:
    """Return the same rows for the same model: every id is as likely as any other."""
    generator = torch.Generator().manual_seed(0)

    def draw(most: int, count: int) -> Tensor:
        return torch.randint(most, (count,), generator=generator)

    fixed = [
        draw(feature.cardinality, DRAWN_ROWS * (feature.hotness or 0)).view(DRAWN_ROWS, -1)
        for feature in manifest.fixed
    ]
    ids = torch.cat(fixed, dim=1) if fixed else torch.zeros(DRAWN_ROWS, 0, dtype=torch.int64)
    ragged = {}
    for feature in manifest.ragged:
        lengths = draw(LONGEST + 1, DRAWN_ROWS)
        ragged[feature.name] = RaggedIds(draw(feature.cardinality, int(lengths.sum())), lengths)
    numerical = torch.randn(DRAWN_ROWS, len(manifest.numerical), generator=generator)
    return Rows(numerical, ids, ragged)
