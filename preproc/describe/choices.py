"""The use of each column in the written description, and its reason."""

import re
from dataclasses import dataclass, replace
from typing import Any

from configs.table_schema import LINE_FORMATS
from preproc.describe.columns import MOST_VALUES, Column, has_name
from preproc.describe.formats import FoundTable
from preproc.table.expressions import quoted, text

FEWEST = "the fewest: a dataset has a categorical feature"
LABEL = (
    r"((is|has)_)?(label|target|y|class|click(ed|s)?|clk|buy|bought|purchased?|convert(ed)?|conversions?|liked?|outcome|"
    r"response|survived|churn(ed)?|install(ed)?|ordered|watched|default)|.*_(label|target|clicked|bought|purchased)"
)
GRADE = r"(.*_)?(ratings?|stars|score|grade)"
WEIGHT = r"(sample|row|instance|importance|example|case)_weights?"
TIME = (
    r"(.*_)?(time|timestamp|ts|date|datetime|day|hour|unix|epoch)(_(ms|s|utc|local))?|created(_at)?"
)
KEY = (
    r"(.*_)?(user|item|ad|adgroup|movie|product|query|session|campaign|creative|site|app|device|group|brand|cate|video)?"
    r"(id|ids)|(.*_)?(uid|pid|iid|idx|index|key|uuid|guid|code|zip|zipcode|hash)|c\d+|unnamed_\d+|__index_level_\d+__"
)
THING = (
    r"(.*_)?(user|item|movie|product|ad|advertiser|campaign|creative|site|app|device|model|city|country|region|category|"
    r"cate|brand|shop|store|seller|genre|gender|occupation|type|channel|publisher|page|query|session|weekday|month)"
)
USER = r"(.*_)?(user|customer|visitor|member|client|account|reviewer|uid)(_?id)?"
ITEM = (
    r"(.*_)?(item|product|movie|video|song|track|article|book|sku|asin|ad|creative|iid|pid)(_?id)?"
)
OF_ITEM = r"(.*_)?(category|cate|genre|brand|shop|store|seller|artist|author|album)(_?id)?"
POSITIVE = ("1", "yes", "y", "true", "t", "positive", "pos", "click", "clicked", "buy", "bought")
TRUTH = ({"0", "1"}, {"0.0", "1.0"}, {"true", "false"}, {"0"}, {"1"})
UNIX_SECONDS = (6e8, 4.2e9)
FEW = 12
"""Whole numbers of at most so many values are rather codes than amounts."""
UNIQUE = 0.95
"""Share of the rows with a value of their own from which on a text tells nothing of other rows."""
RARE = 0.01
"""Least share of the rarer value in a label that neither its name nor its position tells."""
SKEWED = 20.0
"""A largest value of so many medians asks for a logarithm."""


@dataclass(frozen=True, slots=True)
class Choice:
    column: Column
    role: str  # label, weight, time, numerical, categorical, weights (of ids) or left out
    keys: dict[str, Any]  # of its entry in the description, besides the name
    why: str  # the reason, or what was seen
    is_candidate: bool = False  # whether it may be the label, or the weight, as well


def choose(columns: list[Column], table: FoundTable, label: str | None = None) -> list[Choice]:
    """Return a choice per column; the label is the likeliest column, or the one called `label`; ValueError if there is none."""
    candidates = label_candidates(columns)
    by_name = {column.name.strip(): column for column in columns}
    if label is not None and label.strip() not in by_name:
        raise ValueError(f"label={label}: no such column; the columns are {', '.join(by_name)}")
    likeliest = candidates[0] if candidates else None
    chosen = by_name[label.strip()] if label is not None else likeliest
    if label is not None and chosen is not None:
        if chosen.distinct == 0:
            raise ValueError(f"label={chosen.name}: no row has a value; name another column")
        if chosen.is_list or chosen.is_nested:
            raise ValueError(
                f"label={chosen.name}: got values of type {chosen.type_name}, want a number, a truth or a text per row; name "
                "another column, or leave label out and write an expression"
            )
    times = [c for c in columns if _is_time(c, _has_names(table)) and c is not chosen]
    choices = []
    for column in columns:
        choice = _choice(column, table, by_name)
        if column is chosen:
            keys, why = _label(column)
            if column.missing:
                share = 100 * column.missing / column.rows
                why += f"; {share:.3g} % of the rows have none and end the run: on_bad=skip leaves them out"
            choice = Choice(column, "label", keys, why)
        elif column in times:
            is_first = column is times[0]
            why = "orders the rows: the last ones test" if is_first else "another time"
            choice = Choice(column, "time" if is_first else "left out", {}, why)
        elif has_name(column, LABEL):
            why = "may be a label by its name; as a feature it would tell the label"
            choice = replace(choice, role="left out", keys={}, why=why)
        if column in candidates and column is not chosen and column not in times:
            choice = replace(choice, is_candidate=True)
        choices.append(choice)
    choices = [_with_ids(choice, choices) for choice in choices]
    numbers = [choice for choice in choices if choice.role == "numerical"]
    if numbers and all(choice.role != "categorical" for choice in choices):
        fewest = min(numbers, key=lambda choice: choice.column.distinct)
        why = f"{fewest.column.distinct:,} values, {FEWEST}"
        choices[choices.index(fewest)] = replace(fewest, role="categorical", keys={}, why=why)
    return choices


def label_candidates(columns: list[Column]) -> list[Column]:
    """Return the columns that may be the label, the likeliest first: by name, then by position, then grades."""
    first, last = columns[0], columns[-1]
    ranks: list[tuple[int, Column]] = []
    for column in columns:
        if column.missing or column.is_list or column.distinct == 0 or column.rows == 1:
            continue
        two, named = column.distinct == 2, has_name(column, LABEL)
        is_truth = {value.lower() for value, _ in column.values} in TRUTH
        if named and (two or is_truth):
            ranks.append((0, column))
        elif two and column.is_number and column in (first, last):
            ranks.append((1 if column is first else 2, column))
        elif named and column.is_number:
            ranks.append((3, column))
        elif has_name(column, GRADE) and column.is_number and column.distinct > 1:
            ranks.append((4, column))
        elif two and is_truth and column.values[-1][1] >= RARE * column.rows:
            ranks.append((5, column))
    return [column for _, column in sorted(ranks, key=lambda rank: rank[0])]


def _label(column: Column) -> tuple[dict[str, Any], str]:
    values = dict(column.values)
    if {value.lower() for value in values} in TRUTH:
        ones = sum(values[value] for value in values if value.lower() in ("1", "1.0", "true"))
        return {}, f"{100 * ones / column.present:.3g} % ones"
    name = quoted(column.name)
    number = f"CAST({name} AS DOUBLE)" if column.is_text else name
    if column.is_number and column.distinct > MOST_VALUES:
        return {"kind": "regression"}, f"a number, {column.lowest:g} to {column.highest:g}"
    if column.is_number:
        # The smallest bound that at most half of the rows reach.
        above, bound = 0, column.highest
        for value, times in sorted(column.values, key=lambda pair: -float(pair[0])):
            if above and above + times > column.present / 2:
                break
            above, bound = above + times, float(value)
        number_itself = "; for the number itself: kind: regression" * (column.distinct > 2)
        why = f"{100 * above / column.present:.3g} % ones{number_itself}"
        return {"expression": f"{number} >= {bound:g}"}, why
    one = next((v for v in values if v.lower() in POSITIVE), min(values, key=lambda v: values[v]))
    share = 100 * values[one] / column.present
    return {"expression": f"{name} = {text(one)}"}, f"{share:.3g} % ones"


def _has_names(table: FoundTable) -> bool:
    """Return whether the names of the columns are those of the file, and tell what they hold."""
    return table.source.format in LINE_FORMATS or not table.source.columns


def _is_time(column: Column, has_name_: bool) -> bool:
    """Return whether a column has times; of numbers the name must say so, or they are recent seconds of a file without names."""
    if column.missing or column.distinct < 2:
        return False
    if column.is_time or not column.is_number or column.lowest < 1e6:
        return column.is_time
    low, high = UNIX_SECONDS
    return has_name(column, TIME) if has_name_ else low < column.lowest <= column.highest < high


def time_order(column: Column) -> str:
    kind = "TIMESTAMP" if column.is_time else "BIGINT" if column.is_whole else "DOUBLE"
    return f"CAST({quoted(column.name)} AS {kind})" if column.is_text else quoted(column.name)


def time_seconds(column: Column) -> str:
    """Return the SQL of a time in the unit of events: a timestamp, or seconds; Unix times in other units are divided."""
    low, high = UNIX_SECONDS
    for unit in (10**3, 10**6, 10**9):
        if column.is_number and unit * low < column.lowest <= column.highest < unit * high:
            return f"{time_order(column)} / {unit}"
    return time_order(column)


def time_parts(column: Column) -> str:
    """Return the SQL of a timestamp of which hour and weekday can be taken; nothing of numbers that count no seconds."""
    low, high = UNIX_SECONDS
    seconds = time_seconds(column)
    if column.is_time:
        return seconds
    is_unix = low < column.lowest <= column.highest < high or seconds != time_order(column)
    return f"to_timestamp({seconds})" if is_unix else ""


def _choice(column: Column, table: FoundTable, by_name: dict[str, Column]) -> Choice:
    """Return a feature, or why the column is none."""

    def out(why: str) -> Choice:
        return Choice(column, "left out", {}, why)

    source = table.source
    if source.format == "libsvm" and re.fullmatch(r"ids|values|x\d+", column.name):
        return _libsvm_choice(column, source.columns, by_name)
    if source.format == "libffm" and column.name.endswith("_value"):
        return _values_choice(column, by_name[column.name.removesuffix("_value")])
    if column.is_nested:
        return out(f"{column.type_name}: take single values out of it by an expression")
    if column.distinct == 0:
        return out("no value in any row")
    if column.distinct == 1 and not column.missing:
        return out("the same value in all rows")
    if has_name(column, WEIGHT) and column.is_number and column.lowest >= 0 and not column.missing:
        return Choice(column, "weight", {}, "weighs the rows")
    if column.is_list and column.has_numbers and (ids := _ids_of(column, by_name)):
        return _values_choice(column, ids)
    if column.is_list:
        how = {"separator": column.separator} if column.separator else {"list": True}
        why = f"lists of {column.items:,} values"
        if all(re.fullmatch(r"-?\d+,\d+", value) for value, _ in column.values):
            why += f"; a number with a decimal comma is CAST(replace({quoted(column.name)}, ',', '.') AS DOUBLE)"
        return Choice(column, "categorical", how, why)
    is_key = _has_names(table) and has_name(column, KEY)
    is_unique = column.distinct >= UNIQUE * column.present and column.present > 20
    if is_unique and ((is_key and column.is_whole) or not (column.is_number or column.is_time)):
        return out("nearly every row has a value of its own")
    span = column.highest - column.lowest + 1
    if column.is_whole and column.distinct == column.rows == span > 20:
        return out("numbers the rows one by one")
    if table.is_criteo and has_name(column, r"i\d+|num_\d+"):
        transforms = {"transforms": [{"log": 3}, {"fill": 0}]}
        return Choice(column, "numerical", transforms, "as dataset=criteo_kaggle")
    # Numbers that name things: ids of libffm, by their name, few of them, with zeros before, or too large for amounts.
    is_code = column.is_whole and (
        is_key
        or source.format == "libffm"
        or has_name(column, THING)
        or (
            column.lowest >= 0
            and (column.distinct <= FEW or column.padded > 0 or column.highest >= 2**40)
        )
    )
    if column.is_number and column.kind != "boolean" and not is_code:
        return _numerical(column)
    keys: dict[str, str] = {}
    if column.is_float and column.is_whole:
        keys["expression"] = f"CAST({quoted(column.name)} AS BIGINT)"
    return Choice(column, "categorical", keys, f"{column.distinct:,} values")


def _ids_of(column: Column, by_name: dict[str, Column]) -> Column | None:
    """Return the list that a list of numbers weighs, by its name: `tags` of `tag_weights`, with its separator if it is a text."""
    found = re.fullmatch(r"(.+?)s?_(weight|value|score)s?", column.name.strip())
    names = (found[1], f"{found[1]}s") if found else ()
    lists = [by_name[name] for name in names if name in by_name and by_name[name].is_list]
    return next((ids for ids in lists if ids.separator == column.separator), None)


def _with_ids(choice: Choice, choices: list[Choice]) -> Choice:
    """Return a choice as its ids or weights want it: both are lists, and weights of no feature are left out."""
    weighed = {c.keys["ids"]: c.column.separator or " " for c in choices if c.role == "weights"}
    if choice.role == "categorical" and choice.column.name in weighed and choice.column.is_text:
        return replace(choice, keys={"separator": weighed[choice.column.name]})
    features = [c.column.name for c in choices if c.role == "categorical"]
    if choice.role == "weights" and choice.keys["ids"] not in features:
        return replace(choice, role="left out", keys={}, why="its ids are left out")
    return choice


def _numerical(column: Column) -> Choice:
    transforms: list[Any] = []
    if column.missing:
        transforms.append({"fill": float(f"{column.middle:.6g}")})
    is_skewed = column.lowest >= 0 and column.highest > SKEWED * max(column.middle, 1)
    transforms += [{"log": 1}] * is_skewed + ["standardise"]
    why = f"{column.lowest:g} to {column.highest:g}, median {column.middle:g}"
    return Choice(column, "numerical", {"transforms": transforms}, why)


def without_constant_indices(
    columns: list[Column], table: FoundTable
) -> tuple[list[Column], FoundTable]:
    """Return columns and table of libsvm without the columns of single indices if all items have one value, as 1 of one-hot."""
    single = [c for c in columns if re.fullmatch(r"x\d+", c.name)]
    if table.source.format != "libsvm" or any(c.distinct > 1 for c in single):
        return columns, table
    columns = [column for column in columns if column not in single]
    source = replace(table.source, columns=[column.name for column in columns])
    return columns, replace(table, source=source)


def _libsvm_choice(column: Column, names: list[str], by_name: dict[str, Column]) -> Choice:
    """Return the choice for ids and values of all items, or for the value of one index, which is 0 where it is absent."""
    has_indices = any(name not in ("label", "qid", "ids", "values") for name in names)
    if column.name == "values" and not has_indices:
        return _values_choice(column, by_name["ids"])
    if column.name == "ids":
        why = f"which of {column.items or column.distinct:,} indices a row has"
        return Choice(column, "categorical", {"separator": " "}, why)
    if column.name == "values":
        return Choice(column, "left out", {}, "the columns x hold it")
    transforms: list[Any] = [{"fill": 0}, "standardise"]
    return Choice(column, "numerical", {"transforms": transforms}, "0 where it is absent")


def _values_choice(column: Column, ids: Column) -> Choice:
    """Return the choice for the values of items beside those of the ids: a number where the id is always the same."""
    if ids.distinct == 1 and column.is_number and column.distinct > 1:
        return _numerical(column)
    if column.distinct == 1 or column.items == 1:
        return Choice(column, "left out", {}, "the same value for all ids")
    return Choice(column, "weights", {"ids": ids.name}, f"weights of the ids of {ids.name}")
