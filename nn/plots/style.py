"""Look of all pictures of a run: colours, fonts, title, and a file that is complete or absent."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from configs.messages import printable, shortened
from dataloading.dataset.durable_files import replace_bytes

INK = "#30343b"
FAINT = "#8a919c"
TRAIN = "#3b6fb6"
TEST = "#d1603d"
SPEED = "#3d8b6e"
RATE = "#7a5ba6"

WIDTH_INCHES = 12
DOTS_PER_INCH = 130

# matplotlib warns where the home directory cannot be written, and takes a temporary one.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

# Any: matplotlib types its keys as a Literal of all their names.
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#c4c8ce",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "grid.color": "#e9ebee",
    "xtick.color": "#c4c8ce",
    "ytick.color": "#c4c8ce",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.framealpha": 0.75,
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
}


@contextmanager
def picture(out_png: Path, height: float, title: str, facts: str) -> Iterator[Any]:
    """Yield an empty figure of `height` inches with a title and a line of facts, and write it at the end of the block.

    Raises OSError: the picture cannot be written.
    """
    # Importing matplotlib takes most of a second, so only the end of a run pays for it.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH)
        top = 1 - 0.62 / height
        figure.set_layout_engine(
            "constrained", w_pad=0.12, h_pad=0.1, wspace=0.03, hspace=0.04, rect=(0, 0, 1, top)
        )
        for text, inches, size, room, color, weight in (
            (title, 0.18, 13.0, 112, INK, "bold"),
            (facts, 0.44, 9.5, 180, FAINT, "normal"),
        ):
            # A long line is drawn smaller before it is shortened.
            size *= min(1, max(0.7, room / max(len(text), 1)))
            line = plain(text, int(room / 0.7))
            place = (0.012, 1 - inches / height)
            figure.text(*place, line, va="center", size=size, color=color, weight=weight)
        yield figure
        content = BytesIO()
        figure.savefig(content, format="png")
        replace_bytes(out_png, content.getvalue(), out_png.with_name(f".{out_png.name}.tmp"))


def plain(text: str, longest: int = 40) -> str:
    """Return a text as matplotlib draws it: without control characters, and without formulas."""
    return shortened(printable(text), longest).replace("$", r"\$")
