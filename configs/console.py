"""The terminal of all commands: a rich console that shows every text as it is, without markup and control characters."""

import os
from typing import Any

from rich.console import Console
from rich.text import Text

from configs.messages import printable


class LiteralConsole(Console):
    """Console for text with names from files: `[red]` is five letters, and a control character is shown as an escape.

    A text in a table, a title or a line is one line; pass a `Text` to print several lines, or styles.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the literal text; rich calls this for every `str` that it prints."""
        return super().render_str(printable(text), **options | {"markup": False, "emoji": False})


def command_console(pipe_width: int = 120) -> LiteralConsole:
    """Return the console of a command; a file or a pipe, which has no width of its own, has `pipe_width` columns."""
    console = LiteralConsole()
    has_width = console.is_terminal or "COLUMNS" in os.environ
    return console if has_width else LiteralConsole(width=pipe_width)


def print_line(console: Console, text: str) -> None:
    """Print a text that no width breaks, with nothing of it coloured."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
