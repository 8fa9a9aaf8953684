"""Command `python -m serving.apply`: make the next version of a model from the newest one and the deltas after it."""

from pathlib import Path

from configs.command_line import NO_OUTPUT, command
from configs.messages import on_one_line
from configs.serving_schema import ApplyConfig
from serving.manifest import MANIFEST, proof_line
from serving.versions import next_version, servable


def run(config: ApplyConfig) -> None:
    base, output = directories(config)
    # Imported here: torch takes seconds, and the errors above need none.
    from nn.library_warnings import quiet_libraries

    quiet_libraries()
    from nn.deltas.delta import size_of
    from serving.exporting.applied import apply_deltas

    manifest, chain = apply_deltas(base, config.deltas, output, config.fitted)
    rows = sum(table.touched for delta in chain for table in delta.tables.values())
    plural = "" if len(chain) == 1 else "s"
    text = (
        f"{base} and {len(chain)} delta{plural} of {rows:,} rows, {size_of(chain)}, step {manifest.source['step']:,}, "
        f"written to {output}"
    )
    print(on_one_line(text))
    print(on_one_line(proof_line("proof", manifest.proof)))


def directories(config: ApplyConfig) -> tuple[Path, Path]:
    """Return the model directory to begin at, and the one to write.

    Raises ValueError: there is no version to begin at, or no directory to write.
    """
    assert config.model is not None, "checked by the options"
    model = Path(config.model)
    output = None if config.output is None else Path(config.output)
    if (model / MANIFEST).exists():
        if output is None:
            raise ValueError(
                f"model={model} is a model directory; set output=DIR, or name a directory of versions"
            )
        return model, output
    versions = servable(model)
    if not versions:
        raise ValueError(
            f"model={model} has no version to begin at; write one with python -m serving.export output={model}/1"
        )
    return model / versions[0], output or model / next_version(model)


if __name__ == "__main__":
    command(run, ApplyConfig, "serving_apply", ("model",), interrupted=NO_OUTPUT)
