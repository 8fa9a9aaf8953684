"""Text of `--help`: every option with its value after composition and its meaning.

Hydra fills a help template from the composed yaml, which holds values but no meanings. The schema holds the
meanings, so a resolver joins the two: a yaml with

    hydra:
      help:
        template: |
          ...
          ${option_help:}

prints them for the schema last given to `register_option_help`.
"""

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import Container, DictConfig, OmegaConf

from configs.schema import describe

NOT_COMPOSED = object()
WIDTH = 100
MEANING_COLUMN = 40


SectionClasses = Mapping[str, Callable[[DictConfig], type]]
"""Open section -> function of its composed values that finds the class of all its options."""
NO_SECTIONS: SectionClasses = {}


def register_option_help(schema: type, section_classes: SectionClasses = NO_SECTIONS) -> None:
    """Make `${option_help:}` print the options of `schema`; call it before Hydra composes."""
    OmegaConf.register_new_resolver(
        "option_help",
        lambda *, _root_: option_help(schema, _root_, section_classes),
        replace=True,
    )


def option_help(
    schema: type, config: DictConfig, section_classes: SectionClasses = NO_SECTIONS
) -> str:
    """Return a line `key=value  meaning` for every option of `schema`, values from `config`."""
    sections = {name: find(config[name]) for name, find in section_classes.items()}
    defaults = OmegaConf.create(
        {name: OmegaConf.structured(found) for name, found in sections.items()}
    )
    lines = []
    for key, meaning in describe(schema, sections=sections):
        value = OmegaConf.select(config, key, default=NOT_COMPOSED)
        if value is NOT_COMPOSED:
            value = OmegaConf.select(defaults, key)
        head = f"  {key}={_as_override(value)}"
        wrapped = textwrap.wrap(meaning, WIDTH - MEANING_COLUMN, break_on_hyphens=False)
        if len(head) <= MEANING_COLUMN - 2:
            head = head.ljust(MEANING_COLUMN) + wrapped.pop(0)
        lines += [head, *(" " * MEANING_COLUMN + line for line in wrapped)]
    # Hydra substitutes $NAME in the finished text, so a dollar sign of ours has to be doubled.
    return "\n".join(lines).replace("$", "$$")


def _as_override(value: Any) -> str:
    """Format a value as it is typed behind `key=`."""
    if value is None:
        return "null"
    if isinstance(value, Container):
        value = OmegaConf.to_container(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(_as_override(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_as_override(item)}" for key, item in value.items()) + "}"
    return getattr(value, "name", str(value))
