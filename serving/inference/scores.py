"""Logits to scores: keep rates are corrected, and binary outputs become probabilities."""

import numpy as np
import torch
from torch import Tensor

from serving.manifest import Manifest

# B: rows, O: outputs


class ScoreHead:
    def __init__(self, manifest: Manifest, device: torch.device | str = "cpu") -> None:
        self._is_binary = [output.is_binary for output in manifest.outputs]
        shifts = [output.shift for output in manifest.outputs]
        self._shifts = torch.tensor(shifts, dtype=torch.float32, device=device)
        # Only probabilities depend on the rate at which rows were kept.
        self._corrected = torch.tensor(self._is_binary, dtype=torch.float32, device=device)

    def __call__(self, logits: Tensor, keep_rates: Tensor | None) -> Tensor:
        """Return the scores, float32 [B, O]: probabilities of binary outputs, numbers of others.

        `logits`: [B], or [B, O] of several outputs. `keep_rates`: float32 [B]; None if no row has one.
        """
        logits = logits.view(len(logits), -1) + self._shifts
        if keep_rates is not None:
            logits = logits + keep_rates.log()[:, None] * self._corrected
        if all(self._is_binary):
            return logits.sigmoid()
        columns = [
            column.sigmoid() if is_binary else column
            for column, is_binary in zip(logits.unbind(1), self._is_binary, strict=True)
        ]
        return torch.stack(columns, dim=1)


def why_not_finite(scores: np.ndarray) -> str | None:
    """Return why scores [B, O] are refused, if one is no finite number: it is no answer, and JSON has no form for it."""
    is_bad = ~np.isfinite(scores).all(axis=1)
    if not is_bad.any():
        return None
    return f"row {int(is_bad.argmax())}: the score is not finite; the numerical values are larger than the model can compute with"
