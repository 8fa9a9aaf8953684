"""Expansion of one-hot ids to the ids that MLPerf's reference writes to disk."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.schema import MultiHotConfig
from dataloading.dataset.binary import BinarySource
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from nn.embedding import multi_hot
from nn.embedding.multi_hot import MultiHot, expand
from tests.helpers.composed import TINY, losses_of_cases
from tests.helpers.datasets import make_loader, synthetic_source

CPU = torch.device("cpu")
# More draws than words in a chunk; powers of two, which reject no word; one row, which draws no word; and a feature that is
# not expanded.
ROWS = [5000, 1, 4096, 3, 16, 20_265, 9000]
HOTNESS = [27, 4, 3, 2, 100, 1, 7]


def spec_of(rows: list[int] = ROWS, hotness: list[int] | None = None) -> FeatureSpec:
    return synthetic_source(cardinalities=rows, hotness=hotness or []).spec


def expanding(hotness: list[int] = HOTNESS, seed: int = 0, threads: int = 1) -> MultiHot:
    return MultiHot(spec_of(), MultiHotConfig(hotness=hotness, seed=seed), threads)


def additional_ids(rows: list[int], hotness: list[int], seed: int = 0) -> list[np.ndarray]:
    """Draw as MLPerf's reference does: int64 [rows, hotness - 1] per table."""
    np.random.seed(seed)  # noqa: NPY002
    return [
        np.random.randint(0, size, size=(size, count - 1))  # noqa: NPY002
        for size, count in zip(rows, hotness, strict=True)
    ]


@pytest.mark.parametrize("order", [range(7), [6, 0, 4, 4, 3, 1, 2]])
def test_additional_ids_are_numpys_draws_of_all_tables_in_order(order):
    """The result depends neither on the tables of a rank nor on the order of its calls."""
    expected = additional_ids(ROWS, HOTNESS)
    expanded = expanding()
    for index in order:
        if HOTNESS[index] > 1:
            table = expanded.lookup_table(f"cat_{index}", CPU)
            assert table.dtype == torch.int32
            assert np.array_equal(table.numpy(), expected[index])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_segments_of_any_size_draw_the_same(monkeypatch, threads):
    """The largest table takes 39 segments, the smaller ones none: both ways to end a table."""
    monkeypatch.setattr(multi_hot, "CHUNK_WORDS", 64)
    monkeypatch.setattr(multi_hot, "SEGMENT_WORDS", 4096)
    monkeypatch.setattr(multi_hot, "SURE", 0.9)
    expanded, expected = expanding(threads=threads), additional_ids(ROWS, HOTNESS)
    for index in (6, 0, 3, 2):
        assert np.array_equal(expanded.lookup_table(f"cat_{index}", CPU), expected[index])


def test_another_seed_draws_other_ids():
    first, again = (expanding(seed=seed).lookup_table("cat_6", CPU) for seed in (0, 3))
    assert np.array_equal(again, additional_ids(ROWS, HOTNESS, seed=3)[6])
    assert not torch.equal(first, again)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_stored_id_comes_first_and_its_additional_ids_follow(dtype):
    table = torch.tensor([[5, 6], [7, 8], [9, 10]], dtype=torch.int32)
    expanded = expand(torch.tensor([2, 0, 2], dtype=dtype), table)
    assert expanded.dtype == torch.int32
    assert expanded.tolist() == [[2, 9, 10], [0, 5, 6], [2, 9, 10]]


def test_the_model_sees_the_hotness_after_expansion():
    expanded = expanding()
    spec = expanded.expanded_spec(spec_of())
    assert [feature.hotness for feature in spec.categorical] == HOTNESS
    assert [feature.mean_hotness for feature in spec.categorical] == HOTNESS
    assert "cat_5" not in expanded.hotness
    assert expanded.hotness["cat_4"] == 100
    # A checkpoint fits the materialised dataset, and not the one-hot one without expansion.
    assert spec.fingerprint() == spec_of(hotness=HOTNESS).fingerprint() != spec_of().fingerprint()


def test_expansion_takes_four_bytes_per_additional_id():
    sizes = expanding().expansion_bytes()
    assert "cat_5" not in sizes
    assert sizes["cat_0"] == 5000 * 26 * 4 == expanding().lookup_table("cat_0", CPU).nbytes


@pytest.mark.parametrize("hotness", [None, [1] * 7])
def test_without_hotness_nothing_changes(hotness):
    off = MultiHot(spec_of(), MultiHotConfig(hotness=hotness))
    assert (off.hotness, off.expansion_bytes()) == ({}, {})
    assert off.expanded_spec(spec_of()) == spec_of()


def test_a_hotness_is_required_per_feature():
    with pytest.raises(ValueError, match=r"hotness has 2 entries for 7 categorical features; give"):
        expanding([3, 3])


@pytest.mark.parametrize("stored", [2, None])
def test_only_one_hot_features_are_expanded(stored):
    message = "which is not stored one-hot"
    spec = spec_of([10, 20])
    several = replace(spec.categorical[1], hotness=stored)
    spec = replace(spec, categorical=(spec.categorical[0], several))
    MultiHot(spec, MultiHotConfig(hotness=[3, 1]))
    with pytest.raises(ValueError, match=rf"^data\.multi_hot\.hotness is 5 for 'cat_1', {message}"):
        MultiHot(spec, MultiHotConfig(hotness=[3, 5]))


def test_a_table_beyond_int32_is_not_expanded():
    with pytest.raises(ValueError, match="which has 3000000000 rows, and additional ids are int32"):
        MultiHot(spec_of([3_000_000_000]), MultiHotConfig(hotness=[2]))


TABLES = {"user": (300, 5), "item": (70, 1), "tag": (40, 12)}


def write_twice(root: Path) -> tuple[Path, Path]:
    """Write the same rows one-hot and materialised, with the additional ids after every id."""
    rows, generator = {"train": 256, "test": 64}, np.random.default_rng(1)
    additional = additional_ids(*(list(column) for column in zip(*TABLES.values(), strict=True)))
    stored, materialised = root / "one_hot", root / "materialised"
    drawn = {
        split: {name: generator.integers(0, size, count) for name, (size, _) in TABLES.items()}
        for split, count in rows.items()
    }
    for path, is_expanded in ((stored, False), (materialised, True)):
        features = [
            CategoricalFeature.of(name, size, hotness if is_expanded else 1)
            for name, (size, hotness) in TABLES.items()
        ]
        with write_dataset(path, categorical=features, numerical=("n",)) as dataset:
            for split, ids in drawn.items():
                if is_expanded:
                    ids = {
                        name: np.column_stack([column, table[column]]).squeeze()
                        for (name, column), table in zip(ids.items(), additional, strict=True)
                    }
                dataset[split].append(
                    numerical=drawn[split]["item"][:, None] / 70,
                    labels=drawn[split]["user"] % 2 == 0,
                    ids=ids,
                )
    return stored, materialised


def ids_of_one_batch(path: Path) -> dict[str, torch.Tensor]:
    source = BinarySource(FeatureSpec.load(path))
    loader = make_loader(source, "train", batch_size=64, rank=0, world_size=1, device=CPU, seed=1)
    [batch] = loader.batches(1, 1)
    return {name: ids.values().reshape(64, -1) for name, ids in batch.ids.to_dict().items()}


def test_expanded_batches_are_those_of_the_materialised_dataset(tmp_path):
    one_hot, materialised = map(ids_of_one_batch, write_twice(tmp_path))
    hotness = [count for _, count in TABLES.values()]
    spec = FeatureSpec.load(tmp_path / "one_hot")
    expanded = MultiHot(spec, MultiHotConfig(hotness=hotness))
    for name, ids in one_hot.items():
        if name in expanded.hotness:
            ids = expand(ids.squeeze(1), expanded.lookup_table(name, CPU))
        assert torch.equal(ids, materialised[name])


def test_the_documented_conversion_writes_mlperfs_rows(tmp_path, monkeypatch):
    """128 rows per day; the first half of the last day is the test split. Ids are taken modulo the rows of their table."""
    root = Path(__file__).parents[3]
    code = (root / "docs/mlperf.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("mlperf").mkdir()
    Path("data").mkdir()
    generator = np.random.default_rng(1)
    days = [
        {
            "dense": generator.normal(size=(128, 13)).astype(np.float32),
            "sparse": generator.integers(0, 2**31, (128, 26), np.int32),
            "labels": generator.integers(0, 2, (128, 1), np.int32),
        }
        for _ in range(24)
    ]
    for number, day in enumerate(days):
        for name, values in day.items():
            np.save(f"mlperf/day_{number}_{name}.npy", values)
    code = code.replace('"configs', f'"{root}/configs').replace("1_000_000", "100")
    exec(code, {})
    spec = FeatureSpec.load("data/criteo_mlperf")
    assert (spec.rows_of("train"), spec.rows_of("test")) == (23 * 128, 64)
    source = BinarySource(spec)
    columns = source.read("train", np.array([[128, 256]]))
    assert np.array_equal(columns.numerical, days[1]["dense"])
    assert np.array_equal(columns.labels, days[1]["labels"][:, 0])
    assert np.array_equal(columns.ids[1], days[1]["sparse"][:, 1] % 39_060)
    columns = source.read("test", np.array([[0, 64]]))
    assert np.array_equal(columns.ids[20], days[23]["sparse"][:64, 20] % 40_000_000)


def test_training_on_one_hot_rows_equals_training_on_the_materialised_dataset(tmp_path):
    stored, materialised = write_twice(tmp_path)
    hotness = [count for _, count in TABLES.values()]
    expected, expanded = losses_of_cases(
        [
            [*TINY, f"data.path={materialised}"],
            [*TINY, f"data.path={stored}", f"data.multi_hot.hotness={hotness}"],
        ],
        num_steps=6,
    )
    assert expanded == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_kernel_expands_features_of_different_numbers_of_ids_as_plain_torch(dtype):
    """Interpreted here, compiled on a GPU; features of more than 16 and of more than 32 ids have launches of their own."""
    pytest.importorskip("triton")
    from nn.ops.triton.id_expansion import IdExpansionKernel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, hotness, stored = [50, 4, 7, 30], [40, 3, None, 100], [1, 1, 2, 1]
    tables = [
        None if count is None else torch.randint(size, (size, count - 1), dtype=torch.int32)
        for size, count in zip(rows, hotness, strict=True)
    ]
    num_samples = 37
    pieces = [
        torch.randint(size, (num_samples * count,), dtype=dtype)
        for size, count in zip(rows, stored, strict=True)
    ]
    wanted = torch.cat(
        [
            ids if table is None else expand(ids, table).flatten().to(dtype)
            for ids, table in zip(pieces, tables, strict=True)
        ]
    )
    moved = [None if table is None else table.to(device) for table in tables]
    kernel = IdExpansionKernel(moved, stored, num_samples)
    assert torch.equal(kernel(torch.cat(pieces).to(device)).cpu(), wanted)
