"""Colours and style of every picture, of runs, servers and datasets alike."""

import logging
from typing import Any

INK = "#30343b"
FAINT = "#8a919c"
TRAIN = "#3b6fb6"
TEST = "#d1603d"
SPEED = "#3d8b6e"
RATE = "#7a5ba6"
COLORS = (TRAIN, TEST, SPEED, RATE, "#b08b2e", "#5f7f99", "#a34f7b", INK)
"""Of the lines of a picture, in their order."""

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
