"""The suite that ships finds what is wrong with a backend, and tries nothing dangerous on one that does not hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_replication.sandbox.bubblewrap import Bubblewrap
from composer_replication.sandbox.conformance import test_bad_input as bad_input
from composer_replication.sandbox.conformance import (
    test_commands,
    test_ends,
    test_files,
    test_limits,
    test_walls,
)
from composer_replication.sandbox.conformance.plugin import HARMLESS_WITHOUT_ISOLATION
from composer_replication.sandbox.harbor_backend import Harbor

HERE = Path(__file__).parent
MODULES = (bad_input, test_commands, test_ends, test_files, test_limits, test_walls)


def held_to_it(backend: str, only: str) -> tuple[int, dict[str, Any]]:
    """What the command says."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    words = ["sandbox", "conformance", "--backend", backend, "--only", only, "--json", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "composer_replication.cli.main", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


@pytest.mark.long
def test_every_deviation_is_named() -> None:
    if not Bubblewrap().is_available().ok:
        pytest.skip("not available here")
    only = "one_text or nul_byte or must_not_be_empty or exit_code or closes_its_descriptors"
    code, found = held_to_it("conformance_backends:Wrong", only)
    assert (code, found["ok"], found["unheld_guards"]) == (3, False, [])
    assert {row["test"] for row in found["failed"]} == {
        "test_a_command_that_closes_its_descriptors",
        "test_a_nul_byte_is_refused",
    }
    assert found["known_failures"] == [
        {"test": "test_one_text_is_for_the_shell", "reason": "an exit code of 5 becomes 6"}
    ]
    assert found["passed"] == 5 + 5  # exit codes, empty commands


@pytest.mark.long
def test_nothing_dangerous_is_tried_where_nothing_holds() -> None:
    """The test that would be tried only reads; the reason why it is not is the same for all."""
    code, found = held_to_it("conformance_backends:Open", "one_text or hidden_folders")
    assert (code, found["ok"], found["passed"], found["failed"]) == (3, False, 1, [])
    assert "host_files" in found["unheld_guards"]
    (row,) = found["not_run"]
    assert row["test"] == "test_hidden_folders_beside_the_tree"
    assert "host_files" in row["reason"]


def test_a_part_without_a_test_is_refused_and_is_no_verdict() -> None:
    only = "disk and"
    code, found = held_to_it("conformance_backends:Open", only)
    assert (code, found["error"]["code"]) == (2, "CR0206")
    assert only in found["error"]["message"]


def test_the_lists_name_tests_that_exist() -> None:
    tests = {name for module in MODULES for name in vars(module) if name.startswith("test_")}
    assert tests >= HARMLESS_WITHOUT_ISOLATION
    assert tests >= set(Harbor.known_failures)
    renames_temporary_files = "test_links_that_one_command_plants_do_not_lead_the_next_one_s_mounts_out"
    assert renames_temporary_files in tests - HARMLESS_WITHOUT_ISOLATION


def test_pytest_is_asked_for_where_it_is_missing() -> None:
    code = "import sys; sys.modules['pytest'] = None\nfrom composer_replication.cli.main import main\nsys.exit(main())"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            "sandbox",
            "conformance",
            "--backend",
            "bubblewrap",
            "--json",
            "--quiet",
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if not Bubblewrap().is_available().ok:
        pytest.skip("not available here")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (3, "CR0101")
    assert error["message"] == "the conformance suite needs pytest, which is not installed."
