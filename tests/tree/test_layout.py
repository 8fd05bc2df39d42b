"""The layout of the tree, as CONTRIBUTING.md describes it: rooms, one name in three places, imports that point down."""

import ast
import graphlib
from collections.abc import Iterable

import fastdiff
from tests.tree import floors
from tests.tree.floors import MODULES, PACKAGE, REGISTRIES, ROOT, imported_names, imports_of, name_of, nodes_of

KERNELS = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))
SOURCES = sorted(
    {*PACKAGE, *(path for folder in ("benchmarks", "training", "tests") for path in (ROOT / folder).rglob("*.py"))}
)
MOST_FILES = 12  # in a room
MOST_FLOORS = 10
CIRCLES = ()  # known import cycles of folders, still to be removed
LONG = {  # file of more than 400 lines -> why
}
SUB_ROOMS = (
    "kernels.plans",
    "kernels.host",
    "kernels.device",
    "models.blocks",
    "hosting.catalogue",
    "serve.drawing",
    "serve.orders",
    "serve.wire",
    "ui.history",
    "ui.inputs",
    "ui.parts",
    "ui.queueing",
    "ui.serving",
)
# The rooms, from top to bottom. Each imports only from its own line and from the lines below.
FLOORS = (
    ("app", "__main__"),
    ("cli",),
    ("ui", "serve", "serve.drawing"),
    ("bulk", "engine", "hosting", "serve.orders", "verification", "doctor", "tuning", "warming"),
    ("runs", "pipelines", "acceleration"),
    ("models",),
    ("diffusion",),  # the models do not import it
    (
        "samplers",
        "models.blocks",
        "hosting.catalogue",
        "serve.wire",
        "ui.history",
        "ui.inputs",
        "ui.parts",
        "ui.queueing",
        "ui.serving",
    ),
    ("requests", "text", "adapters"),
    ("checkpoints",),
    ("execution",),
    ("kernels",),
    ("kernels.plans",),
    ("kernels.host",),
    ("kernels.device",),
    ("__init__", "arguments", "edges", "errors", "extras", "kinds", "outputs", "refused", "sampler_names", "schema"),
)


def room_of(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in SUB_ROOMS else parts[0]


def floor_of(module: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room_of(module) in rooms)


def assert_none(offenders: Iterable[str]) -> None:
    """Fail with a line for each offender. pytest itself would truncate a long list."""
    lines = [*offenders]
    assert not lines, "\n".join(lines)


def test_every_kernel_has_its_test_and_its_benchmark():
    assert {"conv2d", "group_norm", "attention", "denoise"} <= set(KERNELS)
    places = [f"{place}{name}.py" for name in KERNELS for place in ("tests/kernels/test_", "benchmarks/kernels/bench_")]
    assert_none(place for place in places if not (ROOT / place).is_file())


def test_no_file_is_too_long():
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert_none(f"{name}: {lines} lines" for name, lines in lengths.items() if lines > 400 and name not in LONG)


def test_no_room_is_too_full():
    full = []
    for folder in sorted({path.parent for path in SOURCES}):
        files = sorted(path.name for path in folder.glob("*.py") if path.name != "__init__.py")
        if len(files) > MOST_FILES and name_of(folder) not in REGISTRIES:
            full.append(f"{name_of(folder)}: {len(files)} files, {', '.join(files)}")
    assert_none(full)


def test_imports_point_down():
    assert_none(
        f"{name_of(path)}:{line}: {module} imports {other}"
        for module, path in MODULES.items()
        for other, line in imports_of(path).items()
        if floor_of(other) < floor_of(module)
    )


def test_there_are_few_floors():
    """`python -m tests.tree.floors` prints them."""
    assert max(floors.floors(floors.folder_graph()).values()) <= MOST_FLOORS


def test_no_folders_import_in_a_circle():
    found = floors.circles(floors.folder_graph())
    assert_none(line for circle in found if circle not in CIRCLES for line in floors.describe(circle))
    assert len(found) == len(CIRCLES), "an import cycle is gone: remove it from CIRCLES"


def test_no_imports_go_in_circles():
    graph = {module: imports_of(path).keys() - {module} for module, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_no_module_has_the_name_of_a_public_function():
    """Importing such a module would replace the function in its package."""
    taken = [name_of(path) for path in PACKAGE if path.stem in fastdiff.__all__]
    for path in PACKAGE:
        if path.parent != ROOT / "kernels":  # these files are named after their operations
            functions = [node for node in nodes_of(path)[0].body if isinstance(node, ast.FunctionDef)]
            taken += [f"{name_of(path)}:{node.lineno}" for node in functions if node.name == path.stem]
    assert_none(taken)


def test_docstrings_begin_with_a_verb_or_with_what_they_return():
    assert_none(
        f"{name_of(path)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for path in SOURCES
        if any(word in path.read_bytes() for word in (b"What ", b"Of "))  # to parse all files takes seconds
        for node in nodes_of(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and (text := ast.get_docstring(node) or "").startswith(("What ", "Of "))
    )


def test_no_source_imports_diffusers():
    """`extras` imports it by name, when something needs it."""
    imports = [(path, name, line) for path in PACKAGE for name, line in imported_names(path)]
    assert_none(f"{name_of(path)}:{line}: {name}" for path, name, line in imports if name.split(".")[0] == "diffusers")


def test_the_bare_name_kernels_is_never_imported():
    """The name belongs to Hugging Face's package."""
    bare = []
    for path in SOURCES:
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            bare += [f"{name_of(path)}:{node.lineno}: {name}" for name in names if name.split(".")[0] == "kernels"]
    assert_none(bare)
