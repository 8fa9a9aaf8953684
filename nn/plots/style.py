"""Title, legends and file of all pictures of a run; the file is written under a temporary name and renamed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from configs.messages import printable, shortened
from configs.palette import FAINT, INK, STYLE
from dataloading.dataset.durable_files import replace_bytes

WIDTH_INCHES = 12
DOTS_PER_INCH = 130


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
            position = (0.012, 1 - inches / height)
            figure.text(*position, line, va="center", size=size, color=color, weight=weight)
        yield figure
        content = BytesIO()
        figure.savefig(content, format="png")
        replace_bytes(out_png, content.getvalue())


def title_of(facts: Mapping[str, Any]) -> str:
    """Return what a title begins with: the model and the data of a run, as far as its files name them."""
    model = str(facts.get("model") or facts.get("recipe") or "run").rpartition(":")[2]
    data = facts.get("data")
    return model if data is None else f"{model} on {shortened(Path(str(data)).name, 40)}"


def legend_above(axes: Any, columns: int = 2, title: str | None = None, lines: int = 1) -> None:
    """Draw the legend between the title and the frame of a panel, where it hides no point; it has space for `lines` at least."""
    handles, _ = axes.get_legend_handles_labels()
    if not handles:
        return
    legend = axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=min(columns, len(handles)),
        title=title,
        title_fontsize=9,
        alignment="left",
        borderaxespad=0.1,
        borderpad=0.2,
        labelspacing=0.25,
        columnspacing=1.2,
        handlelength=1.5,
    )
    # Its width is not that of the panel, which the title keeps free above.
    legend.set_in_layout(False)
    lines = max(lines, -(-len(handles) // columns) + (title is not None))
    pad = 6 + 13.5 * lines
    for side in ("left", "right"):
        axes.set_title(axes.get_title(loc=side), loc=side, pad=pad)


def label_point(axes: Any, x: float, y: float, text: str, color: str) -> None:
    """Write a short text above a point."""
    axes.annotate(
        text, (x, y), (0, 8), textcoords="offset points", ha="center", size=8.5, color=color
    )


def plain(text: str, longest: int = 40) -> str:
    """Return a text as matplotlib draws it: without control characters, and without formulas."""
    return shortened(printable(text), longest).replace("$", r"\$")
