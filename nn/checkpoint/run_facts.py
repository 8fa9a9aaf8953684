"""Content of run.json: every value that a reader uses is checked once, when it is read.

A checkpoint may come from anybody, and its checksums prove no more than that nobody changed it by accident.
"""

from collections.abc import Callable, Mapping
from typing import Any

from configs.messages import shown
from dataloading.lineage import FORGOTTEN, FORGOTTEN_BEFORE
from nn.checkpoint.tensor_index import check_plain_name

MAX_COUNT = 2**62
DAY_FACTS, ENDS_DAY = "stage", "ends_stage"
"""Names in run.json, of checkpoints since 0.2.0, of the day that a run trains and of whether its steps are all behind it."""

Check = Callable[[Any], bool]


def is_count(value: Any) -> bool:
    """Return whether a value of JSON is a number of steps, bytes or files."""
    return type(value) is int and 0 <= value < MAX_COUNT


def _is_number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < MAX_COUNT)


def _is_state(value: Any) -> bool:
    """Return whether a value is two numbers of nanoseconds, bytes or a checksum."""
    numbers = value if isinstance(value, list) else []
    return list(map(type, numbers)) == [int, int] and max(map(abs, numbers)) < 2**63


def _of(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _mapping_to(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _entries(checks: Mapping[str, Check], *optional: str) -> Check:
    """Return a check for a mapping with these entries, of which it may lack the `optional` ones."""
    return lambda value: (
        isinstance(value, dict)
        and checks.keys() - set(optional) <= value.keys() <= checks.keys()
        and all(checks[name](entry) for name, entry in value.items())
    )


def _is_by_batch_size(value: Any) -> bool:
    """Return whether a value has numbers of rows for batch sizes, of every group of tables and owner."""
    return _mapping_to(_list_of(_list_of(is_count)))(value) and all(map(str.isdecimal, value))


_CHECKS: dict[str, tuple[Check, str]] = {
    "format_version": (is_count, "a number"),
    "num_steps": (is_count, "a number of steps"),
    "feature_spec": (_of(str), "a fingerprint"),
    "vocabularies": (_mapping_to(_of(str)), "the checksum of each vocabulary"),
    "index_crc32": (lambda value: is_count(value) and value < 2**32, "a checksum"),
    "files": (_mapping_to(is_count), "the bytes of each file"),
    "config": (_of(dict), "the options of a run"),
    "data_files": (_mapping_to(_is_state), "bytes and time of each file"),
    "data_samples": (_mapping_to(_is_state), "bytes and checksum of each file"),
    "data_checksums": (
        _mapping_to(lambda value: isinstance(value, list) and list(map(type, value)) == [int, str]),
        "bytes and checksum that the spec lists of each file",
    ),
    "trainer": (_of(dict), "the state of the training loop"),
    DAY_FACTS: (_of(dict), "the day of the run"),
    FORGOTTEN: (_mapping_to(_list_of(is_count)), "numbers of rows"),
    FORGOTTEN_BEFORE: (_mapping_to(_list_of(is_count)), "numbers of rows"),
}
_DAY: dict[str, tuple[Check, str]] = {
    "number": (is_count, "the number of a day"),
    "first_step": (is_count, "a number of steps"),
    "identity": (_or_none(_of(str)), "the identity of a fit or null"),
    "previous": (_or_none(_of(str)), "a path or null"),
}
_ROW_CAPACITY = {"shards": _of(list), "rows": _is_by_batch_size, "merged": _is_by_batch_size}
_ROW_CAPACITY |= {"part_rows": is_count, "parts": _is_by_batch_size}
_PART = {"name": _of(str), "rows": is_count, "identity": _or_none(_of(str)), "offsets": _of(object)}
LOOP: dict[str, tuple[Check, str]] = {
    "loss_sum": (_is_number, "a number"),
    "loss_steps": (is_count, "a number of steps"),
    "key_counts": (_mapping_to(is_count), "numbers of keys"),
    "row_capacity": (
        _entries(_ROW_CAPACITY, "merged", "part_rows", "parts"),
        "capacities for distinct rows",
    ),
    "parts": (_list_of(_entries(_PART)), "the parts of a stream"),
    "test": (_of(dict), "an evaluation"),
    "untrained_test_auc": (_or_none(_is_number), "a number or null"),
    "restored_test_auc": (_or_none(_is_number), "a number or null"),
    "best_metric": (_of(str), "the name of a metric"),
    "best_rows": (_of(dict), "the rows of an evaluation"),
    "best_auc": (_or_none(_is_number), "a number or null"),
    "best_step": (_or_none(is_count), "a number of steps or null"),
    "evals_since_best": (is_count, "a number of evaluations"),
    "last_record": (_or_none(is_count), "a number of steps or null"),
    "first_step": (is_count, "a number of steps"),
    "other_days": (_mapping_to(_or_none(_is_number)), "metrics of other days"),
    ENDS_DAY: (_of(bool), "true or false"),
}
"""The state of the training loop (`nn.training.loop_state`), in the order in which a checkpoint holds it."""

NOT_OF_ALL = ("key_counts", "row_capacity", "parts")
"""Its entries that only runs with raw keys, requested tables or a stream have."""

_REQUIRED = ("num_steps", "feature_spec", "index_crc32", "files")
_REQUIRED_OF_TRAINER = tuple(name for name in LOOP if name not in NOT_OF_ALL)
_REQUIRED_TO_RESUME = ("config", "data_files", "data_samples", "trainer")


def check_facts(facts: Mapping[str, Any]) -> None:
    """Check types and ranges of the values in run.json; ValueError names one that is missing or wrong."""
    _check("", facts, _CHECKS, _REQUIRED)
    for name in facts["files"]:
        check_plain_name(name)
    if DAY_FACTS in facts:
        _check(f"{DAY_FACTS}.", facts[DAY_FACTS], _DAY, tuple(_DAY))
        unknown = sorted(set(facts[DAY_FACTS]) - set(_DAY))
        if unknown:
            raise ValueError(f"{DAY_FACTS} has {shown(unknown[0])}; want {', '.join(_DAY)}")
    if "trainer" in facts:
        _check("trainer.", facts["trainer"], LOOP, ())
        numbers = facts["trainer"].get("test", {})
        _check("trainer.test.", numbers, dict.fromkeys(numbers, (_or_none(_is_number), "a number")))


def check_resumable(facts: Mapping[str, Any], num_steps: int) -> None:
    """Check that run.json has all that the run of this checkpoint needs to resume; ValueError if not."""
    if facts["num_steps"] != num_steps:
        raise ValueError(f"it is of step {facts['num_steps']}")
    _check("", facts, _CHECKS, _REQUIRED_TO_RESUME)
    _check("trainer.", facts["trainer"], LOOP, _REQUIRED_OF_TRAINER)
    data = facts["config"].get("data")
    if not isinstance(data, dict) or "path" not in data:
        raise ValueError(f"config.data is {shown(data)}; want the options of a run")


def _check(
    prefix: str,
    values: Mapping[str, Any],
    checks: Mapping[str, tuple[Check, str]],
    required: tuple[str, ...] = (),
) -> None:
    for name in required:
        if name not in values:
            raise ValueError(f"it has no {prefix}{name}")
    for name, (is_good, want) in checks.items():
        if name in values and not is_good(values[name]):
            raise ValueError(f"{prefix}{name} is {shown(values[name])}; want {want}")
