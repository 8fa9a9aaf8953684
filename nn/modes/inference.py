"""`mode=inference`: latencies of the forward pass."""

from configs.schema import Config
from dataloading.loader import LoaderSettings
from nn.build import loader_of_rank
from nn.checks import count, sizes_to_time
from nn.modes.latency import measure
from nn.observability.console import print_inference
from nn.session import open_session


def inference(config: Config, config_yaml: str) -> None:
    with open_session(config, config_yaml) as session:
        if session is None:
            return
        source, ranks = session.source, session.ranks
        session.step.set_training(False)
        sizes = sizes_to_time(config, source, ranks)
        left_out = [f"{size:,}" for size in config.inference.batch_sizes if size not in sizes]
        if left_out:
            session.console.print(
                f"left out: batch sizes {', '.join(left_out)}, which split '{config.eval.split}' of "
                f"{source.num_rows(config.eval.split):,} rows or {count(ranks.world_size, 'rank')} cannot fill"
            )
        results = []
        for batch_size in sizes:
            settings = LoaderSettings(batch_size=batch_size)
            loader = loader_of_rank(
                source, config.eval.split, settings, ranks, session.step.key_maps
            )
            batch = loader.batch(0).to(ranks.device)
            results.append(measure(session.step, batch, config.inference, ranks))
        print_inference(session.console, results)
        session.finish({"inference": results})
