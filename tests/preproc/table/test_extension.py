"""`mode=extend`: the vocabularies of several days against a plain Python reference, and what is refused."""

import json
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dataloading.dataset.feature_spec import FeatureSpec
from dataloading.lineage import Lineage
from preproc.transformed_rows import open_transformed_rows
from preproc.vocabulary_file import check_vocabulary
from serving.exporting.raw_values import write_raw_values
from serving.vocabulary import Vocabulary
from tests.helpers.preproc_command import Refused, preproc
from tests.preproc.table.test_pipeline import build
from tests.preproc.test_fitted_state import change_spec

LIMIT, RETIRE_AFTER = 3, 2
SPLITS = ("train", "test")


def table_of(*paths: Path) -> dict:
    return {
        "sources": {"t": {"files": [str(path) for path in paths]}},
        "label": {"name": "y"},
        "numerical": [{"name": "x", "transforms": ["standardise"]}],
        "categorical": ["user", {"name": "tags", "separator": "|", "max_size": 12}],
        "split": {"train": 0.75},
    }


def write_day(path: Path, day: int, rows: int = 48) -> list[tuple[str, list[str]]]:
    """Write rows whose users and tags move on from day to day."""
    draw = random.Random(day)
    made = [
        (
            f"u{draw.randint(3 * day, 3 * day + 12)}" if draw.random() < 0.95 else "",
            [f"t{draw.randint(day, day + 9)}" for _ in range(draw.randint(0, 3))],
        )
        for _ in range(rows)
    ]
    lines = [f"{i % 2},{i + 10 * day},{u},{'|'.join(t)}" for i, (u, t) in enumerate(made)]
    path.write_text("\n".join(["y,x,user,tags", *lines]) + "\n")
    return made


@dataclass
class Reference:
    """A vocabulary by the rules of `preproc/table/extension.py`, one value at a time."""

    max_size: int | None
    ids: dict[str, int] = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)
    last: dict[str, int] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)

    def see(self, values: list[str], day: int) -> None:
        today = Counter(values)
        for value in self.ids:
            if value in self.retired:
                if self.counts[value] + today[value] >= LIMIT:
                    self.retired.discard(value)
            elif not today[value] and day - self.last[value] >= RETIRE_AFTER:
                self.retired.add(value)
                self.counts[value] = 0
        self.counts += today
        self.last |= dict.fromkeys(today, day)
        ready = [v for v, count in self.counts.items() if v not in self.ids and count >= LIMIT]
        for value in sorted(ready, key=lambda v: (-self.counts[v], v.encode())):
            if self.max_size is None or len(self.ids) < self.max_size:
                self.ids[value] = len(self.ids) + 1

    def id(self, value: str) -> int:
        return 0 if value in self.retired else self.ids.get(value, 0)


def ids_in(output: Path, name: str, value_dtype: str = "i1") -> list[int]:
    return np.concatenate(
        [np.fromfile(output / split / f"{name}.bin", value_dtype) for split in SPLITS]
    ).tolist()


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Write five days, and compare each with the reference; return directories, references and the days' files."""
    root = tmp_path_factory.mktemp("days")
    users, tags = Reference(None), Reference(12)
    for day in range(5):
        rows = write_day(root / f"day_{day}.csv", day)
        train = rows[:36]
        users.see([user for user, _ in train if user], day)
        tags.see([tag for _, row in train for tag in row], day)
        table, output = table_of(root / f"day_{day}.csv"), root / f"data_{day}"
        if day:
            options = [f"fitted={root / f'data_{day - 1}'}", f"retire_after={RETIRE_AFTER}"]
            build(output, table, "mode=extend", *options)
        else:
            build(output, table, f"frequency_limit={LIMIT}")
        assert ids_in(output, "user") == [users.id(user) for user, _ in rows]
        assert ids_in(output, "tags") == [tags.id(tag) for _, row in rows for tag in row]
        cardinality = {f.name: f.cardinality for f in FeatureSpec.load(output).categorical}
        assert cardinality == {"user": len(users.ids) + 1, "tags": len(tags.ids) + 1}
        preproc("mode=verify", f"path={output}")
        report = json.loads((output / "report.json").read_text())["columns"]["user"]
        seen = {user for user, _ in train if user}
        numbers = [len(seen), sum(users.id(user) > 0 for user in seen), cardinality["user"]]
        assert [report[name] for name in ("distinct", "kept", "table_rows")] == numbers
        # Other limits cannot choose among the ids of earlier days.
        assert (report["coverage"] is None) == (day > 0)
    # The days are such that every rule acted.
    assert users.retired
    assert len(tags.ids) == 12
    return root, users


def test_old_values_keep_their_ids_and_retired_ones_are_no_others(days):
    root, users = days
    last = pq.read_table(root / "data_4/vocabulary/user.parquet").to_pydict()
    first = pq.read_table(root / "data_0/vocabulary/user.parquet").to_pydict()
    assert last["value"][: len(first["value"])] == first["value"]
    assert last["id"] == list(range(1, len(users.ids) + 1))
    assert {
        v for v, gone in zip(last["value"], last["retired"], strict=True) if gone
    } == users.retired
    assert last["day"] == sorted(last["day"])


def test_each_day_names_the_fit_before_it(days):
    root, _ = days
    lineages = [Lineage.of(FeatureSpec.load(root / f"data_{day}").metadata) for day in range(5)]
    assert [lineage.day for lineage in lineages] == list(range(5))
    assert [one.parent for one in lineages[1:]] == [one.identity for one in lineages[:-1]]
    assert len({lineage.identity for lineage in lineages}) == 5
    # Metadata may hold anything, also keys of these names.
    assert Lineage.of({"day": "Monday", "parent": 3, "files": []}) == Lineage()
    # Statistics stay as they were fitted, unless they are fitted again.
    statistics = [
        json.loads((root / f"data_{d}/preproc.json").read_text())["statistics"] for d in (0, 4)
    ]
    assert statistics[0] == statistics[1]


def test_files_of_a_day_may_be_split_in_any_way(days, tmp_path):
    root, _ = days
    head, *lines = (root / "day_1.csv").read_text().splitlines()
    for number, some in enumerate((lines[:5], lines[5:])):
        (tmp_path / f"part_{number}.csv").write_text("\n".join([head, *some]) + "\n")
    table = table_of(tmp_path / "part_0.csv", tmp_path / "part_1.csv")
    extend = ["mode=extend", f"fitted={root / 'data_0'}", f"retire_after={RETIRE_AFTER}"]
    build(tmp_path / "out", table, *extend)
    for name in ("vocabulary/user.parquet", "rare/user.parquet", "train/user.bin", "test/tags.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (root / "data_1" / name).read_bytes()
    build(tmp_path / "refit", table, *extend, "refit=true")
    statistics = json.loads((tmp_path / "refit/preproc.json").read_text())["statistics"]["x"][0]
    assert statistics[0] == pytest.approx(np.mean(range(10, 46)))


def test_retired_values_have_id_0_everywhere(days, tmp_path):
    root, users = days
    fitted = root / "data_4"
    gone, live = next(iter(users.retired)), next(v for v in users.ids if v not in users.retired)
    (tmp_path / "new.csv").write_text(f"x,user,tags\n1,{gone},\n2,{live},\n")
    with open_transformed_rows(fitted, [tmp_path / "new.csv"]) as rows:
        (batch,) = rows
    assert batch.features.column("user").to_pylist() == [0, users.ids[live]]
    build(
        tmp_path / "transformed",
        table_of(tmp_path / "new.csv"),
        "mode=transform",
        f"fitted={fitted}",
    )
    assert np.fromfile(tmp_path / "transformed/test/user.bin", "i1").tolist() == [
        0,
        users.ids[live],
    ]
    raw_values = write_raw_values(tmp_path, str(fitted), FeatureSpec.load(fitted), {})
    (feature,) = (each for each in raw_values["categorical"] if each["name"] == "user")
    file, size = feature["vocabulary"]
    assert Vocabulary(tmp_path / file, size).ids([gone, live]).tolist() == [0, users.ids[live]]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["frequency_limit=2"], "was fitted with 3, which counts over all days; leave it out"),
        (["table.categorical=[user]"], "fitted on other features or transforms"),
        (["retire_after=0"], "retire_after must be positive or null, got 0"),
        (["rare_counts=true"], "rare_counts=true is of mode=fit"),
    ],
)
def test_bad_options_are_one_line(days, tmp_path, options, wanted):
    root, _ = days
    with pytest.raises(Refused, match=wanted) as refused:
        build(
            tmp_path / "out",
            table_of(root / "day_1.csv"),
            *["mode=extend", f"fitted={root / 'data_0'}", *options],
        )
    assert "\n" not in refused.value.message
    assert refused.value.exit_code == 2


def test_a_day_without_a_column_and_a_fit_without_counts_are_refused(days, tmp_path):
    root, _ = days
    (tmp_path / "day.csv").write_text("y,x,user\n0,1,a\n1,2,b\n")
    extend = ["mode=extend", f"fitted={root / 'data_0'}"]
    with pytest.raises(Refused, match="tags"):
        build(tmp_path / "out", table_of(tmp_path / "day.csv"), *extend)
    limit = [f"frequency_limit={LIMIT}", "rare_counts=false"]
    build(tmp_path / "fit", table_of(root / "day_0.csv"), *limit)
    with pytest.raises(Refused, match="fit it again with rare_counts=true"):
        build(
            tmp_path / "out",
            table_of(root / "day_1.csv"),
            *["mode=extend", f"fitted={tmp_path / 'fit'}"],
        )


def test_a_dataset_that_was_transformed_is_no_fit_to_extend(days, tmp_path):
    root, _ = days
    fitted = f"fitted={root / 'data_0'}"
    build(tmp_path / "same", table_of(root / "day_1.csv"), "mode=transform", fitted)
    extend = ["mode=extend", f"fitted={tmp_path / 'same'}"]
    with pytest.raises(Refused, match="was made by mode=transform, which fits nothing"):
        build(tmp_path / "out", table_of(root / "day_1.csv"), *extend)
    options = ["mode=extend", fitted, "vocabulary=all"]
    with pytest.raises(Refused, match=r"vocabulary=all, but .* was fitted on the training rows"):
        build(tmp_path / "out", table_of(root / "day_1.csv"), *options)
    shutil.copytree(root / "data_0", tmp_path / "other")
    change_spec(tmp_path / "other", lambda spec: spec["metadata"].update(vocabulary_rows="some"))
    with pytest.raises(Refused, match=r"no day can follow: .* vocabulary_rows 'some'; fit again"):
        build(
            tmp_path / "out",
            table_of(root / "day_1.csv"),
            *["mode=extend", f"fitted={tmp_path / 'other'}"],
        )


def test_exchanged_ids_of_a_later_day_are_found(days, tmp_path):
    root, _ = days
    rows = pq.read_table(root / "data_2/vocabulary/user.parquet")
    assert check_vocabulary(root / "data_2/vocabulary/user.parquet", "") == len(rows)
    values = rows.column("value").to_pylist()
    # Between two days, and within the first one: neither is found by the count alone.
    last = rows.column("day").to_pylist().index(1)
    for one, other in ((0, 1), (last - 1, last)):
        changed = [*values]
        changed[one], changed[other] = values[other], values[one]
        days_of = rows.column("day").to_pylist()
        days_of[one], days_of[other] = days_of[other], days_of[one]
        table = rows.set_column(0, "value", [changed])
        table = table.set_column(table.column_names.index("day"), "day", [days_of])
        pq.write_table(table, tmp_path / "user.parquet")
        counts = rows.column("first_count").to_pylist()
        if one or counts[0] == counts[1]:
            with pytest.raises(ValueError, match="exchanged"):
                check_vocabulary(tmp_path / "user.parquet", "")
