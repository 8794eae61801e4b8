"""Whose version of a file counts: the store's for tests and what surrounds them, the policy's for the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_sandbox import FakeSandbox

from composer_replication.errors import SandboxFileError
from composer_replication.records import FileEntry
from composer_replication.rollouts import candidate_tree
from composer_replication.rollouts.candidate_tree import (
    TreeRule,
    TreeTooLargeError,
    candidate_files,
    graded_tree,
)

RULE = TreeRule(
    touched=frozenset({"pkg/code.py", "setup.cfg", "tests/data/golden.txt"}),
    names=frozenset({"pkg", "calendar", "tests"}),
    taken=frozenset({"json", "calendar", "pytest", "numpy"}),
)
BASE = {
    "pkg/__init__.py": b"",
    "pkg/code.py": b"broken",
    "tests/test_code.py": b"stored",
    "conftest.py": b"stored",
    "pyproject.toml": b"stored",
}


@pytest.mark.parametrize(
    "path",
    [
        "pkg/code.py", "pkg/__init__.py", "pkg/new.py", "pkg/data.txt", "README.md", "notes/plan.md", "src/pkg/json.py",
        "pkg/json.py", "calendar.py", "calendar/__init__.py", "setup.cfg", "tests/data/golden.txt", "json/data.txt",
        "pkg/attest.py", "src/numbers_of_mine.py", "contest/x.py", "latest/x.txt", "checks/helpers.py",
        "ab_testing/core.py", "pkg/test_utils/x.py",
    ],
)  # fmt: skip
def test_the_policy_may_change_its_own_files(path: str) -> None:
    assert RULE.takes(path)


@pytest.mark.parametrize(
    "path",
    [
        "tests/test_code.py", "tests/new_data.json", "test/x.py", "unittests/helpers.py", "unit_tests/data.json",
        "pkg/tests-py3/x.txt", "pkg/testing/fakes.py", "pkg/code_test.py", "test_new.py",
        "conftest.py", "pkg/conftest.py", "pyproject.toml", "pkg/pytest.ini", "tox.ini", "pkg/setup.cfg", ".pytest.ini",
        "sitecustomize.py", "src/usercustomize.py", "evil.pth", "src/evil.PTH", "pkg/code.pyc", "pkg/fast.so",
        "__pycache__/code.cpython-312.pyc", "pkg/__pycache__/code.py", ".git/config", ".hidden/code.py",
        "evil.dist-info/entry_points.txt", "evil.egg-info/PKG-INFO", "site-packages/x.py",
        "json.py", "json/__init__.py", "src/json.py", "lib/pytest/__init__.py", "numpy.py", "src/numpy/core.py",
        "/etc/passwd", "../x.py", "a/../b.py", "", ".", "./x.py", "a//b.py", "a\0b", "d/" * 600 + "x", "n" * 256, "bad\udcff.py",
    ],
)  # fmt: skip
def test_the_policy_has_no_say_over_tests_and_what_starts_with_them(path: str) -> None:
    assert not RULE.takes(path)


def test_edits_of_tests_do_not_count_and_the_rest_does() -> None:
    candidate = {
        "pkg/__init__.py": b"changed",
        "pkg/code.py": b"mine",
        "pkg/extra.py": b"new",
        "tests/test_code.py": b"assert True",
        "tests/test_more.py": b"mine",
        "pkg/conftest.py": b"mine",
        "pyproject.toml": b"mine",
    }
    assert graded_tree(BASE, candidate, RULE) == {
        **BASE,
        "pkg/__init__.py": b"changed",
        "pkg/code.py": b"mine",
        "pkg/extra.py": b"new",
    }


def test_what_the_policy_deleted_is_gone_but_for_tests() -> None:
    assert graded_tree(BASE, {}, RULE) == {
        path: BASE[path] for path in ("tests/test_code.py", "conftest.py", "pyproject.toml")
    }


def test_a_file_in_the_way_of_a_test_is_left_out() -> None:
    files = graded_tree(
        BASE, {"tests": b"a file", "pyproject.toml/x": b"", "pkg": b"", "pkg/code.py": b"x"}, RULE
    )
    assert files == {
        **{p: BASE[p] for p in ("tests/test_code.py", "conftest.py", "pyproject.toml")},
        "pkg": b"",
    }


def test_only_what_counts_is_fetched_from_a_sandbox() -> None:
    sandbox = FakeSandbox(
        {"pkg/code.py": b"x", "tests/test_code.py": b"y", ".git/index": b"z", "a/b.txt": b""}
    )
    assert candidate_files(sandbox, RULE.takes) == {"pkg/code.py": b"x", "a/b.txt": b""}


def test_a_file_that_cannot_be_read_is_not_there() -> None:
    class Closed(FakeSandbox):
        def read_file(self, path: str, *, max_bytes: int = 0) -> bytes:
            raise SandboxFileError("CR0309", "the file cannot be used: permission denied.")

    assert candidate_files(Closed({"pkg/code.py": b"x"}), RULE.takes) == {}


@pytest.mark.parametrize(("kind", "most", "said"), [("BYTES", 9, "10 bytes"), ("FILES", 1, "2 files")])
def test_a_tree_that_is_too_large_is_refused_before_it_is_read(
    kind: str, most: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unread(FakeSandbox):
        def read_file(self, path: str, *, max_bytes: int = 0) -> bytes:
            raise AssertionError("it was read")

    monkeypatch.setattr(candidate_tree, f"MAX_TREE_{kind}", most)
    with pytest.raises(TreeTooLargeError, match=said):
        candidate_files(Unread({"a.txt": b"12345", "b.txt": b"12345", "tests/big": b"x" * 99}), RULE.takes)


def test_a_folder_that_holds_tests_is_the_stores_whatever_it_is_called() -> None:
    rule = replace(RULE, folders_of_tests=frozenset({"checks"}), touched=frozenset({"checks/code.py"}))
    assert not rule.takes("checks/helpers.py") and not rule.takes("checks/data/cases.json")
    assert rule.takes("checks/code.py") and rule.takes("pkg/checks/x.py")


def test_a_tree_that_cannot_be_listed_is_the_attempts_own_doing() -> None:
    class Endless(FakeSandbox):
        def list_files(self, path: str = ".") -> list[FileEntry]:
            raise SandboxFileError("CR0309", "the folder cannot be listed: too many entries.", where=path)

    with pytest.raises(TreeTooLargeError, match="too many entries"):
        candidate_files(Endless(BASE), RULE.takes)
