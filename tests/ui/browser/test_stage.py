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
    captions,
    fill,
    generate,
    more_settings,
    number,
    run_shown,
    until,
    wait_for_end,
    wait_for_status,
)

pytestmark = pytest.mark.slow

DISPLAYED = """
(image) => ({
    width: image.getBoundingClientRect().width,
    height: image.getBoundingClientRect().height,
    natural: image.naturalWidth,
    room: [image.parentElement.clientWidth, image.parentElement.clientHeight],
    rendering: getComputedStyle(image).imageRendering,
})
"""
PLACES = """
() => [...document.querySelectorAll("#generate, #gallery, #gallery-view")]
    .map((each) => Math.round(each.getBoundingClientRect().y))
"""  # of elements that must not move
PLACE_ON_STAGE = """
(image) => image.getBoundingClientRect().x - document.querySelector("#gallery").getBoundingClientRect().x
"""  # a scrollbar of the page moves both


def on_stage(page, gallery: str = "#gallery"):
    return page.locator(gallery).get_by_test_id("detailed-image")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_small_picture_fills_the_stage_by_a_whole_factor(open_page, size):
    page = open_page(size)
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")
    page.locator("#gallery img[data-small]").first.wait_for()
    shown = on_stage(page).evaluate(DISPLAYED)
    factor = shown["width"] / shown["natural"]
    assert factor == int(factor) >= 4 and shown["height"] == shown["width"]
    assert all(side < shown["width"] + shown["natural"] for side in [min(shown["room"])])
    assert shown["rendering"] == "pixelated"


def test_the_preview_is_as_large_as_the_picture_will_be(page, slow_steps):
    slow_steps.seconds = 100  # otherwise the run may end between two looks at the server
    generate(page)
    slow_steps.turns.release()
    image = page.locator("#preview img").first
    image.wait_for()
    place, drawn = image.evaluate(PLACE_ON_STAGE), image.evaluate(DISPLAYED)
    before = page.evaluate(PLACES)
    slow_steps.turns.release(100)
    wait_for_status(page, "Drew 1 picture")
    until(page, lambda: page.evaluate(PLACES) == before)
    finished = on_stage(page).evaluate(DISPLAYED)
    assert (drawn["width"], drawn["rendering"]) == (finished["width"], "pixelated")
    assert abs(place - on_stage(page).evaluate(PLACE_ON_STAGE)) < 4


def test_several_are_a_strip_that_the_arrows_walk_and_a_grid_by_one_control(page):
    generate(page, pictures=3, steps=1, seed=10)
    wait_for_status(page, "Drew 3 pictures")
    strip = page.locator("#gallery .thumbnail-small")
    assert strip.count() == 3
    settings = page.locator("dl.settings").locator("visible=true")
    settings.get_by_text("10", exact=True).wait_for()
    strip.first.focus()
    page.keyboard.press("ArrowRight")
    settings.get_by_text("11", exact=True).wait_for()
    assert "seed 11" in on_stage(page).get_attribute("alt")
    page.locator("#gallery-view").get_by_text("Grid").click()
    on_stage(page).locator("visible=true").wait_for(state="detached")
    tiles = page.locator("#gallery .thumbnail-lg")
    assert [tile.is_visible() for tile in tiles.all()] == [True] * 3
    tiles.nth(2).click()
    settings.get_by_text("12", exact=True).wait_for()
    on_stage(page).locator("visible=true").wait_for()
    assert page.locator("#gallery-view").get_by_role("radio", name="One").is_checked()
    page.keyboard.press("Escape")
    on_stage(page).wait_for(state="detached")
    page.locator("#gallery-view label.selected").get_by_text("Grid").wait_for()


def test_zoom_to_pixels(page):
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")
    whole = on_stage(page).evaluate(DISPLAYED)["width"]
    page.locator("#gallery-view").get_by_text("Pixels").click()
    until(page, lambda: on_stage(page).evaluate(DISPLAYED)["width"] != whole)
    shown = on_stage(page).evaluate(DISPLAYED)
    assert shown["width"] >= 2 * whole and shown["width"] % shown["natural"] == 0
    assert shown["rendering"] == "pixelated"


def test_captions_tell_runs_apart_and_say_what_is_shown(page):
    for steps in (1, 2):
        generate(page, steps=steps, seed=5)
        wait_for_status(page, "Drew 1 picture")
        wait_for_end(page)
    label = re.search(r"Label\s+(.+)", page.locator("dl.settings").first.inner_text())[1]
    assert on_stage(page).get_attribute("alt") == f"seed 5, {label}"
    page.get_by_role("tab", name="History").click()
    page.locator("#history .caption-label").nth(1).wait_for()
    images = page.locator("#history .thumbnail-lg img")
    assert [image.get_attribute("alt") for image in images.all()] == [
        f"{label}, seed 5, {steps} step{'s' * (steps > 1)}" for steps in (2, 1)
    ]


def test_a_picture_takes_no_key_from_who_types(page, slow_steps):
    generate(page, steps=3)
    seed = page.get_by_label("Seed").first
    seed.focus()
    wait_for_status(page, "Drew 1 picture")
    on_stage(page).wait_for()
    wait_for_end(page)
    assert seed.evaluate("(field) => field === document.activeElement")


def test_each_run_takes_a_new_seed_unless_the_lock_keeps_it(page):
    seed = page.get_by_label("Seed", exact=True).first

    def draw() -> str:
        """Draw a picture, and return its seed."""
        before = run_shown(page)
        generate(page, steps=1, seed=None)
        until(page, lambda: run_shown(page) != before)
        wait_for_status(page, "Drew 1 picture")
        drawn = re.match(r"seed (\d+)", on_stage(page).get_attribute("alt"))[1]
        page.locator("dl.settings").get_by_text(drawn, exact=True).wait_for()
        return drawn

    assert seed.input_value() == "-1"
    first, second = draw(), draw()
    assert first != second and seed.input_value() == "-1"
    page.get_by_role("button", name=LOCK).first.click()
    until(page, lambda: seed.input_value() == second)
    assert draw() == draw() == second
    page.get_by_role("button", name=DICE).first.click()
    until(page, lambda: seed.input_value() == "-1")
    assert draw() != second
    seed.fill("")
    assert draw() != second
    seed.fill("7")
    assert draw() == draw() == "7"


def test_before_the_first_picture_the_lock_chooses_a_seed(page):
    page.get_by_role("button", name=LOCK).first.click()
    seed = page.get_by_label("Seed", exact=True).first
    until(page, lambda: seed.input_value() != "-1")
    assert 0 <= int(seed.input_value()) <= MAX_SEED


def test_the_page_opens_with_a_label_that_names_its_pictures(page):
    assert page.get_by_label("Group").first.input_value() == "smileys: smiling faces"


def in_view(page, locator) -> bool:
    box = locator.bounding_box()
    return box["y"] >= 0 and box["y"] + box["height"] <= page.viewport_size["height"]


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_generate_is_in_reach_wherever_one_is_on_the_form(open_page, size):
    page = open_page(size)
    more_settings(page)
    number(page, "Batch size").wait_for()
    button = page.locator("#generate")
    for field in (page.get_by_label("Model", exact=True).first, number(page, "Steps"), number(page, "Batch size")):
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
    generate(page, pictures=2, steps=4)
    line = re.compile(r"^Picture 1 of 2, step \d of 4, [\d.]+ pictures/s, \d+ s left$")
    page.locator("#status [role=progressbar]").wait_for()
    assert line.match(page.locator("#status").inner_text().strip())


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
    slow_steps.seconds = 1
    page.locator("#generate").dispatch_event("click")
    page.locator("#status [role=progressbar]").wait_for()

    def is_on_top():
        page.evaluate("scrollBy(0, document.querySelector('#gallery').getBoundingClientRect().top + 99)")
        return page.locator("#status [role=progressbar]").evaluate(on_top)

    until(page, is_on_top)


def test_cancel_is_there_while_something_is_drawn(page, slow_steps):
    cancel = page.get_by_role("button", name="Cancel").locator("visible=true")
    assert cancel.count() == 0
    slow_steps.seconds = 1.0  # the page may look late on a busy machine
    generate(page, steps=3)
    cancel.wait_for()
    wait_for_status(page, "Drew 1 picture")
    cancel.wait_for(state="detached")


def test_a_double_click_draws_once(page, slow_steps):
    fill(page, {page.get_by_label("Seed").first: "0"})
    page.locator("#generate").dblclick()
    wait_for_status(page, "Drew 1 picture")
    wait_for_end(page)
    generate(page, steps=1, seed=5)  # a run of the second click would come before this one
    page.locator("#gallery [alt^='seed 5']").first.wait_for()
    page.get_by_role("tab", name="History").click()
    page.locator("#history .caption-label").get_by_text("seed 5").wait_for()
    assert captions(page, "#history") == ["seed 5", "seed 0"]


def test_generate_tells_of_a_lost_server_and_the_page_comes_back_with_it(page):
    page.get_by_label("Seed").first.fill("5")
    page.context.set_offline(True)
    page.locator("#generate").click()
    refusal = page.locator(".actions [role=alert]").locator("visible=true")
    refusal.filter(has_text="The server did not take this run").wait_for()
    page.locator("#status [role=alert]").get_by_text("restart the server; then press the button again").wait_for()
    page.context.set_offline(False)
    wait_for_status(page, "Choose what to draw")
    page.wait_for_function("document.querySelector('input[aria-label=\"Seed\"]').value === '5'")
    generate(page, steps=1)
    wait_for_status(page, "Drew 1 picture")


def test_a_run_that_breaks_off_says_what_to_do(page, monkeypatch):
    monkeypatch.setattr(drawing, "draw", lambda run, pipe: 1 / 0)
    page.locator("#generate").click()
    alert = page.locator("#status [role=alert]")
    alert.wait_for()
    assert "The run failed" in alert.inner_text()
    wait_for_end(page)


def test_settings_are_copied_as_text(page):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    generate(page, steps=1, seed=5)
    wait_for_status(page, "Drew 1 picture")
    page.get_by_role("button", name="Copy settings").locator("visible=true").click()
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
        assert refusal.count() == 1 and page.locator("#generate-runs li").count() == 1
        page.unroute("**/gradio_api/run/predict*")
        slow_steps.turns.release()
        page.locator("#status [role=progressbar]").wait_for()
        page.locator("#generate").click()
        until(page, lambda: page.locator("#generate-runs li").count() == 2)
        assert refusal.count() == 0
        page.get_by_role("button", name="Cancel").locator("visible=true").last.click()
        until(page, lambda: page.locator("#generate-runs li").count() == 1)


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
    assert refusal.count() == 1
