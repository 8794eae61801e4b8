"""Starts a worker twice, as two trainer processes over gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def both_ranks(worker: Path, folder: Path, *words: str) -> list[dict[str, Any]]:
    """What each rank of ``worker WORDS FOLDER`` wrote to ``rank-R.json`` there; the processes are gone afterwards."""
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    workers = []
    try:
        for rank in range(2):
            log = (folder / f"log-{rank}.txt").open("w")
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, str(worker), *words, str(folder)]
            workers.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
            log.close()
        codes = [process.wait(timeout=500) for process in workers]
    finally:
        for process in workers:
            process.kill()
            process.wait()
    logs = "\n".join((folder / f"log-{rank}.txt").read_text()[-3000:] for rank in range(2))
    assert codes == [0, 0], logs
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
