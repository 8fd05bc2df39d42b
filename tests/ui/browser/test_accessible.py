"""Browser tests of accessibility: axe-core, focus rings and names of groups."""

import pytest

from tests.ui.browser.actions import (
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
