"""Command `python -m serving.triton`: write a model repository for the Triton inference server."""

from omegaconf import DictConfig

from configs.command_line import NO_OUTPUT, command, errors_end_command
from configs.messages import on_one_line
from configs.overrides import options_text, to_config
from configs.serving_schema import TritonConfig


def run(composed: DictConfig) -> None:
    """Check the composed options and write the repository; report errors in one line."""
    with errors_end_command(options_text(composed, "output"), interrupted=NO_OUTPUT):
        config: TritonConfig = to_config(composed)
        from serving.triton.repository import LOOPBACK, write_repository

        names = write_repository(config)
    print(on_one_line(f"models     {', '.join(names)}"))
    print(
        on_one_line(
            f"written to {config.output}; tritonserver --model-repository {config.output} {LOOPBACK}"
        )
    )


if __name__ == "__main__":
    command(run, TritonConfig, "serving_triton")
