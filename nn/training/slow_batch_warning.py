"""The warning that a batch does not fit the captured step."""

import logging

from nn.distributed.process_group import Ranks


class SlowBatchWarning:
    """Says once, on rank 0, why batches are launched operation by operation; says nothing on CPUs, where no step is captured."""

    def __init__(self, ranks: Ranks) -> None:
        self._is_due = ranks.is_rank0 and ranks.device.type == "cuda"

    def __call__(self, reason: str) -> None:
        """Warn, unless this warning has been given before. `reason`: "a batch has more ... than ..."."""
        if not self._is_due:
            return
        self._is_due = False
        logging.getLogger(__name__).warning(
            f"{reason}; such batches are trained operation by operation, which is slower. If their ids or lengths follow "
            "their order, set data.shuffle_block"
        )
