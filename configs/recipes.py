"""What a recipe may be called where a command or a function takes its name: a command, an experiment or a model."""

from difflib import get_close_matches
from pathlib import Path

from configs.built_in import MODELS

COMMANDS = ("dlrm", "dcnv2")


def command_of(recipe: str) -> tuple[str, list[str]]:
    """Return the command that a recipe stands for, such as dlrm, and the options that it begins with.

    Raises:
        ValueError: there is no such recipe.
    """
    if recipe in COMMANDS:
        return recipe, []
    experiments = sorted(path.stem for path in Path(__file__).parent.glob("experiment/*.yaml"))
    if recipe in experiments:
        return "dlrm", [f"experiment={recipe}"]
    if recipe in MODELS:
        return "dlrm", [f"recipe={recipe}", f"model.name={recipe}"]
    close = get_close_matches(recipe, [*COMMANDS, *MODELS, *experiments], n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(
        f"there is no recipe={recipe}; {hint}want {', '.join(COMMANDS)}, an experiment ({', '.join(experiments)}) or a model "
        f"({', '.join(MODELS)})"
    )
