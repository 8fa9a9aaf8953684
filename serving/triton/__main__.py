"""Command `python -m serving.triton`: write a model repository for the Triton inference server."""

from configs.command_line import NO_OUTPUT, command
from configs.messages import on_one_line
from configs.serving_schema import TritonConfig


def run(config: TritonConfig) -> None:
    from serving.triton.repository import LOOPBACK, write_repository

    names = write_repository(config)
    print(on_one_line(f"models     {', '.join(names)}"))
    print(
        on_one_line(
            f"written to {config.output}; tritonserver --model-repository {config.output} {LOOPBACK}"
        )
    )


if __name__ == "__main__":
    command(run, TritonConfig, "serving_triton", interrupted=NO_OUTPUT)
