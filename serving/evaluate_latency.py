"""Command `python -m serving.evaluate_latency`: latency and throughput of a server under load, with real rows of a dataset."""

import asyncio
from pathlib import Path

from configs.command_line import command
from configs.messages import on_one_line
from configs.serving_schema import LatencyConfig


def run(config: LatencyConfig) -> None:
    from serving.client.latency import measure
    from serving.client.latency_picture import draw
    from serving.client.results import write_csv

    results = asyncio.run(measure(config, lambda line: print(on_one_line(line), flush=True)))
    if config.output is not None:
        folder = Path(config.output)
        folder.mkdir(parents=True, exist_ok=True)
        write_csv(results, folder / "latency.csv")
        facts = f"{config.url}, {config.seconds:g} s per load, rows of {Path(config.data_path or '').name}"
        draw(results, f"Latency of {config.model}", facts, folder / "latency.png")
        print(on_one_line(f"written to {folder}/latency.csv and latency.png"))


if __name__ == "__main__":
    command(run, LatencyConfig, "serving_latency", ("url",))
