"""Single files in Chromium: choose one, draw with it, and go back to it from its picture."""

import shutil

import pytest

from fastdiff.checkpoints.model_hash import file_hash
from fastdiff.hosting.models import Models
from fastdiff.requests import png
from fastdiff.ui.shared import Shared
from tests.ui.browser.actions import combobox, drop, expect, generate, pick, textbox, wait_for_status

pytestmark = pytest.mark.slow
SMALL, XL = "./small.safetensors", "./deep/my XL ü.SFT"


@pytest.fixture(scope="module")
def shared(files_dir) -> Shared:
    return Shared(Models(files_dir, device="cpu"))


def expect_model(page, name: str) -> None:
    expect(combobox(page, "Model").first).to_have_value(name)


def test_a_file_draws_and_its_picture_chooses_it_again(open_page, files_dir, tmp_path):
    page = open_page()
    pick(page, "Model", SMALL)
    wait_for_status(page, f"Ready to draw with {SMALL}")
    textbox(page, "Prompt").fill("the cat")
    generate(page, steps=2, seed=5)
    wait_for_status(page, "Drew 1 picture")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download this picture").click()
    path = shutil.copy(download.value.path(), tmp_path / "cat.png")
    digits = file_hash(files_dir / SMALL)
    assert f"Model hash: {digits[:10]}, Model: small, " in png.read_text(path)["parameters"]

    pick(page, "Model", XL)
    wait_for_status(page, f"Ready to draw with {XL}")
    page.get_by_role("button", name="Use these settings").click()
    wait_for_status(page, "Loaded the settings of seed 5")
    expect_model(page, SMALL)
    page.get_by_role("button", name="Send to Compare").click()
    expect(page.get_by_role("tab", name="Compare")).to_have_attribute("aria-selected", "true")
    expect_model(page, SMALL)

    (files_dir / SMALL).rename(files_dir / "renamed.safetensors")
    again = open_page()
    drop(again, (tmp_path / "cat.png").read_bytes(), "cat.png")
    wait_for_status(again, "Loaded the settings of cat.png")
    expect_model(again, "./renamed.safetensors")
    expect(textbox(again, "Prompt")).to_have_value("the cat")
