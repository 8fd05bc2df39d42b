"""LoRAs in Chromium: pick two, set their weights, draw, and bring them back from the picture."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from fastdiff.hosting.catalogue.offered import OptionFiles
from fastdiff.hosting.models import Models
from fastdiff.requests import png
from fastdiff.ui.shared import Shared
from tests.adapters.formats import in_diffusers, random_loras, save
from tests.support.text_pipelines import text_pipeline
from tests.ui.browser.actions import (
    DESKTOP,
    PHONE,
    combobox,
    drop,
    expect,
    fill,
    generate,
    number,
    open_tab,
    pick,
    screenshot,
    settings,
    textbox,
    wait_for_status,
)
from tests.ui.browser.test_accessible import are_in_order, walk

pytestmark = pytest.mark.slow
SD1 = "./text/sd1"


@pytest.fixture(scope="module")
def lora_dir(tmp_path_factory):
    """A folder with two LoRAs, and with one that has NaN."""
    folder = tmp_path_factory.mktemp("loras")
    first, second = (in_diffusers(random_loras(text_pipeline("sd1"), seed=seed)) for seed in (1, 2))
    save(folder / "style.safetensors", first)
    save(folder / "a detail of a very long name.safetensors", second)
    save(folder / "broken.safetensors", {key: each * torch.nan for key, each in first.items()})
    save_file({"emb_params": torch.ones(2, 32)}, folder / "blurb.safetensors")
    return folder


@pytest.fixture(scope="module")
def shared(models_dir, lora_dir) -> Shared:
    return Shared(Models(models_dir, device="cpu", files=OptionFiles(lora_dir, lora_dir)))


def choose(page, *names: str) -> None:
    """Pick LoRAs of the visible form, one after the other."""
    field = combobox(page, "LoRAs").first
    for name in names:
        field.click()
        page.get_by_role("option", name=name, exact=True).click()
        number(page, name.removesuffix(".safetensors")).wait_for()
    page.keyboard.press("Escape")


def test_two_loras_draw_and_come_back_from_the_picture(open_page, tmp_path, lora_dir):
    page = open_page()
    expect(combobox(page, "LoRAs")).to_have_count(0)
    pick(page, "Model", SD1)
    wait_for_status(page, f"Ready to draw with {SD1}")
    textbox(page, "Prompt").fill("a blurb")
    page.get_by_text("3 of 22 tokens").locator("visible=true").first.wait_for()
    long = "a detail of a very long name.safetensors"
    choose(page, "style.safetensors", long)
    fill(page, {number(page, "style"): "0.8"})
    generate(page, steps=1, seed=5)
    wait_for_status(page, "Drew 1 picture")
    expect(settings(page)).to_contain_text(f"style.safetensors:0.8, {long}:1")
    expect(settings(page)).to_contain_text("blurb.safetensors:blurb")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download this picture").click()
    path = shutil.copy(download.value.path(), tmp_path / "cat.png")
    record = png.read_settings(path)
    assert record["lora"] == ["style.safetensors:0.8", f"{long}:1"]
    assert record["embedding"] == ["blurb.safetensors:blurb"]

    page.get_by_label("Remove style.safetensors").or_(page.locator(".token-remove")).locator(
        "visible=true"
    ).first.click()
    expect(number(page, "style")).to_have_count(0)
    expect(number(page, long.removesuffix(".safetensors"))).to_have_value("1")

    (lora_dir / long).rename(lora_dir / "gone")
    try:
        again = open_page()
        drop(again, (tmp_path / "cat.png").read_bytes(), "cat.png")
        wait_for_status(again, f"not restored: the LoRA {long}, which is not here")
        expect(number(again, "style")).to_have_value("0.8")
        again.reload()
        expect(number(again, "style")).to_have_value("0.8")
    finally:
        (lora_dir / "gone").rename(lora_dir / long)


def test_a_bad_file_is_one_message(open_page):
    page = open_page()
    pick(page, "Model", SD1)
    wait_for_status(page, f"Ready to draw with {SD1}")
    choose(page, "broken.safetensors")
    generate(page, steps=1, seed=5)
    wait_for_status(page, "broken.safetensors: NaN or infinity in ")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_sliders_stand_under_the_picker(open_page, size, tmp_path):
    page = open_page(size)
    pick(page, "Model", SD1)
    wait_for_status(page, f"Ready to draw with {SD1}")
    long = "a detail of a very long name"
    choose(page, "style.safetensors", f"{long}.safetensors")
    screenshot(page, f"loras-{size['width']}", tmp_path, full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    names = walk(page, "Draw")
    wanted = "Negative prompt", "LoRAs", "number input for style", f"number input for {long}", "Generate"
    assert are_in_order(names, *wanted)
    open_tab(page, "Compare")
    combobox(page, "Model").first.fill(SD1)
    page.get_by_role("option", name=SD1, exact=True).click()
    combobox(page, "LoRAs").first.wait_for()
    choose(page, "style.safetensors")
    screenshot(page, f"loras-compare-{size['width']}", tmp_path, full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert are_in_order(walk(page, "Compare"), "LoRAs", "number input for style", "Settings")
