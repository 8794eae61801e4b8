"""The starter of one node's processes: its exit code, its place among the nodes, sharded weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.trainer import node_processes

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
