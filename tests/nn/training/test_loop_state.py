"""The state of the training loop: a checkpoint holds it whole."""

import dataclasses
import json
import math

from nn.checkpoint.run_facts import LOOP, check_facts
from nn.models.metric import AUC, METRICS
from nn.observability.run_directory import FIRST_AUC
from nn.training.limits import Day
from nn.training.loop_state import LoopState, Origin

FACTS = {"num_steps": 12, "feature_spec": "", "index_crc32": 0, "files": {}}
SCORED = {"split": "test", "rows": 256, "group": None}


def trained() -> LoopState:
    state = LoopState(num_steps=12, first_step=4, loss_sum=1.5, loss_steps=2, last_record=10)
    state.compare_by(AUC, SCORED)
    state.take_evaluation({"step": 12, "test_auc": 0.7, "test_log_loss": math.nan}, AUC)
    state.other_days = {"next_auc": 0.6}
    state.first_auc = {"untrained_test_auc": 0.5, "restored_test_auc": None}
    state.key_counts = {"new_keys": 3}
    state.row_capacity = {"shards": [[["item"], [40]]], "rows": {"64": [[21]]}}
    state.parts = [{"name": "a", "rows": 3, "identity": None, "offsets": [[0, 5]]}]
    return state


def test_every_field_is_saved_and_checked():
    fields = {field.name for field in dataclasses.fields(LoopState)} - {
        "num_steps",
        "day",
        "origin",
    }
    renamed = {"best_value": ["best_auc"], "ends_day": ["ends_stage"], "first_auc": FIRST_AUC}
    names = [name for field in fields for name in renamed.get(field, [field])]
    assert sorted(names) == sorted(LOOP)
    assert sorted(trained().facts(ends_day=False)) == sorted(LOOP)
    check_facts(json.loads(json.dumps(FACTS | {"trainer": trained().facts(ends_day=False)})))


def test_a_state_is_the_same_after_saving_and_loading():
    facts = json.loads(json.dumps(trained().facts(ends_day=False)))
    loaded = LoopState.of_facts(facts, 12, Day())
    assert loaded.origin is Origin.RESUMED
    assert loaded.compare_by(AUC, SCORED) is None
    assert (loaded.num_steps, loaded.best_step, loaded.best_value) == (12, 12, 0.7)
    assert loaded.facts(ends_day=False) == facts
    assert list(loaded.facts(ends_day=False)) == list(facts)


def test_the_choice_of_the_best_starts_over_with_another_metric_or_other_rows():
    for metric, scored in ((METRICS[1], SCORED), (AUC, SCORED | {"rows": 128})):
        state = trained()
        note = state.compare_by(metric, scored)
        assert note is not None
        assert f"by {metric.key}" in note
        assert (state.best_step, state.evals_since_best) == (None, 0)
        assert math.isnan(state.best_value)
        assert (state.test == {}) == (scored != SCORED)


def test_a_new_day_starts_without_evaluations_and_sums():
    facts = trained().facts(ends_day=True)
    day = LoopState.of_facts(facts, 12, Day(number=1, is_new=True))
    assert (day.test, day.best_step, day.loss_steps, day.other_days) == ({}, None, 0, {})
    assert day.first_auc == dict.fromkeys(FIRST_AUC)
    assert (day.first_step, day.last_record) == (4, 10)
