"""A model directory that is loaded: rows in, scores out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from serving.inference.dense import load_dense
from serving.inference.key_rows import KeyRows, load_key_rows
from serving.inference.model_rows import Rows
from serving.inference.raw_values import RawValues
from serving.inference.requests import IdInputs
from serving.inference.scores import ScoreHead
from serving.inference.tables import Lookup, MappedTables
from serving.manifest import DENSE, Manifest

# B: rows, N: numerical features, O: outputs


@dataclass(slots=True)
class Sampled:
    """Ids in samples of the requests, of tables with rows in host memory behind a GPU's, and those whose row the GPU had."""

    lookups: int = 0
    hits: int = 0


class ServedModel:
    """Tables and dense component of a model directory.

    `raw`: its transformation of raw values; None if only ids are served. `keys`: rows of raw keys by feature; None without.
    """

    def __init__(
        self,
        manifest: Manifest,
        look_up: Lookup,
        dense: Callable[..., Tensor],
        raw: RawValues | None = None,
        keys: Mapping[str, KeyRows] | None = None,
    ) -> None:
        self.manifest, self.raw, self.id_inputs = manifest, raw, IdInputs(manifest, keys)
        self.sampled = Sampled()
        self._look_up = look_up
        self._dense = dense
        self._head = ScoreHead(manifest)

    @classmethod
    def load(cls, directory: Path, manifest: Manifest | None = None) -> Self:
        """Map the tables and load the dense component of a model directory; `Manifest.verify` compares its files.

        Raises ModelError: it is no model directory, or is damaged.
        """
        manifest = manifest or Manifest.read(directory)
        keys = load_key_rows(directory, manifest)
        raw = RawValues.load(directory, manifest, keys)
        dense = load_dense(directory / DENSE)
        return cls(manifest, MappedTables(directory, manifest), dense, raw, keys)

    def scores(self, *parts: Rows) -> Tensor:
        """Return the scores of rows, one part after another, [B, O]: probabilities of binary outputs, numbers of others."""
        rows = Rows.joined(parts)
        with torch.inference_mode():
            logits = self._dense(rows.numerical, *self._look_up(rows))
            return self._head(logits, rows.keep_rates)
