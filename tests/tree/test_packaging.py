"""Build, import and run the wheel, the source distribution, and checkouts with and without symbolic links."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.waiting import TIMEOUT

ROOT = Path(__file__).parents[2]
LINK = "fastdiff/kernels"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
IMPORT = "import importlib, sys; sys.path.insert(0, '.'); [importlib.import_module(name) for name in sys.argv[1:]]"

CONVOLVE = """
import sys, torch, fastdiff
from fastdiff.kernels.conv2d import conv2d
assert conv2d(torch.ones(1, 3, 3, 1), torch.ones(1, 1, 3, 3)).item() == 9
print(fastdiff.__file__, sys.modules[conv2d.__module__].__file__, sep="\\n")
"""


def run(command: Sequence[str | Path], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def build(tree: Path, folder: Path) -> tuple[Path, Path]:
    """Build the wheel and the source distribution of a tree into a folder, and return both paths."""
    run([sys.executable, "-I", "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", folder], tree)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def assert_convolves(command: Sequence[str | Path], folder: Path, package: Path, kernels: Path) -> None:
    """Run CONVOLVE in a folder, and check that it imports the package and the kernels from the expected folders."""
    places = [Path(line).resolve() for line in run([*command, CONVOLVE], folder).splitlines()]
    assert places == [(package / "__init__.py").resolve(), (kernels / "conv2d.py").resolve()]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the source distribution of this tree."""
    return build(ROOT, tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    """The unpacked source distribution."""
    return unpack(built[1], tmp_path_factory.mktemp("unpacked"))


@pytest.fixture
def tree(request, unpacked):
    """The unpacked source distribution; or with a text file instead of the link, as git writes it without symlinks."""
    link = unpacked / LINK
    if request.param == "without-links":
        link.write_text("../kernels")
    yield unpacked
    link.unlink(missing_ok=True)


both_trees = pytest.mark.parametrize("tree", ["sdist", "without-links"], indirect=True)


def test_the_wheel_holds_each_file_of_the_package_and_of_the_kernels_once(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    sources = {path for room in ("fastdiff", "kernels") for path in (ROOT / room).rglob("*") if path.is_file()}
    expected = {path.relative_to(ROOT).as_posix() for path in sources if "__pycache__" not in path.parts} - {LINK}
    expected = {name for name in expected if not name.startswith(f"{LINK}/")}  # rglob of Python 3.13 follows the link
    assert set(names) == {f"fastdiff/{name}" if name.startswith("kernels/") else name for name in expected}
    assert {"fastdiff/kernels/device/conv2d.py", "fastdiff/kernels/plans/dispatch.py"} <= set(names)
    assert {name.split("/")[2] for name in names if name.endswith(".safetensors")} == {
        "emoji-sd",
        "emoji64",
        "emoji64-dit",
    }


def test_the_wheel_is_quickly_had(built):
    assert built[0].stat().st_size < 80e6


def test_the_source_distribution_holds_each_tracked_file_once(built):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    with tarfile.open(built[1]) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert len(names) == len(set(names))
    tracked = run(["git", "ls-files", "-z"], ROOT).rstrip("\0").split("\0")
    assert {name for name in tracked if (ROOT / name).exists()} - set(names) <= {LINK}


@pytest.mark.slow
@both_trees
def test_the_same_is_built_from_every_tree(built, tree, tmp_path):
    again = build(tree, tmp_path / "again")
    assert [path.name for path in again] == [path.name for path in built]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in built]


def test_the_wheel_runs(built, tmp_path):
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path)
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); exec(sys.argv[1])"
    package = tmp_path / "fastdiff"
    assert_convolves([sys.executable, "-I", "-c", start], tmp_path, package, package / "kernels")


@pytest.mark.slow
@both_trees
def test_a_tree_runs_uninstalled(tree, tmp_path):
    assert_convolves([sys.executable, "-c"], tree, tree / "fastdiff", tree / "kernels")
    command = ["sample", "--model", "emoji64", "--label", "noto travel", "--num-images", "1", "--steps", "1"]
    run([sys.executable, "-m", "fastdiff", *command, "--out", tmp_path / "out"], tree)
    assert len(list((tmp_path / "out").glob("*.png"))) == 1
    assert "fastdiff ui" in run([sys.executable, "app.py", "--help"], tree)


@pytest.mark.slow
@both_trees
def test_a_tree_runs_installed_editable(tree, tmp_path):
    environment = tmp_path / "venv"
    builder = venv.EnvBuilder(symlinks=os.name == "posix")
    builder.create(environment)
    python = builder.ensure_directories(environment).env_exe
    packages = Path(
        run([python, "-I", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], tmp_path).strip()
    )
    # The tree's .pth file is read before z.pth, so the tree comes before this interpreter's packages (torch, pip ...).
    (packages / "z.pth").write_text("\n".join(sys.path))
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    run([python, "-I", "-m", "pip", "install", *options, "--editable", tree], tmp_path)
    assert not (packages / "fastdiff").exists()  # an editable install copies nothing
    assert_convolves([python, "-I", "-c"], tmp_path, tree / "fastdiff", tree / "kernels")


@pytest.mark.slow
def test_the_unpacked_source_distribution_runs_its_tests(unpacked):
    """It runs the quickest tests."""
    run([*PYTEST, "tests/tree/test_layout.py"], unpacked)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_the_unpacked_source_distribution_holds_what_its_tests_import(unpacked, part):
    """Three processes import all test files, which also need benchmarks/ and training/."""
    files = sorted((unpacked / "tests").rglob("*.py"))
    names = [".".join(path.relative_to(unpacked).with_suffix("").parts) for path in files if path.stem != "__main__"]
    assert len(names) > 200
    run([sys.executable, "-c", IMPORT, *names[part * len(names) // 3 : (part + 1) * len(names) // 3]], unpacked)
