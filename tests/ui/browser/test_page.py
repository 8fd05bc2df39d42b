"""Browser tests of the page: Chromium, driven by playwright, in desktop and phone widths.

Screenshots are saved to the folder in the environment variable SCREENSHOTS, if it is set.
"""

import os
import re
import shutil
import time

import pytest

from fastdiff.requests import png
from tests.ui.browser.actions import (
    DESKTOP,
    DICE,
    LOCK,
    PHONE,
    captions,
    drop,
    generate,
    more_settings,
    number,
    numbers,
    pick,
    screenshot,
    until,
    wait_for_end,
    wait_for_status,
)

pytestmark = pytest.mark.slow
CONTRAST = """
(element) => {
    const parse = (text) => text.match(/[\\d.]+/g).map(Number);
    const luminance = ([r, g, b]) => [r, g, b].map((c) => c / 255)
        .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    let behind = element;
    while (parse(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor]
        .map((color) => luminance(parse(color)) + 0.05);
    return Math.max(a, b) / Math.min(a, b);
}
"""  # the contrast of an element's text with its background, as in WCAG 2.2
NAMELESS = """
() => [...document.querySelectorAll("input, select, textarea, button, a[href], [role=tab], [role=progressbar]")]
    .filter((e) => e.checkVisibility() && e.type !== "file")
    .filter((e) => !(e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.title
        || [...(e.labels || [])].some((label) => label.innerText.trim()) || e.innerText.trim()))
    .map((e) => e.outerHTML.slice(0, 200))
"""  # visible controls without a name for a screen reader

STATUS_AND_PREVIEW = """
() => [document.querySelector("#status").innerText, document.querySelector("#preview img")?.src]
"""


PANELS = {"Draw": "#generate", "Compare": ".side", "History": "#history"}


def show(page, tab: str) -> None:
    page.get_by_role("tab", name=tab).click()
    page.locator(PANELS[tab]).locator("visible=true").first.wait_for()


def test_the_first_click_draws(page):
    assert "press Generate" in page.locator("#status").inner_text()
    page.get_by_role("button", name="Generate").click()
    wait_for_status(page, "Drew 1 picture")
    assert len(captions(page)) == 1


def test_progress_and_a_preview_that_sharpens(page, slow_steps):
    slow_steps.seconds = 0.8  # the page looks every 0.25 s, and later on a busy machine
    generate(page, pictures=2, steps=5, batch_size=2)
    seen = [("", None)]
    while "Drew" not in seen[-1][0]:
        seen.append(page.evaluate(STATUS_AND_PREVIEW))
        page.wait_for_timeout(50)
    pattern = r"Picture 1 to 2 of 2, step (\d) of 5, [\d.]+ pictures/s"
    steps = [int(k) for text, _ in seen for k in re.findall(pattern, text)]
    pictures = {picture for _, picture in seen if picture}
    assert steps == sorted(steps) and len(set(steps)) >= 3
    assert len(pictures) >= 3
    assert page.locator("#preview img").count() == 0
    assert captions(page) == ["seed 0", "seed 1"]


def test_cancel_keeps_what_is_finished(page, slow_steps):
    generate(page, pictures=5, steps=4)
    page.locator("#gallery .caption-label").get_by_text("seed 0").wait_for()
    page.get_by_role("button", name="Cancel").click()
    wait_for_status(page, "Cancelled")
    ended = len(slow_steps)
    time.sleep(2)
    assert len(slow_steps) <= ended + 1 < 5 * 4
    assert captions(page) == [f"seed {i}" for i in range(len(slow_steps) // 4)]
    generate(page, seed=9, steps=1)
    wait_for_status(page, "Drew 1 picture")
    assert captions(page) == ["seed 9"]


def test_two_visits_wait_for_each_other_and_share_nothing(open_page, slow_steps):
    one, other = open_page(), open_page()
    generate(one, pictures=3, steps=6, seed=100)
    one.locator("#preview img").first.wait_for()
    generate(other, steps=2, seed=200)
    wait_for_status(other, "Waiting for 1 run before it")
    other.get_by_role("button", name="Cancel").click()
    wait_for_status(other, "Cancelled")
    other.get_by_role("button", name="Generate").click()
    wait_for_status(one, "Drew 3 pictures")
    wait_for_status(other, "Drew 1 picture")
    assert captions(one) == ["seed 100", "seed 101", "seed 102"] and captions(other) == ["seed 200"]
    for page, own in ((one, ["seed 102", "seed 101", "seed 100"]), (other, ["seed 200"])):
        page.get_by_role("tab", name="History").click()
        page.locator("#history").get_by_text(own[0]).wait_for()
        assert captions(page, "#history") == own
    assert number(one, "Batch size").count() == 0  # the other tab's form is hidden
    one.get_by_role("tab", name="Draw").click()
    assert one.get_by_label("Seed").first.input_value() == "100"


def test_settings_of_a_picture_come_back(page, tmp_path):
    generate(page, pictures=2, steps=2, seed=40)
    wait_for_status(page, "Drew 2 pictures")
    page.locator("#gallery").get_by_role("button", name=re.compile("Thumbnail 2")).first.click()
    page.locator("dl.settings").get_by_text("41", exact=True).wait_for()
    assert re.search(r"Seed\s+41\s+Label\s+fluent-3d", page.locator("dl.settings").first.inner_text())
    with page.expect_download() as download:
        page.get_by_role("button", name="Download this picture").locator("visible=true").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert png.read_settings(path)["seed"] == 41
    number(page, "Steps").fill("7")
    page.get_by_label("Seed").first.fill("1")
    page.get_by_role("button", name="Use these settings").locator("visible=true").click()
    wait_for_status(page, "Loaded the settings of seed 41")
    assert (page.get_by_label("Seed").first.input_value(), number(page, "Steps").input_value()) == ("41", "2")


def test_all_pictures_at_once(page, tmp_path):
    generate(page, pictures=2, steps=1)
    wait_for_status(page, "Drew 2 pictures")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as ZIP").locator("visible=true").click()
    download.value.save_as(tmp_path / "all.zip")
    shutil.unpack_archive(tmp_path / "all.zip", tmp_path / "all")
    files = sorted((tmp_path / "all").iterdir())
    assert [png.read_settings(file)["seed"] for file in files] == [0, 1]


def test_a_dropped_png_restores_its_settings(page, server, engine, tmp_path):
    from fastdiff.ui.drawing import draw, prepare
    from fastdiff.ui.parts.request import Limits, UncheckedRequest

    options = UncheckedRequest(label="noto birds", seed=77, steps=3, scheduler="ddpm", guidance_scale=1.5, width=72)
    *_, (_, [drawn]) = draw(prepare(options, engine, Limits()), engine, tmp_path)
    drop(page, drawn.path.read_bytes(), "mine.png")
    wait_for_status(page, "Loaded the settings of mine.png")
    more_settings(page)
    assert page.get_by_label("Style").first.input_value() == "noto"
    assert page.get_by_label("Group").first.input_value() == "animals: birds"
    assert page.get_by_label("Seed").first.input_value() == "77"
    values = {label: number(page, label).input_value() for label in ("Steps", "Guidance", "Width", "Height")}
    assert values == {"Steps": "3", "Guidance": "1.5", "Width": "72", "Height": "64"}
    assert page.get_by_label("Scheduler", exact=True).locator("visible=true").input_value() == "DDPM"
    page.get_by_role("button", name="Generate").click()
    wait_for_status(page, "Drew 1 picture")


def test_a_dropped_gif_is_refused(page):
    drop(page, b"GIF89a picture", "photo.png")
    page.get_by_role("alert").get_by_text("photo.png is not a PNG, JPEG or WebP file").wait_for()


def test_wrong_input_shows_its_message_and_the_page_goes_on(page):
    for seed, message in (("-2", "seed: -2 is not a whole number from 0"), ("2.5", "seed: 2.5 is not a whole number")):
        generate(page, seed=seed)
        page.get_by_role("alert").get_by_text(message).wait_for()
    generate(page, seed=3, steps=1)
    wait_for_status(page, "Drew 1 picture")
    assert page.get_by_role("alert").count() == 0


@pytest.mark.parametrize("tab", ["Draw", "Compare"])
def test_steps_have_a_slider_to_150_and_a_field_that_takes_more(page, tab):
    show(page, tab)
    if tab == "Draw":
        more_settings(page)
    field, slider = number(page, "Steps"), page.get_by_label("range slider for Steps").locator("visible=true").first
    assert (field.input_value(), slider.input_value(), slider.get_attribute("max")) == ("50", "50", "150")
    slider.focus()
    page.keyboard.press("ArrowRight")
    until(page, lambda: field.input_value() == "51")
    field.fill("400")
    page.keyboard.press("Tab")
    until(page, lambda: slider.input_value() == "150")
    page.wait_for_timeout(300)
    assert field.input_value() == "400"


def test_a_run_of_more_steps_than_the_slider_has_and_of_too_many(page):
    generate(page, steps=151)
    wait_for_status(page, "Drew 1 picture")
    page.locator("dl.settings").get_by_text("151", exact=True).wait_for()
    generate(page, steps=1001)
    page.get_by_role("alert").get_by_text("Steps: 1001 is not a whole number from 1 to 1000").wait_for()


def test_another_model_chooses_its_scheduler_and_steps_in_draw_and_compare(page):
    more_settings(page)
    for tab in ("Draw", "Compare"):
        show(page, tab)
        scheduler = page.get_by_label("Scheduler", exact=True).locator("visible=true").first
        assert scheduler.input_value() == "DDIM" and number(page, "Steps").input_value() == "50"
        pick(page, "Model", "./text/sd1")
        until(page, lambda scheduler=scheduler: scheduler.input_value() == "PNDM")
        pick(page, "Scheduler", "EULER-A")
        pick(page, "Model", "./plain/tiny")
        until(page, lambda: number(page, "Width").input_value() == "16")
        assert scheduler.input_value() == "EULER-A"  # chosen by the user


def test_the_form_follows_the_model(page):
    more_settings(page)
    pick(page, "Model", "./plain/tiny")
    wait_for_status(page, "Ready to draw with ./plain/tiny")
    for label in ("Style", "Group", "Label"):
        assert page.get_by_label(label, exact=True).locator("visible=true").count() == 0
    assert page.get_by_label("number input for Guidance").locator("visible=true").count() == 0
    assert page.get_by_text("Examples").locator("visible=true").count() == 0
    assert number(page, "Width").input_value() == "16"
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")
    pick(page, "Model", "./cats")
    wait_for_status(page, "Ready to draw with ./cats")
    assert page.get_by_label("Label", exact=True).locator("visible=true").first.input_value() == "0"


def test_groups_follow_the_style(page):
    pick(page, "Style", "noto")
    pick(page, "Group", "people: couples and families")
    pick(page, "Style", "twemoji")
    assert page.get_by_label("Group").first.input_value() == "people: couples and families"
    pick(page, "Style", "fluent-flat")
    page.wait_for_function("document.querySelector('input[aria-label=\"Group\"]').value === 'smileys: any'")


def test_an_example_is_drawn_by_a_click(page):
    page.locator("#examples").get_by_role("button", name="railways").click()
    wait_for_status(page, "Drew 1 picture")
    assert captions(page) == ["seed 3"]
    assert re.search(r"Label\s+noto railways", page.locator("dl.settings").first.inner_text())
    assert page.get_by_label("Group").first.input_value() == "travel: railways"


def test_runs_wait_in_a_list_that_a_reload_and_a_second_tab_show_and_each_can_be_cancelled(page, slow_steps):
    slow_steps.seconds = 100
    generate(page, pictures=2, steps=2, seed=50)
    page.locator("#generate-runs li").wait_for()
    examples = page.locator("#examples")
    for name in ("railways", "fruit"):
        examples.get_by_role("button", name=name).click()
        page.locator("#generate-runs").get_by_text(name).wait_for()
    second = page.context.new_page()
    second.goto(page.url)
    page.reload()
    for each in (page, second):
        until(each, lambda each=each: each.locator("#generate-runs li").count() == 3)
        assert "Waiting for 1 run before it" in each.locator("#generate-runs li").nth(1).inner_text()
    second.get_by_role("button", name="Cancel noto railways").locator("visible=true").click()
    until(page, lambda: page.locator("#generate-runs li").count() == 2)
    slow_steps.turns.release(2)
    page.bring_to_front()
    page.locator("#preview img").first.wait_for()
    page.locator("#gallery .caption-label").get_by_text("seed 50").wait_for()
    page.get_by_role("button", name=re.compile("Cancel .*2 pictures")).locator("visible=true").click()
    slow_steps.seconds = 0
    slow_steps.turns.release(100)
    wait_for_end(page)
    page.locator("dl.settings").get_by_text("twemoji fruit").wait_for()


def test_compare(page, tmp_path):
    page.get_by_role("tab", name="Compare").click()
    page.get_by_label("Seed", exact=True).locator("visible=true").fill("0")
    steps = numbers(page, "Steps")
    assert [steps.nth(i).input_value() for i in (0, 1)] == ["50", "25"]
    for i, count in enumerate((1, 3)):
        steps.nth(i).fill(str(count))
    page.get_by_role("button", name="Compare", exact=True).click()
    table = page.locator("dl.settings").locator("visible=true")
    table.get_by_text("Pixel difference").wait_for()
    page.get_by_test_id("imageslider-image").first.wait_for()
    assert re.search(r"A took\s+[\d.]+ s\s+B took\s+[\d.]+ s\s+Pixel difference\s+[\d.]+ of 255", table.inner_text())
    assert page.locator(".enlarged img").count() == 2
    assert page.get_by_test_id("imageslider-image").count() == 2
    steps.nth(1).fill("1")
    page.get_by_role("button", name="Compare", exact=True).click()
    table.get_by_text("none: the pictures are identical").wait_for()
    page.get_by_role("tab", name="History").click()
    page.locator("#history").get_by_text("seed 0").first.wait_for()
    assert captions(page, "#history") == ["seed 0"] * 4


def test_the_keyboard_is_enough(page):
    order = []
    for _ in range(30):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.innerText.trim()"))
        if order[-1] == "Generate":
            break
    wanted = ["Draw", "Model", "Style", "Group", "number input for Pictures", "Seed", DICE, LOCK, "Generate"]
    assert [name for name in order if name in wanted] == wanted
    page.keyboard.press("Enter")
    wait_for_status(page, "Drew 1 picture")


def test_enter_in_the_seed_draws(page):
    page.get_by_label("Seed").first.fill("5")
    page.keyboard.press("Enter")
    wait_for_status(page, "Drew 1 picture")
    assert captions(page) == ["seed 5"]


def test_every_control_has_a_name(page):
    more_settings(page)
    for tab in ("Draw", "Compare", "History"):
        show(page, tab)
        assert page.evaluate(NAMELESS) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(open_page, theme):
    page = open_page(theme=theme)
    generate(page, seed="-2")
    page.get_by_role("alert").wait_for()
    assert page.evaluate("document.body.classList.contains('dark')") == (theme == "dark")
    page.mouse.move(0, 0)
    texts = [
        page.get_by_role("alert"),
        page.get_by_text("0 to 4294967295").first,
        page.get_by_text("How many; seeds count up"),
        page.get_by_text("The same settings"),
        page.get_by_role("button", name="Generate"),
        page.get_by_role("button", name=DICE).first,
    ]
    until(page, lambda: min(each.evaluate(CONTRAST) for each in texts) >= 4.5)  # colors fade in


@pytest.mark.parametrize(
    ("name", "size", "theme"), [("desktop", DESKTOP, "light"), ("phone", PHONE, "light"), ("phone-dark", PHONE, "dark")]
)
def test_widths(open_page, tmp_path, name, size, theme):
    page = open_page(size, theme)
    pick(page, "Style", "noto")
    pick(page, "Group", "animals: birds")
    generate(page, pictures=4 if name == "desktop" else 1, steps=20 if "SCREENSHOTS" in os.environ else 2, batch_size=2)
    page.get_by_role("button", name="More settings").click()
    wait_for_status(page, "Drew")
    page.mouse.move(0, 0)
    wait_for_end(page)
    page.evaluate("scrollTo(0, 0)")
    screenshot(page, name, tmp_path, full_page=name != "desktop")
    for tab in ("Draw", "Compare", "History"):
        show(page, tab)
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
