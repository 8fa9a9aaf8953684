"""Parts of small runs that take a tenth of their time, made once per process, before the forks if they can be."""

import sys
from functools import cache
from pathlib import Path

from configs.schema import SyntheticConfig
from dataloading.synthetic import SyntheticSource
from nn.observability import environment


def make_once() -> None:
    """Let the runs of this process and of its forks share git's answer, for which it looks at every file, and clicks."""
    environment.git_commit = cache(environment.git_commit)
    environment.git_commit(Path(environment.__file__).parents[2])
    # Its import takes seconds, which the fast tests do not need.
    if "nn.build" in sys.modules:
        sys.modules["nn.build"].SyntheticSource = _clicks  # type: ignore[attr-defined]


_made: dict[str, SyntheticSource] = {}


def _clicks(stream: SyntheticConfig, seed: int) -> SyntheticSource:
    """Return clicks, which nothing changes; making their teacher takes longer than a few steps."""
    key = repr((stream, seed))
    if key not in _made:
        _made[key] = SyntheticSource(stream, seed)
    return _made[key]
