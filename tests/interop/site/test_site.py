"""The site is built with every warning an error: a link, an anchor or a name that leads nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
COPIED = ("docs", "recipes", "examples", "scripts", "src", "tests/golden", "mkdocs.yml")


def build(root: Path, to: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(to)]
    return subprocess.run(
        command,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )


def test_the_site_is_whole(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    first = (tmp_path / "site/index.html").read_text()
    assert 'href="start-here.html"' in first and 'src="images/quickstart-report.png"' in first
    assert "max_proxy_real_gap" in (tmp_path / "site/reference.html").read_text()
    assert "composer-rl traces ingest" in (tmp_path / "site/commands/traces.html").read_text()
    assert 'href="commands/traces.html"' in (tmp_path / "site/commands.html").read_text()
    assert (tmp_path / "site/examples/quickstart.ipynb").is_file()
    pages = [path.read_text() for path in (tmp_path / "site").glob("*.html")]
    assert not any('src="http' in page for page in pages)  # nothing is fetched from elsewhere


def test_no_page_of_commands_is_long() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    from site_hooks import command_pages

    assert max(len(text.splitlines()) for text in command_pages().values()) <= 400


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy(ROOT / name, tmp_path / name)
    for path in (*ROOT.glob("*.md"), ROOT / "LICENSE"):
        shutil.copy(path, tmp_path)
    (tmp_path / "docs/faq.md").write_text("[gone](nowhere.md) [no place](tasks.md#no-such-heading)")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr and "no-such-heading" in done.stderr
