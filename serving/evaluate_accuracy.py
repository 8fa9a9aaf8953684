"""Command `python -m serving.evaluate_accuracy`: AUC and log loss of a split as a server scores it, and its latencies."""

import asyncio
import json
from pathlib import Path

from configs.command_line import command
from configs.messages import on_one_line
from configs.serving_schema import AccuracyConfig


def run(config: AccuracyConfig) -> None:
    from dataloading.dataset.durable_files import write_synced
    from serving.client.accuracy import evaluate, lines

    found = asyncio.run(evaluate(config))
    for line in lines(found):
        print(on_one_line(line))
    if config.output is not None:
        write_synced(Path(config.output), json.dumps(found, indent=1) + "\n")
        print(on_one_line(f"written to {config.output}"))


if __name__ == "__main__":
    command(run, AccuracyConfig, "serving_accuracy", ("url",))
