"""Command `python -m serving.forget`: remove values of a feature, such as users that want to be deleted, wherever they are.

Every checkpoint, export and model is replaced by a copy in which the rows of the values are zeros and their keys are gone; then
the vocabularies lose the values. The next delta of a run that resumes from its checkpoint has these rows, so that versions that
follow it lose them too. What cannot be changed is named, and the exit code is 1 while something has a value.
"""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from glob import escape
from pathlib import Path

from configs.command_line import command
from configs.messages import on_one_line
from configs.serving_schema import ForgetConfig
from dataloading.dataset.durable_files import clear_leftovers, exclusive
from dataloading.dataset.feature_spec import SPEC_NAME
from nn.checkpoint.directory import CHECKPOINTS
from nn.checkpoint.tensor_index import INDEX_FILE
from nn.observability.records import CONFIG
from nn.observability.run_lock import RunLock
from serving.manifest import DENSE

LEFTOVER = re.compile(r"\.(.+)\.(?:partial|replaced)-[0-9a-f]{8}")
"""Directories that a killed process leaves beside the one that it was writing."""


def run(config: ForgetConfig) -> None:
    assert config.feature is not None, "checked by the options"
    assert config.keys is not None, "likewise"
    # What a link names is replaced, and not the link by a copy of that.
    directories = [Path(name).resolve() for name in config.directories]
    for directory in directories:
        _clear(directory)
        if not directory.is_dir():
            raise ValueError(f"directories: {directory} is no directory")
    found = {name: [*_with(name, directories)] for name in (INDEX_FILE, DENSE, SPEC_NAME)}
    # A run that trains may have no checkpoint yet.
    runs = {of.parent.parent for of in found[INDEX_FILE] if of.parent.name == CHECKPOINTS}
    runs.update(_with(CONFIG, directories))
    with ExitStack() as stack:
        for run_dir in runs:
            stack.enter_context(RunLock(logging.getLogger(__name__))).take(run_dir)
        # Each is read, and replaced later: another call may not replace it meanwhile.
        for path in sorted({path for paths in found.values() for path in paths}):
            stack.enter_context(exclusive(path.with_name(f"{path.name}.forget"), "removes values"))
        # Imported here: torch takes seconds, and the errors above need none.
        from nn.library_warnings import quiet_libraries

        quiet_libraries()
        from serving.exporting.forgetting import forget
        from serving.value_search import Values, holders

        values = Values.read(config.feature, Path(config.keys))
        unchanged = 0
        for path, text, is_good in forget(values, found):
            unchanged += not is_good
            print(on_one_line(f"{path}: {text}"))
        left = [found for directory in directories for found in holders(directory, values)]
    for path, kind in left:
        print(on_one_line(f"{path}: still has a value ({kind}); remove it, or make it again"))
    where = ", ".join(map(str, directories))
    if left or unchanged:
        print(on_one_line(f"places left below {where}: {unchanged + len(left)}"))
        raise SystemExit(1)
    print(on_one_line(f"left below {where}: none of {len(values.texts):,} values"))


def _clear(directory: Path) -> None:
    """Remove what killed calls left of a directory and of those below it, or put it back."""
    found = [*directory.parent.glob(f".{escape(directory.name)}.*")]
    for folder, names, _ in os.walk(directory):
        found += [Path(folder, name) for name in names]
    roots = {path.with_name(of[1]) for path in found if (of := LEFTOVER.fullmatch(path.name))}
    for root in sorted(roots):
        with exclusive(root, f"is writing {root}"):
            clear_leftovers(root)


def _with(name: str, directories: list[Path]) -> Iterator[Path]:
    """Yield the directories that have a file, each once; links are not followed."""
    for directory in directories:
        for folder, folders, names in os.walk(directory):
            folders.sort()
            if name in names:
                yield Path(folder)


if __name__ == "__main__":
    command(run, ForgetConfig, "serving_forget", ("directories", "keys"))
