"""Text of `--help`: every option with its value after composition and its meaning, in the groups of the schema.

Hydra fills a help template from the composed yaml, which holds values but no meanings. The schema holds the
meanings, so a resolver joins the two: a yaml with

    hydra:
      help:
        template: |
          ...
          ${group_help:experiment}
          ${option_help:}

prints the files of `configs/experiment/`, and the options of the schema last given to `register_option_help`.
`--help optimizer` prints those of a group alone.
"""

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from configs.messages import shown
from configs.option_values import written
from configs.options import describe, type_hints

NOT_COMPOSED = object()
WIDTH = 100
"""Columns of a file or a pipe; a terminal has its own, up to `MOST_WIDTH`."""
MOST_WIDTH = 120
MEANING_COLUMN = 40
CONFIGS = Path(__file__).parent


SectionClasses = Mapping[str, Callable[[DictConfig], type]]
"""Open section -> function of its composed values that finds the class of all its options."""
NO_SECTIONS: SectionClasses = {}


@dataclass(frozen=True, slots=True)
class Topics:
    """The part of the help that is printed: groups, options or parts of their names; everything without words."""

    words: Sequence[str]
    groups: Sequence[str]

    def choose(self, options: Sequence[str]) -> list[str]:
        """Return the options that a word names, or all of them.

        A word names a group or an option, else the options with it in their names. Raises ValueError: a word names nothing.
        """
        if not self.words:
            return list(options)
        chosen: set[str] = set()
        for word in self.words:
            found = [option for option in options if f"{option}.".startswith(f"{word}.")]
            found = found or [option for option in options if word in option]
            if not found and word not in self.groups:
                known = [
                    *options,
                    *self.groups,
                    *(part for option in options for part in option.split(".")),
                ]
                close = get_close_matches(word, known, n=1)
                hint = f"did you mean {close[0]}? " if close else ""
                raise ValueError(
                    f"--help: no option has {shown(word)} in its name; {hint}--help alone lists all options"
                )
            chosen.update(found)
        return [option for option in options if option in chosen]


def register_option_help(schema: type, section_classes: SectionClasses, topics: Topics) -> None:
    """Make the help print the topics among the options of `schema`; call it before Hydra composes."""
    OmegaConf.register_new_resolver(
        "option_help",
        lambda *, _root_: _for_hydra(option_help(schema, _root_, section_classes, topics)),
        replace=True,
    )
    OmegaConf.register_new_resolver(
        "group_help", lambda group: _for_hydra(group_help(group, is_short=True)), replace=True
    )


def _for_hydra(text: str) -> str:
    # Hydra substitutes $NAME in the finished text, so a dollar sign of ours has to be doubled.
    return text.replace("$", "$$")


def option_help(
    schema: type, config: DictConfig, section_classes: SectionClasses, topics: Topics
) -> str:
    """Return a line `key=value  meaning` for the chosen options of `schema`, values from `config`, with a title per section.

    Raises ValueError: no option has a word of `topics` in its name.
    """
    sections = {name: find(config[name]) for name, find in section_classes.items()}
    defaults = OmegaConf.create(
        {name: OmegaConf.structured(found) for name, found in sections.items()}
    )
    meanings = dict(describe(schema, sections=sections))
    chosen = topics.choose(list(meanings))
    types = type_hints(schema) | sections
    blocks = [group_help(word) for word in topics.words if word in topics.groups]
    for section, options in groupby(
        chosen, lambda option: option.partition(".")[0] if "." in option else ""
    ):
        lines = [f"{section}: {_first_sentence(types[section])}"] if section else []
        for option in options:
            value = OmegaConf.select(config, option, default=NOT_COMPOSED)
            if value is NOT_COMPOSED:
                value = OmegaConf.select(defaults, option)
            lines += _entry(f"{option}={written(value)}", meanings[option])
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _first_sentence(section: type) -> str:
    """Return that of the docstring of a class, or of the next base that has one; Python gives dataclasses their signature.

    The options of a model need none: `DLRMOptions` says it.
    """
    name = section.__name__
    if name.endswith("Options") and (section.__doc__ or "").startswith(f"{name}("):
        return f"Options of {name.removesuffix('Options')}"
    texts = ((base.__name__, base.__dict__.get("__doc__")) for base in section.__mro__)
    written = (text for name, text in texts if text and not text.startswith(f"{name}("))
    return next(written).strip().splitlines()[0].rstrip(".")


def group_help(group: str, *, is_short: bool = False) -> str:
    """Return an entry `group=name  description` per file of a config group; a short one leaves out what follows a colon.

    The first comment of a file describes it.
    """
    lines: list[str] = []
    for path in sorted((CONFIGS / group).glob("*.yaml")):
        comments = (
            line.removeprefix("# ").strip()
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.startswith("# ") and "@package" not in line
        )
        meaning = next(comments, "")
        if is_short:
            meaning = meaning.partition(": ")[0].rstrip(".")
        lines += _entry(f"{group}={path.stem}", meaning)
    return "\n".join(lines)


def _entry(head: str, meaning: str) -> list[str]:
    """Return the lines of an entry: its head and, beside or below it, its meaning."""
    columns = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else WIDTH
    width = min(max(columns, MEANING_COLUMN + 20), MOST_WIDTH)
    wrapped = textwrap.wrap(meaning, width - MEANING_COLUMN, break_on_hyphens=False)
    head = f"  {head}"
    if len(head) <= MEANING_COLUMN - 2 and wrapped:
        head = head.ljust(MEANING_COLUMN) + wrapped.pop(0)
    return [head, *(" " * MEANING_COLUMN + line for line in wrapped)]
