"""Browser tests of the sections that open: their fields can be reached, and Generate never covers them."""

import pytest

from tests.ui.browser.actions import PHONE, combobox, expect, generate, more_settings, number, until

pytestmark = pytest.mark.slow

LAPTOP = {"width": 1280, "height": 720}
SIZES = pytest.mark.parametrize("size", [LAPTOP, PHONE], ids=["laptop", "phone"])
IN_SIGHT = """(each) => {
    const bar = [...document.querySelectorAll(".actions")].find((each) => each.checkVisibility());
    const {top, bottom} = each.getBoundingClientRect();
    return top >= 0 && bottom <= bar.getBoundingClientRect().top;
}"""
FOCUSED = """() => {
    const field = document.activeElement, {x, y, width, height} = field.getBoundingClientRect();
    const bar = [...document.querySelectorAll(".actions")].find((each) => each.checkVisibility());
    const covered = [0.1, 0.5, 0.9].some((share) => {
        const top = document.elementFromPoint(x + width / 2, y + share * height);
        return !top || bar.contains(top);
    });
    return [Boolean(field.closest("#more, #axes")), field.ariaLabel || field.innerText || field.value, covered];
}"""


@SIZES
@pytest.mark.parametrize("section", ["More settings", "X/Y sheet"])
def test_a_section_shows_what_it_holds_when_it_opens(open_page, size, section):
    page = open_page(size)
    button = page.get_by_role("button", name=section)
    button.click()
    first = {"More settings": page.locator("#more .steps"), "X/Y sheet": combobox(page, "Y: rows")}[section].first
    first.wait_for()
    until(page, lambda: first.evaluate(IN_SIGHT) and button.evaluate(IN_SIGHT))


@SIZES
@pytest.mark.parametrize("runs", [0, 4])
def test_no_field_in_focus_lies_under_generate_or_the_list_of_runs(open_page, size, runs, slow_steps):
    page = open_page(size)
    more_settings(page)
    page.get_by_role("button", name="X/Y sheet").click()
    combobox(page, "Y: rows").wait_for()
    slow_steps.seconds = 100
    for count in range(runs):
        generate(page)
        expect(page.locator("#generate-runs li")).to_have_count(count + 1)
    page.wait_for_timeout(1500)  # the sections have been scrolled into view
    page.evaluate("scrollTo(0, 0)")
    number(page, "Seed").focus()
    seen = []
    for key in ("Tab", "Shift+Tab"):
        for _ in range(60):
            page.keyboard.press(key)
            until(page, lambda: not all(page.evaluate(FOCUSED)[::2]))  # not inside a section and covered
            is_inside, name, _ = page.evaluate(FOCUSED)
            seen += [name] if is_inside else []
            if not is_inside and seen and name in ("Generate", "Seed"):
                break
    assert {"Steps", "Scheduler", "Eta", "number input for Batch size", "Y: rows"} & {*seen} >= {"Steps", "Y: rows"}
    assert seen.count("Steps") == 2
