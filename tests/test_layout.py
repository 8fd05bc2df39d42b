"""The shape of the tree that CONTRIBUTING.md describes: rooms, one stem in three places, imports that point down."""

import ast
import graphlib
from pathlib import Path

import pytest

import fastdiff

ROOT = Path(__file__).parents[1]
KERNELS = sorted(path.stem for path in (ROOT / "kernels").glob("*.py"))
PACKAGE = sorted(
    {path for path in (ROOT / "fastdiff").rglob("*.py") if "fastdiff/kernels" not in path.as_posix()}
    | set((ROOT / "kernels").rglob("*.py"))
)
SOURCES = sorted(
    {*PACKAGE, *(path for folder in ("benchmarks", "training", "tests") for path in (ROOT / folder).rglob("*.py"))}
)
MOST_FILES = 12  # of a room
LONG = {  # files of more than 400 lines, and why
}
# The rooms, from the roof to the ground: each imports from itself and from those below it.
FLOORS = (
    ("app", "__main__"),
    ("cli",),
    ("ui",),
    ("bulk",),
    ("runs",),
    ("pipelines", "acceleration", "reporting"),
    ("results",),
    ("diffusion",),
    ("models",),
    ("models.blocks",),
    ("requests", "text"),
    ("checkpoints",),
    ("execution",),
    ("kernels",),
    ("kernels.host",),
    ("kernels.device",),
    ("__init__", "arguments", "errors", "extras", "schema"),
)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """The dotted name below `fastdiff`: runs.drawing, kernels.host.dispatch; a package's own file has its name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "fastdiff" else parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PACKAGE}


def room_of(module: str) -> str:
    parts = module.split(".")
    return (
        ".".join(parts[:2])
        if parts[:2] in (["kernels", "host"], ["kernels", "device"], ["models", "blocks"])
        else parts[0]
    )


def floor_of(module: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if room_of(module) in rooms)


def imports_of(path: Path) -> set[str]:
    """The modules of fastdiff that a file names in its imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return {name.removeprefix("fastdiff.") for name in found} & MODULES.keys()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("place", ["tests/kernels/test_{}.py", "benchmarks/bench_{}.py"])
def test_every_kernel_has_its_test_and_its_benchmark(kernel, place):
    assert (ROOT / place.format(kernel)).is_file()


def test_there_are_kernels():
    assert {"conv2d", "group_norm", "attention", "denoise"} <= set(KERNELS)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_is_too_long(path):
    lines = len(path.read_text().splitlines())
    assert lines <= 400 or name_of(path) in LONG, f"{lines} lines"


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES}), ids=name_of)
def test_no_room_is_too_full(folder):
    files = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MOST_FILES or folder.name in ("tests", "benchmarks"), files


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_imports_point_down(path):
    module = module_of(path)
    up = [other for other in imports_of(path) if floor_of(other) < floor_of(module)]
    assert not up, f"{module} imports {', '.join(up)}"


def test_no_imports_go_in_circles():
    graph = {module: imports_of(path) - {module} for module, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_no_module_has_the_name_of_a_public_function(path):
    """It would take the function's place in its package as soon as somebody imported the module."""
    assert path.stem not in fastdiff.__all__
    if path.parent != ROOT / "kernels":  # whose stems are the operations' names
        defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        assert path.stem not in defined


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_docstrings_begin_with_a_verb_or_with_what_they_return(path):
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    assert not [text for text in texts if text.startswith(("What ", "Of "))]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_bare_name_kernels_is_never_imported(path):
    """It belongs to Hugging Face's package."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        assert not any(name.split(".")[0] == "kernels" for name in names)
