"""The pages that a person reads, in a real Chromium: desktop and phone, light and dark, by keyboard, and asked by axe."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from composer_replication.cli.main import main
from composer_replication.report import write_report

ROOT = Path(__file__).parents[3]
SCREENSHOTS = ROOT / "build" / "browser"
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SIZES = {"desktop": (1280, 900), "phone": (360, 740)}
FOCUSABLE = "summary, [tabindex], a[href], button, input"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    programs = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    program = next(filter(None, programs), None)
    if program is None:
        pytest.exit("No Chromium is on this machine: apt-get install -y chromium", returncode=1)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=FLAGS.split())
        yield running
        running.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A recorded run, a halted one with everything that a run folder can hold, and recorded sessions."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(ROOT / "tests/golden/recorded_runs/quickstart-0", folder / "recorded")
    spec = spec_from_file_location("run_maker", ROOT / "tests/unit/report/conftest.py")
    assert spec is not None and spec.loader is not None
    maker: Any = module_from_spec(spec)
    spec.loader.exec_module(maker)
    sessions, page = folder / "sessions", folder / "sessions.html"
    assert main(["traces", "ingest", str(ROOT / "examples/traces"), "--out", str(sessions), "--quiet"]) == 0
    assert main(["traces", "show", str(sessions), "--out", str(page), "--quiet"]) == 0
    return {
        "recorded": write_report(folder / "recorded"),
        "halted": write_report(maker.write_run(folder / "halted", is_hacked=True)),
        "sessions": page,
    }


def open_page(browser: Browser, path: Path, size: str, scheme: Any) -> tuple[Page, list[str]]:
    width, height = SIZES[size]
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    return page, errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["recorded", "halted", "sessions"])
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


@pytest.mark.parametrize("name", ["halted", "sessions"])
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
