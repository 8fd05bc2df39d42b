"""The documents: public names have a page, links and paths exist, the site has all pages, and READMEs stay short."""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePath

import pytest

import fastdiff
from tests.tree.floors import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "kernels/README.md",
    ROOT / "fastdiff/bulk/README.md",
    *PAGES,
]
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1`*\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(`+)(.+?)\1")
LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)
# A path: of a Python file, or below a folder of the repository. Names like kernels/<x>.py are not paths.
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
MADE = {".venv", "outputs", "samples", "build", "dist", "_build"}  # folders that commands make
REMOVED = {"benchmarks/megakernel.py"}  # named together with the commit that has it
EXAMPLES = "conv_net", "modulate"  # what the pages in docs/extending add

documents = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


def prose(path: Path) -> str:
    """Return the text of a document without its blocks of code."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def headings(path: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub and MyST make them."""
    lines = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def links(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the file and the anchor of each relative link; the file is empty in a link within the document."""
    for target in LINK.findall(CODE.sub("", prose(path).replace("\n", " "))):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor


def paths(path: Path) -> Iterator[str]:
    """Yield the paths that a document names as code, such as `kernels/linear.py`."""
    folders = {each.name for each in ROOT.iterdir() if each.is_dir()} - MADE
    for _, code in CODE.findall(prose(path).replace("\n", " ")):
        first, slash, _ = code.partition("/")
        example = any(name in code for name in EXAMPLES) or code in REMOVED
        if slash and PATH.fullmatch(code) and (first in folders or code.endswith(".py")) and not example:
            yield code


@functools.cache
def tree() -> tuple[PurePath, ...]:
    """Return all files and folders of the repository, relative to its root."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = {*folders} - MADE - {".git", "__pycache__"}
        found += [Path(folder, name).relative_to(ROOT) for name in (*folders, *files)]
    return tuple(found)


def exists(name: str) -> bool:
    """Whether a path of the repository ends with `name`, which may have `*` in it.

    A sentence about a folder names the files in it without the folder.
    """
    return any(path.match(name) for path in tree())


def entries(page: Path) -> Iterator[Path]:
    """Yield the pages in the toctrees of a page."""
    for block in TOCTREE.findall(page.read_text(encoding="utf-8")):
        for line in filter(None, map(str.strip, block.splitlines())):
            if not line.startswith(":"):
                yield page.parent / f"{line}.md"


def test_every_public_name_is_documented():
    text = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
    documented = {*re.findall(r"^\.\. auto\w+:: fastdiff\.(\w+)$", text, re.MULTILINE)}
    documented |= {*re.findall(r"`fastdiff\.(__\w+__)`", text)}
    assert sorted({*fastdiff.__all__} - documented) == []


@documents
def test_every_link_leads_somewhere(document):
    broken = []
    for file, anchor in links(document):
        target = document.parent / file if file else document
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in headings(target)):
            broken.append(f"{file}#{anchor}" if anchor else file)
    assert not broken, "\n".join(broken)


@documents
def test_every_path_exists(document):
    missing = [name for name in paths(document) if not exists(name)]
    assert not missing, "\n".join(missing)


def test_the_code_of_the_sampler_page_is_the_samplers():
    files = ("fastdiff/samplers/dpm2.py", "tests/samplers/test_dpm2.py")
    sources = [(ROOT / name).read_text(encoding="utf-8") for name in files]
    page = (DOCS / "extending/sampler.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    assert [block for block in blocks if not any(block in source for source in sources)] == []


def test_every_page_is_in_a_toctree():
    listed = [entry.relative_to(DOCS).as_posix() for page in PAGES for entry in entries(page)]
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES]
    missing = sorted({*listed} - {*pages})
    assert not missing, "\n".join(["pages of toctrees that do not exist:", *missing])
    assert sorted({*pages} - {*listed}) == ["index.md"], "a page is in no toctree"
    assert len(listed) == len({*listed}), "a page is in two toctrees"


def count_words(text: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in text.split())


def count_cells(text: str) -> int:
    """Return the number of table cells, with those of the head."""
    rows = [line.strip() for line in text.splitlines() if line.startswith("|")]
    return sum(row.strip("|").count("|") + 1 for row in rows if not re.fullmatch(r"[|:\- ]+", row))


@pytest.mark.parametrize(("name", "most"), [("README.md", 1300), ("kernels/README.md", 1200)])
def test_a_readme_is_short(name, most):
    words = count_words((ROOT / name).read_text(encoding="utf-8"))
    assert words <= most


def test_the_readme_has_few_table_cells():
    cells = count_cells((ROOT / "README.md").read_text(encoding="utf-8"))
    assert cells <= 100


def test_the_version_is_the_same_everywhere():
    changes = re.findall(r"^## (\d\S*) - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    cited = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert [changes[0]] == cited == [fastdiff.__version__]


def test_what_counts_as_a_link_a_path_and_a_cell(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c\n\n[x](a.md#b) ![y](c.png) [z](https://z) `[no](no.md)`\n```\n[no](no.md) `tests/no.py`\n```\n"
        "`tests/tree/floors.py` `no/such.py` `kernels/<x>.py` `kernels/*.py` `outputs/x.png` `a/b`\n"
    )
    assert [*links(page)] == [("a.md", "b"), ("c.png", "")]
    assert headings(page) == {"a-b-c"}
    assert [*paths(page)] == ["tests/tree/floors.py", "no/such.py", "kernels/*.py"]
    assert [exists(name) for name in paths(page)] == [True, False, True]
    assert count_cells("| a | b |\n|---|---|\n| 1 | |\n\nx | y\n") == 4
    assert count_words("| one two | - 3 |") == 3
