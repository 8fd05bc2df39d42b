"""Browser tests of accessibility: axe-core, focus rings, names of groups, and the order of the Tab key."""

import pytest

from tests.ui.browser.actions import (
    DESKTOP,
    PHONE,
    combobox,
    expect,
    fill,
    generate,
    more_settings,
    numbers,
    open_tab,
    pick,
    textbox,
    until,
    wait_for_end,
    wait_for_seeds,
    wait_for_status,
)

pytestmark = pytest.mark.slow
IMPACTS = {"serious", "critical"}
NAMES = """(fields) => fields.map((field) =>
    field.ariaLabel || field.labels[0].querySelector("[data-testid=block-info]").innerText)"""
FOCUSED = """
() => {
    const [element, style] = [document.activeElement, getComputedStyle(document.activeElement)];
    return [element.outerHTML.slice(0, 200), style.outlineStyle, parseFloat(style.outlineWidth), style.outlineColor];
}
"""
# whether all colors have faded in
IS_STILL = """() => document.getAnimations().every(
    (each) => each.playState !== "running" || each.effect.getComputedTiming().endTime === Infinity)"""

# Compare the element in focus with the one before: themselves, or the blocks in which their ways part.
STEP = """() => {
    const now = document.activeElement, before = globalThis.before;
    const name = now.ariaLabel || now.innerText?.trim() || now.labels?.[0]?.innerText.trim() || now.className;
    if (now === document.body) return {name: null, follows: true};
    const way = (each) => each ? [...way(each.parentElement), each] : [];
    const isFixed = (each) => getComputedStyle(each).position === "fixed";
    if (way(now).some(isFixed)) return {name, follows: true};  // on a phone, the bar over the page
    globalThis.before = now;
    const holds = (a, b) => a.left <= b.left && a.right >= b.right && a.top <= b.top && a.bottom >= b.bottom;
    const follows = (a, b) => {
        const isBelow = b.top >= a.bottom - 2;
        const isRight = b.left >= a.left - 2 && b.right >= a.right && b.bottom > a.top + 2 && a.bottom > b.top;
        return isBelow || isRight || holds(a, b) || holds(b, a);  // a field holds its buttons, a picture too
    };
    const [one, other] = [way(before), way(now)];
    const parting = one.findIndex((each, index) => each !== other[index]);
    const blocks = [one[parting] ?? before, other[parting] ?? now];
    const box = (each) => each.getBoundingClientRect();
    return {name, follows: follows(...blocks.map(box)) || follows(box(before), box(now))};
}"""
SHOWN = """() => {
    const now = document.activeElement, {x, y, width, height} = now.getBoundingClientRect();
    const top = document.elementFromPoint(x + width / 2, y + height / 2);  // null outside the window
    return now.checkVisibility({opacityProperty: true, visibilityProperty: true}) && width > 0 && height > 0
        && Boolean(top) && (now.contains(top) || top.contains(now));
}"""
SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])


def problems(page) -> list[str]:
    """Return what axe-core finds serious or critical on the page as it is now: the rule, the element and why."""
    from axe_playwright_python.sync_playwright import Axe  # optional, like playwright

    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_function(IS_STILL)
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:200]} in {node['target']}: {node['failureSummary']}"
        for rule in found
        if rule["impact"] in IMPACTS
        for node in rule["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page, theme):
    page = open_page(theme=theme)
    more_settings(page)
    page.get_by_role("button", name="X/Y sheet").click()
    found = {"Draw": problems(page)}
    generate(page, pictures=2, steps=1)
    wait_for_status(page, "Drew 2 pictures")
    wait_for_end(page)
    wait_for_seeds(page, 0, 1)
    found["Draw with a picture"] = problems(page)
    open_tab(page, "History")
    wait_for_seeds(page, 1, 0, gallery="#history")
    found["History"] = problems(page)
    page.locator("#history .thumbnail-lg").first.click()
    page.locator("#delete").wait_for()
    found["History with a picture"] = problems(page)
    open_tab(page, "Compare")
    found["Compare"] = problems(page)
    steps = numbers(page, "Steps")
    fill(page, {steps.nth(0): "1", steps.nth(1): "2"})
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_test_id("imageslider-image").first.wait_for()
    found["Compare with pictures"] = problems(page)
    assert {place: each for place, each in found.items() if each} == {}


@pytest.mark.parametrize("tab", ["Draw", "History", "Compare"])
def test_the_focused_control_has_a_ring(page, tab):
    open_tab(page, tab)
    page.get_by_role("tab", name=tab).focus()
    seen = []
    for _ in range(12):
        page.keyboard.press("Tab")
        page.wait_for_function(IS_STILL)
        seen.append(page.evaluate(FOCUSED))
        if seen[-1][0].startswith("<body"):
            seen.pop()
            break
    assert len(seen) >= 3
    accent = page.evaluate("getComputedStyle(document.body).getPropertyValue('--primary-500').trim()")
    red, green, blue = (int(accent[i : i + 2], 16) for i in (1, 3, 5))
    ring = ["solid", 2, f"rgb({red}, {green}, {blue})"]
    assert [each for each in seen if each[1:] != ring] == []


def test_related_fields_are_named_groups(page):
    more_settings(page)
    for name, field in (("Random start", "Seed"), ("Number of steps", "Steps")):
        group = page.get_by_role("group", name=name, exact=True).first
        expect(numbers(group, field)).to_have_count(1)
    page.get_by_role("button", name="X/Y sheet").click()
    wait_for_fields(page, "Label", "Style", "Group")
    sliders = [f"{part} for {side}" for side in ("Width", "Height") for part in ("number input", "range slider")]
    wait_for_fields(page, "Picture size", *sliders)
    wait_for_fields(page, "X/Y sheet", "X: columns", "Y: rows")
    pick(page, "Model", "./text/sd1")
    textbox(page, "Negative prompt").wait_for()
    wait_for_fields(page, "Prompts", "Prompt", "Styles", "Recent prompts", "Negative prompt")
    open_tab(page, "Compare")
    wait_for_fields(page, "Label", "Style", "Group")
    for name in ("A", "B"):
        group = page.get_by_role("group", name=f"Settings of {name}", exact=True)
        expect(combobox(group, "Model")).to_have_count(1)


def wait_for_fields(page, group: str, *names: str) -> None:
    """Wait until the named group has visible fields of these names, in this order."""
    found = page.get_by_role("group", name=group, exact=True).locator("input:visible, textarea:visible")
    until(page, lambda: found.evaluate_all(NAMES) == [*names])


def walk(page, tab: str) -> list[str]:
    """Press Tab from the tab list to the end of the page, check each element, and return their names.

    Each element must be visible, and below the one before or on its right.
    """
    page.get_by_role("tab", name=tab).focus()
    page.evaluate("globalThis.before = document.activeElement")
    names: list[str] = []
    while True:
        page.keyboard.press("Tab")
        step = page.evaluate(STEP)
        if step["name"] is None:
            assert names[-1] == "Settings", f"the focus is lost after {names[-1]}"
            return names
        assert step["follows"], f"{step['name']} follows {names[-1]}"
        names.append(step["name"])
        until(page, lambda: page.evaluate(SHOWN))  # the page may still scroll


def are_in_order(names: list[str], *some: str) -> bool:
    return [name for name in names if name in some] == [*some]


def tiles(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("Thumbnail")]


def draw(page, pictures: int) -> None:
    generate(page, pictures=pictures, steps=1)
    wait_for_end(page)
    wait_for_seeds(page, *range(pictures))
    page.locator("#gallery .preview").wait_for()


@SIZES
def test_tab_goes_through_the_form(page, size):
    page.set_viewport_size(size)
    names = walk(page, "Draw")
    assert are_in_order(names, "Model", "Style", "Group", "Seed", "Generate", "One", "Grid", "Settings")
    more_settings(page)
    page.get_by_role("button", name="X/Y sheet").click()
    page.get_by_label("Y: rows").wait_for()
    pick(page, "Model", "./text/sd1")
    page.get_by_label("Negative prompt").locator("visible=true").wait_for()
    names = walk(page, "Draw")
    assert are_in_order(names, "Prompt", "Negative prompt", "Steps", "Scheduler", "Y: rows", "Generate", "Grid")


@SIZES
@pytest.mark.parametrize("pictures", [1, 3])
def test_tab_finds_no_picture_behind_another_and_all_in_the_grid(page, size, pictures):
    page.set_viewport_size(size)
    draw(page, pictures)
    names = walk(page, "Draw")
    numbered = [f"Thumbnail {1 + i} of {pictures}" for i in range(pictures)]
    assert tiles(names) == (numbered if pictures > 1 else [])
    assert are_in_order(names, "Generate", "detailed view of selected image", "Grid", "Use these settings")
    page.get_by_role("radio", name="Grid").locator("visible=true").check()
    assert tiles(walk(page, "Draw")) == numbered


@SIZES
def test_tab_goes_through_history(page, size):
    page.set_viewport_size(size)
    draw(page, 2)
    open_tab(page, "History")
    wait_for_seeds(page, 1, 0, gallery="#history")
    names = walk(page, "History")
    assert are_in_order(names, "Search", "Day", "Page", "Select several", *tiles(names), "Grid")
    assert len(tiles(names)) == 2
    page.locator("#history .thumbnail-lg").first.click()
    page.locator("#delete").wait_for()
    names = walk(page, "History")  # the lists of models and days leave the picture open
    assert are_in_order(
        names, "Day", "Close", *tiles(names), "Grid", "Previous", "Next", "Use these settings", "Delete"
    )
    assert len(tiles(names)) == 2


@SIZES
def test_tab_goes_through_compare(page, size):
    page.set_viewport_size(size)
    open_tab(page, "Compare")
    names = walk(page, "Compare")
    assert are_in_order(names, "Style", "Group", "Seed", "Settings") and names.count("Scheduler") == 2
    steps = numbers(page, "Steps")
    fill(page, {steps.nth(0): "1", steps.nth(1): "2"})
    page.locator("#compare").click()
    page.get_by_test_id("imageslider-image").first.wait_for()
    names = walk(page, "Compare")
    assert are_in_order(names, "Use the settings of A", "Use the settings of B", "Group", "Seed", "Settings")
    assert names.count("Fullscreen") == 3
