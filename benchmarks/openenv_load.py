"""Steps a second of a server of environments under clients that die, and what they leave behind.

    python benchmarks/openenv_load.py [--steps 10000] [--sessions 32] [--death-share 0.01] [--kill-every 500] [--seed 0]

The server is a process of its own, started by ``composer-rl serve-env`` over two real tasks. Its clients are OpenEnv's,
eight sessions a process, over the loopback. They make calls in real sandboxes (files, a search, short commands), reset
after some 40 of them, and submit one attempt in ten, which is graded. At ``--death-share`` of the calls a client breaks its
connection without a word while the call runs; after each ``--kill-every`` steps one process of clients is killed and
another takes its place. At the end all of them are killed. Then nothing may be left: sessions as /health counts them,
sandboxes as folders of the server's temporary folder and as processes below it in /proc. Exit code 1 when anything is left, or
when an attempt was lost: one whose client was alive and got an error, or no reward for what it submitted. The deaths that are
planted say so themselves, or are killed before they say anything, and explain none of those.
Runs in .venvs/openenv, which it makes where it is missing (make interop).
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

ROOT = Path(__file__).parents[1]
PROJECT = ROOT / "recipes" / "tiny-cpu" / "project"
PINS = ("tinymath/numbers.py::clamp", "tinymath/numbers.py::sign")
STAMP = ".venvs/openenv/.setup-done"
SESSIONS_A_PROCESS = 8
ATTEMPT_CALLS = 40
SUBMIT_SHARE = 0.1
WAIT_SECONDS = 60.0
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("list_files", {}),
    ("read_file", {"path": "tinymath/numbers.py"}),
    ("write_file", {"path": "notes.txt", "content": "a line\n" * 100}),
    ("search", {"pattern": "def "}),
    ("bash", {"command": "git status --short | head -5"}),
    ("bash", {"command": "cat tests/*.py | wc -l"}),
)


def say(word: str) -> None:
    """One word to the process that counts."""
    print(word, flush=True)


async def one_client(url: str, draw: random.Random, death_share: float) -> None:
    """One session after the other, for ever; says each step and each death."""
    from composer_replication.rollouts.environment.openenv_client import FeatureDeletionClient
    from composer_replication.rollouts.environment.openenv_types import ToolAction

    while True:
        client = FeatureDeletionClient(url)
        try:
            await client.reset(seed=draw.randrange(100))
            for _ in range(draw.randint(1, 2 * ATTEMPT_CALLS)):
                name, arguments = draw.choice(CALLS)
                call = asyncio.ensure_future(client.step(ToolAction(name=name, arguments=arguments)))
                if draw.random() < death_share:
                    await asyncio.sleep(draw.random() * 0.02)
                    client._ws.transport.abort()  # noqa: SLF001  a dead client says no farewell
                    await asyncio.gather(call, return_exceptions=True)
                    say("died")
                    break
                await call
                say("step")
            else:
                if draw.random() < SUBMIT_SHARE:
                    say("graded" if (await client.step(ToolAction(name="submit"))).reward == 0.0 else "lost")
                    say("step")
                await client.close()
        except (RuntimeError, OSError) as error:  # places of the dead are not free at once
            say("full" if "CR0852" in str(error) else f"lost {str(error)[:100]}")
            await asyncio.sleep(0.2)


async def clients(url: str, seed: int, death_share: float) -> None:
    """What one process of clients does until it is killed."""
    draws = [random.Random(f"{seed}/{place}") for place in range(SESSIONS_A_PROCESS)]
    await asyncio.gather(*(one_client(url, draw, death_share) for draw in draws))


def begin_clients(
    options: argparse.Namespace, url: str, seed: int, said: Queue[str]
) -> subprocess.Popen[str]:
    """A process of clients; what they say is put into ``said``."""
    words = [sys.executable, __file__, "--clients-of", url, "--seed", str(seed)]
    words += ["--death-share", str(options.death_share)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line.strip())

    Thread(target=listen, daemon=True).start()
    return process


def drive(options: argparse.Namespace, url: str) -> tuple[dict[str, int], float]:
    """What the clients said, by word, and for how many seconds steps were made."""
    said: Queue[str] = Queue()
    num_processes = -(-options.sessions // SESSIONS_A_PROCESS)
    working = [begin_clients(options, url, options.seed + n, said) for n in range(num_processes)]
    draw, counts, started = random.Random(options.seed), {"step": 0, "killed": 0}, 0.0
    while counts["step"] < options.steps:
        word = said.get(timeout=600)
        started = started or time.monotonic()
        counts[word] = counts.get(word, 0) + 1
        if word == "step" and counts["step"] % options.kill_every == 0:
            place = draw.randrange(num_processes)
            working[place].kill()
            working[place].wait()
            counts["killed"] += 1
            seed = options.seed + num_processes + counts["killed"]
            working[place] = begin_clients(options, url, seed, said)
        if word == "step" and counts["step"] % 1000 == 0:
            print(f"{counts['step']} steps, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    seconds = time.monotonic() - started
    for process in working:
        process.kill()
        process.wait()
    return counts, seconds


def health(url: str) -> dict[str, Any]:
    """What the server says of itself."""
    with urllib.request.urlopen(f"{url}/health", timeout=WAIT_SECONDS) as answer:
        known: dict[str, Any] = json.loads(answer.read())
    return known


def below(pid: int) -> list[int]:
    """Living processes below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z" and entry.name.isdigit():
            parents[int(entry.name)] = int(parent)
    found, new = [], [pid]
    while new:
        new = [child for child, parent in parents.items() if parent in new]
        found += new
    return found


def left_over(server: subprocess.Popen[str], url: str, temporary: Path) -> tuple[int, int]:
    """Sessions and sandboxes that are there when the ends of the dead have had their time."""
    last = time.monotonic() + WAIT_SECONDS
    while True:
        sessions = int(health(url)["sessions"]["open"])
        folders = [*temporary.glob("composer-rl-scratch-*/attempt-*")]
        sandboxes = max(len(folders), len(below(server.pid)))
        if sessions == sandboxes == 0 or time.monotonic() > last:
            return sessions, sandboxes
        time.sleep(0.2)


def begin_server(
    options: argparse.Namespace, store: Path, temporary: Path
) -> tuple[subprocess.Popen[str], str]:
    """The server and its address; what else it says is passed on."""
    words = [sys.executable, "-m", "composer_replication.cli.main", "serve-env", str(store), "--port", "0"]
    words += [
        "--json",
        "--max-sessions",
        str(options.sessions),
        "--drain-seconds",
        "0",
        "--max-calls",
        "1000",
    ]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    server = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    said = server.stderr
    assert said is not None
    url = next(found[1] for line in said if (found := re.search(r"at (http://\S+)", line)))
    Thread(target=lambda: [print(line, end="", file=sys.stderr) for line in said], daemon=True).start()
    return server, url


def has_failed(counts: dict[str, int], *, num_left: int, returncode: int) -> bool:
    """Whether an attempt was lost under a client that lived, or the server left anything or ended badly.

    Args:
        counts: what the clients said, by word.
        num_left: sessions, sandboxes and files that are still there.
        returncode: of the server.
    """
    num_lost = sum(number for word, number in counts.items() if word.startswith("lost"))
    return bool(num_lost or num_left or returncode)


def measure(options: argparse.Namespace, folder: Path) -> int:
    """Build, serve, drive, end, and say what was found; 1 where anything is left or an attempt was lost."""
    from composer_replication.tasks.build import build_tasks

    store, temporary = folder / "tasks", folder / "temporary"
    build_tasks([str(PROJECT)], store, symbols={str(PROJECT): PINS})
    temporary.mkdir()
    server, url = begin_server(options, store, temporary)
    counts, seconds = drive(options, url)
    sessions, sandboxes = left_over(server, url, temporary)
    server.terminate()
    assert server.stdout is not None
    result = json.loads(server.stdout.read())
    server.wait(WAIT_SECONDS)
    files = len([*temporary.iterdir()])
    lost = {word: number for word, number in counts.items() if word.startswith("lost")}
    print(
        f"{counts['step']} steps, {options.sessions} sessions at a time: {counts['step'] / seconds:.1f} steps/s"
    )
    print(
        f"connections broken {counts.get('died', 0)}, client processes killed {counts['killed']} of "
        f"{SESSIONS_A_PROCESS} sessions each, refused while full {result['refused']}, attempts graded "
        f"{counts.get('graded', 0)}, lost {sum(lost.values())} {lost or ''}"
    )
    print(f"leaked sessions {sessions}, leaked sandboxes {sandboxes}, files left by the server {files}")
    num_left = sessions + sandboxes + files
    return int(has_failed(counts, num_left=num_left, returncode=server.returncode))


def main() -> int:
    """The command line, in the environment that has OpenEnv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--death-share", type=float, default=0.01)
    parser.add_argument("--kill-every", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients-of", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("openenv") is None:
        subprocess.run(["make", STAMP], cwd=ROOT, check=True)
        python = str((ROOT / STAMP).parent / "bin" / "python")
        os.execv(python, [python, *sys.argv])
    if options.clients_of:
        asyncio.run(clients(options.clients_of, options.seed, options.death_share))
    with tempfile.TemporaryDirectory() as folder:
        return measure(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
