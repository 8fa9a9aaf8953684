"""A run from its typed configuration: each mode is a function, which takes it also as text for the run directory.

They raise:
    ValueError: an invalid option or input; raised on all ranks.
    RankError: an error that one rank alone finds, such as a bad row.
    DivergedError: the loss is not finite; raised on all ranks.
    SharedError: an error that all ranks find while training, such as a checkpoint of another model.
    LostRankError: another rank has ended.
    StoppedError: a signal stopped the run; raised on all ranks.
"""

from collections.abc import Callable

from configs.schema import Config, Mode
from nn.modes.evaluate import evaluate
from nn.modes.importance import importance
from nn.modes.inference import inference
from nn.modes.plan import show_plan
from nn.modes.train import train

MODES: dict[Mode, Callable[[Config, str], None]] = {
    Mode.plan: show_plan,
    Mode.train: train,
    Mode.eval: evaluate,
    Mode.importance: importance,
    Mode.inference: inference,
}
