"""Names for programs: `from hybrid_parallel_recsys import Run`. Each is imported when it is first used.

The packages behind them have short names, such as `configs`, and import each other by these. A wheel holds them below this
package, so that it adds one name to an environment.
"""

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # In a wheel, which this is for, they lie there.
    from hybrid_parallel_recsys.configs.options import option as option
    from hybrid_parallel_recsys.configs.schema import ModelConfig as ModelConfig
    from hybrid_parallel_recsys.dataloading.dataset.dataset_directory import (
        write_dataset as write_dataset,
    )
    from hybrid_parallel_recsys.nn.embedding.optimizer import StateField as StateField
    from hybrid_parallel_recsys.nn.embedding.optimizer import TableRule as TableRule
    from hybrid_parallel_recsys.nn.library.loaded_run import Run as Run
    from hybrid_parallel_recsys.nn.library.options import options as options
    from hybrid_parallel_recsys.nn.library.own_training import Training as Training
    from hybrid_parallel_recsys.nn.loggers.run_logger import RunLogger as RunLogger
    from hybrid_parallel_recsys.nn.models.metric import Metric as Metric
    from hybrid_parallel_recsys.nn.models.model import Model as Model
    from hybrid_parallel_recsys.nn.observers.observer import Observer as Observer
    from hybrid_parallel_recsys.nn.training.dense_optimizer import DenseRule as DenseRule
    from hybrid_parallel_recsys.preproc.frames import describe as describe
    from hybrid_parallel_recsys.preproc.frames import preprocess as preprocess

MODULES = {
    "DenseRule": "nn.training.dense_optimizer",
    "Metric": "nn.models.metric",
    "Model": "nn.models.model",
    "ModelConfig": "configs.schema",
    "Observer": "nn.observers.observer",
    "Run": "nn.library.loaded_run",
    "RunLogger": "nn.loggers.run_logger",
    "StateField": "nn.embedding.optimizer",
    "TableRule": "nn.embedding.optimizer",
    "Training": "nn.library.own_training",
    "describe": "preproc.frames",
    "option": "configs.options",
    "options": "nn.library.options",
    "preprocess": "preproc.frames",
    "write_dataset": "dataloading.dataset.dataset_directory",
}
__all__ = list(MODULES)
PACKAGES = ("configs", "dataloading", "preproc", "nn")
"""What a program that uses them imports; commands have processes of their own."""
HERE = Path(__file__).resolve().parent
ROOT = HERE if (HERE / "configs").is_dir() else HERE.parent
"""What holds the packages and the commands: this directory in a wheel, the one above in a checkout."""
# So that `python -m hybrid_parallel_recsys.preproc` is found in a checkout too.
__path__.append(str(ROOT))


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"{__name__} has no {name}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__


def _load(name: str) -> None:
    """Import a package by its short name from here, wherever Python would find one of that name.

    Raises ImportError: another one was imported before.
    """
    if (other := sys.modules.get(name)) is not None:
        paths = [Path(path).resolve() for path in other.__path__]
        if paths != [ROOT / name]:
            raise ImportError(
                f"{__name__} needs the name {name}, under which {', '.join(map(str, paths))} was imported; rename that, or "
                "run this in a process of its own"
            )
        return
    spec = PathFinder.find_spec(name, [str(ROOT)])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


for _name in PACKAGES:
    _load(_name)
