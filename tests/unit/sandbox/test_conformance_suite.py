"""The suite that ships finds what is wrong with a backend, and tries nothing dangerous on one that does not hold."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from finished import finished

from composer_replication.sandbox.bubblewrap import Bubblewrap
from composer_replication.sandbox.conformance import test_commands, test_files, test_limits, test_walls
from composer_replication.sandbox.conformance.plugin import HARMLESS_WITHOUT_ISOLATION
from composer_replication.sandbox.harbor_backend import Harbor

HERE = Path(__file__).parent
MODULES = (test_commands, test_files, test_limits, test_walls)


def held_to_it(backend: str, only: str) -> tuple[int, list[str]]:
    """Exit code and summary lines of pytest."""
    suite = "composer_replication.sandbox.conformance"
    words = ["--pyargs", suite, "-p", f"{suite}.plugin", "--sandbox-backend", backend, "-k", only]
    words += ["-rA", "-q", "-c", os.devnull, "-p", "no:cacheprovider", "--import-mode=importlib"]
    done = finished(
        [sys.executable, "-m", "pytest", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
    )
    return done.returncode, done.stdout.splitlines()


def named(lines: list[str], outcome: str) -> set[str]:
    return {
        line.rpartition("::")[2].split("[")[0].split()[0] for line in lines if line.startswith(f"{outcome} ")
    }


@pytest.mark.long
def test_every_deviation_is_named() -> None:
    if not Bubblewrap().is_available().ok:
        pytest.skip("not available here")
    only = "one_text or no_call or what_comes_back or closes_its_descriptors"
    code, lines = held_to_it("conformance_backends:Wrong", only)
    assert code == pytest.ExitCode.TESTS_FAILED
    failed = {
        "test_a_command_that_closes_its_descriptors",
        "test_text_that_no_call_of_the_system_takes_is_refused",
    }
    assert named(lines, "FAILED") == failed
    assert named(lines, "XFAIL") == {"test_one_text_is_for_the_shell"}
    assert sum(line.startswith("PASSED ") for line in lines) == 16 + 1  # what comes back, no calls


@pytest.mark.long
def test_nothing_dangerous_is_tried_where_nothing_holds() -> None:
    """The test that would be tried only reads; the reason why it is not is the same for all."""
    code, lines = held_to_it("conformance_backends:Open", "one_text or hidden_folders")
    assert code == pytest.ExitCode.TESTS_FAILED  # although what was tried has passed
    assert named(lines, "PASSED") == {"test_one_text_is_for_the_shell"}
    (skipped,) = (line for line in lines if line.startswith("SKIPPED "))
    assert "it would get out" in skipped and "host_files" in skipped


def test_the_lists_name_tests_that_exist() -> None:
    tests = {name for module in MODULES for name in vars(module) if name.startswith("test_")}
    assert tests >= HARMLESS_WITHOUT_ISOLATION
    assert tests >= set(Harbor.known_failures)
    renames_temporary_files = "test_links_that_one_command_plants_do_not_lead_the_next_one_s_mounts_out"
    assert renames_temporary_files in tests - HARMLESS_WITHOUT_ISOLATION
