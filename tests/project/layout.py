"""Count the layout: `python -m tests.project.layout [TREE]` prints modules, import levels and imports between subpackages."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "configs",
    "dataloading",
    "preproc",
    "nn",
    "compare",
    "serving",
    "status",
    "sweep",
    "hybrid_parallel_recsys",
)
LONGEST_FUNCTION = 66
MOST_ARGUMENTS = 7

Graph = dict[str, set[str]]
HOLD_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


@cache
def _tracked() -> frozenset[Path] | None:
    """Return the files that git tracks, or None outside a checkout."""
    listing = ["git", "ls-files", "-z"]
    try:
        done = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return frozenset(ROOT / name for name in done.stdout.split("\0") if name)


def is_ours(path: Path) -> bool:
    """Return whether a file belongs to the project; a user's own files may lie beside them."""
    tracked = _tracked()
    return tracked is None or not path.is_relative_to(ROOT) or path in tracked


def modules_of(tree: Path) -> dict[str, Path]:
    """Module name -> file, of the packages and the scripts beside them."""
    files = [*tree.glob("*.py"), *(path for top in PACKAGES for path in (tree / top).rglob("*.py"))]
    ours = filter(is_ours, files)
    names = {".".join(path.relative_to(tree).with_suffix("").parts): path for path in ours}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def statements_in(source: str) -> Iterator[ast.AST]:
    """Yield a file's statements, which are definitions and imports too; expressions, most of the nodes, hold none."""
    open_ends: list[ast.AST] = [parsed(source)]
    while open_ends:
        node = open_ends.pop()
        yield node
        open_ends += [n for n in ast.iter_child_nodes(node) if isinstance(n, HOLD_STATEMENTS)]


def imports_of(modules: dict[str, Path]) -> Graph:
    """Module -> modules of the tree that it imports, inside functions too."""
    graph: Graph = {}
    for name, path in modules.items():
        targets = set()
        for node in statements_in(path.read_text()):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                targets |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        # The import of a submodule names its package too, which imports nothing itself.
        packages = {module for module, file in modules.items() if file.name == "__init__.py"}
        graph[name] = (targets & set(modules)) - packages - {name}
    return graph


def levels_of(graph: Graph) -> dict[str, int]:
    """Return the level of each module: the length of its longest chain of imports."""
    levels: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        levels[name] = 1 + max((levels[target] for target in graph.get(name, ())), default=0)
    return levels


def subpackage_graph(graph: Graph, modules: dict[str, Path]) -> Graph:
    """Subpackage -> subpackages that it imports; a module beside a package's folders is a subpackage of its own."""

    def subpackage_of(name: str) -> str:
        parent = name.rpartition(".")[0]
        return name if "." not in parent else parent

    real = {name for name, path in modules.items() if path.name != "__init__.py"}
    subpackages: Graph = {subpackage_of(name): set() for name in real}
    for name in real:
        subpackages[subpackage_of(name)] |= {subpackage_of(target) for target in graph[name] & real}
    return {subpackage: targets - {subpackage} for subpackage, targets in subpackages.items()}


def long_functions(modules: dict[str, Path]) -> list[tuple[int, str]]:
    """Lines and names of functions over the limit, longest first."""
    found = []
    for name, path in modules.items():
        for node in statements_in(path.read_text()):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > LONGEST_FUNCTION:
                    found.append((length, f"{name}.{node.name}"))
    return sorted(found, reverse=True)


def wide_constructors(modules: dict[str, Path]) -> list[tuple[int, str]]:
    """Arguments and names of constructors with more than the limit."""
    found = []
    for name, path in modules.items():
        for owner in statements_in(path.read_text()):
            if not isinstance(owner, ast.ClassDef):
                continue
            for node in owner.body:
                if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                    count = len(node.args.args) - 1 + len(node.args.kwonlyargs)
                    if count > MOST_ARGUMENTS:
                        found.append((count, f"{name}.{owner.name}"))
    return sorted(found, reverse=True)


def report(tree: Path) -> None:
    """Print the counts of a tree."""
    modules = modules_of(tree)
    graph = imports_of(modules)
    files = [path for path in modules.values() if path.name != "__init__.py"]
    print("modules per folder:")
    for folder, count in sorted(Counter(path.parent.relative_to(tree) for path in files).items()):
        print(f"  {folder!s:24} {count:3}")
    for package in ("nn", "preproc"):
        names = {name for name in modules if name.startswith(f"{package}.")}
        inside = {name: graph[name] & names for name in names}
        print(f"{package}: {sum(map(len, inside.values()))} arrows between modules", end="")
        print(f" on {max(levels_of(inside).values())} levels")
        subpackages = subpackage_graph(inside, {name: modules[name] for name in names})
        folders = {
            subpackage
            for subpackage in subpackages
            if (tree / subpackage.replace(".", "/")).is_dir()
        }
        between = {
            subpackage: targets & folders
            for subpackage, targets in subpackages.items()
            if subpackage in folders
        }
        print(
            f"{package}: {len(folders)} folders and {len(subpackages) - len(folders)} modules beside them",
            end="",
        )
        print(f", {sum(map(len, between.values()))} arrows between folders", end="")
        print(f", {sum(map(len, subpackages.values()))} with the modules beside them", end="")
        try:
            print(f", on {max(levels_of(subpackages).values())} levels")
        except CycleError as error:
            print(f", in a circle: {' -> '.join(error.args[1])}")
    print(f"functions over {LONGEST_FUNCTION} lines:", long_functions(modules))
    print(f"constructors with more than {MOST_ARGUMENTS} arguments:", wide_constructors(modules))


if __name__ == "__main__":
    report(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT)
