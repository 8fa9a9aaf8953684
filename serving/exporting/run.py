"""Export of a checkpoint as a model directory, which is complete or absent."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from configs.command_line import project_version
from configs.messages import shown
from configs.schema import Config
from configs.serving_schema import Device, ModelExportConfig
from dataloading.dataset.durable_files import new_output, write_synced
from dataloading.dataset.source import Source
from dataloading.lineage import FORGOTTEN
from nn.build import open_source, stored_key_maps
from nn.checkpoint.forgetting import all_forgotten
from nn.checkpoint.saved import SavedModel
from nn.deltas.delta import CHAIN
from nn.embedding.declared_tables import Tables, embedding_columns, hands_out_rows
from nn.models.options import AttentionNorm, HSTUOptions
from nn.models.registry import declared_tables
from nn.models.tasks import Task, tasks_of_run
from nn.saved_config import config_of
from serving.exporting.dense import (
    check_aoti,
    export_aoti,
    export_dense,
    export_onnx,
    load_aoti,
    load_dense,
    load_onnx,
)
from serving.exporting.from_rows import FromRows
from serving.exporting.proof import TrainingPath, looked_up_rows, proof_batches, prove, rows_of
from serving.exporting.proof_rows import write_proof_rows
from serving.exporting.raw_values import write_raw_values
from serving.exporting.tables import write_tables
from serving.inference.key_rows import write_key_rows
from serving.inference.model import ServedModel
from serving.inference.model_rows import Rows
from serving.inference.tables import MappedTables
from serving.manifest import (
    ERROR,
    MACHINE_CODE,
    MANIFEST,
    OF_ONNX,
    VOCABULARIES,
    Feature,
    Manifest,
    Output,
    Sequence,
    Table,
    describe_files,
)


@dataclass(frozen=True, slots=True)
class Trained:
    saved: SavedModel
    config: Config
    source: Source
    tables: Tables
    tasks: list[Task]


def export_model(options: ModelExportConfig) -> Manifest:
    """Export a checkpoint; see `configs.serving_schema.ModelExportConfig`.

    Raises ValueError: an option names what cannot be used, the checkpoint is damaged, or the export scores unlike training.
    """
    assert options.checkpoint is not None, "checked by the options"
    assert options.output is not None, "likewise"
    if options.aoti is not None:
        check_aoti(options.aoti)
    trained = open_trained(Path(options.checkpoint).resolve(), options.data_path)
    model = trained.config.model
    if isinstance(model, HSTUOptions) and model.attention_norm is AttentionNorm.batch_max:
        raise ValueError(
            "model.attention_norm=batch_max: a served score would depend on the rows beside it; train with "
            "model.attention_norm=length or capacity"
        )
    handed_out = [of.name for of in trained.tables if hands_out_rows(of, trained.source.spec)]
    if options.onnx and handed_out:
        raise ValueError(
            f"onnx=true: the dense component takes rows of table {shown(handed_out[0])} itself, and finds their places by an "
            "operation that ONNX lacks (searchsorted); leave onnx out"
        )
    with new_output(Path(options.output)) as unfinished:
        return _write(unfinished, trained, options)


def open_trained(path: Path, data: str | None) -> Trained:
    """Open a checkpoint of a run, and the dataset that proves its export.

    Raises ValueError: it is no checkpoint of a run, the dataset has other features, or the run expands ids.
    """
    saved = SavedModel.open(path, "checkpoint")
    try:
        config = config_of(saved.facts)
    except ValueError as error:
        raise ValueError(
            f"checkpoint={path} is no checkpoint of a run ({error}); name a step_N directory in a run's checkpoints/"
        ) from None
    if data is not None:
        config.data.path = data
    if config.data.multi_hot.hotness:
        raise ValueError(
            "the run expands its ids (data.multi_hot), which no request has; export a model that was trained without"
        )
    source = open_source(config)
    spec = source.spec
    if spec.fingerprint() != saved.facts["feature_spec"]:
        raise ValueError(
            f"data_path={config.data.path} has other features than the dataset that the run was trained on; set data_path=DIR to "
            "one with the same"
        )
    tables = declared_tables(config.model, spec)
    return Trained(saved, config, source, tables, tasks_of_run(config, spec))


def _write(directory: Path, trained: Trained, options: ModelExportConfig) -> Manifest:
    spec, dtype = trained.source.spec, options.dtype.name
    raw = None
    # First: a fit that cannot be served is refused before tables of any size are written.
    if options.fitted is not None:
        raw = write_raw_values(directory, options.fitted, spec, trained.saved.facts)
    maps = stored_key_maps(trained.config, spec, trained.saved.index)
    batches = proof_batches(trained.source, options.split, options.rows, maps)
    numbers = looked_up_rows(trained.tables, batches)
    columns = embedding_columns(trained.tables, spec)
    dense = load_dense(trained.config, spec, trained.saved)
    tables = [
        Table(
            table.name,
            table.num_embeddings,
            table.embedding_dim,
            table.pooling.name.lower(),
            list(table.feature_names),
        )
        for table in trained.tables
    ]
    manifest = _manifest(trained, options, tables)
    manifest.check_inputs()
    rows, error = write_tables(directory, tables, trained.saved.index, dtype, numbers)
    exported = FromRows(dense, manifest) if manifest.handed_out else dense
    export_dense(directory, exported, len(spec.numerical), columns)
    if options.onnx:
        export_onnx(directory, exported, len(spec.numerical), columns)
    if options.aoti is not None:
        export_aoti(directory, exported, len(spec.numerical), columns, options.aoti)
    keys_of_rows = {} if maps is None else maps.keys_of_rows()
    files = {table: write_key_rows(directory, table, keys) for table, keys in keys_of_rows.items()}
    keys = {f.name: files[f.table or f.name] for f in spec.categorical if f.is_dynamic}
    manifest = replace(manifest, keys=keys, raw=raw)
    path = TrainingPath(trained.tables, numbers, rows, dense, trained.tasks, spec)
    _write_manifest(directory, manifest, {})
    served = ServedModel.load(directory)
    # Before the files are described; the proof is of the same rows.
    write_proof_rows(directory, Rows.joined([rows_of(batch, served) for batch in batches]))
    proof = asdict(prove(batches, path, served, options.split)) | {ERROR: error}
    if options.onnx:
        served = ServedModel(manifest, MappedTables(directory, manifest), load_onnx(directory))
        proof[OF_ONNX] = asdict(prove(batches, path, served, options.split, elsewhere=True))
    if options.aoti is not None:
        forward = load_aoti(directory, options.aoti)
        served = ServedModel(manifest, MappedTables(directory, manifest), forward)
        on_gpu = options.aoti is Device.cuda
        proof[MACHINE_CODE] = asdict(prove(batches, path, served, options.split, elsewhere=on_gpu))
    return _write_manifest(directory, manifest, proof)


def _write_manifest(directory: Path, manifest: Manifest, proof: dict[str, Any]) -> Manifest:
    complete = replace(manifest, files=describe_files(directory), proof=proof)
    write_synced(directory / MANIFEST, complete.to_json())
    return complete


def _manifest(trained: Trained, options: ModelExportConfig, tables: list[Table]) -> Manifest:
    """Return the manifest without raw values and raw keys."""
    spec, config, saved = trained.source.spec, trained.config, trained.saved
    facts = saved.facts | {FORGOTTEN: all_forgotten(saved.facts)}
    return Manifest(
        name=options.name or config.model.name.rpartition(":")[2],
        model=config.model.name,
        numerical=list(spec.numerical),
        categorical=[Feature(f.name, f.cardinality, f.hotness) for f in spec.categorical],
        keep_rate=None if spec.keep_rate is None else spec.keep_rate.name,
        outputs=[Output(task.name, task.is_binary, task.shift) for task in trained.tasks],
        dtype=options.dtype.name,
        tables=tables,
        sequences=[
            Sequence(
                name=group.name,
                features=list(group.features),
                numbers=[column.name for column in group.numbers],
                time=group.time,
                max_length=group.max_length,
                weight=group.weight,
            )
            for group in spec.sequences
            if any(hands_out_rows(table, spec) for table in trained.tables)
        ],
        source={
            "checkpoint": saved.path.name,
            "step": facts["num_steps"],
            "seed": config.seed,
            "feature_spec": facts["feature_spec"],
            **{n: facts[n] for n in (CHAIN, VOCABULARIES, FORGOTTEN) if facts.get(n)},
            "recipe": project_version(),
            "torch": torch.__version__,
        },
    )
