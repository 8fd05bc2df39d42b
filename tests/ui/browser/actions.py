"""Actions of the browser tests on the page: fill the form, click, wait, read."""

import base64
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
DICE, LOCK = "A random seed for each run", "Keep the picture's seed"  # the buttons beside the seed
TIMEOUT = 120_000  # milliseconds; only a hanging test takes that long
PANELS = {"Draw": "#generate", "Compare": ".side", "History": "#history"}


def expect(found):
    """Return Playwright's assertions, which wait. Playwright is optional, so this imports it late."""
    from playwright import sync_api

    return sync_api.expect(found)


def until(page, holds: Callable[[], object]) -> None:
    """Wait for a condition that no locator can express, while the page keeps running."""
    deadline = time.monotonic() + TIMEOUT / 1000
    while not holds():
        assert time.monotonic() < deadline, "timed out"
        page.wait_for_timeout(50)


def generate(page, pictures: int = 1, steps: int | None = None, seed: int | None = 0, batch_size: int = 1) -> None:
    """Fill the form and click Generate. seed: None leaves the field as it is."""
    fields = {number(page, "Pictures"): str(pictures)}
    if steps is not None:
        more_settings(page)
        fields |= {number(page, "Steps"): str(steps), number(page, "Batch size"): str(batch_size)}
    if seed is not None:
        fields[number(page, "Seed")] = str(seed)
    fill(page, fields)
    page.get_by_role("button", name="Generate").click()


def fill(page, fields: dict) -> None:
    """Fill fields, by their locators, until the values stay: a field that was just opened loses its input."""
    while any(field.input_value() != value for field, value in fields.items()):
        for field, value in fields.items():
            field.fill(value)
        page.wait_for_timeout(300)


def more_settings(page) -> None:
    if not number(page, "Batch size").is_visible():
        page.get_by_role("button", name="More settings").click()
    number(page, "Batch size").wait_for()


def open_tab(page, name: str) -> None:
    page.get_by_role("tab", name=name).click()
    page.locator(PANELS[name]).locator("visible=true").first.wait_for()


def number(page, label: str):
    return numbers(page, label).first


def numbers(page, label: str):
    """Return the number fields of this name, alone or beside a slider."""
    names = (label, f"number input for {label}")
    return page.locator(", ".join(f'input[aria-label="{name}"]' for name in names)).locator("visible=true")


def combobox(page, name: str):
    """Return the visible lists of this name. A group may have the same name."""
    return page.get_by_role("combobox", name=name, exact=True)


def textbox(page, name: str):
    return page.get_by_role("textbox", name=name, exact=True)


def wait_for_status(page, text: str) -> None:
    page.locator("#status").get_by_text(text).wait_for()


def wait_for_end(page) -> None:
    """Wait until the list of runs is empty."""
    expect(page.locator(".runs")).to_have_count(0)


def wait_for_seeds(page, *seeds: int, gallery: str = "#gallery") -> None:
    """Wait until a gallery has pictures of these seeds, in this order, by their captions."""
    captions = [re.compile(rf"seed {seed}\b") for seed in seeds]
    expect(page.locator(f"{gallery} .caption-label")).to_have_text(captions)


def settings(page):
    """Return the table beside the enlarged picture."""
    return page.locator("dl.settings").locator("visible=true")


def screenshot(page, name: str, tmp_path: Path, **options) -> None:
    page.screenshot(path=Path(os.environ.get("SCREENSHOTS", tmp_path)) / f"{name}.png", **options)


def drop(page, data: bytes, name: str, onto: str = "#upload button") -> None:
    """Drop a file onto the page's upload field, or elsewhere, as from a file manager."""
    transfer = page.evaluate_handle(
        """([data, name]) => {
            const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], name, {type: "image/png"}));
            return transfer;
        }""",
        [base64.b64encode(data).decode(), name],
    )
    page.locator(onto).locator("visible=true").first.dispatch_event("drop", {"dataTransfer": transfer})


def pick(page, label: str, choice: str) -> None:
    """Choose an option of a dropdown. Retries, because on a busy machine the list may move under the mouse."""
    field = combobox(page, label).first
    while field.input_value() != choice:
        field.click()
        page.get_by_role("option", name=choice, exact=True).click()
        expect(page.get_by_role("listbox")).to_have_count(0)
