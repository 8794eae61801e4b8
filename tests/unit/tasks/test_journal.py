"""A journal is plain while a build goes on and compressed when it is done; a crash between loses no decision."""

from __future__ import annotations

from pathlib import Path

import pytest

from composer_replication.tasks.blobs import compress
from composer_replication.tasks.journal import Decision, Journal, read_journal

ONE = Decision("a" * 32, "r==1", "r.py::one", task_id="r-1--one")
TWO = Decision("b" * 32, "r==1", "r.py::two", reason="leak", detail="ünïcode\u2028")


def test_it_is_compressed_at_the_end_and_read_again(tmp_path: Path) -> None:
    path, packed = tmp_path / "journal.jsonl", tmp_path / "journal.jsonl.zst"
    journal = Journal(path)
    for decision in (TWO, ONE):
        journal.add(decision)
    plain = path.read_bytes()
    rows = read_journal(path)
    journal.keep([TWO, ONE])
    assert [file.name for file in tmp_path.iterdir()] == [packed.name]
    assert read_journal(path) == rows[::-1]
    finished = packed.read_bytes()
    path.write_bytes(plain)  # killed before the plain one was removed
    again = Journal(path)
    assert [again.find(one.key) for one in (ONE, TWO)] == [ONE, TWO]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    again.keep([ONE, TWO])
    assert packed.read_bytes() == finished


@pytest.mark.parametrize(
    "damage", [b"no zstd", compress(b"no JSON\n"), compress(b'{"an": "older format"}\n')]
)
def test_what_cannot_be_read_is_judged_again(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "journal.jsonl.zst").write_bytes(damage)
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.find(ONE.key) is None
    journal.keep([ONE])
    assert Journal(tmp_path / "journal.jsonl").find(ONE.key) == ONE
