"""Models by name: those of the project and those of other packages.

torch is imported where a model is: the options of the project's own models are checked without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_type_hints

from omegaconf import DictConfig, OmegaConf

from configs.built_in import MODELS
from configs.messages import shown
from configs.options import describe
from configs.overrides import WrittenOption, no_option, to_config, to_section, unknown_options
from configs.schema import Config, EventPooling, ModelConfig, NumericalEncoding
from configs.user_objects import described, load_user_object
from dataloading.dataset.feature_spec import FeatureSpec
from nn.models import options as own_options

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    from nn.models.model import Model


def find_options(name: str) -> type[ModelConfig]:
    """Return the class of the options of a model.

    The model is not imported where `nn.models.options` has the options of its class, so that they are checked without torch.
    """
    class_name = MODELS.get(name, "").partition(":")[2]
    known: type[ModelConfig] | None = getattr(own_options, f"{class_name}Options", None)
    return known or find_model(name).Options


def find_model(name: str) -> type[Model]:
    """Import the model that `model.name` names. Raises ValueError: there is no such model, or the class is not a model."""
    path = MODELS.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        close = get_close_matches(name, MODELS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"there is no model.name={name}; {hint}the models are {', '.join(MODELS)}, and "
            "package.module:Class is one of your own"
        )
    model = load_user_object(path, "model.name")
    from nn.models.model import Model

    missing = None
    options = getattr(model, "Options", None)
    if not isinstance(model, type) or not issubclass(model, Model):
        missing = "it is no subclass of nn.models.model.Model"
    elif not (
        isinstance(options, type) and is_dataclass(options) and issubclass(options, ModelConfig)
    ):
        missing = "it has no Options, a dataclass that is a subclass of configs.schema.ModelConfig"
    if missing is not None:
        raise ValueError(
            f"model.name={name} declares no model: {missing}; nn/models/model.py describes the declaration"
        )
    return model


def typed_config(
    composed: DictConfig, written: Sequence[WrittenOption] = (), common: Config | None = None
) -> Config:
    """Return the typed options of a run, including those of its model; every check of options runs here.

    `written` are options that were written for this model; others of the model may be left from another one's recipe. `common` is
    what `to_config` returns of `composed`, and becomes the result. Raises ValueError: an invalid value, an unknown option, or
    an unknown model; or an option of `written` is one of other models only, or the user's has no effect.
    """
    written = [option for option in written if option.name.startswith("model.")]
    config = common or to_config(composed)
    _refuse_options_of_others(composed.model.name, written)
    config.model = model_options(composed.model)
    for name, reason in own_options.without_effect(config.model).items():
        for option, where, is_users in written:
            if is_users and f"{option}.".startswith(f"model.{name}."):
                raise ValueError(f"{where}{option} has no effect: {reason}; leave it out")
    return config


def _refuse_options_of_others(name: str, written: Sequence[WrittenOption]) -> None:
    own = {declared.name for declared in fields(find_options(name))}
    for written_as, where, _ in written:
        option = written_as.split(".")[1]
        others = [
            other
            for other in MODELS
            if option not in own
            and option in {declared.name for declared in fields(find_options(other))}
        ]
        options = sorted(options_of_own_models()) if others else []
        if others and not any(
            f"{known}.".startswith(f"{written_as}.") or written_as.startswith(f"{known}.")
            for known in options
        ):
            raise ValueError(f"{where}{no_option(written_as, options)}")
        if others:
            raise ValueError(
                f"{where}{written_as} is an option of {', '.join(others)}, and model.name={name} has none of this name; "
                f"leave it out, or choose another model (--help model lists the options of this one)"
            )


def model_options(composed: DictConfig) -> ModelConfig:
    """Return the typed options of the model `composed.name`.

    Options of the project's other models are left out: those of a recipe's own model, when another one is chosen. Raises
    ValueError: an invalid value, an unknown option, or an unknown model.
    """
    options = find_options(composed.name)
    known = {declared.name for declared in fields(options)}
    values = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(values, dict)
    own = {
        key: value
        for key, value in values.items()
        if key in known or not _is_of_another(str(key), value)
    }
    return to_section(OmegaConf.create(own), options, "model")


def _is_of_another(key: str, value: Any) -> bool:
    """Return whether one of the project's models has an option or a section of this name.

    Raises ValueError: a section contains an unknown option.
    """
    for name in MODELS:
        options = find_options(name)
        kind = get_type_hints(options).get(key)
        if kind is None:
            continue
        if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
            for unknown in unknown_options(OmegaConf.create(value), kind, f"model.{key}."):
                raise no_option(unknown, [option for option, _ in describe(options, "model.")])
        return True
    return False


def options_of_own_models() -> set[str]:
    """Return the dotted keys of the options of all models of the project."""
    return {key for name in MODELS for key, _ in describe(find_options(name), "model.")}


def declared_tables(options: ModelConfig, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
    """Return the tables that a model declares for a dataset, after checking them.

    Raises ValueError: the tables do not match the features, or are not supported yet.
    """
    from nn.embedding.declared_tables import check_tables
    from nn.models.event_pooling import pooled_tables
    from nn.models.table_widths import tables_of_widths

    tables = tables_of_widths(
        pooled_tables(_own_tables(options, spec), options, spec), options, spec
    )
    check_tables(tables, options, spec)
    return tables


def _own_tables(options: ModelConfig, spec: FeatureSpec) -> list[EmbeddingBagConfig]:
    """Return the tables as a model declares them. Raises ValueError: it declares something else."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    with _one_line(options, "tables() has failed"):
        found = find_model(options.name).tables(options, spec)
    tables = list(found) if isinstance(found, Iterable) else [found]
    for table in tables:
        if not isinstance(table, EmbeddingBagConfig):
            got = type(found).__name__
            if isinstance(found, Iterable):
                got = f"a {got} with {shown(table)}"
            raise ValueError(
                f"model.name={options.name}: tables() returns {got}; want a list of EmbeddingBagConfig, such as "
                "that of nn.embedding.declared_tables.one_table_per_feature"
            )
    return tables


def build_dense(options: ModelConfig, spec: FeatureSpec, seed: int = 0) -> Model:
    """Build the dense component: forward(numerical [B, N], embeddings) -> logits [B].

    The seed is that of the initial weights of layers without `initialise`; the global random state is not changed. Raises
    ValueError: the options do not fit the features, or the model has parts that would not be trained or saved.
    """
    import torch

    from nn.models.event_pooling import WithPooledEvents, pooled_tables
    from nn.models.own_layers import check_layers
    from nn.models.table_widths import WithProjections, tables_of_widths

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        with _one_line(options, "it cannot be built from its options and the features"):
            dense = _built(options, spec)
    from_rows = EventPooling.last, EventPooling.attention
    if options.sequence_pooling in from_rows or options.event_weights:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            dense = WithPooledEvents(dense, _own_tables(options, spec), options, spec)
    if options.embedding_dims:
        pooled = pooled_tables(_own_tables(options, spec), options, spec)
        tables = tables_of_widths(pooled, options, spec)
        if tables != pooled:  # a table of a file differs in its init_fn
            dense = WithProjections(dense, pooled, tables, spec)
    check_layers(f"model.name={options.name}", dense)
    return dense


@contextmanager
def _one_line(options: ModelConfig, what: str) -> Iterator[None]:
    """Raise any error of a model outside the project, but a ValueError of its own, as a ValueError of one line."""
    try:
        yield
    except Exception as error:  # it may raise anything
        if ":" not in options.name or isinstance(error, ValueError):
            raise
        raise ValueError(
            f"model.name={options.name}: {what} ({described(error)}); correct it"
        ) from error


def _built(options: ModelConfig, spec: FeatureSpec) -> Model:
    """Return the dense component of a model, with encoded numbers where the options want them and it does not do so itself."""
    from nn.layers.feature_vectors import FeatureVectors
    from nn.models.numerical_features import WithEncodedNumbers, encoded_spec, named_numbers
    from nn.models.own_layers import check_built

    model = find_model(options.name)
    dense = model.build(options, spec)
    check_built(f"model.name={options.name}", dense)
    if options.numerical_encoding is NumericalEncoding.plain:
        return dense
    if len(named_numbers(options, spec)) == len(spec.numerical):
        raise ValueError(
            f"model.numerical_encoding={options.numerical_encoding.value}: the dataset has no numerical feature to encode; "
            "leave it out"
        )
    if any(isinstance(layer, FeatureVectors) for layer in dense.modules()):
        return dense
    return WithEncodedNumbers(model.build(options, encoded_spec(options, spec)), options, spec)


def build_meta(options: ModelConfig, spec: FeatureSpec) -> Model:
    import torch
    import torchrec  # noqa: F401  # whose first import fails where tensors are meta

    with torch.device("meta"):
        return build_dense(options, spec)


def check_model(options: ModelConfig, spec: FeatureSpec) -> None:
    """Check before any process group exists that a model can be built for a dataset, and each time with the same constants.

    Raises ValueError: raised by `declared_tables` or `build_dense`; or a buffer is drawn anew each time.
    """
    from nn.models.own_layers import check_constants

    declared_tables(options, spec)
    dense = build_meta(options, spec)
    if ":" in options.name and dict(dense.named_buffers()):
        built = [build_dense(options, spec, seed) for seed in (0, 1)]
        check_constants(f"model.name={options.name}", *built)
