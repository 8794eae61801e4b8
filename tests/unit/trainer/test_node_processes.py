"""The processes of one node: their start, one exit code for all, and what is waited for before each ends."""

from __future__ import annotations

import atexit
import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_trainer import build_trainer

from composer_replication.safety import HeldOutGuard
from composer_replication.trainer import guard_callback, node_processes, processes
from composer_replication.trainer.processes import wait_for_idle_threads

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("codes", "code"), [([5, 1], 5), ([1, 5], 5), ([130, 130], 130), ([-9, 1], 137), ([0, 1], 1), ([0], 0)]
)
def test_one_exit_code_for_all_processes(codes: list[int], code: int) -> None:
    assert node_processes.exit_code_of(codes) == code


def test_the_place_of_a_host_of_sagemaker(tmp_path: Path) -> None:
    file = tmp_path / "resourceconfig.json"
    file.write_text(json.dumps({"current_host": "algo-2", "hosts": ["algo-3", "algo-2", "algo-1"]}))
    assert node_processes.sagemaker_place(file) == (1, "algo-1")


def test_a_file_of_accelerate_says_the_same_as_under_its_own_launcher() -> None:
    given = node_processes.sharding_environment(str(ROOT / "recipes" / "eight-gpus" / "fsdp2.yaml"), 16)
    assert (given["ACCELERATE_USE_FSDP"], given["FSDP_VERSION"]) == ("true", "2")


@pytest.mark.long
@pytest.mark.parametrize("code", [5, 3])
def test_the_exit_code_of_processes_under_torchrun_is_theirs(code: int, tmp_path: Path) -> None:
    """torchrun's own would be 1."""
    (tmp_path / "ending.py").write_text(f"raise SystemExit({code})\n")
    start = (
        "import sys\nfrom composer_replication.trainer import node_processes as n\nn.PROGRAM = 'ending'\n"
        "sys.exit(n.main(['--processes', '2', '--port', '0', '--', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, done.stderr


# ---- before the interpreter ends

NAME = "pt_gloo_test"


def test_threads_of_the_name_are_waited_for_until_they_sleep() -> None:
    has_begun, may_end, steps = threading.Event(), threading.Event(), []

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(NAME)
        has_begun.set()
        hashlib.sha256(bytes(60_000_000)).digest()  # without Python's lock, a tenth of a second
        steps.append("worked")
        may_end.wait()  # asleep, and not ended

    thread = threading.Thread(target=work)
    thread.start()
    has_begun.wait()
    wait_for_idle_threads("pt_gloo")
    assert steps == ["worked"]
    may_end.set()
    thread.join()
    wait_for_idle_threads("pt_gloo")


@pytest.mark.parametrize("module", [processes, guard_callback], ids=["trainer", "callback"])
def test_whoever_trains_in_several_processes_has_them_waited_for(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *call: registered.append(call))
    monkeypatch.setattr(module, "wait_for_gloo_at_exit", processes.wait_for_gloo_at_exit.__wrapped__)
    if module is processes:
        build_trainer(output_dir=tmp_path)
    else:
        guard_callback.HeldOutGuardCallback(HeldOutGuard(), lambda: 0.5)
    assert (wait_for_idle_threads, "pt_gloo") in registered
