"""Commands, options, values and files that README.md, docs/ and benchmarks/README.md tell to type."""

import re
from importlib import import_module

import pytest
import yaml

from dataloading.dataset.feature_spec import FeatureSpec
from tests.project.documented import (
    COMMANDS,
    NO_OPTIONS,
    PAGES,
    ROOT,
    blocks_of,
    check_command,
    check_options,
    check_space,
    check_span,
    commands_in,
    spans_of,
    tables_in,
)


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_tells_to_type_is_accepted(page):
    text = PAGES[page]
    found = []
    blocks = [block for language, block in blocks_of(text) if language in ("", "bash")]
    for is_whole, parts in ((True, blocks), (False, spans_of(text))):
        for part in parts:
            commands = list(commands_in(part, text))
            try:  # a page has many parts, and the wrong ones are listed together
                for command in commands:
                    check_command(command, text, is_whole=is_whole)
                if not is_whole and not commands:
                    check_span(part)
            except ValueError as error:
                found.append(f"{part}: {error}")
    assert found == []


def test_a_wrong_module_flag_key_value_or_file_is_found():
    for text in (
        "python -m preprocess dataset=avazu",
        "python -m benchmarks.floors --explained",
        "python dlrm.py data.paht=DIR",
        "torchrun --nproc-per-node 2 dlrm.py model.cross.num_layers=2",
        "python dlrm.py --multirun optimizer.lr=0.1,-1",
        "python -m serving.export checkpoint=a output=b dtype=int7",
        "python -m preproc --config-dir benchmarks/peers dataset=nothing source=a output=b",
        "uv run --extra cpus pytest",
        "pytest tests/nothing",
    ):
        with pytest.raises(ValueError, match=r"\w"):
            check_command(*commands_in(text, ""), "", is_whole=True)
    for span in (
        "sharding.tables={cat_0: {sharding: row_wise}}",
        "train.amp=fp15",
        "model.pooling=sum|max",
    ):
        with pytest.raises(ValueError, match=r"\w"):
            check_span(span)


def test_the_yaml_of_a_page_is_read_by_its_reader(tmp_path):
    seen = set()
    for page, text in PAGES.items():
        for table in tables_in(text):
            check_options(["source=a", "output=b"], ["preproc"], is_whole=True, table=table)
            seen.add(page)
        for content in map(
            yaml.safe_load, (of for language, of in blocks_of(text) if language == "yaml")
        ):
            # That of a sequence group has no label, and is a part of one.
            if "label" in content.get("channel_spec", ()):
                # The page says of this one: "the same chunks with paths below test/".
                sources = yaml.safe_dump(content["source_spec"]["train"]).replace("train/", "test/")
                content["source_spec"]["test"] = yaml.safe_load(sources)
                (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(content))
                for chunk in (
                    chunk for chunks in content["source_spec"].values() for chunk in chunks
                ):
                    for name in chunk["files"]:
                        (tmp_path / name).parent.mkdir(exist_ok=True)
                        (tmp_path / name).touch()
                assert FeatureSpec.load(tmp_path, measure=False).categorical[2].name == "genres"
            elif "table" in content and "layout" not in content:
                text = yaml.safe_dump(content)
                words = ["dataset=movielens_history", "source=a", "output=b"]
                check_options(words, ["preproc"], is_whole=True, table=text)
            elif any("." in key for key in content):
                check_space(yaml.safe_dump(content))
            else:
                assert "layout" in content or "source_spec" in content
    assert seen == {
        "docs/your_data.md",
        "docs/serving.md",
        "docs/sequences.md",
        "docs/tasks_and_metrics.md",
    }


def test_python_of_a_page_imports_what_is_there():
    for page, text in PAGES.items():
        for code in (code for language, code in blocks_of(text) if language == "python"):
            for module, names in re.findall(r"^from ([\w.]+) import (.+)$", code, re.MULTILINE):
                path = ROOT / module.replace(".", "/")
                source = path.with_suffix(".py")
                if module == "hybrid_parallel_recsys":
                    assert set(names.split(", ")) <= set(import_module(module).__all__), page
                    continue
                if (ROOT / module.partition(".")[0]).is_dir():
                    for name in names.partition("  #")[0].split(", "):
                        assert re.search(
                            rf"^(class|def) {name}\b|^{name}\b", source.read_text(), re.MULTILINE
                        ), page


def test_what_is_no_option_stands_in_a_page():
    named = {span for text in PAGES.values() for span in spans_of(text)}
    assert set(NO_OPTIONS) <= named


def test_every_command_of_the_project_is_checked():
    """Of modules that read options as `key=value`."""
    calls = [
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__main__")
        for folder in ("nn", "serving", "preproc", "compare", "sweep")
        for path in (ROOT / folder).rglob("*.py")
        if "command(run," in path.read_text()
    ]
    assert set(calls) <= set(COMMANDS)
