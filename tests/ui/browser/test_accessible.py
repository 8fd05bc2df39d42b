"""Browser tests of accessibility: axe-core, focus rings and names of groups."""

import pytest
from axe_playwright_python.sync_playwright import Axe

from tests.ui.browser.actions import captions, fill, generate, more_settings, numbers, pick, until, wait_for_end

pytestmark = pytest.mark.slow
PANELS = {"Draw": "#generate", "Compare": ".side", "History": "#history"}
IMPACTS = {"serious", "critical"}
NAMES = """(fields) => fields.map((field) =>
    field.ariaLabel || field.labels[0].querySelector("[data-testid=block-info]").innerText)"""
FOCUSED = """
() => {
    const [element, style] = [document.activeElement, getComputedStyle(document.activeElement)];
    return [element.outerHTML.slice(0, 200), style.outlineStyle, parseFloat(style.outlineWidth), style.outlineColor];
}
"""


def problems(page) -> list[str]:
    """Return what axe-core finds serious or critical on the page as it is now: the rule, the element and why."""
    page.mouse.move(0, 0)
    page.wait_for_timeout(500)  # colors fade in
    page.evaluate("document.activeElement.blur()")
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:200]} in {node['target']}: {node['failureSummary']}"
        for rule in found
        if rule["impact"] in IMPACTS
        for node in rule["nodes"]
    ]


def open_tab(page, name: str) -> None:
    page.get_by_role("tab", name=name).click()
    page.locator(PANELS[name]).locator("visible=true").first.wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page, theme):
    page = open_page(theme=theme)
    more_settings(page)
    page.get_by_role("button", name="X/Y sheet").click()
    found = {"Draw": problems(page)}
    generate(page, pictures=2, steps=1)
    wait_for_end(page)
    page.locator("#gallery img").first.wait_for()
    found["Draw with a picture"] = problems(page)
    open_tab(page, "History")
    until(page, lambda: len(captions(page, "#history")) == 2)
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
        assert numbers(group, field).count() == 1
    page.get_by_role("button", name="X/Y sheet").click()
    assert fields_of(page, "Label") == ["Style", "Group"]
    sliders = [f"{part} for {side}" for side in ("Width", "Height") for part in ("number input", "range slider")]
    assert fields_of(page, "Picture size") == sliders
    assert fields_of(page, "X/Y sheet") == ["X: columns", "Y: rows"]
    pick(page, "Model", "./text/sd1")
    page.get_by_label("Negative prompt").locator("visible=true").wait_for()
    assert fields_of(page, "Prompts") == ["Prompt", "Styles", "Recent prompts", "Negative prompt"]
    open_tab(page, "Compare")
    assert fields_of(page, "Label") == ["Style", "Group"]
    for name in ("A", "B"):
        group = page.get_by_role("group", name=f"Settings of {name}", exact=True)
        assert group.get_by_label("Model", exact=True).count() == 1


def fields_of(page, group: str) -> list[str]:
    """Return the names of the visible fields in the named group, in order."""
    found = page.get_by_role("group", name=group, exact=True).locator("visible=true")
    return found.locator("input:visible, textarea:visible").evaluate_all(NAMES)
