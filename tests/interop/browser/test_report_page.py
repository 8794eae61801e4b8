"""The pages that a person reads, in a real Chromium: desktop and phone, light and dark, by keyboard, and asked by axe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from axe_playwright_python.sync_playwright import Axe

from .conftest import ROOT, SIZES, open_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SCREENSHOTS = ROOT / "build" / "browser"
FOCUSABLE = "summary, [tabindex], a[href], button, input"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["recorded", "halted", "whole", "replicas", "sessions"])
def test_a_page_is_whole(browser: Browser, pages: dict[str, Path], name: str, size: str, scheme: str) -> None:
    page, errors = open_page(browser, pages[name], size, scheme)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}-{size}-{scheme}.png", full_page=True)
    page.eval_on_selector_all("details", "all => all.forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
    found = Axe().run(page).response["violations"]
    serious = {
        rule["id"]: rule["nodes"][0]["html"] for rule in found if rule["impact"] in ("serious", "critical")
    }
    assert serious == {}
    assert errors == []
    page.close()


@pytest.mark.parametrize("name", ["whole", "replicas", "sessions"])
def test_the_keyboard_reaches_each_interactive_part(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    page, _ = open_page(browser, pages[name], "phone", "light")
    number = page.locator(FOCUSABLE).count()
    assert number > 0
    reached = set()
    for _ in range(number + 1):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('details:not([open]) > summary')"):
            page.keyboard.press("Enter")
        reached.add(
            page.evaluate(f"[...document.querySelectorAll({FOCUSABLE!r})].indexOf(document.activeElement)")
        )
    assert set(range(number)) <= reached
    assert page.locator("details:not([open])").count() == 0
    page.close()
