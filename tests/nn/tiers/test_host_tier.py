"""Training with tables in host memory or on disk has the bits of training with all rows on the device."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature
from nn.checkpoint import state as checkpoint
from nn.distributed.sharded_tensor import local_tensors
from nn.embedding.embedding_bags import LocalEmbeddingBags
from tests.helpers.checkpoints import save as save_checkpoint
from tests.helpers.composed import TINY, Built, build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, needs_no_gpu, needs_one_gpu, worlds

# 69 rows in batches of 16 leave 5 for the tail, so that the last batch of an epoch is padded.
SMALL = [
    *TINY,
    "data.synthetic.cardinalities=[5000,40,7,300,3000]",
    "data.synthetic.train_rows=69",
    "train.epochs=9",
    "train.batch_size=16",
    "eval.batch_size=32",
    "checkpoint.delta_every=4",
]
# Steps of half a run: with an end of an epoch in the second one; with more rows, so many that rows leave for the disk.
HALF, HALF_ON_DISK = 4, 14
MORE_ROWS = "data.synthetic.train_rows=197"
# Of GPUs; and, on disk, of them and of rows of few bytes.
HALF_ON_GPU, LONG_HALF_ON_DISK = 8, 20
KINDS = "model.name=tests.nn.models.test_kinds_of_tables:Kinds"


def rule(name: str, dtype: str = "fp32") -> list[str]:
    return [f"optimizer.embedding_name={name}", f"model.embedding_dtype={dtype}"]


def in_host(**tables: float | tuple[str, float]) -> str:
    """Return the override that puts tables into host memory, with their caches."""
    texts = []
    for name, value in tables.items():
        layout, cache = value if isinstance(value, tuple) else ("table_wise", value)
        texts.append(f"{name}: {{type: {layout}, tier: host, cache: {cache}}}")
    return f"sharding.tables={{{','.join(texts)}}}"


def layouts(**tables: str) -> str:
    return f"sharding.tables={{{','.join(f'{name}: {layout}' for name, layout in tables.items())}}}"


# Each case trains with the first override and with the second one.
CASES = {
    "one-hot": (
        [*SMALL, *rule("adagrad")],
        layouts(cat_0="table_wise"),
        in_host(cat_0=0.03, cat_3=0.4, cat_4=0.05),
    ),
    # Several features of a table, several tables of a feature, widths from 1, pooled by mean and not at all.
    "kinds": (
        [*SMALL, KINDS, *rule("adam", "bf16"), "data.synthetic.hotness=[3,1,2,5,1]"],
        layouts(cat_0="table_wise"),
        in_host(cat_0=0.06, cat_1=1, cat_4=0.05, wide_cat_0=0.06, wide_cat_3=1),
    ),
    "expanded": (
        [*SMALL, *rule("ftrl"), "data.multi_hot.hotness=[4,1,1,1,3]"],
        layouts(cat_0="table_wise"),
        in_host(cat_0=0.1, cat_4=0.1),
    ),
}
SHARDED = {
    "rows": (
        [*SMALL, *rule("rowwise_adagrad", "bf16"), "data.synthetic.hotness=[3,1,2,5,1]"],
        layouts(cat_0="row_wise", cat_3="row_wise", cat_4="table_wise"),
        in_host(cat_0=("row_wise", 0.1), cat_3=("row_wise", 1), cat_4=("table_wise", 0.06)),
    ),
    "columns": (
        [*SMALL, *rule("adam")],
        layouts(cat_0="column_wise", cat_1="data_parallel", cat_3="row_wise", cat_4="table_wise"),
        "sharding.tables={cat_0: {type: column_wise, tier: host, cache: 0.04}, cat_1: data_parallel, "
        "cat_3: row_wise, cat_4: {type: table_wise, tier: host, cache: 0.08}}",
    ),
}
# Row-wise float32 tables, whose rows are asked of their owners: one lies on the device, others do not. The table that is not
# row-wise shares their arena.
REQUESTED = (
    [*SMALL, "data.synthetic.hotness=[2,1,1,2,2]"],
    layouts(cat_0="row_wise", cat_2="table_wise", cat_3="row_wise", cat_4="row_wise"),
    "sharding.tables={cat_0: {type: row_wise, tier: host, cache: 0.1}, cat_2: {type: table_wise, tier: host, cache: 1}, "
    "cat_3: row_wise, cat_4: {type: row_wise, tier: host, cache: 0.11}}",
)

# Host memory in GiB that has room for the rows of the device and of a few batches: rows leave it, and return.
HOST_GIB = {"one-hot": 0.00003, "kinds": 0.00015, "rows": 0.00002}


def on_disk(
    case: tuple[list[str], str, str], gib: float, directory: Path
) -> tuple[list[str], str, str]:
    """Return a case with its tables in host memory on disk, and all ids alike."""
    base, without, with_host = case
    disk = [f"sharding.disk_path={directory / 'disk'}", f"sharding.read_ahead_gib={gib}"]
    with_disk = with_host.replace("tier: host", "tier: disk")
    return [*base, *disk, MORE_ROWS, "data.synthetic.exponent=0"], without, with_disk


@pytest.fixture(scope="module")
def ragged(tmp_path_factory) -> tuple[list[str], str, str]:
    """A case with a ragged, a two-hot and a single-hot feature."""
    root = tmp_path_factory.mktemp("tier") / "ragged"
    features = [
        CategoricalFeature.of("genres", 2000, None),
        CategoricalFeature.of("pair", 900, 2),
        CategoricalFeature.of("item", 3000),
    ]
    generator = np.random.default_rng(1)
    with write_dataset(root, categorical=features, numerical=("n", "m")) as dataset:
        for split, rows in (("train", 197), ("test", 64)):
            lengths = generator.integers(0, 4, rows)
            dataset[split].append(
                numerical=generator.normal(size=(rows, 2)),
                labels=generator.random(rows) < 0.4,
                ids={
                    "genres": generator.integers(0, 2000, lengths.sum()),
                    "pair": generator.integers(0, 900, (rows, 2)),
                    "item": generator.integers(0, 3000, rows),
                },
                lengths={"genres": lengths},
            )
    base = [*SMALL, *rule("sgd", "bf16"), f"data.path={root}"]
    return base, layouts(genres="table_wise"), in_host(genres=0.25, pair=0.3, item=0.05)


def test_ragged_ids_train_alike(ragged):
    with ranks_of_cpu():
        assert_alike(trained_both_ways(*ragged))


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_training_with_all_rows_on_the_device(case, tmp_path):
    with ranks_of_cpu():
        assert_alike(trained_both_ways(*CASES[case], tmp_path))


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_two_ranks_train_alike(tmp_path, ranks_per_node):
    for results in run_distributed(
        every_sharded_case, 2, tmp_path, local_world_size=ranks_per_node
    ):
        for result in results:
            assert_alike(result)


@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_requested_rows_of_two_ranks_train_alike(tmp_path, ranks_per_node):
    for results in run_distributed(
        every_requested_case, 2, tmp_path, local_world_size=ranks_per_node
    ):
        for result in results:
            assert_alike(result)


@pytest.mark.parametrize("name", ["one-hot", "kinds"])
def test_tables_on_disk_train_alike(name, tmp_path):
    with ranks_of_cpu():
        results = trained_both_ways(*on_disk(CASES[name], HOST_GIB[name], tmp_path), tmp_path)
    assert_alike(results)


@needs_one_gpu
@pytest.mark.parametrize("case", CASES)
def test_a_gpu_trains_alike(case, tmp_path):
    base, *ways = CASES[case]
    (result,) = run_distributed(on_gpu, 1, [*base, *ON_GPU], *ways, tmp_path)
    assert_alike(result)


@needs_one_gpu
def test_a_gpu_trains_alike_with_tables_on_disk(tmp_path):
    base, *ways = on_disk(CASES["one-hot"], HOST_GIB["one-hot"], tmp_path)
    (result,) = run_distributed(on_gpu, 1, [*base, *ON_GPU], *ways, tmp_path)
    assert_alike(result)


@pytest.mark.parametrize("world_size", worlds(2))
def test_gpus_train_requested_rows_alike(world_size, tmp_path):
    base, *ways = REQUESTED
    base = [*base, *rule("adagrad"), *ON_GPU]
    for results in run_distributed(on_gpu, world_size, base, *ways, tmp_path):
        assert_alike(results)


@needs_no_gpu
def test_kernels_train_requested_rows_alike():
    """The kernels of a GPU, without the graph; some steps, since they are interpreted."""
    pytest.importorskip("triton")
    for (losses, weights), (others, same) in run_distributed(with_kernels, 2):
        assert losses == others
        assert all(map(torch.equal, weights, same))


def with_kernels() -> list[tuple[list[float], list[torch.Tensor]]]:
    """Return losses and this rank's weights without and with tables in host memory."""
    from nn.embedding.triton_launcher import TritonLauncher

    make = LocalEmbeddingBags.__init__

    def make_with_kernels(self, tables, blocks, num_samples, config, *rest):
        make(self, tables, blocks, num_samples, config, *rest)
        if self.tables:
            self._kernels = TritonLauncher(
                self.tables, self._lookups, self._key_bases, self._sources, num_samples, config
            )

    base, *ways = REQUESTED
    found = []
    with ranks_of_cpu(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalEmbeddingBags, "__init__", make_with_kernels)
        patched.setattr("nn.tiers.host_tier.maps_by_kernels", lambda device: True)
        for way in ways:
            built = build(compose_config(*base, *rule("adagrad"), "train.batch_size=4", way))
            losses = built.train(0, 2)
            tables = built.step.tables
            found.append((losses, [shard.weight.clone() for shard in tables.shards()]))
            if tables.tier is not None:
                assert tables.tier.take_counts()["rows_in"] > 0
    return found


def on_gpu(base: list[str], without: str, with_host: str, directory: Path) -> dict:
    from nn.distributed.process_group import process_group, ranks_from_environment

    half = LONG_HALF_ON_DISK if is_on_disk(base) else HALF_ON_GPU
    with process_group(ranks_from_environment("cuda")):
        return trained_both_ways([*base, MORE_ROWS], without, with_host, directory, half)


def every_sharded_case(directory: Path) -> list[dict]:
    with ranks_of_cpu():
        found = [trained_both_ways(*case, directory / name) for name, case in SHARDED.items()]
        disk = on_disk(SHARDED["rows"], HOST_GIB["rows"], directory)
        return [*found, trained_both_ways(*disk, half=LONG_HALF_ON_DISK)]


def every_requested_case(directory: Path) -> list[dict]:
    """Train with each kind of state, through checkpoints with one; then with a table on disk, and without room for requests."""
    base, *ways = REQUESTED
    with ranks_of_cpu():
        found = [trained_both_ways([*base, *rule("adam")], *ways, directory / "host")]
        found.append(trained_both_ways([*base, *rule("rowwise_adagrad")], *ways))
        # Of whole tables too.
        found.append(trained_both_ways([*base, "sharding.exchange=rows"], *ways))
        disk = on_disk(REQUESTED, 0.00002, directory)
        way = disk[2].replace("tier: disk", "tier: host", 1)
        found.append(trained_both_ways(disk[0], disk[1], way, directory / "disk"))
        with pytest.MonkeyPatch.context() as patched:
            # No batch has room, and each asks again.
            patched.setattr("nn.sharding.request_capacity.capacity_for", lambda rows: 1)
            found.append(trained_both_ways(base, *ways))
        return found


def trained_both_ways(
    base: list[str],
    without: str,
    with_host: str,
    directory: Path | None = None,
    half: int | None = None,
) -> dict:
    """Train without and with tables in host memory, and through checkpoints from each to the other, with an evaluation between.

    Returns:
        Way -> (losses, this rank's state); and the traffic of the first half.
    """
    results = {}
    half = half or (HALF_ON_DISK if is_on_disk(base) else HALF)
    plain, tiered = (build(compose_config(*base, override)) for override in (without, with_host))
    losses = {"plain": first_half(plain, half), "tiered": first_half(tiered, half)}
    if directory is not None:
        saved = {
            way: save_checkpoint(directory / way, built.step, half, built.source.spec, built.ranks)
            for way, built in (("plain", plain), ("tiered", tiered))
        }
        ways = {
            "resumed": ("tiered", with_host),
            "moved": ("tiered", without),
            "arrived": ("plain", with_host),
        }
        for way, (origin, override) in ways.items():
            other = build(compose_config(*base, override))
            checkpoint.restore(saved[origin], other.step, with_optimizer=True)
            results[way] = losses["tiered"], second_half(other, half)
    traffic = tiered.step.tables.host_traffic(half)
    for way, built in (("plain", plain), ("tiered", tiered)):
        results[way] = losses[way], second_half(built, half)
    return results | {"traffic": traffic}


def is_on_disk(base: list[str]) -> bool:
    return any(option.startswith("sharding.disk_path") for option in base)


def first_half(built: Built, half: int) -> list[float]:
    losses = built.train(0, half)
    built.score(3)
    return losses


def second_half(built: Built, half: int) -> tuple[list[float], dict[str, list[torch.Tensor]]]:
    built.step.tables.clear_touched()
    losses = built.train(half, half)
    state = {
        name: [tensor.detach().cpu().clone() for tensor in local_tensors(value)]
        for name, value in built.step.state_dict().items()
    }
    for shard in built.step.tables.shards():
        if shard.initial is not None:  # one of a table
            state[f"tables.{shard.table}.weight"] = [shard.rows(torch.arange(len(shard.weight)))]
    # Which rows the second half has changed.
    state["touched"] = [shard.touched.cpu() for shard in built.step.tables.touched_shards()]
    built.step.close()
    return losses, state


def assert_alike(results: dict) -> None:
    traffic = results.pop("traffic")
    assert traffic["tier_hit_rate"] < 0.99, "rows must enter and leave"
    if "tier_disk_rows_in" in traffic:
        assert traffic["tier_disk_rows_in"] > traffic["tier_disk_rows_out"] > 0
    first, (second, state) = results.pop("plain")
    for way, (losses, (later, other)) in results.items():
        assert losses == first, way
        assert later == second, way
        assert other.keys() == state.keys()
        for name, tensors in state.items():
            for tensor, same in zip(tensors, other[name], strict=True):
                assert torch.equal(tensor, same), (way, name)
