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
    combobox,
    drop,
    expect,
    fill,
    generate,
    more_settings,
    number,
    numbers,
    open_tab,
    pick,
    screenshot,
    settings,
    textbox,
    until,
    wait_for_end,
    wait_for_seeds,
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


def test_the_first_click_draws(page):
    wait_for_status(page, "press Generate")
    page.get_by_role("button", name="Generate").click()
    wait_for_status(page, "Drew 1 picture")
    expect(page.locator("#gallery .caption-label")).to_have_count(1)


def test_progress_and_a_preview_that_sharpens(page, slow_steps):
    slow_steps.seconds = 100
    generate(page, pictures=2, steps=5, batch_size=2)
    pictures, image = set(), page.locator("#preview img").first
    for step in range(1, 5):
        slow_steps.turns.release()
        line = rf"Picture 1 to 2 of 2, step {step} of 5, [\d.]+ pictures/s"
        expect(page.locator("#status")).to_contain_text(re.compile(line))
        until(page, lambda: image.get_attribute("src") not in pictures)
        pictures.add(image.get_attribute("src"))
    slow_steps.turns.release()
    wait_for_status(page, "Drew 2 pictures")
    expect(page.locator("#preview img")).to_have_count(0)
    wait_for_seeds(page, 0, 1)


def test_cancel_keeps_what_is_finished(page, slow_steps):
    slow_steps.seconds = 100
    generate(page, pictures=5, steps=4)
    slow_steps.turns.release(4)  # one picture
    wait_for_seeds(page, 0)
    page.get_by_role("button", name="Cancel").click()
    wait_for_status(page, "Cancelled")
    slow_steps.turns.release(100)
    time.sleep(2)
    assert len(slow_steps) <= 5
    wait_for_seeds(page, 0)
    generate(page, seed=9, steps=1)
    wait_for_status(page, "Drew 1 picture")
    wait_for_seeds(page, 9)


@pytest.mark.usefixtures("one_place")
def test_two_visits_wait_for_each_other_and_share_nothing(open_page, slow_steps):
    one, other = open_page(), open_page()
    slow_steps.seconds = 100
    generate(one, pictures=3, steps=6, seed=100)
    slow_steps.turns.release()
    one.locator("#preview img").first.wait_for()
    generate(other, steps=2, seed=200)
    wait_for_status(other, "Waiting for 1 run before it")
    other.get_by_role("button", name="Cancel").click()
    wait_for_status(other, "Cancelled")
    other.get_by_role("button", name="Generate").click()
    slow_steps.turns.release(100)
    wait_for_status(one, "Drew 3 pictures")
    wait_for_status(other, "Drew 1 picture")
    for page, own in ((one, [100, 101, 102]), (other, [200])):
        wait_for_seeds(page, *own)
        open_tab(page, "History")
        wait_for_seeds(page, *reversed(own), gallery="#history")
    expect(numbers(one, "Batch size")).to_have_count(0)  # the other tab's form is hidden
    open_tab(one, "Draw")
    expect(number(one, "Seed")).to_have_value("100")


def test_settings_of_a_picture_come_back(page, tmp_path):
    generate(page, pictures=2, steps=2, seed=40)
    wait_for_status(page, "Drew 2 pictures")
    page.locator("#gallery").get_by_role("button", name=re.compile("Thumbnail 2")).first.click()
    expect(settings(page)).to_contain_text(re.compile(r"Seed\s+41\s+Label\s+fluent-3d"), use_inner_text=True)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download this picture").click()
    path = tmp_path / download.value.suggested_filename
    download.value.save_as(path)
    assert png.read_settings(path)["seed"] == 41
    fill(page, {number(page, "Steps"): "7", number(page, "Seed"): "1"})
    page.get_by_role("button", name="Use these settings").click()
    wait_for_status(page, "Loaded the settings of seed 41")
    expect(number(page, "Seed")).to_have_value("41")
    expect(number(page, "Steps")).to_have_value("2")


def test_all_pictures_at_once(page, tmp_path):
    generate(page, pictures=2, steps=1)
    wait_for_status(page, "Drew 2 pictures")
    with page.expect_download() as download:
        page.get_by_role("button", name="Save as ZIP").click()
    download.value.save_as(tmp_path / "all.zip")
    shutil.unpack_archive(tmp_path / "all.zip", tmp_path / "all")
    files = sorted((tmp_path / "all").iterdir())
    assert [png.read_settings(file)["seed"] for file in files] == [0, 1]


def test_a_dropped_png_restores_its_settings(page, server, shared, tmp_path):
    from fastdiff.ui.drawing import draw, prepare
    from fastdiff.ui.parts.request import Limits, UncheckedRequest

    options = UncheckedRequest(label="noto birds", seed=77, steps=3, scheduler="ddpm", guidance_scale=1.5, width=72)
    *_, (_, [drawn]) = draw(prepare(options, shared, Limits()), shared, tmp_path)
    drop(page, drawn.path.read_bytes(), "mine.png")
    wait_for_status(page, "Loaded the settings of mine.png")
    more_settings(page)
    for name, value in (("Style", "noto"), ("Group", "animals: birds"), ("Scheduler", "DDPM")):
        expect(combobox(page, name)).to_have_value(value)
    for name, value in (("Seed", "77"), ("Steps", "3"), ("Guidance", "1.5"), ("Width", "72"), ("Height", "64")):
        expect(number(page, name)).to_have_value(value)
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
    expect(page.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize("tab", ["Draw", "Compare"])
def test_steps_have_a_slider_to_150_and_a_field_that_takes_more(page, tab):
    open_tab(page, tab)
    if tab == "Draw":
        more_settings(page)
    field, slider = number(page, "Steps"), page.get_by_role("slider", name="range slider for Steps").first
    for each in (field, slider):
        expect(each).to_have_value("50")
    expect(slider).to_have_attribute("max", "150")
    slider.focus()
    page.keyboard.press("ArrowRight")
    expect(field).to_have_value("51")
    field.fill("400")
    page.keyboard.press("Tab")
    expect(slider).to_have_value("150")
    page.wait_for_timeout(300)
    expect(field).to_have_value("400")


def test_a_run_of_more_steps_than_the_slider_has_and_of_too_many(page):
    generate(page, steps=151)
    wait_for_status(page, "Drew 1 picture")
    settings(page).get_by_text("151", exact=True).wait_for()
    generate(page, steps=1001)
    page.get_by_role("alert").get_by_text("Steps: 1001 is not a whole number from 1 to 1000").wait_for()


def test_another_model_chooses_its_scheduler_and_steps_in_draw_and_compare(page):
    more_settings(page)
    for tab in ("Draw", "Compare"):
        open_tab(page, tab)
        scheduler = combobox(page, "Scheduler").first
        expect(scheduler).to_have_value("DDIM")
        expect(number(page, "Steps")).to_have_value("50")
        pick(page, "Model", "./text/sd1")
        expect(scheduler).to_have_value("PNDM")
        pick(page, "Scheduler", "EULER-A")
        pick(page, "Model", "./plain/tiny")
        expect(textbox(page, "Prompt")).to_have_count(0)
        expect(scheduler).to_have_value("EULER-A")  # chosen by the user


def test_the_form_follows_the_model(page):
    more_settings(page)
    pick(page, "Model", "./plain/tiny")
    wait_for_status(page, "Ready to draw with ./plain/tiny")
    for name in ("Style", "Group", "Label"):
        expect(combobox(page, name)).to_have_count(0)
    expect(numbers(page, "Guidance")).to_have_count(0)
    expect(page.locator("#examples")).to_be_hidden()
    expect(number(page, "Width")).to_have_value("16")
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")
    pick(page, "Model", "./cats")
    wait_for_status(page, "Ready to draw with ./cats")
    expect(combobox(page, "Label")).to_have_value("0")


def test_groups_follow_the_style(page):
    pick(page, "Style", "noto")
    pick(page, "Group", "people: couples and families")
    pick(page, "Style", "twemoji")
    expect(combobox(page, "Group")).to_have_value("people: couples and families")
    pick(page, "Style", "fluent-flat")
    expect(combobox(page, "Group")).to_have_value("smileys: any")


def test_an_example_is_drawn_by_a_click(page):
    page.locator("#examples").get_by_role("button", name="railways").click()
    wait_for_status(page, "Drew 1 picture")
    wait_for_seeds(page, 3)
    expect(settings(page)).to_contain_text(re.compile(r"Label\s+noto railways"), use_inner_text=True)
    expect(combobox(page, "Group")).to_have_value("travel: railways")


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
        expect(each.locator("#generate-runs li")).to_have_count(3)
        expect(each.locator("#generate-runs li").nth(1)).to_contain_text("Waiting for 1 run before it")
    second.get_by_role("button", name="Cancel noto railways").click()
    expect(page.locator("#generate-runs li")).to_have_count(2)
    slow_steps.turns.release(2)
    page.bring_to_front()
    page.locator("#preview img").first.wait_for()
    wait_for_seeds(page, 50)
    page.get_by_role("button", name=re.compile("Cancel .*2 pictures")).click()
    slow_steps.seconds = 0
    slow_steps.turns.release(100)
    wait_for_end(page)
    settings(page).get_by_text("twemoji fruit").wait_for()


def test_compare(page, tmp_path):
    open_tab(page, "Compare")
    steps = numbers(page, "Steps")
    expect(steps.nth(0)).to_have_value("50")
    expect(steps.nth(1)).to_have_value("25")
    fill(page, {number(page, "Seed"): "0", steps.nth(0): "1", steps.nth(1): "3"})
    page.get_by_role("button", name="Compare", exact=True).click()
    table = r"A took\s+[\d.]+ s\s+B took\s+[\d.]+ s\s+Pixel difference\s+[\d.]+ of 255"
    expect(settings(page)).to_contain_text(re.compile(table), use_inner_text=True)
    expect(page.locator(".enlarged img")).to_have_count(2)
    expect(page.get_by_test_id("imageslider-image")).to_have_count(2)
    fill(page, {steps.nth(1): "1"})
    page.get_by_role("button", name="Compare", exact=True).click()
    settings(page).get_by_text("none: the pictures are identical").wait_for()
    open_tab(page, "History")
    wait_for_seeds(page, 0, 0, 0, 0, gallery="#history")


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
    number(page, "Seed").fill("5")
    page.keyboard.press("Enter")
    wait_for_status(page, "Drew 1 picture")
    wait_for_seeds(page, 5)


def test_every_control_has_a_name(page):
    more_settings(page)
    for tab in ("Draw", "Compare", "History"):
        open_tab(page, tab)
        until(page, lambda: page.evaluate(NAMELESS) == [])


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(open_page, theme):
    page = open_page(theme=theme)
    generate(page, seed="-2")
    page.get_by_role("alert").wait_for()
    until(page, lambda: page.evaluate("document.body.classList.contains('dark')") == (theme == "dark"))
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
        open_tab(page, tab)
        until(page, lambda: page.evaluate("document.documentElement.scrollWidth") <= size["width"])
