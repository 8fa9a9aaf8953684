"""Command `python -m serving.export`: write a checkpoint as a model directory, and prove that it scores as training does."""

if __name__ == "__main__":
    # First, since the imports below take a moment.
    from configs.stop_signals import end_at_once_on_signals

    end_at_once_on_signals()

from pathlib import Path

from configs.command_line import NO_OUTPUT, command
from configs.messages import on_one_line, require_onnx
from configs.serving_schema import ModelExportConfig
from configs.stop_signals import restore_signals
from dataloading.dataset.durable_files import require_absent
from nn.checkpoint.directory import no_checkpoint
from serving.manifest import ERROR, MACHINE_CODE, OF_ONNX, Manifest, proof_line
from serving.versions import note_of_others


def run(config: ModelExportConfig) -> None:
    checkpoint = Path(config.checkpoint or "")
    if not (checkpoint / "run.json").exists():
        raise no_checkpoint("checkpoint", checkpoint)
    if config.onnx:
        require_onnx()
    require_absent(Path(config.output or ""))
    restore_signals()
    # Imported here: torch and TorchRec take seconds, and the errors above need neither.
    from nn.library_warnings import quiet_libraries
    from nn.versions import require_stack

    require_stack()
    quiet_libraries()
    from serving.exporting.run import export_model

    manifest = export_model(config)
    for line in report(manifest):
        print(on_one_line(line))
    print(on_one_line(f"written to {config.output}"))
    note = note_of_others(Path(config.output or ""))
    if note is not None:
        print(on_one_line(f"note: {note}"))


def report(manifest: Manifest) -> list[str]:
    proof = manifest.proof
    num_bytes = sum(
        state.bytes for name, state in manifest.files.items() if name.startswith("tables/")
    )
    of_fp32 = sum(table.rows * table.row_bytes("fp32") for table in manifest.tables)
    others = {"onnx": OF_ONNX, "aoti": MACHINE_CODE}
    proofs = {"proof": proof} | {name: proof[key] for name, key in others.items() if key in proof}
    takes = "raw values and ids" if manifest.raw else "ids"
    return [
        f"model      {manifest.name} ({manifest.model}), step {manifest.source['step']:,}, takes {takes}",
        f"tables     {len(manifest.tables)} of {manifest.dtype}, {num_bytes / 2**20:,.1f} MiB ({of_fp32 / 2**20:,.1f} in fp32), "
        f"numbers within {proof[ERROR]:.1e}",
        *(proof_line(name, found) for name, found in proofs.items()),
    ]


if __name__ == "__main__":
    command(run, ModelExportConfig, "serving_export", interrupted=NO_OUTPUT)
