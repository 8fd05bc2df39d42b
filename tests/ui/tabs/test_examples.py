"""The page as it opens, with the examples of its first model."""

import asyncio

import pytest

from fastdiff.checkpoints import hub
from fastdiff.requests import defaults
from fastdiff.ui.limits import Limits
from fastdiff.ui.models import Models
from fastdiff.ui.page import build_page
from fastdiff.ui.store import Store
from fastdiff.ui.tabs import examples


@pytest.fixture
def components(upload_folder):
    """Build the page and return the properties of the Draw tab's components, by their labels."""

    async def build(models: Models) -> dict[str, dict]:
        found: dict[str, dict] = {}
        for each in build_page(models, Limits(), Store(upload_folder)).get_config_file()["components"]:
            found.setdefault(each["props"].get("label"), each["props"])
        return found

    return lambda models: asyncio.run(build(models))  # outside of an event loop Gradio makes four and closes none


def test_a_class_model_opens_with_its_pickers(components):
    found = components(Models(device="cpu"))
    assert found["Style"]["visible"] and not found["Prompt"]["visible"]
    assert found["Examples"]["samples"][0] == ["fluent-3d smiling faces"]


def test_a_model_that_reads_text_opens_with_its_first_example(components, monkeypatch, text_folder):
    bundled = {"emoji-sd": text_folder("sd1"), **hub.bundled_models()}
    monkeypatch.setattr(hub, "bundled_models", lambda: bundled)
    monkeypatch.setattr(defaults, "MODEL", "emoji-sd")
    monkeypatch.setitem(examples.EXAMPLES, "emoji-sd", [examples.Example("a red apple", 3)])
    found = components(Models(device="cpu"))
    assert found["Model"]["value"] == "emoji-sd"
    assert (found["Prompt"]["value"], found["Prompt"]["visible"]) == ("a red apple", True)
    assert not any(found[label]["visible"] for label in ("Style", "Group", "Label"))
    assert found["Size"]["choices"][0] == ("16x16", "16x16")
    assert found["Examples"]["samples"] == [["a red apple"]]
