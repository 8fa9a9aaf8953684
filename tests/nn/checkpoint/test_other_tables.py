"""Single tables from checkpoints of their own: their bits and state, the rest of the main checkpoint, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from configs.schema import CheckpointConfig
from dataloading.lineage import OF_FIT, TRANSFORM
from nn.checkpoint import other_tables
from nn.checkpoint import state as checkpoint
from nn.distributed.sharded_tensor import pieces_of
from nn.export.tables import Selection, export_tables
from nn.models.registry import declared_tables
from tests.helpers.checkpoints import save as save_checkpoint
from tests.helpers.command import Ended, run_command
from tests.helpers.composed import build, compose_config, open_source, ranks_of_cpu
from tests.helpers.distributed import run_distributed
from tests.nn.checkpoint.test_reshard import contents
from tests.nn.checkpoint.test_state import case, save

OPTIONS = case("adam", "row_wise")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints of runs with other seeds, one of them with another size of cat_1, and an export without state."""
    root = tmp_path_factory.mktemp("saved")
    paths = {}
    with ranks_of_cpu():
        for seed, name in enumerate(("main", "other", "third", "wide")):
            more = ["data.synthetic.cardinalities=[500,41,7,300,1000]"] if name == "wide" else []
            built = build(compose_config(*OPTIONS, f"seed={seed}", *more))
            built.train(0, 3)
            paths[name] = save(root / name, built, 3)
    paths["export"] = root / "export"
    export_tables(paths["other"], paths["export"], Selection(tables=["cat_1"], optimizer=False))
    return paths


def restored_and_trained(
    main: Path, others: dict[str, str], by_hand: dict[str, Path], layout: str
) -> tuple[Path, list[float]]:
    """Restore, with tables of other checkpoints by the option or by hand; save, and return that and the next losses."""
    with ranks_of_cpu() as ranks:
        built = build(compose_config(*case("adam", layout)))
        checkpoint.restore(main, built.step, with_optimizer=True, others=others)
        state = built.step.state_dict()
        for table, path in by_hand.items():
            stored = contents(path.parent, 3)
            for name in [name for name in state if name.startswith(f"tables.{table}.")]:
                for offsets, piece in pieces_of(state[name]):
                    at = tuple(slice(o, o + n) for o, n in zip(offsets, piece.shape, strict=True))
                    piece.copy_(piece.new_tensor(stored[name][at]))
        built.step.load_state_dict(state)
        target = main.parent / f"restored_{layout}_{bool(others)}"
        path = save_checkpoint(target, built.step, 3, built.source.spec, ranks)
        return path, built.train(3, 2)


@pytest.mark.parametrize("layout", ["row_wise", "column_wise", "data_parallel"])
def test_tables_on_two_ranks_come_from_their_own_checkpoints(saved, layout):
    others = {"cat_1": saved["other"], "cat_3": saved["third"]}
    given = {table: str(path) for table, path in others.items()}
    (path, losses), _ = run_distributed(restored_and_trained, 2, saved["main"], given, {}, layout)
    found = contents(path.parent, 3)
    sources = {name: contents(saved[name].parent, 3) for name in ("main", "other", "third")}
    assert found.keys() == sources["main"].keys()
    for name, values in found.items():
        table = name.split(".")[1]
        source = {"cat_1": "other", "cat_3": "third"}.get(table, "main")
        assert values.tobytes() == sources[source][name].tobytes(), name
    assert (
        found["tables.cat_1.weight"].tobytes() != sources["main"]["tables.cat_1.weight"].tobytes()
    )
    (_, by_hand), _ = run_distributed(restored_and_trained, 2, saved["main"], {}, others, layout)
    assert losses == by_hand


def command(saved: dict[str, Path], run_dir: Path, *words: str) -> Ended:
    """Train two steps with this."""
    options = [*OPTIONS, "train.max_steps=5", "checkpoint.save=false", f"run_dir={run_dir}"]
    return run_command(*options, f"checkpoint.restore={saved['main']}", *words)


def test_a_run_says_which_table_it_takes_from_where(saved, tmp_path):
    where = f"checkpoint.restore_tables={{cat_1: {saved['export']}}}"
    ended = command(saved, tmp_path / "run", where, "checkpoint.parts=[dense,tables]")
    assert ended.exit_code == 0, ended.err
    told = "".join(ended.out.split())  # a path may be broken over lines
    assert f"step_3,dense,tables;cat_1of{saved['export']};trainingstarts" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{cat_1: WIDE}", "cat_1=WIDE has tables.cat_1.weight (41, 8) instead of (40, 8); name"),
        ("{cat_9: OTHER}", "cat_9=OTHER: there is no such table; want one of cat_0, cat_1, cat_2,"),
        ("{cat_0: EXPORT}", "cat_0=EXPORT has no tables.cat_0.weight; name a checkpoint with this table"),
        ("{cat_1: /nowhere}", "cat_1=/nowhere: there is no run.json"),
        ("{cat_1: EXPORT}", "={'cat_1': 'EXPORT'} holds another model or optimizer: no tables.cat_1."),
        ("[cat_1]", "want checkpoints by table, such as {cat_0: PATH}"),
        ("{cat_1: OTHER} checkpoint.parts=[dense]", "beside checkpoint.restore and with tables"),
        ("{cat_1: OTHER} checkpoint.restore=null", "beside checkpoint.restore and with tables"),
    ],
)  # fmt: skip
def test_what_is_not_the_table_of_the_run_is_refused_in_one_line(saved, tmp_path, words, message):
    for name, path in saved.items():
        words, message = (text.replace(name.upper(), str(path)) for text in (words, message))
    more = words.split(" checkpoint")
    ended = command(
        saved,
        tmp_path / "run",
        f"checkpoint.restore_tables={more[0]}",
        *[f"checkpoint{word}" for word in more[1:]],
    )
    assert ended.exit_code == 2
    assert message in ended.err
    assert ended.err.strip().count("\n") == 0


def test_another_vocabulary_of_the_table_is_refused_and_of_another_one_not(saved, monkeypatch):
    learnt = {"vocabularies": {"cat_1": "a", "cat_2": "a"}}
    monkeypatch.setattr(other_tables, "read_facts", lambda _: learnt)
    config = compose_config(*OPTIONS)
    spec = open_source(config).spec
    tables = declared_tables(config.model, spec)

    def check(of_fit: dict[str, str], **options: bool) -> None:
        of_table = {"cat_1": str(saved["other"])}
        parts = CheckpointConfig(restore="x", restore_tables=of_table, **options)
        of_data = replace(spec, metadata={"mode": TRANSFORM, OF_FIT: of_fit})
        other_tables.check_other_tables(parts, tables, of_data, is_resumed=True)

    check({"cat_1": "a", "cat_2": "b"})
    check({"cat_1": "b"}, allow_changes=True)
    with pytest.raises(ValueError, match=r"^checkpoint.restore_tables.cat_1=\S+ was trained with"):
        check({"cat_1": "b"})
