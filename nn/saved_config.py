"""The options of a run as its config.yaml and its checkpoints hold them, read back; nothing is interpolated or executed."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.built_in import MODELS
from configs.messages import first_line, shown
from configs.options import describe, open_sections
from configs.overrides import no_option, unknown_options
from configs.schema import RENAMED, Config
from dataloading.dataset.documents import read_yaml, reading
from nn.models.registry import typed_config


def read_saved_config(path: Path) -> dict[str, Any]:
    """Return the options of a run's config.yaml; their values are not checked yet.

    Raises ValueError: the file is missing or cannot be read, or is no configuration of a run.
    """
    if path.is_dir():
        raise ValueError(f"config={path} is a directory; name the config.yaml in it")
    with reading(f"config={path}", "name the config.yaml of a run directory"):
        values = read_yaml(path)
    if not isinstance(values, dict) or not {"recipe", "model", "train"} <= values.keys():
        raise ValueError(
            f"config={path} is no configuration of a run, which has recipe, model and train; name the config.yaml of a run "
            "directory"
        )
    _rename_earlier(values)
    for key, text in _texts(values):
        if "${" in text or text == "???":
            raise ValueError(
                f"config={path}: {key} is {shown(text)}; a run's config.yaml holds values only"
            )
    for name in unknown_options(OmegaConf.create(values), Config):
        problem = no_option(str(name), [option for option, _ in describe(Config)])
        raise ValueError(f"config={path}: {problem}")
    values.pop("config", None)
    return values


def load_saved_config(path: Path, *, trusted: bool) -> Config:
    """Return the checked options of a run's config.yaml.

    `trusted`: whether a model outside the project, `package.module:Class`, may be imported.

    Raises ValueError: see `read_saved_config`; or an invalid value, or a model that may not be imported.
    """
    values = read_saved_config(path)
    model = values["model"]
    name = model.get("name") if isinstance(model, dict) else None
    if name not in MODELS and not trusted:
        raise ValueError(
            f"{path}: model.name={shown(name)} is no model of the project; trusted=True imports it, which runs its code"
        )
    try:
        return _typed(values)
    except (ValueError, OmegaConfBaseException) as error:
        raise ValueError(f"{path}: {first_line(error)}") from None


def config_of(facts: Mapping[str, Any]) -> Config:
    """Return the checked options of a run from the run.json of a checkpoint.

    Raises ValueError: there are none, or they are not those of this version.
    """
    if "config" not in facts:
        raise ValueError("it has no options of a run")
    values = deepcopy(facts["config"])
    _rename_earlier(values)
    try:
        return _typed(values)
    except OmegaConfBaseException as error:
        raise ValueError(
            f"its options are not those of this version: {shown(str(error))}"
        ) from None


def _typed(values: Mapping[str, Any]) -> Config:
    schema = OmegaConf.structured(Config)
    for section in open_sections(Config):
        OmegaConf.set_struct(schema[section], False)
    return typed_config(OmegaConf.merge(schema, values))  # type: ignore[arg-type]


def _rename_earlier(values: dict[str, Any]) -> None:
    """Replace the names that options had in earlier versions, in place."""
    for old, new in RENAMED.items():
        section, _, name = old.rpartition(".")
        options = values.get(section) if section else values
        if isinstance(options, dict) and name in options:
            options.setdefault(new.rpartition(".")[2], options.pop(name))


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) for every text of a document, keys included."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            below = f"{key}.{name}" if key else str(name)
            if isinstance(name, str):
                yield below, name
            yield from _texts(item, below)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)
