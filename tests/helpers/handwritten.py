"""A dataset in NVIDIA's split binary, written with `struct` from the description of the format, not by our writer."""

import struct
from pathlib import Path

ROWS = {"train": 7, "test": 4}

SPEC = """
channel_spec:
  categorical: [cat_0.bin, cat_1.bin]
  label: [label]
  numerical: &id001 [num_0, num_1]
feature_spec:
  cat_0.bin: {cardinality: 10, dtype: int8}
  cat_1.bin: {cardinality: 40000, dtype: int32}
  label: {dtype: bool}
  num_0: {dtype: float16}
  num_1: {dtype: float16}
metadata: {}
source_spec:
  test:
  - {type: split_binary, features: *id001, files: [test/numerical.bin]}
  - {type: split_binary, features: [label], files: [test/label.bin]}
  - {type: split_binary, features: [cat_0.bin], files: [test/cat_0.bin]}
  - {type: split_binary, features: [cat_1.bin], files: [test/cat_1.bin]}
  train:
  - {type: split_binary, features: *id001, files: [train/numerical.bin]}
  - {type: split_binary, features: [label], files: [train/label.bin]}
  - {type: split_binary, features: [cat_0.bin], files: [train/cat_0.bin]}
  - {type: split_binary, features: [cat_1.bin], files: [train/cat_1.bin]}
"""


def numericals(row: int) -> tuple[float, float]:
    """Return the row's numericals, exact in float16."""
    return row + 0.5, -0.25 * row


def label(row: int) -> int:
    """Return the row's label."""
    return row % 3 % 2


def ids(row: int) -> tuple[int, int]:
    """Return the row's ids in cat_0.bin and cat_1.bin."""
    return row % 10, 39_999 - 5_000 * row


def write_files(root: Path, split: str, num_rows: int) -> None:
    """Write the four files of one split."""
    folder = root / split
    folder.mkdir(parents=True)
    rows = range(num_rows)
    (folder / "numerical.bin").write_bytes(
        b"".join(struct.pack("<ee", *numericals(r)) for r in rows)
    )
    (folder / "label.bin").write_bytes(bytes(label(r) for r in rows))
    (folder / "cat_0.bin").write_bytes(b"".join(struct.pack("<b", ids(r)[0]) for r in rows))
    (folder / "cat_1.bin").write_bytes(b"".join(struct.pack("<i", ids(r)[1]) for r in rows))


def write_handwritten(root: Path, spec: str = SPEC) -> Path:
    """Write both splits and the spec below `root`, and return it."""
    for split, num_rows in ROWS.items():
        write_files(root, split, num_rows)
    (root / "feature_spec.yaml").write_text(spec)
    return root
