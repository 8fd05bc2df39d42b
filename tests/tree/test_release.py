"""The release workflow: what it needs, what it uploads, and the check of the tag."""

import runpy

import pytest
import yaml

import fastdiff
from tests.tree.floors import ROOT

CHECK = runpy.run_path(str(ROOT / ".ci/check_release.py"))
TAG, REPOSITORY = f"v{fastdiff.__version__}", "https://github.com/fastdiff-dev/fastdiff"
TEXT = (ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8")
JOBS = yaml.safe_load(TEXT)["jobs"]


def test_the_version_can_be_released():
    assert CHECK["faults"](TAG, REPOSITORY) == []


@pytest.mark.parametrize(
    ("tag", "repository", "fault"),
    [
        (TAG.removeprefix("v"), REPOSITORY, "tag the commit as v"),
        ("v9.9.9", REPOSITORY, "tag the commit as v"),
        (TAG, "https://github.com/other/fastdiff", "correct its addresses"),
    ],
)
def test_another_tag_or_repository_cannot(tag, repository, fault):
    (line,) = CHECK["faults"](tag, repository)
    assert fault in line


def test_a_version_without_its_section_of_the_changelog_cannot(tmp_path, monkeypatch):
    for name in ("fastdiff/__init__.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    (tmp_path / "CHANGELOG.md").write_text("## Unreleased\n\n## 0.1.0 - 2026-11-21\n")
    monkeypatch.setitem(CHECK["faults"].__globals__, "ROOT", tmp_path)
    (line,) = CHECK["faults"](TAG, REPOSITORY)
    assert line.startswith("CHANGELOG.md: ")


def test_only_what_ci_built_is_published_and_without_a_secret():
    build, publish = (JOBS[name]["steps"] for name in ("build", "publish"))
    commands = [step.get("run", "") for step in build]
    assert "check_release.py" in commands[1] and ".ci/run" in commands
    assert "make package" in (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    assert JOBS["publish"]["needs"] == "build" and not any("run" in step for step in publish)
    assert [step["uses"].partition("@")[0] for step in publish] == [
        "actions/download-artifact",
        "actions/attest-build-provenance",
        "pypa/gh-action-pypi-publish",
    ]
    assert "secrets." not in TEXT and "password" not in TEXT
    assert "permissions" not in JOBS["build"] and "id-token" in JOBS["publish"]["permissions"]


def test_actions_are_pinned_to_commits():
    used = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    assert used and all(len(name.partition("@")[2]) == 40 for name in used)
