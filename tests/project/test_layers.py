"""Imports run one way: configs <- dataloading <- nn <- main, and dataloading <- preproc. Read from the files, not run."""

import ast
import importlib
import re
import sys
from collections import Counter, deque
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from configs.built_in import MODELS
from tests.project.layout import HOLD_STATEMENTS, is_ours, parsed

ROOT = Path(__file__).resolve().parents[2]

# What each package may import of ours, apart from itself.
LAYERS = {
    "configs": set(),
    "dataloading": {"configs"},
    "preproc": {"configs", "dataloading"},
    "nn": {"configs", "dataloading"},
    "compare": {"configs", "dataloading", "nn"},
    "serving": {"configs", "dataloading", "preproc", "nn"},
    "status": {"compare", "configs", "dataloading", "nn"},
    "sweep": {"compare", "configs", "dataloading", "nn"},
    # It names the modules of others as texts, and imports them when a name is used.
    "hybrid_parallel_recsys": {"configs"},
    "setup": set(),
    "main": {"compare", "configs", "nn", "preproc"},
    "dlrm": {"configs", "main"},
    "dcnv2": {"configs", "main"},
    "benchmarks": {"configs", "dataloading", "nn", "serving", "sweep", "main"},
}
# What a subpackage may import beyond that of its package: Python's view of a run takes raw values too.
FURTHER = {"nn.library": {"preproc"}}
# What each subpackage of `nn` and `preproc` may import of its own package: a folder, or a module beside the folders.
SUBPACKAGES = {
    "dataloading.dataset": {"dataloading.gather"},
    "dataloading.gather": set(),
    "dataloading.keys": {"dataloading.dataset", "dataloading.keys.kernels"},
    "dataloading.keys.kernels": set(),
    "dataloading.batch": {"dataloading.dataset"},
    "dataloading.partition": set(),
    "dataloading.embedding_sizes": set(),
    "dataloading.randomness": set(),
    "dataloading.reader_processes": set(),
    "dataloading.batch_memory": {"dataloading.batch", "dataloading.reader_processes"},
    "dataloading.synthetic_history": {"dataloading.dataset", "dataloading.randomness"},
    "dataloading.teacher": {
        "dataloading.dataset",
        "dataloading.randomness",
        "dataloading.synthetic_history",
    },
    "dataloading.storage": {"dataloading.dataset"},
    "dataloading.synthetic": {
        "dataloading.dataset",
        "dataloading.gather",
        "dataloading.randomness",
        "dataloading.synthetic_history",
        "dataloading.teacher",
    },
    "dataloading.stream_source": {
        "dataloading.dataset",
        "dataloading.held_out_source",
        "dataloading.lineage",
    },
    "dataloading.lineage": set(),
    "dataloading.row_sql": set(),
    "dataloading.held_out_source": {"dataloading.dataset"},
    "dataloading.id_counts": {"dataloading.dataset"},
    "dataloading.permuted_source": {"dataloading.dataset", "dataloading.gather"},
    "dataloading.negatives_source": {
        "dataloading.dataset",
        "dataloading.gather",
        "dataloading.randomness",
    },
    "dataloading.arrow_table": {"dataloading.dataset"},
    "dataloading.batch_reader": {
        "dataloading.batch",
        "dataloading.batch_memory",
        "dataloading.dataset",
        "dataloading.partition",
    },
    "dataloading.loader": {
        "dataloading.batch",
        "dataloading.batch_memory",
        "dataloading.batch_reader",
        "dataloading.dataset",
        "dataloading.gather",
        "dataloading.keys",
        "dataloading.partition",
        "dataloading.reader_processes",
    },
    # The launcher of a node checks the versions before it imports torch.
    "nn.distributed": {"nn.ops", "nn.versions"},
    "nn.ops": set(),
    "nn.ops.triton": {"nn.ops"},
    "nn.ops.triton.fp8": {"nn.ops", "nn.ops.triton"},
    "nn.layers": {"nn.ops", "nn.ops.triton", "nn.ops.triton.fp8"},
    "nn.embedding": {"nn.ops", "nn.ops.triton"},
    "nn.embedding.rules": {"nn.embedding", "nn.ops"},
    "nn.layers.interactions": {"nn.layers", "nn.ops", "nn.ops.triton"},
    "nn.models": {
        "nn.embedding",
        "nn.layers",
        "nn.layers.interactions",
        "nn.ops",
    },
    "nn.tiers": {"nn.distributed", "nn.embedding", "nn.layers", "nn.ops"},
    "nn.sharding": {
        "nn.distributed",
        "nn.embedding",
        "nn.layers",
        "nn.ops",
        "nn.tiers",
    },
    "nn.planning": {"nn.embedding", "nn.models", "nn.sharding", "nn.tiers"},
    "nn.checkpoint": {"nn.distributed", "nn.ops", "nn.tiers"},
    "nn.loggers": set(),
    "nn.observers": {"nn.distributed", "nn.models"},
    "nn.plots": {"nn.models"},
    "nn.observability": {
        "nn.distributed",
        "nn.loggers",
        "nn.models",
        "nn.observers",
        "nn.ops",
        "nn.planning",
        "nn.plots",
        "nn.tiers",
    },
    "nn.metrics": {"nn.distributed", "nn.models", "nn.ops"},
    "nn.training": {
        "nn.checkpoint",
        "nn.distributed",
        "nn.embedding",
        "nn.embedding.rules",
        "nn.layers",
        "nn.metrics",
        "nn.models",
        "nn.observability",
        "nn.observers",
        "nn.ops",
        "nn.ops.triton",
        "nn.sharding",
        "nn.tiers",
    },
    "nn.export": {"nn.checkpoint"},
    "nn.deltas": {"nn.checkpoint", "nn.distributed", "nn.observers", "nn.sharding"},
    "nn.replay": {"nn.checkpoint", "nn.deltas", "nn.export"},
    "nn.library_warnings": set(),
    "nn.versions": set(),
    "nn.multirun": {"nn.distributed", "nn.shared_imports"},
    "nn.shared_imports": {"nn.library_warnings", "nn.run", "nn.versions"},
    "nn.scores": {
        "nn.build",
        "nn.checkpoint",
        "nn.checks",
        "nn.distributed",
        "nn.models",
        "nn.observability",
        "nn.resume",
        "nn.training",
    },
    "nn.hypertune": {"nn.models", "nn.observers"},
    "nn.early_checks": {"nn.checkpoint", "nn.distributed", "nn.loggers", "nn.models", "nn.scores"},
    "nn.build": {
        "nn.checkpoint",
        "nn.distributed",
        "nn.embedding",
        "nn.layers",
        "nn.models",
        "nn.planning",
        "nn.sharding",
        "nn.tiers",
        "nn.training",
    },
    "nn.resume": {
        "nn.build",
        "nn.checkpoint",
        "nn.distributed",
        "nn.embedding",
        "nn.loggers",
        "nn.models",
        "nn.observability",
        "nn.next_day",
        "nn.training",
    },
    "nn.days": {
        "nn.checkpoint",
        "nn.distributed",
        "nn.multirun",
        "nn.observability",
        "nn.shared_imports",
    },
    "nn.next_day": {
        "nn.build",
        "nn.checkpoint",
        "nn.distributed",
        "nn.embedding",
        "nn.models",
        "nn.training",
    },
    "nn.step_floor": {"nn.embedding", "nn.models", "nn.tiers", "nn.training"},
    "nn.saved_config": {"nn.models"},
    "nn.library": {
        "nn.build",
        "nn.checkpoint",
        "nn.distributed",
        "nn.early_checks",
        "nn.embedding",
        "nn.library_warnings",
        "nn.models",
        "nn.modes",
        "nn.observability",
        "nn.observers",
        "nn.saved_config",
        "nn.scores",
        "nn.session",
        "nn.training",
        "nn.versions",
    },
    "nn.run": {"nn.modes"},
    "nn.checks": {
        "nn.build",
        "nn.distributed",
        "nn.embedding",
        "nn.models",
        "nn.observability",
        "nn.ops",
        "nn.resume",
        "nn.training",
    },
    "nn.session": {
        "nn.build",
        "nn.checkpoint",
        "nn.checks",
        "nn.distributed",
        "nn.loggers",
        "nn.models",
        "nn.observability",
        "nn.planning",
        "nn.resume",
        "nn.training",
    },
    "nn.baseline": {"nn.metrics", "nn.models", "nn.observability"},
    "nn.modes": {
        "nn.baseline",
        "nn.build",
        "nn.checkpoint",
        "nn.checks",
        "nn.deltas",
        "nn.distributed",
        "nn.hypertune",
        "nn.models",
        "nn.observability",
        "nn.observers",
        "nn.planning",
        "nn.plots",
        "nn.resume",
        "nn.session",
        "nn.next_day",
        "nn.step_floor",
        "nn.training",
    },
    "serving.raw_records": set(),
    "serving.raw_description": {"serving.raw_records"},
    "serving.manifest": {"serving.raw_description", "serving.raw_records"},
    "serving.vocabulary": {"serving.manifest"},
    "serving.versions": {"serving.manifest", "serving.raw_records", "serving.vocabulary"},
    "serving.model_names": {"serving.manifest", "serving.versions"},
    "serving.token_file": set(),
    "serving.http_address": set(),
    "serving.client": {"serving.http_address", "serving.manifest", "serving.token_file"},
    "serving.evaluate_accuracy": {"serving.client"},
    "serving.evaluate_latency": {"serving.client"},
    "serving.inference": {
        "serving.manifest",
        "serving.raw_records",
        "serving.versions",
        "serving.vocabulary",
    },
    "serving.value_search": {
        "serving.inference",
        "serving.manifest",
        "serving.raw_records",
        "serving.vocabulary",
    },
    "serving.exporting": {
        "serving.inference",
        "serving.manifest",
        "serving.raw_records",
        "serving.value_search",
        "serving.versions",
        "serving.vocabulary",
    },
    "serving.gpu": {"serving.inference", "serving.manifest"},
    "serving.loading": {"serving.gpu", "serving.inference"},
    "serving.triton": {"serving.inference", "serving.loading", "serving.manifest"},
    "serving.server": {
        "serving.inference",
        "serving.manifest",
        "serving.model_names",
    },
    "serving.export": {"serving.exporting", "serving.manifest", "serving.versions"},
    "serving.run": {
        "serving.http_address",
        "serving.inference",
        "serving.loading",
        "serving.manifest",
        "serving.model_names",
        "serving.server",
        "serving.token_file",
        "serving.versions",
    },
    "serving.rollback": {"serving.versions"},
    "serving.forget": {"serving.exporting", "serving.manifest", "serving.value_search"},
    "serving.apply": {"serving.exporting", "serving.manifest", "serving.versions"},
    "preproc.column_store": set(),
    "preproc.fitted_state": {
        "preproc.dataset_writer",
        "preproc.text_columns",
        "preproc.vocabulary_file",
    },
    "preproc.forgetting": {
        "preproc.dataset_writer",
        "preproc.fitted_state",
        "preproc.vocabulary_file",
    },
    "preproc.text_columns": set(),
    "preproc.raw_files": set(),
    "preproc.report": set(),
    "preproc.vocabulary_sql": set(),
    "preproc.vocabulary_file": set(),
    "preproc.work_directory": {"preproc.column_store", "preproc.report"},
    "preproc.dataset_writer": {"preproc.column_store"},
    "preproc.ordered_map": set(),
    "preproc.line_blocks": {"preproc.raw_files", "preproc.vocabulary_sql"},
    "preproc.complete_dataset": {
        "preproc.dataset_writer",
        "preproc.fitted_state",
        "preproc.report",
        "preproc.text_columns",
        "preproc.work_directory",
    },
    "preproc.convert": {"preproc.raw_files", "preproc.report"},
    "preproc.kafka_parts": {"preproc.report", "preproc.table.pipeline", "preproc.work_directory"},
    "preproc.synthetic": {"preproc.convert", "preproc.ordered_map", "preproc.report"},
    "preproc.listens": {"preproc.report", "preproc.work_directory"},
    "preproc.verify": {"preproc.report", "preproc.vocabulary_file"},
    "preproc.table": {
        "preproc.dataset_writer",
        "preproc.fitted_state",
        "preproc.line_blocks",
        "preproc.ordered_map",
        "preproc.raw_files",
        "preproc.report",
        "preproc.text_columns",
        "preproc.vocabulary_sql",
        "preproc.work_directory",
    },
    "preproc.describe": {
        "preproc.fitted_state",
        "preproc.line_blocks",
        "preproc.raw_files",
        "preproc.table",
        "preproc.text_columns",
        "preproc.vocabulary_sql",
    },
    "preproc.frames": {"preproc.__main__", "preproc.describe", "preproc.raw_tables"},
    "preproc.table.pipeline": {
        "preproc.complete_dataset",
        "preproc.fitted_state",
        "preproc.raw_files",
        "preproc.report",
        "preproc.table",
        "preproc.text_columns",
        "preproc.vocabulary_sql",
        "preproc.work_directory",
    },
    "preproc.transformed_rows": {
        "preproc.criteo",
        "preproc.fitted_state",
        "preproc.table",
        "preproc.vocabulary_sql",
        "preproc.work_directory",
    },
    "preproc.raw_tables": {"preproc.fitted_state", "preproc.transformed_rows"},
    "preproc.criteo": {
        "preproc.column_store",
        "preproc.complete_dataset",
        "preproc.dataset_writer",
        "preproc.line_blocks",
        "preproc.ordered_map",
        "preproc.raw_files",
        "preproc.report",
        "preproc.text_columns",
        "preproc.vocabulary_sql",
        "preproc.work_directory",
    },
    "preproc.__main__": {
        "preproc.convert",
        "preproc.describe",
        "preproc.kafka_parts",
        "preproc.criteo",
        "preproc.listens",
        "preproc.report",
        "preproc.synthetic",
        "preproc.table.pipeline",
        "preproc.verify",
        "preproc.work_directory",
    },
}
MOST_MODULES = 21
KNOWS_RANKS = {
    "nn.distributed.all_to_all",
    "nn.distributed.link_rates",
    "nn.distributed.process_group",
    "nn.planning.balance",
    "nn.planning.plan_problem",
    "nn.sharding.sharded_tables",
    "nn.sharding.tables",
    "nn.sharding.owned_shard",
    "nn.sharding.placement",
    "nn.sharding.planned_tables",
    "nn.sharding.rank_group",
    "nn.planning.host_tables",
    "nn.planning.planner",
    "nn.checkpoint.state",
    "nn.distributed.node_agent",
    "nn.checkpoint.staging",
    "nn.checkpoint.tensor_files",
}
# The last one tells Hydra something.
READS_ENVIRONMENT = {
    "nn.distributed.process_group",
    "nn.distributed.launcher",
    "nn.distributed.node_launcher",
    "nn.distributed.node_agent",
    "main",
    "configs.arguments",  # one rank of a node warns of a renamed option
    "configs.command_line",
    "configs.console",  # COLUMNS
    "configs.stop_signals",
    "dataloading.storage.local_copy",
    "dataloading.storage.object_store",
    "nn.hypertune",
    "nn.shared_imports",
    "preproc.__main__",  # where Java is
    "sweep.gpus",
    "sweep.trial_process",
    "sweep.trial_server",
}


@dataclass(frozen=True, slots=True)
class Import:
    """`module` as imported; `names` what `from` takes out of it; lazy ones stand in a function, or are for type checkers."""

    module: str
    names: tuple[str, ...]
    lazy: bool

    @property
    def targets(self) -> list[str]:
        """Everything that may be a module: `from torch import distributed` takes a module too."""
        return [self.module, *(f"{self.module}.{name}" for name in self.names)]


@cache
def imports_in(source: str) -> list[Import]:
    """Every import of a file."""
    found = []
    # Statements alone, of which expressions hold none.
    open_ends = deque([(parsed(source), False)])
    while open_ends:
        node, lazy = open_ends.popleft()
        if isinstance(node, ast.Import):
            found += [Import(each.name, (), lazy) for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.append(Import(module, tuple(each.name for each in node.names), lazy))
        lazy |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types_only(node)
        open_ends.extend(
            (child, lazy)
            for child in ast.iter_child_nodes(node)
            if isinstance(child, HOLD_STATEMENTS)
        )
    return found


def _is_for_types_only(node: ast.AST) -> bool:
    """Tell whether a block is `if TYPE_CHECKING:`, whose imports are never run."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def attributes_in(source: str) -> set[str]:
    """Dotted names such as `torch.distributed` or `os.environ` that a file uses."""
    found = {_dotted(n) for n in ast.walk(parsed(source)) if isinstance(n, ast.Attribute)}
    return found - {None}


def _dotted(node: ast.expr) -> str | None:
    """Return a name with its attributes; None for those of anything else."""
    if isinstance(node, ast.Attribute):
        of = _dotted(node.value)
        return of and f"{of}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


@cache
def sources() -> dict[str, str]:
    """Module name -> text, of all files of ours but the tests."""
    files = [*ROOT.glob("*.py"), *(p for top in LAYERS for p in (ROOT / top).rglob("*.py"))]
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (
            path.read_text()
        )
        for path in filter(is_ours, files)
    }


def is_below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@cache
def ours(module: str, lazy: bool) -> set[str]:
    """Modules of ours that `module` imports; with `lazy` those inside functions too."""
    found = [each for each in imports_in(sources()[module]) if lazy or not each.lazy]
    return {target for each in found for target in each.targets if target in sources()}


def reached_from(module: str, lazy: bool = True) -> set[str]:
    """`module` and all of ours that its import brings along."""
    reached, open_ends = {module}, [module]
    while open_ends:
        new = ours(open_ends.pop(), lazy) - reached
        reached |= new
        open_ends += new
    return reached


def importers_of(package: str, among: set[str], lazy: bool = True) -> set[str]:
    """Those of `among` that import `package` or something below it."""
    return {
        module
        for module in among
        if any(
            is_below(target, package)
            for each in imports_in(sources()[module])
            if lazy or not each.lazy
            for target in each.targets
        )
    }


def test_every_file_belongs_to_a_layer():
    assert {name.split(".")[0] for name in sources()} == set(LAYERS)


@pytest.mark.parametrize("package", LAYERS)
def test_a_layer_imports_only_what_lies_below_it(package):
    for name in sources():
        if is_below(name, package):
            used = {target.split(".")[0] for target in ours(name, lazy=True)}
            further = FURTHER.get(name, FURTHER.get(name.rpartition(".")[0], set()))
            assert used <= LAYERS[package] | {package} | further, name


def test_nothing_imports_the_tests():
    assert importers_of("tests", set(sources())) == set()


def test_no_module_imports_itself_by_a_detour():
    graph = {name: ours(name, lazy=True) - {name} for name in sources()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"cycle: {' -> '.join(error.args[1])}")


def subpackage_of(module: str) -> str:
    """The folder of a module, or the module itself where it lies in no folder of its package."""
    package = module.split(".")[0]
    parent = module if has_modules(module) else module.rpartition(".")[0]
    return module if parent == package else parent


@cache
def has_modules(name: str) -> bool:
    return any(each.startswith(f"{name}.") for each in sources())


@cache
def subpackages_imported(lazy: bool) -> dict[str, set[str]]:
    """Subpackage -> other subpackages of its package that its modules import."""
    arrows = {subpackage: set() for subpackage in SUBPACKAGES}
    for name in sources():
        package = name.split(".")[0]
        if package not in ("dataloading", "nn", "preproc", "serving") or name == package:
            continue
        targets = {each for each in ours(name, lazy) if is_below(each, package)} - {package}
        arrows.setdefault(subpackage_of(name), set()).update(map(subpackage_of, targets))
    return {subpackage: found - {subpackage} for subpackage, found in arrows.items()}


def test_every_subpackage_is_in_the_table():
    assert set(subpackages_imported(lazy=True)) == set(SUBPACKAGES)


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_a_subpackage_imports_only_those_that_the_table_allows(subpackage):
    assert subpackages_imported(lazy=True)[subpackage] <= SUBPACKAGES[subpackage]


def test_subpackages_import_one_way():
    try:
        TopologicalSorter(SUBPACKAGES).prepare()
    except CycleError as error:
        pytest.fail(f"cycle: {' -> '.join(error.args[1])}")


def test_no_folder_has_too_many_modules():
    """Models do not count: each is a file of one folder."""
    found = [path for top in (*LAYERS, "tests") for path in (ROOT / top).rglob("*.py")]
    models = {ROOT / f"{path.partition(':')[0].replace('.', '/')}.py" for path in MODELS.values()}
    paths = [path for path in filter(is_ours, found) if path not in models]
    counts = Counter(
        str(path.parent.relative_to(ROOT)) for path in paths if path.name != "__init__.py"
    )
    assert {folder: n for folder, n in counts.items() if n > MOST_MODULES} == {}


@pytest.mark.parametrize("library", ["torch.distributed", "torchrec.distributed"])
def test_ranks_stay_behind_one_boundary(library):
    users = importers_of(library, set(sources()))
    users |= {
        name
        for name, source in sources().items()
        if any(is_below(used, library) for used in attributes_in(source))
    }
    assert {each for each in users if not is_below(each, "benchmarks")} <= KNOWS_RANKS


def test_models_never_ask_for_a_rank():
    assert not reached_from("nn.models.registry") & (
        KNOWS_RANKS | {"nn.training.train_step", "nn.build"}
    )


def test_the_launchers_variables_are_read_in_one_place():
    readers = {
        name
        for name, source in sources().items()
        if attributes_in(source) & {"os.environ", "os.getenv"} or "from os import" in source
    }
    assert {each for each in readers if not is_below(each, "benchmarks")} <= READS_ENVIRONMENT


# A sweep checks the options of its trials, and a model outside the project would be imported for that.
@pytest.mark.parametrize(
    ("package", "lazy"), [("preproc", True), ("compare", True), ("status", True), ("sweep", False)]
)
def test_a_command_without_a_model_needs_no_torch(package, lazy):
    modules = {name for name in sources() if is_below(name, package)}
    brought = set().union(*(reached_from(name, lazy) for name in modules))
    assert importers_of("torch", brought, lazy) | importers_of("torchrec", brought, lazy) == set()


@pytest.mark.parametrize("command", ["run", "rollback", "evaluate_accuracy", "evaluate_latency"])
def test_what_scores_a_model_directory_needs_no_torchrec(command):
    assert importers_of("torchrec", reached_from(f"serving.{command}")) == set()


@pytest.mark.parametrize("library", ["duckdb", "isal", "numba"])
def test_only_preprocessing_of_raw_logs_needs(library):
    users = importers_of(library, set(sources()))
    assert users
    # Training needs Numba for raw keys, and only then; a server needs DuckDB for features that are SQL.
    packages = {"numba": {"dataloading"}, "duckdb": {"preproc", "dataloading"}}
    assert {name.split(".")[0] for name in users} == packages.get(library, {"preproc"})
    assert not reached_from("nn.run", lazy=False) & users
    for start in (
        "preproc.__main__",
        "preproc.synthetic",
        "preproc.verify.run",
        "preproc.convert.run",
    ):
        assert not reached_from(start, lazy=False) & users


def test_help_and_typing_errors_need_no_torch():
    for start in ("main", "dlrm", "dcnv2"):
        brought = reached_from(start, lazy=False)
        assert importers_of("torch", brought, lazy=False) == set()
    assert reached_from("configs.schema") == {
        "configs.schema",
        "configs.options",
        "configs.built_in",
    }
    assert importers_of("hydra", {"configs.schema"}) == set()


def test_our_packages_are_imported_by_name_only():
    """`from torch import nn` followed by `import nn.models.registry` would make `nn` ours."""
    tests = {str(path): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    # To parse all takes seconds.
    suspect = re.compile(rf"\bimport\b.*\b({'|'.join(LAYERS)})\b|\bfrom\s*\.")
    assert suspect.search("import a, nn.models")
    assert suspect.search("from .x import y")
    for name, source in (sources() | tests).items():
        found = imports_in(source) if suspect.search(source) else []
        plain = [each.module for each in found if not each.names]
        assert not [each for each in plain if each.split(".")[0] in LAYERS], name
        assert not [each.module for each in found if each.module.startswith(".")], name


def test_no_file_is_called_like_a_standard_module():
    """`python -m` and scripts put their directory first, where a `logging.py` would replace Python's."""
    stems = {part for name in sources() for part in name.split(".")} - {"__main__"}
    assert stems & sys.stdlib_module_names == set()


@pytest.mark.parametrize(
    "package",
    [
        "configs",
        "dataloading",
        "preproc",
        "nn",
        "compare",
        "serving",
        "status",
        "sweep",
        "main",
        "dlrm",
    ],
)
def test_a_flat_package_is_this_repositorys(package):
    found = importlib.import_module(package).__file__
    assert found is not None
    assert Path(found).is_relative_to(ROOT)


def test_all_forms_of_import_are_seen():
    source = "import a.b\nfrom c import d, e\ndef f():\n    from g.h import i\n    return x.y.z"
    assert imports_in(source) == [
        Import("a.b", (), False),
        Import("c", ("d", "e"), False),
        Import("g.h", ("i",), True),
    ]
    assert attributes_in(source) == {"x.y", "x.y.z"}
