"""Existence of the files, links and flags of NVIDIA's recipe that README.md and docs/ name; commands: test_documented.py."""

import re
from pathlib import Path

import pytest
import yaml

from configs.built_in import MODELS
from configs.options import describe
from configs.schema import Config
from nn.models.registry import find_options
from tests.project.layout import is_ours

OPTIONS = {name: find_options(name) for name in MODELS}

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FLAGS = (ROOT / "docs/tf2_flags.md").read_text()
# README.md, docs/architecture.md, benchmarks/README.md, ... -> text
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md"]
    if is_ours(path)
}

# Every flag of NVIDIA's TF2 recipe (main.py, dlrm.py, dcnv2.py), those that do nothing included.
TF2_FLAGS = [
    "batch_size",
    "valid_batch_size",
    "top_mlp_dims",
    "bottom_mlp_dims",
    "embedding_dim",
    "interaction",
    "optimizer",
    "learning_rate",
    "beta1",
    "beta2",
    "warmup_steps",
    "decay_start_step",
    "decay_steps",
    "num_cross_layers",
    "cross_layer_projection_dim",
    "mode",
    "seed",
    "epochs",
    "max_steps",
    "evals_per_epoch",
    "auc_thresholds",
    "print_freq",
    "amp",
    "loss_scale",
    "xla",
    "cpu",
    "run_eagerly",
    "tfdata_debug",
    "inter_op_parallelism",
    "intra_op_parallelism",
    "column_slice_threshold",
    "row_slice_threshold",
    "data_parallel_threshold",
    "cpu_offloading_threshold_gb",
    "data_parallel_input",
    "concat_embedding",
    "use_mde_embeddings",
    "embedding_zeros_initializer",
    "save_checkpoint_path",
    "restore_checkpoint_path",
    "profiler_start_step",
    "profiled_rank",
    "log_path",
    "dataset_path",
    "feature_spec",
    "dataset_type",
    "dist_strategy",
    "embedding_trainable",
    "synthetic_dataset_use_feature_spec",
    "synthetic_dataset_train_batches",
    "synthetic_dataset_valid_batches",
    "synthetic_dataset_cardinalities",
    "synthetic_dataset_hotness",
    "synthetic_dataset_num_numerical_features",
]

TRAINING_KEYS = {
    key for options in OPTIONS.values() for key, _ in describe(Config, sections={"model": options})
}


def file_map() -> dict[str, str]:
    """Path -> purpose, of every line of the README's map."""
    block = README.split("## Map")[1].split("```")[1]
    lines = [
        re.fullmatch(r"(\S+(?:, \S+)*) {2,}(\S.*)", line) for line in block.split("\n") if line
    ]
    assert all(lines), "a line of the map is no path and purpose"
    return {path: line[2] for line in lines for path in line[1].split(", ")}


def subpackages() -> list[str]:
    """Return every package of the project; of the tests, those that mirror no package."""
    found = filter(is_ours, ROOT.glob("[!.]*/**/__init__.py"))
    packages = [str(path.parent.relative_to(ROOT)) for path in found]
    mirrors = {f"tests/{package}" for package in packages}
    return sorted(f"{package}/" for package in packages if package not in mirrors)


def code(text: str) -> list[str]:
    """Lines of fenced blocks and code spans."""
    blocks = [line for block in text.split("```")[1::2] for line in block.splitlines()]
    spans = re.findall(r"`([^`\n]+)`", "".join(text.split("```")[::2]))
    return blocks + spans


def keys_in(line: str) -> set[str]:
    """Keys that a command or a span sets."""
    return set(re.findall(r"(?:^|[\s'\"])([a-z_]+(?:\.[a-z0-9_]+)*)=", line))


@pytest.mark.parametrize("path", file_map())
def test_the_file_map_names_what_is_there(path):
    found = ROOT / path
    assert found.is_dir() if path.endswith("/") else found.is_file()


def test_the_file_map_says_each_purpose_in_under_ten_words():
    assert {path: text for path, text in file_map().items() if len(text.split()) >= 10} == {}


def test_every_subpackage_and_every_python_file_beside_them_is_in_the_map():
    assert {"nn/", "nn/ops/triton/", "preproc/criteo/", "tests/helpers/"} <= set(subpackages())
    files = [path.name for path in ROOT.glob("*.py") if is_ours(path)]
    assert sorted({*subpackages(), *files} - set(file_map())) == []


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 180


def test_the_readme_names_eight_files_to_read_first():
    _, _, after = README.partition("Read these eight files first")
    files = re.findall(r"`([\w/]+\.py)`", after)
    assert len(files) == 8
    assert [path for path in files if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_and_files_named_in_a_page_exist(page):
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#]+)\)", PAGES[page])
    spans = re.findall(
        r"`((?:nn|dataloading|preproc|configs|docs|tests|benchmarks)/[\w./]*)`", PAGES[page]
    )
    missing = [each for each in links if not (folder / each).exists()]
    assert missing + [each for each in spans if not (ROOT / each).exists()] == []


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_links_to_headings_have_them(page):
    links = re.findall(r"\]\(([^)#]*)#([^)]+)\)", PAGES[page])
    assert [
        (path, anchor)
        for path, anchor in links
        if anchor not in anchors(((ROOT / page).parent / path if path else ROOT / page).read_text())
    ] == []


@pytest.mark.parametrize(
    "path",
    sorted(filter(is_ours, (ROOT / "configs/experiment").glob("*.yaml"))),
    ids=lambda path: path.stem,
)
def test_every_key_of_an_experiment_is_an_option(path):
    def flat(content: dict, prefix: str = "") -> set[str]:
        return {
            key
            for name, value in content.items()
            for key in (
                flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name}
            )
        }

    options = flat(yaml.safe_load(path.read_text())) - {"defaults"}
    # Tasks have the names of the dataset's labels.
    assert {option for option in options if not option.startswith("tasks.")} <= TRAINING_KEYS


def test_every_flag_of_the_tf2_recipe_has_one_row():
    first, _, _ = FLAGS.partition("## Flags that only")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", first, flags=re.MULTILINE)
    assert sorted(flag for flag, _ in rows) == sorted(TF2_FLAGS)


def test_a_row_of_the_flag_table_gives_a_key_or_says_gone():
    rows = re.findall(r"^\| `\w+`.*? \| (.+?) \|", FLAGS, flags=re.MULTILINE)
    assert [each for each in rows if not (keys_in(" ".join(code(each))) or "gone" in each)] == []


def test_the_readme_gives_the_commands_of_the_quick_start_word_for_word():
    for line in (
        "pip install uv",
        "uv run --extra cpu dlrm.py",
        "uv run --extra cpu --group dev pytest",
    ):
        assert any(each.startswith(line) for each in code(README)), line
    assert "run --extra cpu --group dev pytest" in (ROOT / ".ci/run").read_text()
