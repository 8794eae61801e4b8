"""One attempt to get out of a family, inside the jails; and the same without a jail, where it must get out.

The second half proves that the judges can see a success. Its attempts address planted targets only.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.escapes.attempt import Attempt, Outcome, all_attempts  # noqa: E402
from benchmarks.escapes.course import run_course  # noqa: E402
from benchmarks.escapes.judges import secret  # noqa: E402
from benchmarks.escapes.plain import Plain  # noqa: E402
from composer_replication.sandbox import choose_backend  # noqa: E402

SAMPLE = {
    "network: the host's loopback": "TCP",
    "unix sockets": "abstract",
    "host files": "by path",
    "run folder and hidden tests": "a hidden test by path",
    "masked paths": "from the folder above, opened first",
    "writes outside": "through a link in the tree",
    "modes, owners, times and attributes outside": "its mode",
    "poisoned environment of all rollouts": "compiled code of a module",
    "signals to outside processes": "by a handle",
    "settings of outside processes": "its limits",
    "/proc": "a descriptor of an outside process",
    "inherited descriptors": "a folder",
    "variables of the parent": "its own",
    "left for the next command": "a POSIX queue",
    "snapshots": "a folder that is a link at the restore",
    "hard links": "the parent writes over one",
}


def sample() -> list[Attempt]:
    return [attempt for attempt in all_attempts() if SAMPLE.get(attempt.family) == attempt.name]


def test_the_sample_names_attempts_that_exist() -> None:
    assert len(sample()) == len(SAMPLE)


def test_there_are_enough_and_each_has_a_control_or_a_reason() -> None:
    attempts = all_attempts()
    names = Counter(attempt.full_name for attempt in attempts)
    assert [name for name, count in names.items() if count > 1] == []
    assert len(attempts) >= 120
    assert len({attempt.family for attempt in attempts}) >= 20
    with_control = [attempt for attempt in attempts if not attempt.not_without_jail]
    assert len(with_control) / len(attempts) > 0.75


@pytest.mark.parametrize("name", ["bubblewrap", "sandlock"])
def test_nothing_gets_out(name: str) -> None:
    backend = choose_backend(name)
    check = backend.is_available()
    if not check.ok:
        pytest.skip(f"{name} is not available here: {check.detail}")
    found = {f"{f.family}: {f.name}": (f.state, f.evidence) for f in run_course(backend, sample())}
    assert {name: state for name, state in found.items() if state[0] not in {"held", "not run"}} == {}


def test_without_a_jail_every_judge_sees_the_success() -> None:
    """Only planted targets are addressed, by their path or number."""
    found = {f"{f.family}: {f.name}": (f.state, f.evidence) for f in run_course(Plain(), sample())}
    assert {name: state for name, state in found.items() if state[0] != "ESCAPED"} == {}


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ("read(TOLD['secret'])", "ESCAPED"),
        ("show('the secret came out')", "held"),  # its own word counts for nothing
        ("undefined_name", "COULD NOT BE TRIED"),  # a script that crashed has tried nothing
    ],
)
def test_facts_decide_and_a_crash_is_no_success_of_the_jail(script: str, state: str) -> None:
    (finding,) = run_course(Plain(), [Attempt("a", "b", script, secret)])
    assert finding.state == state


def test_a_jail_that_fails_has_not_held() -> None:
    class Broken(Plain):
        """Its jail fails for what the command did."""

        def open(self, spec):
            from composer_replication.sandbox.calls import failure

            sandbox = super().open(spec)

            def broken(*_args, **_options):
                raise failure("CR0302", "it broke.")

            sandbox.exec = broken
            return sandbox

    def nothing(_scene: object, _outcome: Outcome) -> str:
        return ""

    (finding,) = run_course(Broken(), [Attempt("a", "b", "pass", nothing)])
    assert finding.state == "ESCAPED"
    assert "it broke" in finding.evidence
