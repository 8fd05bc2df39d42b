"""Build, import and run the wheel, the source distribution, and checkouts with and without symbolic links."""

import email
import os
import re
import sys
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from email.message import Message
from pathlib import Path

import pytest

import fastdiff
from tests.tree.floors import ROOT
from tests.tree.packages import build, run
from tests.tree.test_documents import LINK as MARKDOWN_LINK

LINK = "fastdiff/kernels"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
IMPORT = "import importlib, sys; sys.path.insert(0, '.'); [importlib.import_module(name) for name in sys.argv[1:]]"

CONVOLVE = """
import sys, torch, fastdiff
from fastdiff.kernels.conv2d import conv2d
assert conv2d(torch.ones(1, 3, 3, 1), torch.ones(1, 1, 3, 3)).item() == 9
print(fastdiff.__file__, sys.modules[conv2d.__module__].__file__, sep="\\n")
"""


def unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / sdist.name.removesuffix(".tar.gz")


def assert_convolves(command: Sequence[str | Path], folder: Path, package: Path, kernels: Path) -> None:
    """Run CONVOLVE in a folder, and check that it imports the package and the kernels from the expected folders."""
    places = [Path(line).resolve() for line in run([*command, CONVOLVE], folder).splitlines()]
    assert places == [(package / "__init__.py").resolve(), (kernels / "conv2d.py").resolve()]


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The source distribution of this tree, whose compression takes seconds."""
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory):
    """The unpacked source distribution."""
    return unpack(sdist, tmp_path_factory.mktemp("unpacked"))


@pytest.fixture
def tree(request, unpacked):
    """The unpacked source distribution; or with a text file instead of the link, as git writes it without symlinks."""
    link = unpacked / LINK
    if request.param == "without-links":
        link.write_text("../kernels")
    yield unpacked
    link.unlink(missing_ok=True)


both_trees = pytest.mark.parametrize("tree", ["sdist", "without-links"], indirect=True)


def test_the_wheel_holds_each_file_of_the_package_and_of_the_kernels_once(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    sources = {path for room in ("fastdiff", "kernels") for path in (ROOT / room).rglob("*") if path.is_file()}
    expected = {path.relative_to(ROOT).as_posix() for path in sources if "__pycache__" not in path.parts} - {LINK}
    expected = {name for name in expected if not name.startswith(f"{LINK}/")}  # rglob of Python 3.13 follows the link
    assert set(names) == {f"fastdiff/{name}" if name.startswith("kernels/") else name for name in expected}
    assert {"fastdiff/kernels/device/conv2d.py", "fastdiff/py.typed", "fastdiff/__init__.pyi"} <= set(names)
    assert {name.split("/")[2] for name in names if name.endswith(".safetensors")} == {
        "emoji-edges",
        "emoji-sd",
        "emoji64",
        "emoji64-dit",
    }


def test_the_documents_say_what_the_wheel_weighs(wheel):
    text = (ROOT / "docs/getting-started.md").read_text(encoding="utf-8")
    (size,) = re.findall(r"The wheel has (\d+) MB", text)
    assert int(size) == round(wheel.stat().st_size / 1e6) < 80


def test_the_metadata_names_every_licence_that_ships(wheel, metadata):
    with zipfile.ZipFile(wheel) as archive:
        shipped = {
            name.split(".dist-info/licenses/")[1] for name in archive.namelist() if ".dist-info/licenses/" in name
        }
    files = [path for model in (ROOT / "fastdiff/bundled").iterdir() for path in (model / "licenses").iterdir()]
    assert shipped == {"LICENSE", "fastdiff/text/clip/LICENSE"} | {path.relative_to(ROOT).as_posix() for path in files}
    assert sorted(metadata.get_all("License-File")) == sorted(shipped)
    named = metadata["License-Expression"].split(" AND ")
    cards = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fastdiff/bundled").glob("*/README.md"))
    texts = {text.replace("CC BY 4.0", "CC-BY-4.0") for text in re.findall(r"\| \[([^]]*)\]\(licenses/", cards)}
    assert {"Apache-2.0"} | texts == set(named) and len(named) == len(set(named))


def test_the_metadata_has_what_pypi_shows(metadata):
    assert metadata["Name"] == "fastdiff" and metadata["Version"] == fastdiff.__version__
    assert "Typing :: Typed" in metadata.get_all("Classifier") and "diffusers" in metadata["Keywords"]
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert {"Source", "Documentation", "Changelog", "Issues"} <= set(urls)
    for url in urls.values():
        page = url.removeprefix(f"{urls['Source']}/blob/main/")
        assert url in (urls["Source"], f"{urls['Source']}/issues") or (ROOT / page).is_file()


def test_the_links_of_the_description_lead_to_files_of_its_version(metadata):
    """PyPI shows the README without the files beside it."""
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    name, version = urls["Source"].removeprefix("https://github.com/"), metadata["Version"]
    pages, pictures = f"{urls['Source']}/blob/v{version}/", f"https://raw.githubusercontent.com/{name}/v{version}/"
    text = metadata.get_payload(decode=True).decode()
    links = MARKDOWN_LINK.findall(text)
    ours = [link for link in links if link.startswith((pages, pictures))]
    assert [link for link in links if not re.match("https?://", link)] == []
    assert len(ours) == len(MARKDOWN_LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))) - 1  # diffusers'
    for link in ours:
        assert link.startswith(pictures) == link.endswith(".png")
        assert (ROOT / link.removeprefix(pages).removeprefix(pictures).partition("#")[0]).exists(), link


@pytest.mark.slow
def test_the_source_distribution_holds_each_tracked_file_once(sdist):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert len(names) == len(set(names))
    tracked = run(["git", "ls-files", "-z"], ROOT).rstrip("\0").split("\0")
    assert {name for name in tracked if (ROOT / name).exists()} - set(names) <= {LINK}


@pytest.mark.slow
@both_trees
def test_the_same_is_built_from_every_tree(wheel, sdist, tree, tmp_path):
    for before in (wheel, sdist):
        target = "wheel" if before == wheel else "sdist"
        again = build(target, tree, tmp_path / target)
        assert again.name == before.name
        assert again.read_bytes() == before.read_bytes()


def test_the_wheel_runs(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
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
