"""A repository without candidates is told why: no green test is the reason then."""

from __future__ import annotations

import pytest

from composer_replication.tasks.planning.candidates import nothing_found


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xef\xbb\xbfdef f():\n    return 1\n", "starts with a byte order mark"),
        ("# coding: latin-1\nx = 'é'\n".encode("latin-1"), "is not UTF-8"),
        (b"print 'two'\n", "does not parse (SyntaxError)"),
    ],
)
def test_a_file_that_cannot_be_cut_is_named(content: bytes, why: str) -> None:
    said = nothing_found({"a.py": b"x = 1\n", "b.py": content, "c.py": content, "tests/test_a.py": b""}, [])
    assert said.startswith("its 3 source files hold nothing")
    assert said.endswith(f"2 of them cannot be cut, the first is b.py, which {why}")


def test_files_that_can_be_cut_are_not_blamed() -> None:
    said = nothing_found({"a.py": b"x = 1\n"}, [("class", "body"), ("class", "whole")])
    assert said == "its 1 source files hold nothing of the sizes class/body, class/whole that can be deleted"
