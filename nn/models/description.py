"""Description of a model, `model.json`: options, features, tables, layers with shapes, parameters and operations.

The model can be built again from it, without the dataset. It is plain JSON with the limits of
`dataloading.dataset.documents`; nothing in it is executed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from configs.built_in import MODELS
from configs.messages import shown
from configs.option_values import plain_values
from configs.schema import ModelConfig
from dataloading.dataset.documents import read_json, reading
from dataloading.dataset.feature_spec import DYNAMIC, CategoricalFeature, FeatureSpec, id_dtype
from dataloading.dataset.row_columns import Channel, RowColumn
from dataloading.dataset.sequences import EventColumn, SequenceGroup
from nn.embedding.declared_tables import embedding_columns, handing_tables, hands_out_rows
from nn.layers.distinct_rows import DistinctRows
from nn.layers.initialization import initialise_dense
from nn.layers.pooled_embeddings import PooledEmbeddings
from nn.layers.sequence_events import SequenceEvents, SequenceTables
from nn.models.ranking_model import RankingModel
from nn.models.registry import build_dense, declared_tables, model_options

if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

FORMAT = 1
ROWS = 2
"""Rows of the batch of zeros that layers are run on; operations are the difference to a batch of one row more."""


def describe_model(options: ModelConfig, stored: FeatureSpec, spec: FeatureSpec) -> dict[str, Any]:
    """Return the content of model.json; `spec` is `stored` after the expansion of ids, as the model sees them."""
    declared = declared_tables(options, spec)
    dense = build_dense(options, spec)
    columns = embedding_columns(declared, spec)
    widths = {table.name: table.embedding_dim for table in declared if hands_out_rows(table, spec)}
    sequences = SequenceTables(spec.sequences, handing_tables(declared, spec))
    hotness = {feature.name: feature.hotness or 1 for feature in spec.categorical}
    zeros = partial(_zeros, columns, widths, hotness, sequences)
    layers, flops = _run_layers(dense, len(spec.numerical), zeros)
    tables = [_table(table) for table in declared]
    return {
        "format": FORMAT,
        "model": plain_values(options),
        "features": _features(stored, spec),
        "tables": tables,
        "layers": layers,
        "parameters": {
            "tables": sum(table["parameters"] for table in tables),
            "dense": _count(dense.parameters()),
        },
        "flops_per_sample": flops,
    }


def _features(stored: FeatureSpec, spec: FeatureSpec) -> dict[str, Any]:
    expanded = {feature.name: feature.hotness for feature in spec.categorical}
    single = {"weight": stored.weight, "keep_rate": stored.keep_rate}
    return {
        "labels": [{"name": label.name, "dtype": label.dtype.name} for label in stored.labels],
        **{name: None if column is None else column.name for name, column in single.items()},
        "numerical": list(stored.numerical),
        "categorical": [
            {
                "name": feature.name,
                "cardinality": feature.cardinality,
                **({"vocabulary": DYNAMIC} if feature.is_dynamic else {}),
                "hotness": feature.hotness,
                "mean_hotness": feature.mean_hotness,
                "expanded_hotness": expanded[feature.name],
                "table": feature.table,
            }
            for feature in stored.categorical
        ],
        **(
            {"sequences": [_group(group) for group in stored.sequences]} if stored.sequences else {}
        ),
    }


def _group(group: SequenceGroup) -> dict[str, Any]:
    numbers = [{"name": column.name, "dtype": column.dtype.name} for column in group.numbers]
    facts = {**asdict(group), "features": list(group.features), "numbers": numbers}
    # A model sees what pools have chosen, and has the weight among its options.
    del facts["pools"], facts["weight"]
    return facts


def _table(table: EmbeddingBagConfig) -> dict[str, Any]:
    return {
        "name": table.name,
        "rows": table.num_embeddings,
        "columns": table.embedding_dim,
        "pooling": table.pooling.name.lower(),
        "dtype": table.data_type.name.lower(),
        "features": list(table.feature_names),
        "parameters": table.num_embeddings * table.embedding_dim,
    }


def _count(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _zeros(
    columns: int,
    widths: Mapping[str, int],
    hotness: Mapping[str, int],
    sequences: SequenceTables,
    rows: int,
) -> Tensor | PooledEmbeddings:
    """Return embeddings of zeros; of tables that hand out rows of these widths, an id a sample, and of groups an event."""
    matrix = torch.zeros(rows, columns)
    if not widths:
        return matrix
    each = torch.arange(rows)

    def rows_of(table: str, feature: str) -> DistinctRows:
        count = hotness[feature]
        positions = each.repeat_interleave(count)
        lengths = torch.full_like(each, count)
        return DistinctRows(torch.zeros(rows + 1, widths[table]), positions, each * count, lengths)

    def sequence_of(name: str) -> SequenceEvents:
        numbers = [torch.zeros(rows) for group in sequences.groups for _ in group.numbers]
        return sequences.events(name, rows_of, lambda table, feature: each, numbers)

    return PooledEmbeddings.with_rows(matrix, rows_of, sequence_of)


def _run_layers(
    dense: nn.Module, num_numerical: int, embeddings: Callable[[int], Tensor | PooledEmbeddings]
) -> tuple[list[dict[str, Any]], int]:
    """Run a dense component on zeros; return its layers in the order of their first call, and the operations per sample.

    A layer is a module without modules in it, or with parameters of its own. Operations are those of matrix products, 2 per
    multiplication and addition, as `torch.utils.flop_counter` counts them.
    """
    calls: dict[str, dict[str, Any]] = {}
    hooks = [
        module.register_forward_hook(_noting(calls, name))
        for name, module in dense.named_modules()
        if name and (not list(module.children()) or list(module.parameters(recurse=False)))
    ]
    try:
        fewer = _operations(dense, ROWS, num_numerical, embeddings)
    finally:
        for hook in hooks:
            hook.remove()
    more = _operations(dense, ROWS + 1, num_numerical, embeddings)
    flops = {name: more[name] - fewer.get(name, 0) for name in more}
    for name, call in calls.items():
        call["flops_per_sample"] = flops.get(name, 0)
    return list(calls.values()), flops[""]


def _operations(
    dense: nn.Module,
    rows: int,
    num_numerical: int,
    embeddings: Callable[[int], Tensor | PooledEmbeddings],
) -> dict[str, int]:
    """Return the operations of a batch of zeros in evaluation mode by module; an empty name is the dense component."""
    was_training = dense.training
    dense.eval()
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            dense(torch.zeros(rows, num_numerical), embeddings(rows))
    finally:
        dense.train(was_training)
    counts = {
        name.partition(".")[2]: sum(operations.values())
        for name, operations in counter.get_flop_counts().items()
    }
    return counts | {"": counter.get_total_flops()}


def _noting(calls: dict[str, dict[str, Any]], name: str) -> Any:
    """Return a hook that notes the shapes of a layer's first call, without the rows of the batch."""

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls.setdefault(
            name,
            {
                "name": name,
                "type": type(module).__name__,
                "input": [list(value.shape[1:]) for value in inputs if isinstance(value, Tensor)],
                "output": list(output.shape[1:]) if isinstance(output, Tensor) else None,
                "parameters": _count(module.parameters()),
            },
        )

    return note


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Checked content of a model.json: options, features as the dataset has them, without files, and as the model sees them."""

    options: ModelConfig
    stored: FeatureSpec
    spec: FeatureSpec

    def build(self, seed: int | None = 0) -> RankingModel:
        """Build tables and dense component for one device, with the initial weights of a seed.

        None leaves the weights of tables undefined, to be loaded. Raises ValueError: the options do not fit the features.
        """
        dense = build_dense(self.options, self.spec, seed or 0)
        initialise_dense(dense, seed or 0)
        declared = declared_tables(self.options, self.spec)
        handed_out = [table.name for table in declared if hands_out_rows(table, self.spec)]
        return RankingModel(declared, dense, seed, handed_out, self.spec.sequences)


def build_from_json(path: Path | str, *, seed: int = 0, trusted: bool = False) -> RankingModel:
    """Build the model that a model.json describes, with the initial weights of a seed; `trusted` as in `read_description`.

    Raises ValueError: the file is missing or describes no model.
    """
    return read_description(Path(path), trusted=trusted).build(seed)


def read_description(path: Path, *, trusted: bool = False) -> ModelDescription:
    """Read a model.json; only if it is `trusted` may a model outside the project, `package.module:Class`, be imported.

    Raises ValueError: the file is missing, malformed, of a newer format, or names a model that may not be imported.
    """
    remedy = "runs of earlier versions wrote none, so evaluate its checkpoint with mode=eval"
    with reading(str(path), remedy):
        content = read_json(path)
    try:
        return _parsed(content, trusted)
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path}: no description of a model ({reason})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _parsed(content: Any, trusted: bool) -> ModelDescription:
    if content["format"] != FORMAT:
        raise ValueError(
            f"it has format {shown(content['format'])}, and this version reads {FORMAT}"
        )
    name = content["model"]["name"]
    if name not in MODELS and not trusted:
        raise ValueError(
            f"model.name={shown(name)} is no model of the project; trusted=True imports it, which runs its code"
        )
    features = content["features"]
    stored = _spec_of(features, "hotness")
    options = model_options(OmegaConf.create(content["model"]))
    return ModelDescription(options, stored, _spec_of(features, "expanded_hotness"))


def _spec_of(features: Mapping[str, Any], hotness: str) -> FeatureSpec:
    names = features["numerical"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"features.numerical is {shown(names)}; want a list of names")
    single = {
        channel: None if features[channel] is None else RowColumn.of(features[channel], channel)
        for channel in (Channel.weight, Channel.keep_rate)
    }
    labels = tuple(
        RowColumn(label["name"], dtype=np.dtype(str(label["dtype"])))
        for label in features["labels"]
    )
    return FeatureSpec(
        root=None,
        numerical=tuple(names),
        numerical_dtype=np.dtype(np.float32),
        labels=labels,
        categorical=tuple(_feature_of(entry, hotness) for entry in features["categorical"]),
        splits={},
        metadata={},
        weight=single[Channel.weight],
        keep_rate=single[Channel.keep_rate],
        sequences=tuple(map(_group_of, features.get("sequences", []))),
    )


def _group_of(entry: Mapping[str, Any]) -> SequenceGroup:
    numbers = tuple(EventColumn(of["name"], np.dtype(str(of["dtype"]))) for of in entry["numbers"])
    return SequenceGroup(**{**entry, "features": tuple(entry["features"]), "numbers": numbers})


def _feature_of(entry: Mapping[str, Any], hotness: str) -> CategoricalFeature:
    name, count, stored = entry["name"], entry[hotness], entry["hotness"]
    if not isinstance(name, str) or not name:
        raise ValueError(f"features.categorical has the name {shown(name)}; want a text")
    cardinality = entry["cardinality"]
    if type(cardinality) is not int or not 0 < cardinality < 2**48:
        raise ValueError(
            f"{shown(name)} has cardinality {shown(cardinality)}; want rows of a table"
        )
    mean = entry["mean_hotness"] if count == stored else count
    if type(mean) not in (int, float) or not math.isfinite(mean):
        raise ValueError(f"{shown(name)} has mean_hotness {shown(mean)}; want a number")
    is_dynamic = entry.get("vocabulary") == DYNAMIC
    dtype = np.dtype(np.int64) if is_dynamic else id_dtype(cardinality)
    return CategoricalFeature(name, cardinality, dtype, count, mean, entry["table"], is_dynamic)
