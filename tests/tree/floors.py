"""The floors of the package: which folder imports which, and how many folders a chain of imports goes through.

    python -m tests.tree.floors

A folder is one floor above the highest folder that it imports from. An import counts wherever it is in a file, and so
does a string that is the name of a module. The files directly in `fastdiff/` are one folder, the ground. Two files are
in no folder: `__init__.py` (the public names) and `__main__.py`.

The command also prints the longest chain of imports between files, the number of statements in each folder without
docstrings, and the modules that only one other module imports. The exit code is 1 if folders import each other in a
cycle.
"""

import ast
import functools
import graphlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = sorted(
    {path for path in (ROOT / "fastdiff").rglob("*.py") if "fastdiff/kernels" not in path.as_posix()}
    | set((ROOT / "kernels").rglob("*.py"))
)
GROUND = "fastdiff"
DOORS = ("__init__", "__main__")
REGISTRIES = (  # folders with one file for each plug-in; a single table or parser imports the files
    "benchmarks/kernels",
    "fastdiff/checkpoints/configs",
    "fastdiff/cli",
    "fastdiff/models",
    "fastdiff/pipelines",
    "fastdiff/samplers",
    "kernels",
    "kernels/device",
    "tests/cli",
    "tests/kernels",
    "tests/samplers",
)

Graph = Mapping[str, AbstractSet[str]]  # folder or module -> what it imports


def name_of(path: Path) -> str:
    """Return a path relative to the root of the tree."""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """Return the dotted name below `fastdiff`, such as runs.drawing; `runs/__init__.py` is runs."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "fastdiff" else parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PACKAGE}


def folder_of(module: str) -> str | None:
    """Return the folder of a module, relative to the root of the tree; None for DOORS."""
    return None if module in DOORS else name_of(MODULES[module].parent)


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return the module of a file, and all classes, functions and imports in it."""
    module = ast.parse(path.read_bytes())
    kinds = ast.ClassDef | ast.FunctionDef | ast.Import | ast.ImportFrom
    return (module, *(node for node in statements(module) if isinstance(node, kinds)))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements below a node. Expressions are skipped, as they contain no statements."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield child
            yield from statements(child)


@functools.cache
def imports_of(path: Path) -> dict[str, int]:
    """Return the fastdiff modules that a file imports, anywhere in the file, and the line of the first import."""
    found: dict[str, int] = {}
    for name, line in imported_names(path):
        found.setdefault(name.removeprefix("fastdiff."), line)
    return {name: line for name, line in found.items() if name in MODULES}


def imported_names(path: Path) -> Iterator[tuple[str, int]]:
    """Yield each name that a file imports, with its line. `from a import b` yields a and a.b."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def named_in_strings(path: Path) -> set[str]:
    """Return the fastdiff modules whose full names are strings in a file, such as for `import_module`."""
    if b'"fastdiff.' not in path.read_bytes():  # most files, and to walk their expressions takes a second
        return set()
    strings = (node.value for node in ast.walk(nodes_of(path)[0]) if isinstance(node, ast.Constant))
    names = (each for each in strings if isinstance(each, str) and each.startswith("fastdiff."))
    return {name.removeprefix("fastdiff.") for name in names} & MODULES.keys()


@functools.cache
def module_graph() -> dict[str, frozenset[str]]:
    """Return what each module imports, without itself and DOORS."""
    return {
        module: frozenset((imports_of(path).keys() | named_in_strings(path)) - {module, *DOORS})
        for module, path in MODULES.items()
        if module not in DOORS
    }


def folder_edges() -> dict[tuple[str, str], list[str]]:
    """Return (folder, folder it imports from) -> the imports, one line each."""
    edges: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, imported in module_graph().items():
        for other in sorted(imported):
            above, below = folder_of(module), folder_of(other)
            if above and below and above != below:
                edges[above, below].append(f"{module} imports {other}")
    return edges


def folder_graph() -> dict[str, set[str]]:
    """Return the folders that each folder imports from."""
    graph: dict[str, set[str]] = {folder: set() for module in MODULES if (folder := folder_of(module))}
    for above, below in folder_edges():
        graph[above].add(below)
    return graph


def reach(graph: Graph, start: str) -> set[str]:
    """Return everything that `start` imports, directly or indirectly."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        each = waiting.pop()
        if each not in found:
            found.add(each)
            waiting += graph[each]
    return found


def circles(graph: Graph) -> list[frozenset[str]]:
    """Return the import cycles: the largest sets of folders that all import each other, directly or indirectly."""
    below = {each: reach(graph, each) for each in graph}
    found = {frozenset(other for other in below[each] if each in below[other]) for each in graph}
    return sorted((circle for circle in found if circle), key=sorted)


def floors(graph: Graph) -> dict[str, int]:
    """Return the floor of each folder, from 1. The folders of an import cycle are on one floor."""
    circle_of = {each: circle for circle in circles(graph) for each in circle}

    @functools.cache
    def floor(folder: str) -> int:
        together = circle_of.get(folder, {folder})
        return 1 + max((floor(other) for each in together for other in graph[each] if other not in together), default=0)

    return {folder: floor(folder) for folder in graph}


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest chain in which each module imports the next. Raises graphlib.CycleError for a cycle."""
    chains: dict[str, list[str]] = {}
    for module in graphlib.TopologicalSorter(graph).static_order():
        chains[module] = [module, *max((chains[other] for other in sorted(graph[module])), key=len, default=[])]
    return max((chains[module] for module in sorted(chains)), key=len, default=[])


def count_statements(source: str) -> int:
    """Return the number of statements in a file's text, without docstrings."""
    nodes = [node for node in statements(ast.parse(source)) if isinstance(node, ast.stmt)]
    return sum(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str))
        for node in nodes
    )


def imported_by_one(graph: Graph) -> list[tuple[str, str]]:
    """Return (module, its importer) for each module that only one other imports, except files of REGISTRIES."""
    importers: dict[str, list[str]] = defaultdict(list)
    for module, imported in graph.items():
        for other in imported:
            importers[other].append(module)
    alone = ((module, *by) for module, by in sorted(importers.items()) if len(by) == 1)
    return [(module, by) for module, by in alone if folder_of(module) not in REGISTRIES]


def describe(circle: AbstractSet[str]) -> list[str]:
    """Return a line for each import inside a cycle of folders."""
    inside = sorted(edge for edge in folder_edges() if circle.issuperset(edge))
    return [f"{above} -> {below}: {', '.join(folder_edges()[above, below])}" for above, below in inside]


def main() -> int:
    """Print everything; return the exit code."""
    graph, found = folder_graph(), circles(folder_graph())
    of_folder = floors(graph)
    for number in range(max(of_folder.values()), 0, -1):
        print(f"{number:>3}  {', '.join(sorted(folder for folder, floor in of_folder.items() if floor == number))}")
    for circle in found:
        print("", f"an import cycle: {', '.join(sorted(circle))}", *describe(circle), sep="\n")
    _print_sizes(longest_chain(module_graph()), imported_by_one(module_graph()))
    return int(bool(found))


def _print_sizes(chain: Sequence[str], alone: Sequence[tuple[str, str]]) -> None:
    print(f"\nthe longest chain of imports, {len(chain)} files:\n{' -> '.join(chain)}")
    counts: Counter[str] = Counter()
    for module, path in MODULES.items():
        counts[folder_of(module) or GROUND] += count_statements(path.read_text(encoding="utf-8"))
    print(f"\nstatements without docstrings, {counts.total()}:")
    print(*(f"{count:>6}  {folder}" for folder, count in sorted(counts.items())), sep="\n")
    print(f"\nmodules that only one other imports, {len(alone)}:")
    print(*(f"{module} by {by}" for module, by in alone), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
