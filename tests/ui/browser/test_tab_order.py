"""Browser tests of the Tab key: it walks through the Draw tab in the order of sight."""

import pytest

from tests.ui.browser.actions import generate, more_settings, pick, until, wait_for_end

pytestmark = pytest.mark.slow

# Compare the element in focus with the one before: their columns, their blocks, or themselves within one block.
STEP = """() => {
    const box = (each) => each.getBoundingClientRect();
    const form = box([...document.querySelectorAll(".column:has(> .actions)")].find((each) => each.checkVisibility()));
    const stage = box([...document.querySelectorAll(".stage-side")].find((each) => each.checkVisibility()));
    const place = ({top, bottom, left, right}) => {
        if (bottom <= form.top) return 0;
        if (top >= Math.max(form.bottom, stage.bottom)) return 3;
        return (left + right) / 2 < stage.left ? 1 : 2;
    };
    const now = document.activeElement, before = globalThis.before;
    globalThis.before = now;
    const name = now.ariaLabel || now.innerText || now.value || now.localName;
    if (now === document.body || !before) return {name, place: 4, follows: true};
    const follows = (a, b) => {
        const isBelow = b.top >= a.bottom - 2, isRight = b.bottom > a.top + 2 && b.left >= a.left - 2;
        const liesOver = a.left >= b.left && a.right <= b.right && a.top >= b.top && a.bottom <= b.bottom;
        return isBelow || isRight || liesOver;  // the buttons over a picture come before it
    };
    const [a, b] = [before.closest(".block"), now.closest(".block")];
    const pair = a && b && a !== b ? [a, b] : [before, now];
    const [last, here] = [box(before), box(now)].map(place);
    return {name, place: here, follows: last === here ? follows(...pair.map(box)) : last < here};
}"""
SHOWN = """() => {
    const now = document.activeElement, {x, y, width, height} = now.getBoundingClientRect();
    const top = document.elementFromPoint(x + width / 2, y + height / 2);
    return now.checkVisibility({opacityProperty: true, visibilityProperty: true}) && width > 0 && height > 0
        && Boolean(top) && (now.contains(top) || top.contains(now));
}"""


def walk(page) -> list[str]:
    """Press Tab from the tab list to the end of the page, check each step, and return the names of the elements."""
    page.get_by_role("tab", name="Draw").focus()
    page.evaluate("globalThis.before = document.activeElement")
    names, place = [], 0
    while True:
        page.keyboard.press("Tab")
        step = page.evaluate(STEP)
        if step["place"] == 4:
            assert place == 3, f"the focus is lost after {names[-1]}"
            return names
        assert step["follows"], f"{step['name']} follows {names[-1]}"
        names, place = [*names, step["name"]], step["place"]
        until(page, lambda: page.evaluate(SHOWN))  # the page may still scroll


def test_tab_goes_in_the_order_of_sight(page):
    names = walk(page)
    assert names.index("Group") < names.index("Generate") < names.index("Grid") < names.index("Settings")
    more_settings(page)
    page.get_by_role("button", name="X/Y sheet").click()
    page.get_by_label("Y: rows").wait_for()
    names = walk(page)
    assert names.index("Scheduler") < names.index("Y: rows") < names.index("Generate")


@pytest.mark.parametrize("pictures", [1, 2])
def test_tab_finds_no_hidden_picture(page, pictures):
    generate(page, pictures=pictures, steps=1)
    wait_for_end(page)
    page.locator("#gallery img").first.wait_for()
    pick(page, "Model", "./text/sd1")
    page.get_by_label("Negative prompt").locator("visible=true").wait_for()
    names = walk(page)
    assert len([name for name in names if name.startswith("Thumbnail")]) == (pictures if pictures > 1 else 0)
    assert "Use these settings" in names
