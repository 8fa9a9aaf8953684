"""Loading and freezing one component, and restoring into larger tables."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.schema import Component
from nn.checkpoint import state as checkpoint
from nn.layers.initialization import fill_uniform_
from tests.helpers.checkpoints import save as save_checkpoint
from tests.helpers.command import run_command
from tests.helpers.composed import (
    DCNV2,
    TINY,
    Built,
    build,
    compose_config,
    ranks_of_cpu,
    table_map,
)
from tests.helpers.distributed import run_distributed
from tests.nn.checkpoint.test_reshard import contents
from tests.nn.checkpoint.test_state import LAYOUTS, case, same, save, state_of

RULES = ["sgd", "adagrad", "rowwise_adagrad", "adam"]
GROWN = [500, 47, 7, 301, 1000]


def weights_of(built: Built) -> dict[Component, dict[str, Tensor]]:
    """Return copies of all weights of a run on one rank."""
    state = state_of(built)
    names = dict(built.step.dense.named_parameters())
    return {
        Component.dense: {name: state[name] for name in names},
        Component.tables: {
            name: state[name]
            for name in state
            if name.startswith("cat_") and name.endswith(".weight")
        },
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Return a checkpoint of each optimizer after three steps."""
    directory = tmp_path_factory.mktemp("saved")
    paths = {}
    with ranks_of_cpu():
        for rule in RULES:
            built = build(compose_config(*case(rule)))
            built.train(0, 3)
            paths[rule] = save(directory / rule, built, 3)
    return paths


@pytest.mark.parametrize("component", Component)
def test_one_component_is_loaded_and_the_other_keeps_the_seeds_weights(saved, component):
    with ranks_of_cpu():
        fresh, complete = (build(compose_config(*case("adagrad"))) for _ in range(2))
        checkpoint.restore(saved["adagrad"], complete.step, with_optimizer=False)
        built = build(compose_config(*case("adagrad")))
        checkpoint.restore(
            saved["adagrad"], built.step, with_optimizer=False, components=[component]
        )
        for other in Component:
            expected = weights_of(complete if other is component else fresh)[other]
            assert same(weights_of(built)[other], expected), other
        assert not same(weights_of(fresh)[component], weights_of(complete)[component])


@pytest.mark.parametrize("component", Component)
def test_the_other_component_may_be_of_another_model(saved, component):
    other = {
        Component.tables: [
            *DCNV2,
            "model.top_mlp=[8,1]",
            "optimizer.embedding_name=adam",
        ],
        Component.dense: ["sharding.tables={cat_0:table_wise}", "optimizer.embedding_name=adam"],
    }
    with ranks_of_cpu():
        built = build(compose_config(*case("adagrad"), *other[component]))
        checkpoint.restore(
            saved["adagrad"], built.step, with_optimizer=False, components=[component]
        )
        built.train(0, 1)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ("[dense,tables,optimizer]", "step_3, 3 steps, dense, tables, optimizer"),
        ("[dense,tables]", "step_3, dense, tables; training starts at step 0"),
        ("[tables]", "step_3, tables; training starts at step 0"),
    ],
)
def test_without_the_optimizer_a_new_run_begins(saved, tmp_path, parts, message):
    ended = run_command(
        *case("adam"),
        f"checkpoint.restore={saved['adam']}",
        f"checkpoint.parts={parts}",
        "checkpoint.save=false",
        "train.max_steps=5",
        f"run_dir={tmp_path / 'run'}",
    )
    assert ended.exit_code == 0, ended.err
    assert message in " ".join(ended.out.split())
    assert "step 5/5" in ended.out


@pytest.mark.parametrize("parts", ["[]", "[optimizer]", "[tables,optimizer]"])
def test_invalid_parts_are_refused(parts):
    ended = run_command(f"checkpoint.parts={parts}", "checkpoint.restore=x")
    assert ended.exit_code == 2
    assert "checkpoint.parts" in ended.err


def test_freezing_both_components_is_refused():
    ended = run_command("train.freeze=[dense,tables]")
    assert ended.exit_code == 2
    assert "nothing would be trained" in ended.err


def frozen_runs(cases: list[list[str]]) -> list[tuple[dict, dict]]:
    """Return per case whether each component changed in two steps, and the names of the tables' state."""
    results = []
    with ranks_of_cpu():
        for overrides in cases:
            built = build(compose_config(*overrides))
            before = [value.clone() for value in local_weights(built)]
            built.train(0, 2)
            after = local_weights(built)
            same_parts = [torch.equal(*pair) for pair in zip(before, after, strict=True)]
            num_dense = len(list(built.step.dense.parameters()))
            changed = {
                Component.dense: not all(same_parts[:num_dense]),
                Component.tables: not all(same_parts[num_dense:]),
            }
            results.append((changed, list(built.step.tables.optimizer_state())))
    return results


def local_weights(built: Built) -> list[Tensor]:
    dense = [parameter.detach() for parameter in built.step.dense.parameters()]
    return dense + [shard.weight.detach() for shard in built.step.tables.shards()]


# Every two of optimizer, sharding and component occur together.
FREEZES = [
    [*case(("adagrad", "adam")[index in (0, 3, 4, 7)], layout), f"train.freeze=[{component.name}]"]
    for index, (layout, component) in enumerate(product(LAYOUTS, Component))
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_frozen_component_does_not_change_and_the_other_learns(world_size):
    # The second batch of 8 rows has padding and takes the dynamic step, the first of 64 rows the static one.
    cases = [[*overrides, "data.synthetic.train_rows=72"] for overrides in FREEZES]
    results = run_distributed(frozen_runs, world_size, cases)
    for overrides, *of_ranks in zip(cases, *results, strict=True):
        frozen = Component.dense if "[dense]" in overrides[-2] else Component.tables
        changed = [changes for changes, _ in of_ranks]
        trained = next(component for component in Component if component is not frozen)
        assert not any(changes[frozen] for changes in changed), overrides
        assert any(changes[trained] for changes in changed), overrides
        if frozen is Component.tables:
            assert not any(state for _, state in of_ranks), (
                "a frozen table needs no optimizer state"
            )


# The dense optimizer of rowwise_adagrad is Adagrad.
@pytest.mark.parametrize(
    ("component", "rule"),
    [pair for pair in product(Component, RULES) if pair != (Component.dense, "rowwise_adagrad")],
)
def test_a_frozen_component_needs_no_optimizer_state(saved, component, rule, tmp_path):
    """Its state is not loaded, and the frozen run resumes from its own checkpoint, which has none."""
    frozen = [*case(rule), f"train.freeze=[{component.name}]"]
    with ranks_of_cpu():
        built = build(compose_config(*frozen))
        checkpoint.restore(saved[rule], built.step, with_optimizer=True)
        kept = weights_of(built)[component]
        built.train(3, 2)
        path = save(tmp_path, built, 5)
        losses = built.train(5, 2)
        again = build(compose_config(*frozen))
        checkpoint.restore(path, again.step, with_optimizer=True)
        assert again.train(5, 2) == losses
        assert same(weights_of(again)[component], kept)
        if rule == "adam":
            thawed = build(compose_config(*case(rule)))
            with pytest.raises(ValueError, match=r"no .*optimizer|no tables.*momentum") as caught:
                checkpoint.restore(path, thawed.step, with_optimizer=True)
            assert str(caught.value).endswith(
                f"; it has no optimizer state of {component.name}, which may have been frozen (train.freeze) or "
                "trained with sgd; to continue training from its weights, set checkpoint.parts=[dense,tables]"
            )


def grown_states(path: Path, overrides: list[str]) -> tuple[Path, list[float]]:
    """Restore into larger tables, save again, and return the new checkpoint and the losses after it."""
    with ranks_of_cpu():
        built = build(compose_config(*overrides))
        checkpoint.restore(path, built.step, with_optimizer=True, grow=True)
        target = path.parent / f"grown_{built.ranks.world_size}"
        grown = save_checkpoint(target, built.step, 3, built.source.spec, built.ranks)
        return grown, built.train(3, 2)


def grown_case(rule: str, layout: str) -> list[str]:
    return [*case(rule, layout), f"data.synthetic.cardinalities={GROWN}"]


# Each sharding with states per element and with one per row.
@pytest.mark.parametrize(
    ("world_size", "layout", "rule"),
    [
        (1, "table_wise", "adam"),
        (1, "table_wise", "rowwise_adagrad"),
        (2, "row_wise", "adam"),
        (2, "row_wise", "rowwise_adagrad"),
        (2, "data_parallel", "adagrad"),
        (2, "data_parallel", "rowwise_adagrad"),
        (2, "data_parallel", "sgd"),
    ],
)
def test_additional_rows_of_a_table_have_the_seeds_weights(saved, rule, world_size, layout):
    path, _ = run_distributed(grown_states, world_size, saved[rule], grown_case(rule, layout))[0]
    before, after = contents(saved[rule].parent, 3), contents(path.parent, 3)
    assert before.keys() == after.keys()
    for index, rows in enumerate(GROWN):
        name = f"tables.cat_{index}.weight"
        old = len(before[name])
        seeds = torch.empty(rows, 8)
        fill_uniform_(seeds, seed=1, table=f"cat_{index}", bound=rows**-0.5)
        assert (after[name][:old] == before[name]).all()
        assert (after[name][old:] == seeds[old:].numpy()).all()
        for state in ("momentum1", "momentum2"):
            name = f"tables.cat_{index}.{state}"
            if name in before:
                assert (after[name][:old] == before[name]).all()
                assert not after[name][old:].any()


@pytest.mark.parametrize(
    ("cardinalities", "grow", "text"),
    [
        (
            GROWN,
            False,
            "cat_1 40 instead of 47, cat_3 300 instead of 301.* set checkpoint.grow=true",
        ),
        (
            [499, 47, 7, 301, 1000],
            True,
            "cat_0 500 instead of 499.* tables can only grow, not shrink",
        ),
    ],
)
def test_other_numbers_of_rows_are_refused(saved, cardinalities, grow, text):
    with ranks_of_cpu():
        built = build(compose_config(*TINY, f"data.synthetic.cardinalities={cardinalities}"))
    with pytest.raises(ValueError, match=text):
        checkpoint.check(saved["sgd"], built.source.spec, table_map(built.config), grow=grow)


def test_grown_tables_pass_the_check_with_grow(saved):
    with ranks_of_cpu():
        built = build(compose_config(*TINY, f"data.synthetic.cardinalities={GROWN}"))
    assert (
        checkpoint.check(saved["sgd"], built.source.spec, table_map(built.config), grow=True)[
            "num_steps"
        ]
        == 3
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            ["model.embedding_dim=12", "model.bottom_mlp=[16,12]"],
            r"weight \(500, 8\) instead of \(500, 12\)",
        ),
        (["data.synthetic.cardinalities=[499,40,7,300,1000]"], r"\(500, 8\) instead of \(499, 8\)"),
    ],
)
def test_growing_allows_no_other_shape(saved, changes, text):
    with ranks_of_cpu():
        built = build(compose_config(*case("adagrad"), *changes))
        with pytest.raises(ValueError, match=text):
            checkpoint.restore(
                saved["adagrad"],
                built.step,
                with_optimizer=True,
                components=[Component.tables],
                grow=True,
            )
