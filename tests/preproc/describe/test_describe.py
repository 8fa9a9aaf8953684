"""`mode=describe` on files of every format: what it names, the yaml that it writes, and that this preprocesses as it is."""

import io
import json
import random
import struct
from contextlib import redirect_stderr
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dataloading.dataset.feature_spec import FeatureSpec
from preproc.__main__ import run
from preproc.table.line_formats import MOST_INDICES
from tests.helpers.command import run_command
from tests.helpers.preproc_command import Refused, compose_preproc, preproc
from tests.preproc.table.test_pipeline import SHARED

DRAW = random.Random(1)
ROWS = 120
needs_data = pytest.mark.skipif(not SHARED.exists(), reason=f"{SHARED} is not here")


def described(source, tmp_path, *more):
    """Return the content of the yaml that the command writes."""
    output = tmp_path / "written.yaml"
    preproc("mode=describe", f"source={source}", f"output={output}", "overwrite=true", *more)
    return yaml.safe_load(output.read_text())


def built(source, content, output, threads=1):
    """Return the features of the dataset of a description."""
    composed = compose_preproc("dataset=any", f"source={source}", f"output={output}", "plot=false")
    composed.threads = threads
    composed.table, composed.frequency_limit = content["table"], content["frequency_limit"]
    with redirect_stderr(io.StringIO()) as stderr:
        try:
            run(composed)
        except SystemExit as end:
            raise Refused(stderr.getvalue(), end.code) from None
    return FeatureSpec.load(output)


def num_rows(spec):
    report = json.loads((spec.root / "report.json").read_text())
    return sum(split["rows"] for split in report["splits"].values())


def kept(output, name):
    return pq.read_table(output / "kept/train.parquet")[name].to_pylist()


def names_of(entries):
    return [entry if isinstance(entry, str) else entry["name"] for entry in entries]


def lines(path, rows):
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def json_lines(path):
    start = datetime(2024, 1, 1)
    return lines(
        path,
        (
            json.dumps(
                {
                    "user_id": i % 9,
                    "tags": DRAW.sample("abc", i % 3),
                    "price": i * 1.5,
                    "clicked": i % 3 == 0,
                    "ts": str(start + timedelta(hours=(7 * i) % ROWS)),
                }
            )
            for i in range(ROWS)
        ),
    )


def csv_rows(comma):
    yield comma.join(("y", "age", "price", "city", "tags", "sample_weight"))
    for i in range(ROWS):
        price = "NA" if i % 7 == 0 else f"{i * 1.5:.2f}"
        tags = "|".join(DRAW.sample("abc", i % 3))
        yield comma.join((str(i % 2), str(i % 50), price, f"c{i % 5}", tags, f"0.{1 + i % 3}"))


def parquet(path):
    columns = {
        "uid": [float(i % 9) for i in range(ROWS)],
        "liked": [i % 2 == 0 for i in range(ROWS)],
        "items": [[i % 5, i % 7] for i in range(ROWS)],
        "when": [datetime(2024, 1, 1) + timedelta(hours=i) for i in range(ROWS)],
        "blob": [b"\xff"] * ROWS,
        "yes or ${no}": ["on", "off"] * (ROWS // 2),
    }
    pq.write_table(pa.table(columns), path)
    return path


def libsvm(path, one_hot):
    indices = [sorted(DRAW.sample(range(1, 9), 4)) for _ in range(ROWS)]
    return lines(
        path,
        (
            f"{'+1' if i % 2 else '-1'} "
            + " ".join(f"{k}:{1 if one_hot else DRAW.random():.3f}" for k in row)
            for i, row in enumerate(indices)
        ),
    )


def libffm(path):
    return lines(
        path,
        (
            f"{i % 2} 0:{i % 5}:0.{1 + i % 9} 1:{9 + i % 4}:1 1:{20 + i % 3}:1 2:30:{i}"
            for i in range(ROWS)
        ),
    )


SOURCES = {
    "csv": (lambda p: lines(p, csv_rows(",")), "y", "age price", "city tags"),
    "tsv": (lambda p: lines(p, csv_rows("\t")), "y", "age price", "city tags"),
    "semicolons": (lambda p: lines(p, csv_rows(";")), "y", "age price", "city tags"),
    "jsonl": (json_lines, "clicked", "price", "user_id tags"),
    "parquet": (parquet, "liked", "", "uid items yes_or___no_"),
    "libsvm": (lambda p: libsvm(p, False), "label", "x1 x2 x3 x4 x5 x6 x7 x8", "ids"),
    "one-hot libsvm": (lambda p: libsvm(p, True), "label", "", "ids"),
    "libffm": (libffm, "label", "f2_value", "f0 f1"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_written_description_preprocesses_as_it_is(kind, tmp_path):
    write, label, numerical, categorical = SOURCES[kind]
    source = write(tmp_path / "rows.data")
    content = described(source, tmp_path)
    table = content["table"]
    assert table["sources"]["rows"]["files"] == "${source}"
    assert table["label"]["name"] == label
    assert names_of(table.get("numerical", [])) == numerical.split()
    assert names_of(table["categorical"]) == categorical.split()
    spec = built(source, content, tmp_path / "data")
    assert [feature.name for feature in spec.categorical] == categorical.split()
    assert num_rows(spec) == ROWS


@pytest.mark.parametrize("word", ["NA", ".", "unknown"])
def test_a_word_among_numbers_stands_for_no_value(tmp_path, word):
    ages = (word if i % 5 == 0 else str(i) for i in range(40))
    source = lines(tmp_path / "rows.csv", ["y,age", *(f"{i % 2},{v}" for i, v in enumerate(ages))])
    assert described(source, tmp_path)["table"]["missing"] == [word]


def test_a_description_says_why_and_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "shop.csv", csv_rows(","))
    monkeypatch.setenv("COLUMNS", "80")
    preproc("mode=describe", "source=shop.csv")
    out = capsys.readouterr().out
    assert all(len(line) <= 80 for line in out.split("wrote")[0].splitlines())
    assert "--config-dir mine dataset=shop source=shop.csv output=data/shop" in out
    text = (tmp_path / "mine/dataset/shop.yaml").read_text()
    assert text.startswith("# @package _global_\n")
    for line in (
        "  missing: [NA]  # texts that stand for no value",
        "  weight: {name: sample_weight}  # weighs the rows",
        '  label: {name: "y"}  # 50 % ones',
        "    - {name: age, transforms: [standardise]}  # 0 to 49, median 19",
        '    - {name: tags, separator: "|"}  # lists of 3 values, 33.3 % missing',
    ):
        assert line in text.splitlines(), text
    built("shop.csv", yaml.safe_load(text), tmp_path / "data/shop")
    sizes = ["model.embedding_dim=4", "model.bottom_mlp=[4]", "model.top_mlp=[1]", "device=cpu"]
    ended = run_command("data.path=data/shop", "train.batch_size=32", *sizes, "log.pictures=false")
    assert ended.exit_code == 0, ended.err
    with pytest.raises(Refused, match=r"mine/dataset/shop.yaml exists already; set overwrite=true"):
        preproc("mode=describe", "source=shop.csv")


def test_a_decimal_comma_is_told_from_a_list_and_a_question_is_a_label(tmp_path):
    rows = (f"{'yes' if i % 3 else 'no'};{i % 9},{i % 7};{i % 5},{i % 4},3" for i in range(ROWS))
    content = described(lines(tmp_path / "rows.csv", ["Clicked?;price;tags", *rows]), tmp_path)
    assert content["table"]["label"]["name"] == "Clicked_"
    text = (tmp_path / "written.yaml").read_text()
    number = "a number with a decimal comma is CAST(replace(\"price\", ',', '.') AS DOUBLE)"
    assert text.count("decimal comma") == text.count(number) == 1


def test_times_order_the_rows_and_grades_become_labels(tmp_path, capsys):
    rows = (f"{i % 7}\t{i % 11}\t{1 + i % 5}\t{880000000 + (i * 37) % 1000}" for i in range(ROWS))
    source = lines(
        tmp_path / "a.inter", ["user_id:token\titem_id:token\trating:float\ttimestamp:float", *rows]
    )
    table = described(source, tmp_path)["table"]
    assert table["label"] == {
        "name": "rating_float",
        "expression": 'CAST("rating:float" AS DOUBLE) >= 4',
    }
    printed = " ".join(capsys.readouterr().out.split())
    rule = ">= 4: 40 % ones; for the number itself: kind: regression"
    assert f'label CAST("rating:float" AS DOUBLE) {rule}' in printed
    assert table["order_by"] == ['CAST("timestamp:float" AS BIGINT)']
    assert table["split"] == {"by": "fraction", "train": 0.9}
    # Another label, by its name; a column named so may tell the label, so it is no feature.
    other = described(source, tmp_path, "label=user_id:token")["table"]
    assert other["label"]["name"] == "user_id_token"


@pytest.mark.parametrize("names", ["user,item,category,time", "customerId,SKU,brand,created_at"])
def test_the_suggested_sequence_of_users_items_and_times_works_as_written(names, tmp_path):
    rows = (
        f"u{i % 7},i{i % 11},c{i % 3},2026-03-01 00:{i % 60:02}:{i // 60:02},{i % 2}"
        for i in range(ROWS)
    )
    source = lines(tmp_path / "log.csv", [f"{names},clicked", *rows])
    assert "sequence" not in described(source, tmp_path)["table"]
    text = (tmp_path / "written.yaml").read_text()
    _, suggested = text.split("for models of sequences (docs/sequences.md):\n")
    with_it = text.replace(suggested, suggested.replace("  #", "  ", 2))
    spec = built(source, yaml.safe_load(with_it), tmp_path / "data")
    (group,) = spec.sequences
    assert (group.name, len(group.features), group.time) == ("seen", 2, "seen_time")


@pytest.mark.parametrize("unit", [1, 10**3, 10**6, 10**9])
def test_the_suggested_sequence_counts_seconds_of_unix_times_in_any_unit(unit, tmp_path):
    first = 1_772_323_200
    rows = (f"u{i % 7},i{i % 11},{(first + 7 * i) * unit + unit // 3},{i % 2}" for i in range(ROWS))
    source = lines(tmp_path / "log.csv", ["user,item,time,clicked", *rows])
    table = described(source, tmp_path)["table"]
    text = (tmp_path / "written.yaml").read_text()
    _, suggested = text.split("for models of sequences (docs/sequences.md):\n")
    assert table["order_by"] == ['CAST("time" AS BIGINT)']
    built(
        source,
        yaml.safe_load(text.replace(suggested, suggested.replace("  #", "  ", 2))),
        tmp_path / "data",
    )
    times = np.fromfile(tmp_path / "data/events/seen_time.bin", "<i8")
    assert sorted(times) == [first + 7 * i for i in range(ROWS)]


def test_names_that_no_file_has_tell_nothing(tmp_path):
    rows = (f"{i + 0.5},{i * 37 % 101},{'abc'[i % 3]},{int(i == 7)},{i % 2}" for i in range(200))
    table = described(lines(tmp_path / "a.csv", rows), tmp_path)["table"]
    assert names_of(table["numerical"]) == ["c1", "c2"]
    assert (names_of(table["categorical"]), table["label"]) == (["c3", "c4"], {"name": "c5"})


@pytest.mark.parametrize(("rows", "batch"), [(100, 32), (1100, 64), (5000, 256)])
def test_small_tables_train_in_small_batches_and_a_number_may_become_a_category(
    rows, batch, tmp_path, capsys
):
    values = (f"{i / 7},{i % 90 / 8},{i % 2}" for i in range(rows))
    described(lines(tmp_path / "a.csv", ["size,part,label", *values]), tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert "categorical part: 90 values, the fewest: a dataset has a categorical feature" in printed
    assert printed.endswith(f"train.batch_size={batch}")


def test_several_label_candidates_are_named(tmp_path, capsys):
    rows = (f"{i % 2},{i % 3 // 2},{i % 5}" for i in range(ROWS))
    content = described(lines(tmp_path / "a.csv", ["click,conversion,ad", *rows]), tmp_path)
    assert content["table"]["label"] == {"name": "click"}
    assert names_of(content["table"]["categorical"]) == ["ad"]
    text = (tmp_path / "written.yaml").read_text()
    assert "# 50 % ones; 'conversion' may be a label too" in text
    assert "#  - conversion: may be a label by its name" in text
    assert "left out ?" in capsys.readouterr().out


def test_without_a_label_the_description_says_so(tmp_path, capsys):
    source = lines(tmp_path / "a.csv", ["a,b", *(f"{i / 7},{'xyz'[i % 3]}" for i in range(ROWS))])
    described(source, tmp_path)
    assert "note: no column looks like a label; name one by label=COLUMN" in capsys.readouterr().out
    with pytest.raises(Refused, match="label=c: no such column; the columns are a, b"):
        described(source, tmp_path, "label=c")


def criteo(i):
    return [str(i % 2), *(str(i + k) for k in range(13)), *(f"{i + k:08x}" for k in range(26))]


@pytest.mark.parametrize("has_header", [True, False])
def test_criteo_with_commas_and_a_header_and_with_tabs_are_recognised(has_header, tmp_path, capsys):
    comma = "," if has_header else "\t"
    names = ["label", *(f" I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    rows = [comma.join(criteo(i % 30)) for i in range(ROWS)]
    source = lines(tmp_path / "sample.txt", [comma.join(names)] * has_header + rows)
    content = described(source, tmp_path)
    out = capsys.readouterr().out
    assert "note: these are Criteo's columns" in out
    # Blanks of a header are seen.
    assert ("' I1'" in out and "13 names of columns have blanks at an end" in out) == has_header
    assert all(n["transforms"] == [{"log": 3}, {"fill": 0}] for n in content["table"]["numerical"])
    spec = built(source, content, tmp_path / "data")
    assert (len(spec.numerical), len(spec.categorical)) == (13, 26)


def test_files_and_directories(tmp_path, capsys):
    directory = tmp_path / "logs"
    directory.mkdir()
    for day in range(2):
        lines(directory / f"day_{day}.csv", csv_rows(","))
    lines(directory / "README", ["Words about the logs"])
    for source in (directory, f"{directory}/day_*.csv"):
        content = described(source, tmp_path)
        (rows,) = content["table"]["sources"].values()
        assert rows["files"] == ("${source}/**/*.csv" if source is directory else "${source}")
        spec = built(source, content, tmp_path / f"data{source is directory}")
        assert num_rows(spec) == 2 * ROWS
    assert f"left out {directory}/README: no table" in capsys.readouterr().out.replace("\n", " ")
    lines(directory / "items.csv", ["item,name", "1,a"])
    described(directory, tmp_path)
    assert f"left out {directory}/items.csv: item, name" in capsys.readouterr().out
    with pytest.raises(
        Refused, match=r"items.csv: other columns than .*day_0.csv; describe one table"
    ):
        described(f"{directory}/*.csv", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (struct.pack("<Q", 20) + b"crc_" + b"x" * 24, "a TFRecord file, .*as Parquet"),
        (b'[{"y": 1},\n{"y": 0}]\n', "one array of JSON; write a line per row, as jq -c"),
        (b'{"y": 1}\n{"y": \n', 'Malformed JSON in file ".*", at byte'),
        (b"y,x\n1,\xe9\n", "not UTF-8 text; convert it, as by iconv"),
        (b"y,x\n", "no rows below the header"),
        (
            b"3,2,bad,good\n" + b"1,2,3,4,5\n" * 20,
            r"the rows begin in line 2, .* tail -n \+2",
        ),
        (b"@RELATION a\n@DATA\n1,2\n", "an ARFF file; write it as CSV"),
    ],
)
def test_what_is_no_table_gets_advice(content, message, tmp_path):
    (tmp_path / "rows.bin").write_bytes(content)
    with pytest.raises(Refused, match=message):
        described(tmp_path / "rows.bin", tmp_path)


def test_a_wrong_line_of_libffm_is_named_while_preprocessing(tmp_path):
    source = libffm(tmp_path / "a.ffm")
    content = described(source, tmp_path)
    source.write_text(source.read_text() + "1 0:7\n")
    with pytest.raises(
        Refused, match=r"a.ffm: no line of libffm, which is label field:id:value ...: 1 0:7"
    ):
        built(source, content, tmp_path / "data")


def test_values_of_libffm_weigh_their_ids(tmp_path):
    source = lines(
        tmp_path / "a.ffm", (f"{i % 2} 0:{i % 3}:0.5 0:{i % 4}:0.{i % 9}" for i in range(ROWS))
    )
    table = described(source, tmp_path)["table"]
    assert table["categorical"] == [{"name": "f0", "separator": " "}]
    group = {"name": "weighed_f0", "lists": ["f0"], "numbers": ["f0_value"], "length": 4096}
    assert table["sequence"] == [group]
    built(source, {"table": table, "frequency_limit": 0}, tmp_path / "data")
    [group] = FeatureSpec.load(tmp_path / "data").sequences
    assert group.columns == ("f0", "f0_value")
    weights = np.fromfile(tmp_path / "data/train/f0_value.bin", "<f4").reshape(-1, 2)
    assert (weights[:, 0] == 0.5).all()
    assert len(np.unique(weights[:, 1])) == 9


def test_a_list_of_weights_in_parquet_is_found_by_its_name(tmp_path):
    rows = [
        {"y": i % 2, "tags": ["a", "b", "c"][: i % 4], "tag_weights": [0.1 * i, 2.5, 0.5][: i % 4]}
        for i in range(ROWS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    content = described(tmp_path / "t.parquet", tmp_path)
    table = content["table"]
    assert table["categorical"] == [{"name": "tags", "list": True}]
    group = {"name": "weighed_tags", "lists": ["tags"], "numbers": ["tag_weights"], "length": 4096}
    assert table["sequence"] == [group]
    built(tmp_path / "t.parquet", content, tmp_path / "data")
    assert len(FeatureSpec.load(tmp_path / "data").sequences) == 1


def weighed_rows(i):
    """Weights of every kind: floats, whole numbers, texts that are numbers."""
    return {
        "y": i % 2,
        "tags": ["a", "b", "c"][: 1 + i % 3],
        "tag_scores": [-0.5 * (i % 4), 2.5, 0.5][: 1 + i % 3],
        "tag_weights": [i % 5, 1, 0][: 1 + i % 3],
        "tag_values": [str(i % 5), "1.5", "0"][: 1 + i % 3],
    }


def weighed_parquet(path):
    pq.write_table(pa.Table.from_pylist([weighed_rows(i) for i in range(ROWS)]), path)


def weighed_json(path):
    lines(path, (json.dumps(weighed_rows(i)) for i in range(ROWS)))


def weighed_csv(path):
    texts = [
        [
            "|".join(map(str, value)) if isinstance(value, list) else str(value)
            for value in weighed_rows(i).values()
        ]
        for i in range(ROWS)
    ]
    lines(path, [",".join(weighed_rows(0)), *map(",".join, texts)])


@pytest.mark.parametrize("write", [weighed_parquet, weighed_json, weighed_csv])
def test_lists_of_weights_of_any_kind_are_numbers_of_one_group(tmp_path, write, capsys):
    source = tmp_path / "rows.data"
    write(source)
    content = described(source, tmp_path)
    table = content["table"]
    how = {"separator": "|"} if write is weighed_csv else {"list": True}
    assert table["categorical"] == [{"name": "tags"} | how]
    numbers = ["tag_weights", "tag_values", "tag_scores"]
    group = {"name": "weighed_tags", "lists": ["tags"], "numbers": numbers, "length": 4096}
    assert table["sequence"] == [group]
    low = "'tag_scores' has weights from -1.5 on; model.event_weights refuses those below 0"
    text = (tmp_path / "written.yaml").read_text()
    assert f"    # {low}\n" in text
    assert "model.event_weights={weighed_tags: tag_weights}" in text
    assert f"note: {low}" in " ".join(capsys.readouterr().out.split())
    built(source, content, tmp_path / "data")
    [group] = FeatureSpec.load(tmp_path / "data").sequences
    assert group.columns == ("tags", *numbers)
    found = np.fromfile(tmp_path / "data/train/tag_scores.bin", "<f4")
    assert found.min() == -1.5


def test_a_list_of_other_texts_or_separators_weighs_nothing(tmp_path):
    rows = (f"{i % 2},{'ab'[i % 2]}|c,{i % 3};1,{i % 3}|high" for i in range(ROWS))
    source = lines(tmp_path / "a.csv", ["y,tags,tag_weights,tag_scores", *rows])
    table = described(source, tmp_path)["table"]
    assert names_of(table["categorical"]) == ["tags", "tag_weights", "tag_scores"]
    assert "sequence" not in table


@pytest.mark.parametrize("is_text", [True, False])
def test_a_label_without_single_values_is_refused(tmp_path, is_text):
    if is_text:
        rows = (f"{i % 2},{'ab'[i % 2]}|c," for i in range(ROWS))
        source = lines(tmp_path / "a.csv", ["y,tags,none", *rows])
    else:
        source = tmp_path / "a.parquet"
        rows = [{"y": i % 2, "tags": [i % 3, 7], "none": None} for i in range(ROWS)]
        pq.write_table(pa.Table.from_pylist(rows), source)
    for name, message in (
        ("none", "label=none: no row has a value; name another column"),
        ("tags", "label=tags: got values of type list, want a number, a truth or a text per row"),
    ):
        with pytest.raises(Refused, match=message) as refused:
            described(source, tmp_path, f"label={name}")
        assert "\n" not in refused.value.message


def test_json_lines_keep_their_order_with_several_threads(tmp_path):
    many = 30_000
    source = lines(
        tmp_path / "a.jsonl", (json.dumps({"y": i % 2, "c": "a", "n": i}) for i in range(many))
    )
    table = {
        "sources": {"t": {"files": str(source), "format": "jsonl"}},
        "label": {"name": "y"},
        "categorical": ["c"],
        "keep": ["n"],
    }
    built(source, {"table": table, "frequency_limit": 0}, tmp_path / "data", threads=4)
    numbers = kept(tmp_path / "data", "n")
    assert numbers == [str(i) for i in range(len(numbers))]


def test_objects_of_many_names_are_columns(tmp_path):
    nested = [{f"k{i}": i, f"K{i}": i} for i in range(600)]  # names that differ by their case
    rows = ({"y": i % 2, "c": "a", f"k{i}": 1, "l": [of], "d": of} for i, of in enumerate(nested))
    source = lines(tmp_path / "a.jsonl", map(json.dumps, rows))
    table = {
        "sources": {"t": {"files": str(source), "format": "jsonl"}},
        "label": {"name": "y"},
        "categorical": ["c", {"name": "l", "list": True}],
        "keep": ["k7", "d"],
    }
    built(source, {"table": table, "frequency_limit": 0}, tmp_path / "data")
    assert json.loads(kept(tmp_path / "data", "d")[0]).keys() == {"k0", "K0"}
    assert kept(tmp_path / "data", "k7").count("1") == 1


def test_many_indices_of_libsvm_are_lists(tmp_path):
    row = " ".join(f"{k}:0.{k}" for k in range(1, MOST_INDICES + 2))
    content = described(lines(tmp_path / "a.svm", [f"0 {row}", f"1 {row} 999:3"] * 30), tmp_path)
    table = content["table"]
    assert table["categorical"] == [{"name": "ids", "separator": " "}]
    group = {"name": "weighed_ids", "lists": ["ids"], "numbers": ["values"], "length": 4096}
    assert table["sequence"] == [group]


@needs_data
def test_public_files(tmp_path):
    directory = SHARED / "movielens/ml-latest-small"
    content = described(directory, tmp_path)
    table = content["table"]
    assert table["sources"]["rows"]["files"].startswith("${source}/ratings.csv")
    assert table["label"] == {"name": "rating", "expression": 'CAST("rating" AS DOUBLE) >= 4'}
    assert names_of(table["categorical"]) == ["userId", "movieId"]
    assert table["order_by"] == ['CAST("timestamp" AS BIGINT)']
    built(directory, content, tmp_path / "data")
    avazu = described(SHARED / "avazu_head_10k.csv.gz", tmp_path)["table"]
    assert avazu["label"] == {"name": "click"}
    assert "id" not in names_of(avazu["categorical"])
    assert "device_model" in names_of(avazu["categorical"])


def test_a_column_named_as_a_label_is_no_feature_and_a_header_that_is_none_is_told(
    tmp_path, capsys
):
    rows = [f"{i % 2 if i != 7 else ''},{i % 5}" for i in range(60)]
    (tmp_path / "gap.csv").write_text("\n".join(["label,a", *rows]) + "\n")
    table = described(tmp_path / "gap.csv", tmp_path)["table"]
    assert names_of(table["categorical"]) == ["a"]
    rows = [f"{i % 2},{i % 5},{i % 3}" for i in range(60)]
    (tmp_path / "twice.csv").write_text("\n".join(["label,a,a", *rows]) + "\n")
    described(tmp_path / "twice.csv", tmp_path)
    captured = capsys.readouterr()
    printed = " ".join((captured.out + captured.err).split())
    assert "no first line of names: the columns are c1 to c3; names would differ" in printed


def test_a_text_for_no_value_is_one_in_every_column_of_text(tmp_path, capsys):
    """A penguin's sex is NA, as its mass is: neither a third value nor what the label tells."""
    sexes = ["NA", "male", "female", "male", "male"]
    rows = (f"{sexes[i % 5]},{'NA' if i % 5 == 0 else i / 7},{'abc'[i % 3]}" for i in range(ROWS))
    source = lines(tmp_path / "a.csv", ["sex,mass,island", *rows])
    content = described(source, tmp_path, "label=sex")
    assert content["table"]["label"]["expression"] == "\"sex\" = 'female'"
    printed = " ".join(capsys.readouterr().out.split())
    assert "sex text 20.0 2 male, female label" in printed
    bad = "25 % ones; 20 % of the rows have none and end the run: on_bad=skip leaves them out"
    assert bad in printed
    assert bad in (tmp_path / "written.yaml").read_text()
    with pytest.raises(Refused, match=r"a\.csv, row 1: the label is missing"):
        built(source, content, tmp_path / "refused")
    content["table"]["order_by"] = ["CAST(mass AS DOUBLE)"]
    with pytest.raises(Refused, match=r"row 1 in the order of table\.order_by: the label is miss"):
        built(source, content, tmp_path / "ordered")


def test_a_number_of_the_row_is_no_feature(tmp_path):
    rows = (f"{ROWS - i},{i * i},{'abc'[i % 3]},{i % 2}" for i in range(ROWS))
    source = lines(tmp_path / "a.csv", ["rownames,square,city,label", *rows])
    table = described(source, tmp_path)["table"]
    assert names_of(table["numerical"]) == ["square"]
    assert "#  - rownames: numbers the rows one by one" in (tmp_path / "written.yaml").read_text()


def test_ids_of_libffm_are_no_numbers(tmp_path):
    rows = (f"{i % 2} 0:{i % 50}:1 1:{i % 20}:1 2:7:{i}" for i in range(ROWS))
    table = described(lines(tmp_path / "a.ffm", rows), tmp_path)["table"]
    assert table["categorical"] == ["f0", "f1"]
    assert [feature["name"] for feature in table["numerical"]] == ["f2_value"]
