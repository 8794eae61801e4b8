"""The pages beside kept pictures of them: desktop, phone, dark. Chromium itself draws, shrinks and compares.

Pictures are 400 pixels wide, those of a phone 180. `UPDATE_PICTURES=1 make interop INTEROP=browser` writes them anew; look at them before they are kept.
Another machine's fonts break lines elsewhere: there the comparison is left out, and that is said.
"""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .conftest import open_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KEPT = Path(__file__).parent / "pictures"
MODES = {"desktop": ("desktop", "light"), "phone": ("phone", "light"), "dark": ("desktop", "dark")}
WIDTHS = {"desktop": 400, "phone": 180, "dark": 400}
NAMES = ("whole", "replicas", "sessions")
MOST_DIFFERENT = 0.0005
"""Share of the small picture's pixels that may differ visibly."""

_FONTS = """() => {
  const pen = document.createElement("canvas").getContext("2d");
  return ["16px system-ui", "16px monospace"].map(font => {
    pen.font = font;
    return pen.measureText("What does a person see? 0123456789").width;
  });
}"""
_SHRINK = """async ([png, width]) => {
  const image = new Image();
  image.src = png;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = Math.round(width * image.height / image.width);
  const pen = canvas.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/webp", 0.6);
}"""
_DIFFERENT = """async both => {
  const shown = await Promise.all(both.map(async source => {
    const image = new Image();
    image.src = source;
    await image.decode();
    const pen = new OffscreenCanvas(image.width, image.height).getContext("2d");
    pen.filter = "blur(1px)";
    pen.drawImage(image, 0, 0);
    return pen.getImageData(0, 0, image.width, image.height);
  }));
  const [one, other] = shown;
  if (Math.abs(one.height - other.height) > 2) return 1;
  let count = 0;
  const length = Math.min(one.data.length, other.data.length);
  for (let place = 0; place < length; place += 4)
    count += [0, 1, 2].some(channel => Math.abs(one.data[place + channel] - other.data[place + channel]) > 16);
  return count / (length / 4);
}"""


def address(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def small_picture(canvas: Page, page: Page, width: int) -> str:
    shrunk: str = canvas.evaluate(_SHRINK, [address(page.screenshot(full_page=True), "png"), width])
    return shrunk


@pytest.fixture(scope="module")
def canvas(browser: Browser) -> Any:
    """A page that may run scripts, which the pages themselves may not."""
    page = browser.new_page()
    fonts = KEPT / "fonts.json"
    found = [round(width, 2) for width in page.evaluate(_FONTS)]
    if "UPDATE_PICTURES" in os.environ:
        KEPT.mkdir(exist_ok=True)
        fonts.write_text(f"{json.dumps(found)}\n")
    elif json.loads(fonts.read_text()) != found:
        pytest.skip(f"the fonts of this machine ({found}) are not those of the kept pictures")
    yield page
    page.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_looks_as_it_did(
    browser: Browser, canvas: Page, pages: dict[str, Path], name: str, mode: str
) -> None:
    page, _ = open_page(browser, pages[name], *MODES[mode])
    seen, kept = small_picture(canvas, page, WIDTHS[mode]), KEPT / f"{name}-{mode}.webp"
    page.close()
    if "UPDATE_PICTURES" in os.environ:
        kept.write_bytes(base64.b64decode(seen.partition(",")[2]))
    assert canvas.evaluate(_DIFFERENT, [seen, address(kept.read_bytes(), "webp")]) <= MOST_DIFFERENT


@pytest.mark.parametrize(
    "change",
    [
        "document.querySelector('.banner').className = 'banner bad'",
        "document.querySelector('.margins').remove()",
        "document.querySelector('.diff').textContent = 'nothing'",
        "document.querySelector('h1').textContent = 'another run, not this one'",
    ],
)
def test_a_changed_page_is_seen(browser: Browser, canvas: Page, pages: dict[str, Path], change: str) -> None:
    page, _ = open_page(browser, pages["whole"], *MODES["desktop"])
    page.evaluate(change)
    kept = address((KEPT / "whole-desktop.webp").read_bytes(), "webp")
    assert (
        canvas.evaluate(_DIFFERENT, [small_picture(canvas, page, WIDTHS["desktop"]), kept]) > MOST_DIFFERENT
    )
    page.close()


def test_the_pictures_are_small() -> None:
    assert sum(path.stat().st_size for path in KEPT.iterdir()) < 300_000
