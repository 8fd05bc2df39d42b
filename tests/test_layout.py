"""One stem, three places: what keeps the tree in the shape that CONTRIBUTING.md describes."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = sorted({path.stem for path in (ROOT / "kernels").glob("*.py")})
SOURCES = sorted(
    path
    for folder in ("fastdiff", "kernels", "benchmarks", "training", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
LONG = {  # files of more than 400 lines, and why
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("place", ["tests/kernels/test_{}.py", "benchmarks/bench_{}.py"])
def test_every_kernel_has_its_test_and_its_benchmark(kernel, place):
    assert (ROOT / place.format(kernel)).is_file()


def test_there_are_kernels():
    assert {"conv2d", "group_norm", "attention", "denoise"} <= set(KERNELS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_too_long(path):
    name = str(path.relative_to(ROOT))
    lines = len(path.read_text().splitlines())
    assert lines <= 400 or name in LONG, f"{lines} lines"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_bare_name_kernels_is_never_imported(path):
    """It belongs to Hugging Face's package."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        assert not any(name.split(".")[0] == "kernels" for name in names)
