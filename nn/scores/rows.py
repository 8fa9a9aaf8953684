"""Rows to score: those of a split."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from configs.schema import Config
from dataloading.batch import Batch
from dataloading.dataset.file_states import data_state
from dataloading.dataset.source import Source
from dataloading.held_out_source import TRAIN, HeldOutSource
from nn.build import Loaders, build_test_loader
from nn.distributed.process_group import Ranks
from nn.scores.named_rows import ROW_NUMBERS, NamedRows, kept_rows
from nn.scores.request import is_held_out, split_to_score

if TYPE_CHECKING:
    # Numba is imported only where there are keys.
    from dataloading.keys.key_maps import KeyMaps


class SplitRows:
    """Rows of one split of a dataset, or of the synthetic clicks, in their order.

    `opened`: a context in which they are read, entered before the process group exists. `missing_rate`: column of keep rates
    that the training rows had and these rows lack, or None. `facts`: all that tells these rows from others, as values of JSON.
    Raises ValueError: there is no such split, or it does not keep one of `predict.columns`.
    """

    def __init__(
        self, config: Config, source: Source, ranks: Ranks, key_maps: "KeyMaps | None" = None
    ) -> None:
        split = split_to_score(config, source.spec)
        self.source = source
        self.num_rows: int | None = source.num_rows(split)
        self.named = self._named_rows(config, split)
        self.title = f"{config.data.path or 'built-in synthetic clicks'}, split {split}"
        rate, files = source.spec.keep_rate, source.spec.splits.get(split)
        is_missing = rate is not None and files is not None and rate.name in files.absent
        self.missing_rate = rate.name if rate is not None and is_missing else None
        self.facts = {**data_state(source.spec), "split": split, "rows": self.num_rows}
        self._loader = build_test_loader(config, source, ranks, split, key_maps)
        self.opened = Loaders(None, self._loader)

    def start(self, num_done: int) -> tuple[Iterator[Batch], int]:
        """Return this rank's batches behind the first `num_done` rows, and how many rows of the first batch are done too.

        The start that scored them may have had another batch size.
        """
        loader = self._loader
        first_step, num_skipped = divmod(num_done, loader.batch_size)
        return loader.batches(first_step, loader.steps_per_epoch - first_step), num_skipped

    def _named_rows(self, config: Config, split: str) -> NamedRows:
        names, root = config.predict.columns, self.source.spec.root
        if not names:
            return ROW_NUMBERS
        if root is None:
            raise ValueError(
                f"predict.columns={names}: the synthetic clicks keep no columns; set data.path, or leave predict.columns out"
            )
        if isinstance(self.source, HeldOutSource) and is_held_out(config):
            border = self.source.num_rows(TRAIN)
            return kept_rows(root, TRAIN, border + self.source.num_rows(split), names, border)
        return kept_rows(root, split, self.num_rows, names)
