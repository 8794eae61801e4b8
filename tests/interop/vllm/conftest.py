"""A real vLLM on this processor, over a tiny model that calls tools."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
RECIPE = HERE.parents[2] / "recipes" / "tiny-tools" / "run.toml"
BOOT_SECONDS = 900
SETTINGS = {
    "agent.max_context_tokens": 2048,
    "agent.max_new_tokens": 40,
    "agent.max_turns": 3,
    "trl.entropy_coef": 0.1,  # random answers earn nothing alike: the weights have to move all the same
    "trl.learning_rate": 1e-3,
    "trl.max_steps": 3,
    "trl.use_vllm": True,
    "trl.vllm_mode": "server",
}


@dataclass
class Server:
    """``url`` without ``/v1``; ``model`` is the folder that it serves."""

    url: str
    model: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def started(model: Path, log: Path, *, num_context: int = 2048) -> Server:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--dtype", "float32"]
    serve += ["--enforce-eager", "--max-model-len", f"{num_context}", "--logprobs-mode", "processed_logprobs"]
    serve += ["--max-logprobs", "-1", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            serve,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        )
    server = Server(f"http://127.0.0.1:{port}", model, process)
    end = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return server
        except OSError:
            time.sleep(1)
    server.kill()
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory, store: Any) -> Path:
    from tool_caller import make_tool_caller

    folder = tmp_path_factory.mktemp("models") / "caller"
    make_tool_caller(folder, store)
    return folder


@pytest.fixture
def served(caller: Path, tmp_path: Path) -> Iterator[Server]:
    server = started(caller, tmp_path / "vllm.log")
    yield server
    if server.process.poll() is None:
        server.kill()


def composer_rl(*words: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    program = [sys.executable, str(HERE / "processor_weights.py"), "--json", *words]
    environment = os.environ | {
        "PYTHONWARNINGS": "ignore",
        "WEIGHTS_FAULT": fault,
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return subprocess.run(program, capture_output=True, text=True, timeout=1800, check=False, env=environment)


def trained(server: Server, out: Path, *more: str, fault: str = "", **changes: Any) -> Any:
    """The finished process of a training run by the recipe ``tiny-tools``."""
    settings = SETTINGS | {"model.name": str(server.model), "trl.vllm_server_base_url": server.url} | changes
    return composer_rl("train", str(RECIPE), "--out", str(out), *overrides(settings), *more, fault=fault)


def overrides(settings: dict[str, Any]) -> list[str]:
    return [
        f"--set={key}={json.dumps(value) if not isinstance(value, str) else value}"
        for key, value in settings.items()
    ]
