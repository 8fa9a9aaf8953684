"""Groups of ranks with the same tables: they keep the same bits, and train as one group and as one process."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from nn.build import hardware_of
from nn.checkpoint import state as checkpoint
from nn.checkpoint.tensor_index import read_index
from nn.distributed.process_group import process_group, ranks_from_environment
from nn.sharding import request_capacity
from tests.helpers import sequence_models
from tests.helpers.checkpoints import save
from tests.helpers.command import run_command
from tests.helpers.composed import TINY, build, compose_config
from tests.helpers.distributed import run_distributed
from tests.helpers.gpus import ON_GPU, needs_gpus
from tests.nn.training.test_train_step import parts, ragged, whole

__all__ = ["ragged"]

RANKS, STEPS, SAVED_AT = 4, 3, 2
ROWS_AND_COLUMNS = "{cat_0: table_wise, cat_1: data_parallel, cat_2: row_wise, cat_3: column_wise, cat_4: row_wise}"
KINDS = {
    "sgd": [f"sharding.tables={ROWS_AND_COLUMNS}", "optimizer.lr=0.5"],
    # Vectors of row-wise tables are added over ranks. The last batch has 5 rows, and the last rank none of them.
    "adagrad": [
        f"sharding.tables={ROWS_AND_COLUMNS}",
        "sharding.exchange=vectors",
        "data.synthetic.train_rows=133",
        "data.synthetic.hotness=[3,1,2,5,1]",
    ],
    "adam": ["sharding.exchange=rows", "sharding.tables={cat_4: row_wise}", "optimizer.lr=0.005"],
    "bf16": ["model.embedding_dtype=bf16", "optimizer.name=adagrad"],
}
HOST = "{cat_0: {type: row_wise, tier: host, cache: 0.3}, cat_3: {type: table_wise, tier: disk, cache: 0.2}}"


def options(kind: str) -> list[str]:
    name = kind if kind in ("sgd", "adagrad", "adam") else "adagrad"
    return [*TINY, f"optimizer.name={name}", "optimizer.eps=0.01", *KINDS[kind]]


def train(cases: list[tuple], directory: Path, device: str = "cpu") -> list[tuple]:
    """Return losses and this rank's weights of each case: options, what it restores, and whether it saves."""
    results = []
    with process_group(ranks_from_environment(device)):
        for number, (case, restored, saves) in enumerate(cases):
            built = build(compose_config(*case))
            first = 0
            if restored is not None:
                path = directory / str(restored) / f"step_{SAVED_AT}"
                checkpoint.restore(path, built.step, with_optimizer=True)
                first = SAVED_AT
            losses = []
            if saves:
                losses = built.train(0, SAVED_AT)
                save(directory / str(number), built.step, SAVED_AT, built.source.spec, built.ranks)
                first = SAVED_AT
            losses += built.train(first, STEPS - first)
            results.append((losses, parts(built)))
            built.step.close()
    return results


def all_kinds(root: Path, ragged: Path) -> dict[str, list[str]]:
    """Return the options of `KINDS`, and of tables in other memories, ragged features and sequences."""
    data = sequence_models.write_sequences(root / "sequences")
    of_kinds = {kind: options(kind) for kind in KINDS}
    of_kinds["host and disk"] = [
        *TINY,
        f"sharding.tables={HOST}",
        "data.synthetic.cardinalities=[4000,40,7,1500,600]",
        "eval.batch_size=64",
        f"sharding.disk_path={root}",
    ]
    of_kinds["merged in host and disk"] = [*of_kinds["host and disk"], "sharding.exchange=rows"]
    of_kinds["host and disk"].append("sharding.exchange=vectors")
    of_kinds["ragged"] = [
        *TINY,
        f"data.path={ragged}",
        "sharding.tables={genres: table_wise, pair: row_wise, item: table_wise}",
        "sharding.exchange=vectors",
    ]
    # Less, and a gradient near zero moves a weight by the rounding of its sign.
    of_kinds["sequences"] = [*sequence_models.overrides("din", data), "optimizer.eps=0.01"]
    return of_kinds


@pytest.fixture(scope="module")
def trained(tmp_path_factory, ragged):
    """Return (losses, weights of each rank) by kind and group size on four ranks, and (losses, weights) of one process."""
    root = tmp_path_factory.mktemp("groups")
    of_kinds = all_kinds(root, ragged)
    groups = [(kind, size) for kind in of_kinds for size in (None, 2)]
    groups += [("sgd", 1), ("adam", 1), ("sequences", 1)]
    # The tail of an epoch ends it, and rounding has no state.
    saved = {("sgd", 2), ("adam", None), ("adam", 2), ("adam", 1)}
    cases = {
        (kind, size): ([*of_kinds[kind], *grouped(size)], None, (kind, size) in saved)
        for kind, size in groups
    }
    numbers = {case: number for number, case in enumerate(cases)}
    for kind, origin, size in MOVES:
        moved = ([*of_kinds[kind], *grouped(size)], numbers[kind, origin], False)
        cases[kind, origin, size] = moved
    one = [(of_kinds[kind], None, False) for kind in of_kinds]
    on_ranks = run_distributed(train, RANKS, list(cases.values()), root)
    alone = dict(zip(of_kinds, train(one, root), strict=True))
    results = {
        case: (rank_results[0][0], [weights for _, weights in rank_results])
        for case, rank_results in zip(cases, zip(*on_ranks, strict=True), strict=True)
    }
    return results, alone, {case: root / str(number) for case, number in numbers.items()}


MOVES = [("adam", 2, 2), ("adam", 2, None), ("adam", None, 2), ("adam", 1, 2), ("sgd", 2, 1)]


def grouped(size: int | None) -> list[str]:
    return [] if size is None else [f"sharding.group_size={size}"]


def of_groups(weights: list[dict], size: int) -> list[dict[str, torch.Tensor]]:
    return [whole(weights[first : first + size]) for first in range(0, len(weights), size)]


def assert_same_bits(weights: dict, others: dict) -> None:
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


OF_DATA = ("host and disk", "merged in host and disk", "ragged", "sequences")
CASES = [*((kind, 2) for kind in (*KINDS, *OF_DATA))]
CASES += [("sgd", 1), ("adam", 1), ("sequences", 1)]


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_groups_train_as_one_group_and_as_one_process(trained, kind, size):
    results, alone, _ = trained
    losses, weights = results[kind, size]
    first, *others = of_groups(weights, size)
    for other in others:
        assert_same_bits(first, other)
    for wanted_losses, wanted in (
        (results[kind, None][0], whole(results[kind, None][1])),
        (alone[kind][0], whole([alone[kind][1]])),
    ):
        assert losses == pytest.approx(wanted_losses, rel=1e-6)
        assert first.keys() == wanted.keys()
        for name, weight in wanted.items():
            torch.testing.assert_close(first[name], weight, rtol=0, atol=2e-5, msg=name)


@pytest.mark.parametrize(("kind", "size"), [("bf16", 2), ("adam", 1), ("sequences", 1)])
def test_an_owner_sums_in_the_order_of_one_group(trained, kind, size):
    """So the bits are those of one group, where no vector is added over ranks and no owner sums the rows of its group first."""
    results, _, _ = trained
    assert_same_bits(whole(results[kind, None][1]), whole(results[kind, size][1][:size]))


def train_tight(case: list[str]) -> tuple:
    """Return losses and weights where a group asks for more distinct rows than every usual batch has capacity for."""
    own, calls = request_capacity._with_reserve, []

    def for_merged_one(rows):
        calls.append(rows)
        is_merged = len(calls) % 2 == 0
        return tuple((1,) * len(of) for of in rows) if is_merged else own(rows)

    with (
        process_group(ranks_from_environment("cpu")),
        patch.object(request_capacity, "_with_reserve", for_merged_one),
    ):
        built = build(compose_config(*case))
        losses = built.train(0, STEPS)
        weights = parts(built)
        built.step.close()
    return losses, weights


@pytest.mark.parametrize("kind", ["adam"])
def test_a_batch_with_more_distinct_rows_than_fit_trains_alike(trained, kind):
    results, _, _ = trained
    losses, weights = results[kind, 2]
    on_ranks = run_distributed(train_tight, RANKS, [*options(kind), *grouped(2)])
    assert losses == on_ranks[0][0]
    assert_same_bits(whole(weights), whole([of_rank for _, of_rank in on_ranks]))


@pytest.mark.parametrize(("kind", "origin", "size"), MOVES)
def test_a_checkpoint_resumes_with_other_groups(trained, kind, origin, size):
    results, _, _ = trained
    (losses, weights), (wanted_losses, wanted) = results[kind, origin, size], results[kind, origin]
    assert losses == pytest.approx(wanted_losses[SAVED_AT:], rel=0 if size == origin else 1e-6)
    moved, stayed = whole(weights), whole(wanted)
    if size == origin:
        assert_same_bits(moved, stayed)
    for name, weight in stayed.items():
        torch.testing.assert_close(moved[name], weight, rtol=0, atol=2e-5, msg=name)


def test_groups_write_each_row_once_and_share_the_work(trained):
    _, _, directories = trained
    grouped_files, flat = (
        {
            path.name: path.stat().st_size
            for path in (directories["adam", size] / f"step_{SAVED_AT}").glob("*.bin")
        }
        for size in (2, None)
    )
    assert len(grouped_files) == RANKS
    assert min(grouped_files.values()) > sum(flat.values()) / RANKS / 2
    tensors = read_index(directories["adam", 2] / f"step_{SAVED_AT}").tensors
    assert len(tensors["tables.cat_4.weight"].chunks) == 2
    assert len(tensors["tables.cat_0.momentum1"].chunks) == 1


def test_groups_of_unequal_size_are_refused():
    hardware_of(compose_config(*TINY, "sharding.group_size=4"), "cpu", 16, 8)
    hardware_of(compose_config(*TINY), "cpu", 7, 7)
    for size, world, local in ((3, 4, 4), (6, 12, 4), (8, 4, 4)):
        with pytest.raises(ValueError, match=rf"^sharding.group_size={size} does not divide"):
            hardware_of(compose_config(*TINY, f"sharding.group_size={size}"), "cpu", world, local)
    ended = run_command(*TINY, "sharding.group_size=2")
    assert ended.exit_code == 2
    assert "want 1, or null for one group" in ended.err


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("kind", ["sgd", "adam", "bf16"])
@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=needs_gpus(2 * size)) for size in (1, 2)]
)
def test_gpus_as_two_groups_train_as_one_group(tmp_path, kind, captures, size):
    case = [*options(kind), *ON_GPU, "train.tf32=false", f"train.capture={captures}"]
    cases = [([*case, *grouped(each)], None, False) for each in (None, size)]
    flat, of_ranks = zip(*run_distributed(train, 2 * size, cases, tmp_path, "cuda"), strict=True)
    assert of_ranks[0][0] == pytest.approx(flat[0][0], rel=2e-5)
    first, second = of_groups([weights for _, weights in of_ranks], size)
    assert_same_bits(first, second)
    for name, weight in whole([weights for _, weights in flat]).items():
        torch.testing.assert_close(first[name], weight, rtol=0, atol=2e-4, msg=name)
