"""Model directories with right checksums and hostile content are refused at load in one line, before any request."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from serving.inference.versions import load_version
from serving.manifest import MANIFEST, ModelError
from tests.serving.handmade_model import write_manifest, write_raw_model

NAN = float("nan")
KEYS = 20
VALUES = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_raw_model(tmp_path_factory.mktemp("model") / "1")


def edited(model: Path, target: Path, edit: Callable[[Path, dict], None]) -> Path:
    """Return a copy of a model with an edit, and with the checksums of what it has then."""
    shutil.copytree(model, target)
    document = json.loads((target / MANIFEST).read_text())
    edit(target, document)
    return write_manifest(target, document)


def in_file(name: str, dtype: str, index: int, value: float) -> Callable[[Path, dict], None]:
    def edit(directory: Path, _: dict) -> None:
        size = np.dtype(dtype).itemsize
        np.memmap(directory / name, dtype, "r+", size * index, 1)[0] = value

    return edit


def in_manifest(code: str) -> Callable[[Path, dict], None]:
    def edit(_: Path, document: dict) -> None:
        raw = document["raw"]
        exec(code, {"d": document, "raw": raw, "c": raw["categorical"], "nan": NAN})

    return edit


def key_row(row: int) -> Callable[[Path, dict], None]:
    return in_file("keys/own.bin", "<i4", 2 * KEYS + 3, row)


def value_id(number: int) -> Callable[[Path, dict], None]:
    return in_file("vocabulary/positions.bin", "<u4", 2 * (VALUES + 1) + VALUES + 3, number)


HOSTILE = {
    "a row beyond the table": (key_row(2**31 - 1), "has the rows 1 to 2147483647, and the table 0"),
    "a row one beyond": (key_row(40), "rows 1 to 40, and the table 0 to 39"),
    "a negative row": (key_row(-1), "has the rows -1 to 39"),
    "the smallest row": (key_row(-(2**31)), "has the rows -2147483648 to"),
    "keys out of order": (in_file("keys/own.bin", "<i8", 3, 9), "has keys that do not ascend"),
    "an id of 4e9": (value_id(4 * 10**9), "has ids that are not 1 to 16"),
    "an id one beyond": (value_id(17), "has ids that are not 1 to 16"),
    "id 0": (value_id(0), "has ids that are not 1 to 16"),
    "texts before the file": (
        in_file("vocabulary/positions.bin", "<i8", 3, -(2**40)),
        "has texts that do not follow one another",
    ),
    "a row of NaN": (
        in_file("tables/shared.bin", "<f4", 16 * 200 + 5, NAN),
        "shared.bin has a number that is not finite",
    ),
    "NaN in the proof": (
        in_manifest("d['proof'] = {'machine_code': {'limit': nan}}"),
        "the proof has a number that is not finite",
    ),
    "a numerical twice": (in_manifest("d['numerical'] = ['a', 'a']"), "different names"),
    "an output twice": (in_manifest("d['outputs'][1]['name'] = 'click'"), "different names"),
    "many ids per row": (
        in_manifest("d['categorical'][0]['hotness'] = 2**40"),
        "hotness: got .*, want a whole number",
    ),
    "many buckets": (
        in_manifest("c[4] |= {'buckets': 10**9, 'vocabulary': None}"),
        "'narrow': got 1000000000, want ids below its cardinality, 9",
    ),
    "no bucket": (
        in_manifest("c[4] |= {'buckets': 0, 'vocabulary': None}"),
        "'narrow': got 0, want",
    ),
    "a vocabulary of another table": (
        in_manifest("c[4]['vocabulary'] = c[1]['vocabulary']"),
        "'narrow': got 299, want ids below its cardinality, 9",
    ),
    "keys without a file": (in_manifest("c[4]['is_key'] = True"), "'raw keys', want a file of"),
    "a column of 7 dimensions": (in_manifest("raw['columns']['a'] = 7"), "want 1, or 2 of a list"),
    "a column of no feature": (
        in_manifest("raw['columns']['x'] = 1; raw['is_text']['x'] = True"),
        "columns: got .'x'., want the columns that",
    ),
    "a cross of no columns": (
        in_manifest("c[0] |= {'cross': ['y', 'z']}"),
        "malformed|KeyError|'y'",
    ),
    "several ids of one value": (in_manifest("c[1]['separator'] = ''"), "want hotness 1 without"),
    "a separator that is none": (
        in_manifest("c[1]['separator'] = 5"),
        "separator: got 5, want text",
    ),
    "features in another order": (
        in_manifest("c[0], c[4] = c[4], c[0]"),
        "the features of the model",
    ),
    "numericals in another order": (
        in_manifest("raw['numerical'].reverse()"),
        "want the numerical features of the model",
    ),
    "no raw feature": (in_manifest("raw['categorical'] = []"), "want the features of the model"),
    "no hotness": (
        in_manifest("del d['categorical'][0]['hotness']"),
        "categorical.0.: got no hotness",
    ),
    "no column": (in_manifest("del c[0]['column']"), "categorical.0.: got no column"),
    "a source of texts": (in_manifest("d['source'] = ['a']"), "source: got .*, want a mapping"),
    "a table that is a text": (
        in_manifest("d['tables'][0] = 'a'"),
        "tables.0.: got 'a', want a map",
    ),
    "another pooling": (
        in_manifest("d['tables'][0]['pooling'] = 'max'"),
        "want one of sum, mean, none",
    ),
    "half a row": (
        in_manifest("d['tables'][0]['rows'] = 0.5"),
        "rows: got 0.5, want a whole number",
    ),
    "raw is a list": (in_manifest("d['raw'] = [1]"), "raw values: got .1., want a mapping"),
    "statistics of NaN": (
        in_manifest("raw['numerical'][0]['fitted'][0][1] = nan"),
        "finite numbers",
    ),
    "a vocabulary that is no file of the model": (
        in_manifest("c[4]['vocabulary'] = ['vocabulary/other.bin', 8]"),
        "'narrow': got 'vocabulary/other.bin', want a vocabulary among the files",
    ),
    "a vocabulary and buckets": (in_manifest("c[4]['buckets'] = 5"), "want buckets alone"),
    "a vocabulary and keys": (
        in_manifest("c[0]['vocabulary'] = c[4]['vocabulary']"),
        "want keys alone",
    ),
    "vocabularies that are a list": (
        in_manifest("d['source']['vocabularies'] = [1]"),
        "vocabularies of the source must be an object",
    ),
    "the middle": (in_manifest("c[1]['take'] = 'middle'"), "take: got 'middle', want one of first"),
    "a length that is a text": (in_manifest("c[1]['length'] = 'no'"), "want true or false"),
    "a length of no numerical": (
        in_manifest("c[1]['length'] = True"),
        "want the numerical features of the model",
    ),
    "other empty items": (in_manifest("raw['empty_items'] = 1"), "want one of dropped, unknown"),
    "a number as text of 5": (in_manifest("raw['five'] = {'a': 5}"), "five: .*texts by column"),
    "is_text of a part": (in_manifest("raw['is_text'] = {'a': True}"), "KeyError|'b'"),
    "is_text of no booleans": (
        in_manifest("raw['is_text'] = dict.fromkeys(raw['columns'], 'yes')"),
        "is_text: .*want true or false by column",
    ),
    "is_text is a list": (in_manifest("raw['is_text'] = []"), "no manifest of a model"),
    "an unknown transform": (
        in_manifest("raw['numerical'][0]['transforms'][0] = 'exec'"),
        "one of",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_model_is_refused_in_one_line(model, tmp_path, name):
    edit, message = HOSTILE[name]
    with pytest.raises(ModelError) as found:
        load_version(edited(model, tmp_path / "1", edit), "1", None)
    assert re.search(message, str(found.value)), found.value
    assert "\n" not in str(found.value)


def test_the_model_itself_loads(model):
    assert load_version(model, "1", None).model.raw is not None
