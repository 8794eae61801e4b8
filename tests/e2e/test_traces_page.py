"""The commands of docs/traces.md, one after the other, on the shipped session: from recorded sessions to a trained model."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]


def commands() -> list[str]:
    """The commands of the walk, in the page's order."""
    section = (ROOT / "docs" / "traces.md").read_text().split("## From")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def wait_for(url: str) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5)
        except OSError:
            time.sleep(0.5)
        else:
            return
    raise AssertionError(f"nothing answers at {url}")


def test_the_walk_of_the_page(tmp_path: Path) -> None:
    work, home = tmp_path / "work", tmp_path / "home"
    (home / ".claude" / "projects" / "tinymath").mkdir(parents=True)
    shutil.copy(ROOT / "examples" / "traces" / "session.jsonl", home / ".claude" / "projects" / "tinymath")
    work.mkdir()
    for name in ("examples", "recipes"):
        shutil.copytree(ROOT / name, work / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(Path.home() / ".cache"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    background: list[subprocess.Popen[bytes]] = []
    lines = commands()
    assert len(lines) == 7
    try:
        for line in lines:
            text = line.replace("8123", port)
            if text.endswith("&"):
                background.append(
                    subprocess.Popen(["sh", "-c", f"exec {text[:-1]}"], cwd=work, env=environment)
                )
                wait_for(f"http://127.0.0.1:{port}/v1/models")
                continue
            done = subprocess.run(
                ["sh", "-c", text], cwd=work, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode in ((0, 6) if "replay" in text else (0,)), (text, done.stdout, done.stderr)
    finally:
        for process in background:
            process.terminate()
            process.wait()
    metrics = (work / "runs" / "traces" / "metrics.jsonl").read_text()
    assert "replay" in metrics
    assert "dana" not in (work / "sessions" / "traces.jsonl").read_text()
    assert "denied" in (work / "sessions.html").read_text()
