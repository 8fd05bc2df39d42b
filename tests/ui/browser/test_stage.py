"""Browser tests of the stage: one picture fills it with sharp pixels, the others are in a strip beside it."""

import json
import re

import pytest

from fastdiff.kinds import MAX_SEED
from fastdiff.runs import drawing
from tests.ui.browser.actions import (
    DESKTOP,
    DICE,
    LOCK,
    PHONE,
    combobox,
    expect,
    fill,
    generate,
    more_settings,
    number,
    open_tab,
    settings,
    until,
    wait_for_end,
    wait_for_seeds,
    wait_for_status,
)

pytestmark = pytest.mark.slow

DISPLAYED = """
(image) => ({
    width: image.getBoundingClientRect().width,
    height: image.getBoundingClientRect().height,
    natural: image.naturalWidth,
    room: [image.parentElement.clientWidth, image.parentElement.clientHeight],
    x: image.getBoundingClientRect().x - document.querySelector("#gallery").getBoundingClientRect().x,
    rendering: getComputedStyle(image).imageRendering,
})
"""  # x on the stage: a scrollbar of the page moves both
PLACES = """
() => ["#generate", "#gallery", "#gallery-view"].map((each) => {
    const y = document.querySelector(each).getBoundingClientRect().y;
    return Math.round(each === "#generate" ? y : y + scrollY);
})
"""  # of elements that must not move: Generate in the window, the others on the page, which may still be scrolling
ON_STAGE = "document.querySelector('#gallery [data-testid=detailed-image]')?.src"


def on_stage(page, gallery: str = "#gallery"):
    return page.locator(gallery).get_by_test_id("detailed-image")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_small_picture_fills_the_stage_by_a_whole_factor(open_page, size):
    page = open_page(size)
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")

    def fills_the_stage():
        shown = on_stage(page).evaluate(DISPLAYED)
        natural, width = shown["natural"], shown["width"]
        is_whole = natural > 0 and width % natural == 0 and width >= 4 * natural and shown["height"] == width
        return is_whole and min(shown["room"]) < width + natural and shown["rendering"] == "pixelated"

    until(page, fills_the_stage)


def test_the_preview_is_as_large_as_the_picture_will_be(page, slow_steps):
    slow_steps.seconds = 100  # otherwise the run may end between two looks at the server
    generate(page)
    slow_steps.turns.release()
    image = page.locator("#preview img").first
    until(page, lambda: image.evaluate(DISPLAYED)["width"] > 0)
    drawn, before = image.evaluate(DISPLAYED), page.evaluate(PLACES)
    assert drawn["rendering"] == "pixelated"
    slow_steps.turns.release(100)
    wait_for_status(page, "Drew 1 picture")
    until(page, lambda: page.evaluate(PLACES) == before)

    def is_as_large():
        finished = on_stage(page).evaluate(DISPLAYED)
        return finished["width"] == drawn["width"] and abs(finished["x"] - drawn["x"]) < 4

    until(page, is_as_large)


def test_several_are_a_strip_that_the_arrows_walk_and_a_grid_by_one_control(page):
    generate(page, pictures=3, steps=1, seed=10)
    wait_for_status(page, "Drew 3 pictures")
    strip = page.locator("#gallery .thumbnail-small")
    expect(strip).to_have_count(3)
    settings(page).get_by_text("10", exact=True).wait_for()
    strip.first.focus()
    page.keyboard.press("ArrowRight")
    settings(page).get_by_text("11", exact=True).wait_for()
    expect(on_stage(page)).to_have_attribute("alt", re.compile("seed 11"))
    page.locator("#gallery-view").get_by_text("Grid").click()
    expect(on_stage(page)).to_be_hidden()
    tiles = page.locator("#gallery .thumbnail-lg")
    expect(tiles.locator("visible=true")).to_have_count(3)
    tiles.nth(2).click()
    settings(page).get_by_text("12", exact=True).wait_for()
    on_stage(page).wait_for()
    expect(page.locator("#gallery-view").get_by_role("radio", name="One")).to_be_checked()
    page.keyboard.press("Escape")
    expect(on_stage(page)).to_have_count(0)
    page.locator("#gallery-view label.selected").get_by_text("Grid").wait_for()


def test_zoom_to_pixels(page):
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")
    page.locator("#gallery img[data-small]").first.wait_for()
    whole = on_stage(page).evaluate(DISPLAYED)["width"]
    assert whole > 0
    page.locator("#gallery-view").get_by_text("Pixels").click()

    def is_enlarged():
        shown = on_stage(page).evaluate(DISPLAYED)
        return shown["width"] >= 2 * whole and shown["width"] % shown["natural"] == 0

    until(page, is_enlarged)
    expect(on_stage(page)).to_have_css("image-rendering", "pixelated")


def test_captions_tell_runs_apart_and_say_what_is_shown(page):
    for steps in (1, 2):
        generate(page, steps=steps, seed=5)
        expect(settings(page)).to_contain_text(re.compile(rf"Steps\s+{steps}\b"), use_inner_text=True)
        wait_for_end(page)
    label = re.search(r"Label\s+(.+)", settings(page).inner_text())[1]
    expect(on_stage(page)).to_have_attribute("alt", f"seed 5, {label}")
    open_tab(page, "History")
    images = page.locator("#history .thumbnail-lg img")
    expect(images).to_have_count(2)
    expect(images.nth(0)).to_have_attribute("alt", f"{label}, seed 5, 2 steps")
    expect(images.nth(1)).to_have_attribute("alt", f"{label}, seed 5, 1 step")


def test_a_picture_takes_no_key_from_who_types(page, slow_steps):
    slow_steps.seconds = 100
    generate(page, steps=3)
    number(page, "Seed").focus()
    slow_steps.turns.release(3)
    wait_for_status(page, "Drew 1 picture")
    on_stage(page).wait_for()
    wait_for_end(page)
    expect(number(page, "Seed")).to_be_focused()


def test_each_run_takes_a_new_seed_unless_the_lock_keeps_it(page):
    seed, pictures = number(page, "Seed"), [None]

    def draw() -> str:
        """Draw a picture, and return its seed."""
        generate(page, steps=1, seed=None)
        until(page, lambda: page.evaluate(ON_STAGE) not in pictures)
        pictures.append(page.evaluate(ON_STAGE))
        wait_for_status(page, "Drew 1 picture")
        drawn = re.match(r"seed (\d+)", on_stage(page).get_attribute("alt"))[1]
        settings(page).get_by_text(drawn, exact=True).wait_for()
        return drawn

    expect(seed).to_have_value("-1")
    first, second = draw(), draw()
    assert first != second
    expect(seed).to_have_value("-1")
    page.get_by_role("button", name=LOCK).click()
    expect(seed).to_have_value(second)
    assert draw() == draw() == second
    page.get_by_role("button", name=DICE).click()
    expect(seed).to_have_value("-1")
    assert draw() != second
    seed.fill("")
    assert draw() != second
    seed.fill("7")
    assert draw() == draw() == "7"


def test_before_the_first_picture_the_lock_chooses_a_seed(page):
    page.get_by_role("button", name=LOCK).click()
    expect(number(page, "Seed")).to_have_value(re.compile(r"^\d+$"))
    assert int(number(page, "Seed").input_value()) <= MAX_SEED


def test_the_page_opens_with_a_label_that_names_its_pictures(page):
    expect(combobox(page, "Group")).to_have_value("smileys: smiling faces")


def in_view(page, locator) -> bool:
    box = locator.bounding_box()
    return box["y"] >= 0 and box["y"] + box["height"] <= page.viewport_size["height"]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_generate_is_in_reach_wherever_one_is_on_the_form(open_page, size):
    page = open_page(size)
    more_settings(page)
    button = page.locator("#generate")
    for field in (combobox(page, "Model"), number(page, "Steps"), number(page, "Batch size")):
        field.scroll_into_view_if_needed()
        until(page, lambda: in_view(page, button))


def test_on_a_phone_the_finished_picture_scrolls_into_view(open_page):
    page = open_page(PHONE)
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")
    until(page, lambda: in_view(page, on_stage(page)))
    generate_at = page.locator("#generate").bounding_box
    until(page, lambda: on_stage(page).bounding_box()["y"] + 300 < generate_at()["y"])


def test_one_line_says_how_far_the_run_is(page, slow_steps):
    slow_steps.seconds = 100
    generate(page, pictures=2, steps=4)
    slow_steps.turns.release()
    line = re.compile(r"^Picture 1 of 2, step 1 of 4, [\d.]+ pictures/s, \d+ (s|min) left$")
    expect(page.locator("#status")).to_have_text(line, use_inner_text=True)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_generate_and_the_line_of_a_run_are_above_the_pictures(open_page, slow_steps, size):
    page = open_page(size)
    generate(page, steps=3)
    wait_for_status(page, "Drew 1 picture")
    on_top = """(each) => {
        const {x, y, width, height} = each.getBoundingClientRect();
        return each.contains(document.elementFromPoint(x + width / 2, y + height / 2));
    }"""

    def is_reachable():
        page.evaluate(
            "scrollBy(0, document.querySelector('#gallery').getBoundingClientRect().bottom - innerHeight + 9)"
        )
        return page.locator("#generate").evaluate(on_top)

    until(page, is_reachable)  # the page scrolls by itself at first
    label_is_below = """() => {
        const labels = [...document.querySelectorAll("[data-testid=block-info]")];
        const label = labels.find((each) => each.innerText === "Guidance");
        const place = () => label.getBoundingClientRect();
        scrollBy(0, place().y - document.querySelector("#generate").getBoundingClientRect().y - 9);
        return document.elementFromPoint(place().x + 5, place().y + 5).closest(".actions") !== null;
    }"""
    until(page, lambda: page.evaluate(label_is_below))
    slow_steps.seconds = 100
    slow_steps.turns.release()
    page.locator("#generate").dispatch_event("click")
    page.locator("#status [role=progressbar]").wait_for()

    def is_on_top():
        page.evaluate("scrollBy(0, document.querySelector('#gallery').getBoundingClientRect().top + 99)")
        return page.locator("#status [role=progressbar]").evaluate(on_top)

    until(page, is_on_top)


def test_cancel_is_there_while_something_is_drawn(page, slow_steps):
    cancel = page.get_by_role("button", name="Cancel")
    expect(cancel).to_have_count(0)
    slow_steps.seconds = 100
    generate(page, steps=3)
    cancel.wait_for()
    slow_steps.turns.release(3)
    wait_for_status(page, "Drew 1 picture")
    expect(cancel).to_have_count(0)


def test_a_double_click_draws_once(page, slow_steps):
    fill(page, {number(page, "Seed"): "0"})
    page.locator("#generate").dblclick()
    wait_for_status(page, "Drew 1 picture")
    wait_for_end(page)
    generate(page, steps=1, seed=5)  # a run of the second click would come before this one
    wait_for_seeds(page, 5)
    open_tab(page, "History")
    wait_for_seeds(page, 5, 0, gallery="#history")


def test_generate_tells_of_a_lost_server_and_the_page_comes_back_with_it(page):
    number(page, "Seed").fill("5")
    page.context.set_offline(True)
    page.locator("#generate").click()
    refusal = page.locator(".actions [role=alert]").locator("visible=true")
    refusal.filter(has_text="The server did not take this run").wait_for()
    page.locator("#status [role=alert]").get_by_text("restart the server; then press the button again").wait_for()
    page.context.set_offline(False)
    wait_for_status(page, "Choose what to draw")
    expect(number(page, "Seed")).to_have_value("5")
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")


def test_a_run_that_breaks_off_says_what_to_do(page, monkeypatch):
    monkeypatch.setattr(drawing, "draw", lambda run, pipe: 1 / 0)
    page.locator("#generate").click()
    expect(page.locator("#status [role=alert]")).to_contain_text("The run failed")
    wait_for_end(page)


def test_settings_are_copied_as_text(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    generate(page, steps=1, seed=5)
    wait_for_status(page, "Drew 1 picture")
    page.get_by_role("button", name="Copy settings").click()
    until(page, lambda: page.evaluate("navigator.clipboard.readText()"))
    text = page.evaluate("navigator.clipboard.readText()")
    assert text.startswith("fluent-3d smiling faces\nSteps: 1, Sampler: DDIM, ") and "Seed: 5, Size: 64x64" in text


def test_a_run_that_cannot_be_sent_says_so_beside_the_button_also_while_another_is_drawn(page, slow_steps):
    slow_steps.seconds = 100
    generate(page, seed=1, steps=9)
    page.locator("#generate-runs li").wait_for()
    refusal = page.locator(".actions [role=alert]").locator("visible=true")

    def refuse(route) -> None:
        if json.loads(route.request.post_data)["fn_index"] == event:
            answer(route)
        else:
            route.continue_()

    event = page.evaluate("""() => {
        const {components, dependencies} = window.gradio_config;
        const {id} = components.find((each) => each.props.elem_id === "generate");
        return dependencies.find((each) => each.backend_fn && each.targets.some(([own]) => own === id)).id;
    }""")
    for answer in (  # noqa: B007  # `refuse` calls it
        lambda route: route.fulfill(status=500, body="Internal Server Error"),
        lambda route: route.fulfill(status=413, json={"detail": "too large"}),
    ):
        page.route("**/gradio_api/run/predict*", refuse)
        page.locator("#generate").click()
        refusal.filter(has_text="The server did not take this run. Press the button again").wait_for()
        page.wait_for_timeout(1000)  # the next looks at the queue leave it there
        expect(refusal).to_have_count(1)
        expect(page.locator("#generate-runs li")).to_have_count(1)
        page.unroute("**/gradio_api/run/predict*")
        slow_steps.turns.release()
        page.locator("#status [role=progressbar]").wait_for()
        page.locator("#generate").click()
        expect(page.locator("#generate-runs li")).to_have_count(2)
        expect(refusal).to_have_count(0)
        page.get_by_role("button", name="Cancel").last.click()
        expect(page.locator("#generate-runs li")).to_have_count(1)


def test_a_wrong_value_is_told_while_another_run_is_drawn(page, slow_steps):
    slow_steps.seconds = 100
    generate(page, seed=1, steps=5)
    page.locator("#generate-runs li").wait_for()
    generate(page, seed=-2, steps=5)
    refusal = page.locator(".actions [role=alert]").locator("visible=true")
    refusal.filter(has_text="Seed: -2 is not a whole number").wait_for()
    for step in (1, 2):
        slow_steps.turns.release()
        page.locator("#status").get_by_text(f"Step {step} of 5").wait_for()
    expect(refusal).to_have_count(1)
