"""A real Chromium, and the pages that it is shown."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from composer_replication.cli.main import main
from composer_replication.report import write_report

ROOT = Path(__file__).parents[3]
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
SIZES = {"desktop": (1280, 900), "phone": (360, 740)}


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
    """A recorded run, a halted and a whole one with everything that a run folder can hold, replicas, and recorded sessions."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(ROOT / "tests/golden/recorded_runs/quickstart-0", folder / "recorded")
    spec = spec_from_file_location("run_maker", ROOT / "tests/unit/report/conftest.py")
    assert spec is not None and spec.loader is not None
    maker: Any = module_from_spec(spec)
    spec.loader.exec_module(maker)
    sessions, page = folder / "sessions", folder / "sessions.html"
    assert main(["traces", "ingest", str(ROOT / "examples/traces"), "--out", str(sessions), "--quiet"]) == 0
    assert main(["traces", "show", str(sessions), "--out", str(page), "--quiet"]) == 0
    whole = maker.add_parts(maker.write_run(folder / "whole"))
    runs = [maker.add_parts(maker.write_run(folder / "two" / f"replica-{number}")) for number in range(2)]
    assert main(["report", str(folder / "two"), "--quiet"]) == 0
    assert all((run / "report.html").is_file() for run in runs)
    return {
        "recorded": write_report(folder / "recorded"),
        "halted": write_report(maker.write_run(folder / "halted", is_hacked=True)),
        "whole": write_report(whole),
        "replicas": folder / "two" / "report.html",
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
