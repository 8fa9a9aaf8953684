"""Training on raw keys: the same bits as training on the rows that a plain dictionary gives to the keys."""

import os
import re
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.numpy import load_file

from configs.export_schema import ExportFormat
from configs.schema import Component, DynamicConfig, Evict
from configs.serving_schema import ModelExportConfig
from dataloading.batch import Batch
from dataloading.dataset.dataset_directory import write_dataset
from dataloading.dataset.feature_spec import CategoricalFeature, FeatureSpec
from dataloading.dataset.open_dataset import open_dataset
from dataloading.dataset.source import Columns, read_with_keys
from dataloading.keys import batch_mapper, key_link, key_table
from dataloading.keys.described_keys import DescribedKeys
from dataloading.keys.key_maps import KeyMaps
from dataloading.keys.rekeyed import TableFullError
from dataloading.keys.shared_key_maps import SharedKeyMaps
from dataloading.loader import Loader, LoaderSettings
from nn.build import build_test_loader, build_train_loader, open_source
from nn.checkpoint.tensor_index import read_index
from nn.distributed.process_group import is_lost_peer
from nn.distributed.sharded_tensor import local_tensors, pieces_of
from nn.embedding.declared_tables import initial_bound
from nn.export.tables import Selection, export_tables
from nn.layers.initialization import fill_uniform_
from nn.library.loaded_run import Run
from nn.models.registry import declared_tables
from nn.replay import replay
from nn.training.evaluator import Evaluator, predictions
from serving.exporting.run import export_model
from serving.inference.key_rows import load_key_rows
from serving.inference.model import ServedModel
from serving.manifest import IDS, NUMERICAL, PADDING
from tests.dataloading.keys.reference import ReferenceMap, keys_of_a_rank
from tests.helpers.command import run_command
from tests.helpers.composed import build, compose_config, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.helpers.rank_processes import start
from tests.helpers.runs import differences, records
from tests.nn.metrics.test_task_metrics import gauc_by_loop

BATCH, STEPS, TEST_ROWS, CAPACITY = 32, 12, 64, 36
MANY_BATCH, MANY_STEPS, MANY_ROWS = 8, 60, 500
ROWS = {"train": BATCH * STEPS, "test": TEST_ROWS}
SMALL = [
    "model.embedding_dim=4",
    "model.bottom_mlp=[4]",
    "model.top_mlp=[4,1]",
    f"train.batch_size={BATCH}",
    f"eval.batch_size={BATCH}",
    "optimizer.embedding_name=adam",
    "data.shuffle_block=0",
    "device=cpu",
    "log.pictures=false",
    "log.loggers=[]",
]
KEYED = [*SMALL, "data.dynamic.admit_after=2"]
EXPANDED = "data.multi_hot.hotness=[3,1,2]"
EXPIRING = ["data.dynamic.expire_after=24"]
EXPANDED_WAYS = ["expanded", "expanded row-wise", "expanded, distinct rows"]


def drawn(split: str) -> dict:
    """Draw users that come and go, and ragged histories of the same users."""
    rng = np.random.default_rng(len(split))
    rows = ROWS[split]
    lengths = rng.integers(0, 4, rows)

    def users(at: np.ndarray) -> np.ndarray:
        keys = (at // 8 + rng.integers(0, 14, len(at))) * 0x9E3779B97F4A7C1 - 2**61
        keys[rng.random(len(at)) < 0.1] = 0
        return keys

    at = np.arange(rows) if split == "train" else np.full(rows, ROWS["train"] - 9)
    return {
        "numerical": rng.normal(size=(rows, 2)),
        "labels": rng.random(rows) < 0.4,
        "ids": {
            "user": users(at),
            "past": users(np.repeat(at, lengths)),
            "item": rng.integers(0, 9, rows),
        },
        "lengths": {"past": lengths},
    }


def write(root: Path, columns: dict, user: CategoricalFeature, past: CategoricalFeature) -> Path:
    with write_dataset(
        root,
        categorical=[user, past, CategoricalFeature.of("item", 9)],
        numerical=("n", "m"),
        numerical_dtype="float32",
        splits=list(columns),
    ) as dataset:
        for split, of_split in columns.items():
            dataset[split].append(**of_split)
    return root


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Datasets of keys and of the rows that a dictionary gives to them, and the rows that are new at each step."""
    root = tmp_path_factory.mktemp("keys")
    columns = {split: drawn(split) for split in ROWS}
    write(
        root / "keys",
        columns,
        CategoricalFeature.of_keys("user", CAPACITY),
        CategoricalFeature.of_keys("past", CAPACITY, None, "user"),
    )
    reference = ReferenceMap(CAPACITY, DynamicConfig(admit_after=2, evict=Evict.age))
    train, lengths = columns["train"], columns["train"]["lengths"]["past"]
    ends = np.cumsum(lengths)
    new_rows = []
    for step in range(STEPS):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        items = slice(ends[rows.start] - lengths[rows.start], ends[rows.stop - 1])
        keys = [*train["ids"]["user"][rows].tolist(), *train["ids"]["past"][items].tolist()]
        before = dict(reference.rows.slots)
        found = reference.map(keys, step + 1)
        train["ids"]["user"][rows] = found[:BATCH]
        train["ids"]["past"][items] = found[BATCH:]
        after = reference.rows.slots
        new_rows.append({row: key for key, row in after.items() if before.get(key) != row})
    for name, keys in columns["test"]["ids"].items():
        if name != "item":
            columns["test"]["ids"][name] = np.array(reference.look_up(keys.tolist()))
    assert sum(map(len, new_rows)) > len(reference.rows.slots) + 10, "keys are evicted"
    write(
        root / "rows",
        columns,
        CategoricalFeature.of("user", CAPACITY),
        CategoricalFeature.of("past", CAPACITY, None, "user"),
    )
    torch.save(new_rows, root / "new_rows.pt")
    return root


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """A dataset of more keys than rows, of which an arena has room for some."""
    rng, rows = np.random.default_rng(5), MANY_STEPS * MANY_BATCH
    lengths = rng.integers(0, 4, rows)

    def users(at: np.ndarray) -> np.ndarray:
        return (2 * at + rng.integers(0, 200, len(at))) * 0x9E3779B97F4A7C1 - 2**61

    at = np.arange(rows)
    ids = {"user": users(at), "past": users(np.repeat(at, lengths)), "item": at % 9}
    columns = {
        "numerical": rng.normal(size=(rows, 2)),
        "labels": rng.random(rows) < 0.4,
        "ids": ids,
        "lengths": {"past": lengths},
    }
    few = {name: ids[name][:8] for name in ("user", "item")}
    few["past"] = ids["past"][: lengths[:8].sum()]
    test = {name: columns[name][:8] for name in ("numerical", "labels")}
    return write(
        tmp_path_factory.mktemp("many"),
        {"train": columns, "test": test | {"ids": few, "lengths": {"past": lengths[:8]}}},
        CategoricalFeature.of_keys("user", MANY_ROWS),
        CategoricalFeature.of_keys("past", MANY_ROWS, None, "user"),
    )


def tables_of_many(path: str, options: list[str]):
    """Train, read keys beside it from time to time, and return losses, tables with state, and the rows that left the device."""
    config = compose_config(*KEYED, f"data.path={path}", "data.dynamic.admit_after=1", *options)
    with ranks_of_cpu() as ranks:
        built = build(config)
        prefetcher = built.prefetcher(0, MANY_STEPS)
        losses = [built.step.train(step, prefetcher).loss for step in range(MANY_STEPS)]
        built.step.set_training(False)
        logits = [
            logits.clone()
            for _, logits in predictions(built.step, built.test_loader.batches(0, 1), ranks.device)
        ]
        tables = {
            f"{name} {[*offsets]}": tensor.clone().numpy()
            for name, value in built.step.state_dict().items()
            if name.startswith("tables.")
            for offsets, tensor in pieces_of(value)
        }
        for own in built.step.tables.shards():
            if own.initial is not None:  # the state has changes of it
                offsets = [own.row_offset, own.column_offset]
                weights = own.rows(torch.arange(len(own.weight)))
                tables[f"tables.{own.table}.weight {offsets}"] = weights.numpy()
        tier = built.step.tables.tier
        left = 0 if tier is None else tier.take_counts()["rows_out"]
        built.step.close()
        return losses, [x.numpy() for x in logits], tables, left, ranks.rank


def state_after_training(path: str, new_rows: list[dict[int, int]] | None, options: list[str]):
    """Train, and return the complete tables with optimizer state and the losses; rows are replaced by hand if given."""
    config = compose_config(*options, f"data.path={path}")
    with ranks_of_cpu() as ranks:
        built = build(config)
        prefetcher = built.prefetcher(0, STEPS)
        losses = []
        for step in range(STEPS):
            if new_rows is not None:
                replace_rows(built, config, new_rows[step])
            losses.append(built.step.train(step, prefetcher).loss)
        tables = {}
        for name, value in built.step.state_dict().items():
            if name.startswith("tables."):
                empty = torch.empty(0, *value.shape[1:])
                tables[name] = torch.cat([*local_tensors(value), empty]).numpy()
        built.step.close()
        scores = []
        built.step.set_training(False)
        for batch in built.test_loader.batches(0, 2):
            scores.append(batch.ids.values().numpy().copy())
        return losses, tables, scores, ranks.rank


def replace_rows(built, config, new: dict[int, int]) -> None:
    """Write the weights that belong to the keys, and zeros as optimizer state, row by row."""
    declared = {t.name: t for t in declared_tables(config.model, built.source.spec)}
    for name, value in built.step.state_dict().items():
        if not name.startswith("tables.user."):
            continue
        for (first, *_), tensor in pieces_of(value):
            for row, key in new.items():
                if not first <= row < first + len(tensor):
                    continue
                tensor[row - first] = 0
                if name.endswith(".weight"):
                    bound = initial_bound(declared["user"])
                    fill_uniform_(
                        tensor[row - first][None],
                        seed=config.seed,
                        table="user",
                        row_offset=key,
                        bound=bound,
                    )


@pytest.mark.parametrize(
    ("ranks", "sharding"),
    [
        (1, []),
        (2, ["sharding.types=[row_wise]"]),
        (2, ["sharding.types=[data_parallel]"]),
        (2, ["sharding.group_size=1"]),
        (4, ["sharding.group_size=2"]),
        (1, [EXPANDED]),
        (2, [EXPANDED, "sharding.types=[row_wise]"]),
        (2, [EXPANDED, "sharding.types=[table_wise]", "sharding.exchange=rows"]),
    ],
    ids=["one rank", "row-wise", "replicated", "groups", "groups of two nodes", *EXPANDED_WAYS],
)
def test_it_equals_training_on_the_rows_of_a_dictionary(data, ranks, sharding):
    new_rows = torch.load(data / "new_rows.pt")
    own, other = (
        run_distributed(
            state_after_training,
            ranks,
            *(str(data / name), rows, options + sharding),
            local_world_size=min(ranks, 2),
        )
        for name, rows, options in (("keys", None, KEYED), ("rows", new_rows, SMALL))
    )
    for (losses, tables, scored, _), (want_losses, want_tables, want_scored, _) in zip(
        own, other, strict=True
    ):
        assert losses == want_losses
        assert tables.keys() == want_tables.keys()
        for name in tables:
            np.testing.assert_array_equal(tables[name], want_tables[name], err_msg=name)
        for ids, want in zip(scored, want_scored, strict=True):
            np.testing.assert_array_equal(ids, want)


@pytest.mark.parametrize(
    ("ranks", "sharding"),
    [
        (1, []),
        (2, ["sharding.types=[row_wise]"]),
        (2, ["sharding.types=[column_wise]"]),
        (2, ["sharding.group_size=1"]),
        (1, EXPIRING),
        (2, [*EXPIRING, "data.multi_hot.hotness=[2,1,1]", "sharding.types=[row_wise]"]),
    ],
    ids=["one rank", "row-wise", "column-wise", "groups", "keys that expire", "expanded rows"],
)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_tables_in_other_memory_train_to_the_same_bits(many, tmp_path, ranks, sharding, tier):
    sizes = [f"train.batch_size={MANY_BATCH}", f"eval.batch_size={MANY_BATCH}"]
    disk = f"sharding.disk_path={tmp_path}" if tier == "disk" else "sharding.disk_path=null"
    elsewhere = [f"sharding.tables={{user: {{tier: {tier}, cache: 0.8}}}}", disk]
    wanted, found = (
        run_distributed(tables_of_many, ranks, str(many), [*sizes, *sharding, *options])
        for options in ([], elsewhere)
    )
    for (losses, logits, tables, _, _), (other, others, same, _, _) in zip(
        wanted, found, strict=True
    ):
        assert other == losses
        np.testing.assert_array_equal(others, logits)
        assert tables.keys() == same.keys()
        for name in tables:
            np.testing.assert_array_equal(same[name], tables[name], err_msg=name)
    assert max(left for *_, left, _ in found) > 50


def trained(data: Path, run_dir: Path, steps: int, *options: str) -> None:
    ended = run_command(
        *KEYED,
        *options,
        f"data.path={data / 'keys'}",
        f"run_dir={run_dir}",
        f"train.max_steps={steps}",
        "eval.every=4",
        "log.every=4",
        "checkpoint.save_every=5",
    )
    assert ended.exit_code == 0, ended.err


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """A run without interruption."""
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    trained(data, run_dir, STEPS)
    return run_dir


@pytest.mark.parametrize("options", [[], ["sharding.tables={user: {tier: host, cache: 1}}"]])
def test_a_resumed_run_has_the_same_map_on_any_number_of_ranks(data, whole, tmp_path, options):
    last = f"checkpoints/step_{STEPS}"
    trained(data, tmp_path / "parts", 5, *options)
    shutil.copytree(tmp_path / "parts", tmp_path / "ranks")
    trained(data, tmp_path / "parts", STEPS, *options)
    for name in ("rank_00000.bin", "tensors.json"):
        assert (tmp_path / "parts" / last / name).read_bytes() == (whole / last / name).read_bytes()
    run_distributed(trained, 2, data, tmp_path / "ranks", STEPS)
    on_ranks = read_index(tmp_path / "ranks" / last).tensors
    for name, tensor in read_index(whole / last).tensors.items():
        if name.startswith("keys."):
            own = np.concatenate([*on_ranks[name].blocks()])
            np.testing.assert_array_equal(own, np.concatenate([*tensor.blocks()]), err_msg=name)


def test_a_table_of_another_checkpoint_brings_its_keys(data, whole, tmp_path):
    last, before = (whole / f"checkpoints/step_{step}" for step in (STEPS, 10))
    options = [f"checkpoint.restore={before}", f"checkpoint.restore_tables={{user: {last}}}"]
    resumed = run_command(
        *KEYED, f"data.path={data / 'keys'}", *options, f"run_dir={tmp_path / 'r'}"
    )
    assert resumed.exit_code == 2
    assert (
        "has raw keys, which count the steps of their own run; set checkpoint.parts" in resumed.err
    )
    options += ["checkpoint.parts=[dense,tables]", "train.freeze=[tables]"]
    trained(data, tmp_path / "run", 1, *options)
    found = read_index(tmp_path / "run/checkpoints/step_1").tensors
    wanted, other = (read_index(path).tensors for path in (last, before))
    for name in ("keys.user.keys", "tables.user.weight"):
        np.testing.assert_array_equal(found[name].array(), wanted[name].array())
        assert (found[name].array() != other[name].array()).any()


def test_records_count_the_keys_that_come_and_go(data, whole):
    found = [record for record in records(whole) if "keys_new" in record]
    new_rows = torch.load(data / "new_rows.pt", weights_only=False)
    rows_with_key, totals = set(), []
    for new in new_rows:
        evicted = len(rows_with_key & set(new))
        rows_with_key |= set(new)
        totals.append((len(new), evicted, len(rows_with_key) / (CAPACITY - 1)))
    windows = [totals[first : first + 4] for first in range(0, STEPS, 4)]
    assert [record["keys_new"] for record in found] == [
        sum(new for new, _, _ in window) / 4 for window in windows
    ]
    assert [record["keys_evicted"] for record in found] == [
        sum(evicted for _, evicted, _ in window) / 4 for window in windows
    ]
    assert [record["key_rows_used"] for record in found] == [window[-1][2] for window in windows]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("data.multi_hot.hotness=[1,2,1]", "data.multi_hot.hotness is 2 for 'past', which is not"),
        ("data.dynamic.admit_after=0", "data.dynamic.admit_after must be positive, got 0"),
        ("data.dynamic.evict=never", "evict=never keeps all keys"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(data, tmp_path, option, message):
    ended = run_command(*KEYED, f"data.path={data / 'keys'}", f"run_dir={tmp_path / 'run'}", option)
    assert ended.exit_code == 2
    assert message in ended.err
    assert ended.err.strip().count("\n") == 0


@pytest.mark.parametrize("form", ["binary", "parquet"])
def test_the_key_of_padding_is_refused_in_one_line(tmp_path, form):
    keys = CategoricalFeature.of_keys("user", CAPACITY)
    with write_dataset(
        tmp_path / "keys", categorical=[keys], numerical=["n"], file_format=form
    ) as dataset:
        for split, rows in ROWS.items():
            at = np.arange(rows)
            dataset[split].append(labels=at % 2, ids={"user": at}, numerical=np.zeros((rows, 1)))
    if form == "binary":
        path = tmp_path / "keys/train/user.bin"
        path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
    else:
        (path,) = (tmp_path / "keys/train").glob("*.parquet")
        table = pq.read_table(path)
        users = pa.array([*table["user"].to_pylist()[:-1], -1])
        at = table.column_names.index("user")
        pq.write_table(table.set_column(at, table.field("user"), users), path)
    options = [*KEYED, f"data.path={tmp_path / 'keys'}", f"run_dir={tmp_path / 'run'}"]
    ended = run_command(*options)
    assert ended.exit_code == 2
    last = ROWS["train"] - 1
    assert ended.err.strip() == (
        f"error: feature 'user': key -1 at row {last} of {path} stands for no value; write 0 for a missing one, else "
        "another number"
    )


def test_a_model_is_not_scored_with_the_ids_of_another_seed(data, tmp_path):
    run = tmp_path / "run"
    trained(data, run, 5, EXPANDED)
    words = ["mode=predict", f"config={run}/config.yaml", f"output={tmp_path}/scores.csv"]
    words += [f"checkpoint.restore={run}/checkpoints/step_5", "data.multi_hot.seed=3"]
    ended = run_command(*words)
    assert ended.exit_code == 2
    assert (
        "was trained with data.multi_hot.seed=0, and 3 draws other ids; set that one" in ended.err
    )
    assert run_command(*words, "checkpoint.allow_changes=true").exit_code == 0


def predicted_by_both_ways(
    data: Path, step: Path, room: Path, *options: str
) -> tuple[np.ndarray, Columns]:
    """Return the scores of the test rows by mode=predict, which are those of `Run.predict`, and these rows."""
    ended = run_command(
        *(*KEYED, *options, "mode=predict", f"data.path={data / 'keys'}"),
        *(f"checkpoint.restore={step}", f"output={room / 'scores.parquet'}"),
    )
    assert ended.exit_code == 0, ended.err
    predicted = pq.read_table(room / "scores.parquet")["score"].to_numpy()
    columns = read_with_keys(
        open_dataset(FeatureSpec.load(data / "keys")), "test", np.array([[0, TEST_ROWS]])
    )
    user, past, item = columns.ids
    offsets = np.concatenate([[0], np.cumsum(columns.lengths[1])])
    table = pa.table(
        {"n": columns.numerical[:, 0], "m": columns.numerical[:, 1], "user": user}
        | {"past": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), past), "item": item}
    )
    run = Run.load(step.parent.parent, checkpoint=step.name)
    np.testing.assert_allclose(run.predict(table)["score"], predicted, atol=1e-6)
    return predicted, columns


def scores_of_ranks(data: Path, step: Path, output: Path) -> None:
    options = [f"data.path={data / 'keys'}", f"checkpoint.restore={step}", f"output={output}"]
    ended = run_command(*KEYED, "mode=predict", *options)
    assert ended.exit_code == 0, ended.err


def test_scores_are_those_of_prediction_wherever_keys_are_mapped(data, whole, tmp_path):
    step = whole / "checkpoints" / f"step_{STEPS}"
    predicted, columns = predicted_by_both_ways(data, step, tmp_path)
    run_distributed(scores_of_ranks, 2, data, step, tmp_path / "of_ranks.parquet")
    of_ranks = pq.read_table(tmp_path / "of_ranks.parquet")["score"].to_numpy()
    np.testing.assert_allclose(of_ranks, predicted, atol=1e-6)
    user, past, item = columns.ids
    model = tmp_path / "model"
    export_model(ModelExportConfig(checkpoint=str(step), output=str(model), rows=TEST_ROWS))
    served = ServedModel.load(model)
    assert served.manifest.keys["user"] == served.manifest.keys["past"]
    matrix = np.full((TEST_ROWS, 3), PADDING)
    matrix[np.arange(3) < columns.lengths[1][:, None]] = past
    inputs = {NUMERICAL: columns.numerical, IDS: np.stack([user, item], axis=1), "past": matrix}
    scores = served.scores(served.id_inputs.rows(inputs, TEST_ROWS))
    np.testing.assert_allclose(scores[:, 0], predicted, atol=1e-6)
    keys = load_key_rows(model, served.manifest)["user"]
    unknown = keys.rows(np.array([0, 12345, user[user != 0][-1]]))
    assert unknown[:2].tolist() == [0, 0]


@pytest.mark.parametrize("sharding", ["[row_wise]", "[table_wise]"])
def test_expanded_rows_are_resumed_on_other_ranks_replayed_and_predicted(data, tmp_path, sharding):
    options = (EXPANDED, "checkpoint.delta_every=2", "checkpoint.keep=9")
    trained(data, tmp_path / "run", 5, *options)
    shutil.copytree(tmp_path / "run", tmp_path / "ranks", symlinks=True)
    trained(data, tmp_path / "run", STEPS, *options)
    run_distributed(
        trained, 2, data, tmp_path / "ranks", STEPS, *options, f"sharding.types={sharding}"
    )
    steps = [tmp_path / name / f"checkpoints/step_{STEPS}" for name in ("run", "ranks")]
    whole, on_ranks = (read_index(step).tensors for step in steps)
    for name in whole:
        if name.startswith(("keys.", "tables.")):
            own, wanted = on_ranks[name].array(), whole[name].array()
            np.testing.assert_allclose(own, wanted, atol=2e-6, rtol=2e-5, err_msg=name)
    base = tmp_path / "ranks/checkpoints/step_0"
    export_tables(steps[1], tmp_path / "wanted", Selection(parts=[*Component], optimizer=False))
    replay(base, [str(tmp_path / "ranks/deltas")], tmp_path / "replayed")
    for path in (tmp_path / "wanted").iterdir():
        assert (tmp_path / "replayed" / path.name).read_bytes() == path.read_bytes(), path.name
    predicted, _ = predicted_by_both_ways(data, steps[0], tmp_path, EXPANDED)
    assert len(np.unique(predicted)) == TEST_ROWS


def test_keys_without_a_row_are_groups_of_their_own(data):
    config = compose_config(*KEYED, f"data.path={data / 'keys'}", "eval.group=user")
    with ranks_of_cpu() as ranks:
        built = build(config)
        built.train(0, STEPS)
        loader = built.test_loader
        found = Evaluator(built.step, loader, ranks, config.eval).run()["test_gauc"]
        batches = predictions(built.step, loader.batches(0, loader.steps_per_epoch), ranks.device)
        scores = torch.cat([x[: b.num_valid].clone() for b, x in batches]).numpy()
    everywhere = np.array([[0, TEST_ROWS]])
    columns = read_with_keys(built.source, "test", everywhere)
    rows = open_dataset(FeatureSpec.load(data / "rows")).read("test", everywhere).ids[0]
    clicks, groups = columns.labels, columns.ids[0]
    assert len(set(groups)) > len(set(rows)), "keys are unknown"
    expected = gauc_by_loop(scores, clicks, groups, np.ones(TEST_ROWS))
    assert found == pytest.approx(expected, abs=1e-6)


def test_exported_tables_have_their_keys(whole, tmp_path):
    step = whole / "checkpoints" / f"step_{STEPS}"
    with pytest.raises(ValueError, match="format=tf2 has no place for the raw keys of table"):
        export_tables(step, tmp_path / "tf2", format=ExportFormat.tf2)
    assert not (tmp_path / "tf2").exists()
    record = export_tables(step, tmp_path / "tables", Selection(optimizer=False))
    assert record["keys"] == ["keys.safetensors"]
    keys = load_file(tmp_path / "tables" / "keys.safetensors")["user.keys"]
    stored = np.concatenate([*read_index(step).tensors["keys.user.keys"].blocks()])
    np.testing.assert_array_equal(keys, stored)
    assert np.count_nonzero(keys) == CAPACITY - 1


def test_threads_processes_and_ranks_read_the_same_rows(data):
    source = open_dataset(FeatureSpec.load(data / "keys"))
    policy = DynamicConfig(admit_after=2)
    settings = LoaderSettings(batch_size=20, seed=1, shuffle_block=20, admits_keys=True)

    def read(
        rank: int, world_size: int, *, forks: bool
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
        maps = KeyMaps(source.spec, policy)
        loader = Loader(source, "train", settings, rank=rank, world_size=world_size, key_maps=maps)
        if forks:
            loader.fork_readers()
        found = []
        for batch in loader.batches(12, 12):
            maps.take_rekeyed()
            names = batch.ids.keys()
            found.append({name: batch.ids[name].values().numpy().copy() for name in names})
        state = maps.state()
        loader.close()
        return found, state

    whole, state = read(0, 1, forks=False)
    assert max(rows["user"].max() for rows in whole) > 20
    np.testing.assert_equal(read(0, 1, forks=True), (whole, state))
    for world_size in (2, 4):
        parts, states = zip(
            *(read(rank, world_size, forks=False) for rank in range(world_size)), strict=True
        )
        for of_rank in states:
            np.testing.assert_equal(of_rank, state)
        joined = [
            {name: np.concatenate([rows[name] for rows in of_ranks]) for name in of_ranks[0]}
            for of_ranks in zip(*parts, strict=True)
        ]
        np.testing.assert_equal(joined, whole)


def seen_by_a_rank(path: str, options: list[str], is_shared: bool) -> tuple[list, list]:
    """Return the rows of batches, those that got other keys, and states, of ranks that do not wait for each other."""
    config = compose_config(*KEYED, f"data.path={path}", "data.prefetch=3", *options)
    found: list = []
    with ExitStack() as stack:
        ranks = stack.enter_context(ranks_of_cpu())
        for module in (batch_mapper, key_link, key_table):  # forks have drawn the same number
            stack.enter_context(patch.object(module, "DRAWN", np.uint64(ranks.rank + 1)))
        source = open_source(config)
        maps = (
            build(config).step.key_maps if is_shared else KeyMaps(source.spec, config.data.dynamic)
        )
        assert maps.maps_all == (not is_shared or ranks.local_rank == 0)
        train = build_train_loader(config, source, ranks, maps)
        test = build_test_loader(config, source, ranks, key_maps=maps)
        drawn = np.random.default_rng(ranks.rank)

        def add(batch: Batch) -> None:
            time.sleep(drawn.random() / 100)
            found.append([batch.ids[name].values().numpy().copy() for name in ("user", "past")])

        def read(first: int, last: int) -> dict[str, np.ndarray]:
            batches = train.batches(first)
            for step in range(first, last):
                add(next(batches))
                rekeyed = maps.take_rekeyed()
                found.append({name: (of.rows, of.keys) for name, of in rekeyed.items()})
                if step % 3 == 0:
                    found.append(maps.take_counts(3))
                    for batch in test.batches(0, 1):
                        add(batch)
            batches.close()
            return maps.state()

        states = [read(0, 11), read(11, 30), read(30, MANY_STEPS)]
        ranks.barrier()
        for state, first in ((states[0], 11), (states[2], 20)):
            maps.load(state)
            states.append(read(first, first + 9))
            ranks.barrier()
    return found, states


@pytest.mark.parametrize(("ranks", "ranks_of_node"), [(1, 1), (2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize(
    "options", [["data.dynamic.evict=count"], ["data.dynamic.admit_after=1", *EXPIRING]]
)
def test_ranks_have_the_rows_that_maps_of_their_own_would_give(many, ranks, ranks_of_node, options):
    sizes = [f"train.batch_size={MANY_BATCH}", f"eval.batch_size={MANY_BATCH}"]
    shared, own = (
        run_distributed(
            *(seen_by_a_rank, ranks, str(many), [*options, *sizes], is_shared),
            local_world_size=ranks_of_node,
        )
        for is_shared in (True, False)
    )
    for rank, ((found, states), (wanted, wanted_states)) in enumerate(
        zip(shared, own, strict=True)
    ):
        np.testing.assert_equal(found, wanted)
        for state, wanted_state in zip(states, wanted_states, strict=True):
            if rank % ranks_of_node == 0:
                np.testing.assert_equal(state, wanted_state)
            else:
                shapes, wanted_shapes = (
                    {name: (values.shape, values.dtype) for name, values in of.items()}
                    for of in (state, wanted_state)
                )
                assert shapes == wanted_shapes


def kill_at_batch_9_of_rank_0(rank: int) -> None:
    see = batch_mapper.see_parts

    def killing(*arguments) -> None:
        see(*arguments)
        if arguments[5] == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        batch_mapper.see_parts = killing


def test_a_killed_mapper_ends_all_ranks_with_a_line_and_the_run_resumes_to_its_bits(data, tmp_path):
    options = [*KEYED, f"data.path={data / 'keys'}", f"train.max_steps={STEPS}"]
    options += ["checkpoint.save_every=2", "data.prefetch=2"]

    def start_ranks(name: str, prepare=int) -> tuple[list[int], str]:
        ranks = start(
            [*options, f"run_dir={tmp_path / name}"], 2, tmp_path / "log", prepare=prepare
        )
        codes = ranks.wait(120)
        return codes, ranks.log.read_text()

    codes, output = start_ranks("killed", kill_at_batch_9_of_rank_0)
    assert codes == [-signal.SIGKILL, 1], output
    (line,) = [line for line in output.splitlines() if line.startswith("error")]
    assert line.startswith("error: rank 1 stopped because another rank has exited")
    assert "Traceback" not in output
    for name in ("killed", "whole"):
        codes, output = start_ranks(name)
        assert codes == [0, 0], output
    assert differences(tmp_path / "whole", tmp_path / "killed") == []


def kill_rank_0_before_it_connects(rank: int) -> None:
    if rank == 0:
        KeyMaps.connect = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


def test_a_mapper_that_is_killed_before_ranks_connect_ends_them_with_a_line(data, tmp_path):
    options = [*KEYED, f"data.path={data / 'keys'}", f"run_dir={tmp_path / 'run'}"]
    ranks = start(options, 2, tmp_path / "log", prepare=kill_rank_0_before_it_connects)
    assert ranks.wait(120) == [-signal.SIGKILL, 1]
    output = ranks.log.read_text()
    (line,) = [line for line in output.splitlines() if line.startswith("error")]
    assert line.startswith("error: rank 1 stopped because another rank has exited")
    assert "Traceback" not in output


@pytest.fixture
def of_a_node() -> tuple[KeyMaps, SharedKeyMaps]:
    """The maps of a node of two ranks, with five rows for keys, in one process."""
    features = (CategoricalFeature.of_keys("user", 6),)
    spec = FeatureSpec(None, (), np.dtype(np.float32), (), features, {}, {})
    maps, other = (
        kind(spec, DynamicConfig(evict=Evict.never), 2) for kind in (KeyMaps, SharedKeyMaps)
    )
    with ThreadPoolExecutor(1) as pool:
        connected = pool.submit(maps.connect, offer := maps.listen())
        other.connect(offer)
        connected.result()
    return maps, other


def map_keys(maps: KeyMaps, last: int) -> None:
    keys = maps.describe(lambda _: keys_of_a_rank(np.arange(1, last)))
    maps.map(lambda: keys)


def test_a_full_table_is_full_on_the_other_ranks_of_the_node(of_a_node):
    maps, other = of_a_node
    for own in of_a_node:
        map_keys(own, 3)
    with pytest.raises(TableFullError) as error:
        map_keys(maps, 9)
    with pytest.raises(TableFullError, match=re.escape(str(error.value))):
        map_keys(other, 9)


def test_a_rank_does_not_wait_for_a_batch_that_it_does_not_read(of_a_node):
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(map_keys, of_a_node[1], 3)
        with pytest.raises(TimeoutError):
            waits.result(0.3)
        of_a_node[1].stop()
        waits.result(10)


def test_a_rank_that_maps_no_more_ends_the_others(of_a_node, monkeypatch):
    maps, other = of_a_node

    def no_memory(*_) -> None:
        raise MemoryError("of the rows")

    for own in of_a_node:
        map_keys(own, 2)
    with monkeypatch.context() as patch:
        patch.setattr("dataloading.keys.batch_mapper.do_jobs", no_memory)
        with pytest.raises(MemoryError):
            map_keys(maps, 4)
    keys = other.describe(lambda _: keys_of_a_rank(np.arange(4)))
    with pytest.raises(RuntimeError, match="maps the raw keys of this node has ended"):
        other.look_up(lambda: keys)
    (peer,) = maps._server._peers
    peer.close()
    with pytest.raises(RuntimeError, match="has ended") as error:
        map_keys(other, 4)
    assert is_lost_peer(error.value)


def test_a_batch_that_finds_a_table_full_leaves_the_state_of_the_step_whole():
    features = (CategoricalFeature.of_keys("user", 6), CategoricalFeature.of_keys("item", 60))
    spec = FeatureSpec(None, (), np.dtype(np.float32), (), features, {}, {})
    maps = KeyMaps(spec, DynamicConfig(evict=Evict.never))

    def map_range(first: int, last: int) -> None:
        keys = maps.describe(lambda _: keys_of_a_rank(np.arange(first, last)))
        maps.map(lambda: keys)

    map_range(1, 4)
    maps.take_rekeyed()
    before = maps.state()
    map_range(2, 6)
    with pytest.raises(TableFullError, match="evict=never keeps all keys"):
        map_range(3, 20)
    with pytest.raises(RuntimeError, match="an earlier batch of keys has failed"):
        map_range(4, 30)
    np.testing.assert_equal(maps.state(), before)
    maps.rewind()

    def unreadable() -> DescribedKeys:
        raise ValueError("a value is invalid")

    with pytest.raises(ValueError, match="a value is invalid"):
        maps.map(unreadable)
    with pytest.raises(RuntimeError, match="has failed"):
        map_range(7, 9)
    np.testing.assert_equal(maps.state(), before)
    maps.rewind()
    map_range(2, 6)
    assert maps.take_rekeyed()["user"].keys.tolist() == [4, 5]


def test_a_map_with_a_part_of_a_batch_has_no_state(monkeypatch):
    features = (CategoricalFeature.of_keys("user", 60),)
    spec = FeatureSpec(None, (), np.dtype(np.float32), (), features, {}, {})
    maps = KeyMaps(spec, DynamicConfig())
    before = maps.state()

    def map_range(last: int) -> None:
        keys = maps.describe(lambda _: keys_of_a_rank(np.arange(1, last)))
        maps.map(lambda: keys)

    def no_memory(*_) -> None:
        raise MemoryError("of the rows")

    with monkeypatch.context() as patch:
        patch.setattr("dataloading.keys.batch_mapper.do_jobs", no_memory)
        with pytest.raises(MemoryError):
            map_range(9)
    with pytest.raises(RuntimeError, match="ended midway"):
        maps.state()
    with pytest.raises(RuntimeError, match="ended midway"):
        map_range(9)
    maps.load(before)
    map_range(9)
    np.testing.assert_equal(maps.state(), before)


def test_a_full_table_is_one_line_of_all_ranks(data, tmp_path):
    errors = run_distributed(error_of_full_table, 2, data, tmp_path / "run")
    (line,) = [error for error in errors if error]
    assert "data.dynamic.evict=never keeps all keys" in line
    assert line.count("\n") == 1


def error_of_full_table(data: Path, run_dir: Path) -> str:
    never = [f"data.path={data / 'keys'}", f"run_dir={run_dir}", "data.dynamic.evict=never"]
    ended = run_command(*KEYED, *never)
    assert ended.exit_code == 2
    return ended.err
