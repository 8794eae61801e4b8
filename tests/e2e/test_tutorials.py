"""The tutorials, typed in as they stand: each page's ``bash`` blocks, one shell after the other, on what the page itself names."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
from datasets import load_dataset
from huggingface_hub import DatasetCard, ModelCard

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```bash(?: no-test=(\S+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_RUN = {
    "start-here": ["installs-packages", "fetches-a-model", "takes-as-long-as-the-recipe-says", "empties-your-cache"],
    "guard-anywhere": ["needs-your-logs"],
    "traces": [],
    "engines": ["installs-vllm", *["needs-gpus"] * 4],
    "scale": ["needs-a-cluster", "needs-gpus"],
    "publishing": [],
}  # fmt: skip
TYPED_IN = (*NOT_RUN, "replicas", "guard-bench")


def blocks(page: str) -> list[tuple[str, str]]:
    """Why a block is not run, else nothing, and its commands."""
    return BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text())


def type_in(page: str, folder: Path, **variables: str) -> str:
    """Run a page's blocks in a folder with what a checkout has; what they printed."""
    for name in ("examples", "recipes"):
        shutil.copytree(ROOT / name, folder / name, dirs_exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PORT": str(port),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        **variables,
    }
    script = "set -euxo pipefail\n" + "".join(text for reason, text in blocks(page) if not reason)
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as shell:
        try:
            said, _ = shell.communicate(timeout=1500)
        finally:
            if shell.poll() != 0:
                os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, said[-4000:]
    return said


class Hub(BaseHTTPRequestHandler):
    """What `hf upload` asks of a hub, and the files that it was sent, under the address of their repository."""

    received: ClassVar[dict[str, dict[str, bytes]]] = {}

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def answer(self, **value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer(name="me", id="me/it", sha="0" * 40, siblings=[])

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self.answer(files=[{**one, "uploadMode": "regular", "shouldIgnore": False} for one in files])
        elif "/commit/" in self.path:
            rows = [json.loads(line) for line in body.splitlines()]
            self.received[self.path.split("/commit/")[0].removeprefix("/api/")] = {
                row["value"]["path"]: base64.b64decode(row["value"]["content"])
                for row in rows
                if row["key"] == "file"
            }
            self.answer(
                success=True, commitUrl=f"http://{self.headers['Host']}/me/it/commit/1", commitOid="1" * 40
            )
        else:  # a new repository, or the check of a card
            name = json.loads(body).get("name", "")
            self.answer(url=f"http://{self.headers['Host']}/me/{name}", errors=[], warnings=[])


@pytest.fixture
def hub() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")], ids=lambda page: page.stem)
def test_every_command_of_a_page_is_typed_in_or_says_why_not(page: Path) -> None:
    text = page.read_text()
    assert "```sh\n" not in text
    bare = [commands for reason, commands in BLOCK.findall(text) if not reason]
    assert not bare or page.stem in TYPED_IN


@pytest.mark.parametrize("page", NOT_RUN)
def test_what_is_not_run_says_why_and_every_page_is_short(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert [reason for reason, _ in blocks(page) if reason] == NOT_RUN[page]
    assert text.count("```bash") == len(blocks(page)) and "```sh\n" not in text
    assert len(text.splitlines()) < 170


def test_commands_for_gpus_are_shown_without_them(tmp_path: Path) -> None:
    assert "--processes 8" in type_in("engines", tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_repository_becomes_a_trained_model_and_both_are_published(tmp_path: Path, hub: str) -> None:
    said = type_in("start-here", tmp_path)
    assert "ready for composer-rl quickstart" in said and "\ndef add(a, b):" in said
    assert json.loads((tmp_path / "runs/try/summary.json").read_text())["global_step"] == 2
    type_in("publishing", tmp_path, HF_ENDPOINT=hub, HF_TOKEN="hf_none", HF_HUB_OFFLINE="0")
    tasks, model = Hub.received["datasets/me/deleted-features"], Hub.received["models/me/my-model"]
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(model)
    assert ModelCard(model["README.md"].decode()).data.library_name == "transformers"
    assert DatasetCard(tasks["README.md"].decode()).data.license == "other"
    assert load_dataset(str(tmp_path / "public"), cache_dir=str(tmp_path / "cache"))["train"].num_rows > 0


@pytest.mark.long
def test_the_guard_stops_three_loops(tmp_path: Path) -> None:
    said = type_in("guard-anywhere", tmp_path)
    assert said.count("stopped: the Hacking Gap") == 2
    assert re.findall(r"^exit code (\d)", said, re.MULTILINE) == ["5", "6"]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sessions_become_pairs_and_a_model(tmp_path: Path) -> None:
    type_in("traces", tmp_path)
    assert "replay" in (tmp_path / "runs/traces/metrics.jsonl").read_text()
    assert "dana" not in (tmp_path / "sessions/traces.jsonl").read_text()
    assert "denied" in (tmp_path / "sessions.html").read_text()


@pytest.mark.long
def test_a_job_runs_in_the_background(tmp_path: Path) -> None:
    said = type_in("scale", tmp_path)
    assert "#SBATCH --nodes=2" in said and "kind: Job" in said
    assert json.loads((tmp_path / "runs/tiny-cpu/summary.json").read_text())["global_step"] == 2


@pytest.mark.long
def test_two_replicas_meet_and_the_guard_is_set_beside_other_rules(tmp_path: Path) -> None:
    type_in("replicas", tmp_path)
    assert json.loads((tmp_path / "runs/two/summary.json").read_text())["fragments_equal"] is True
    assert "cusum-clean-15 (matched)" in type_in("guard-bench", tmp_path)
