"""A store whose build was cut off says so, can be used, and is finished by the same command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.tasks import build_state
from composer_replication.tasks.build import build_tasks
from composer_replication.tasks.build_state import Decision, Journal, read_journal
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import compress

MakeProject = Callable[[Mapping[str, str]], Path]
PLANTED = {
    "planted.py": "def one():\n    return 11\n\n\ndef two():\n    return 22\n",
    "test_planted.py": "import planted\n\n\ndef test_one():\n    assert planted.one() == 11\n\n\n"
    "def test_two():\n    assert planted.two() == 22\n\n\ndef test_nothing():\n    pass\n",
}
SENTENCE = "The build of this store was cut off"


def stopped_after_one(source: Path, out: Path) -> None:
    """A build that ends in the middle, as by a full disk: the first task is there, the second is not."""

    class Stopped(Exception):
        pass

    def stop(_done: int, _total: int, what: str) -> None:
        if what == "1 tasks":
            raise Stopped

    with pytest.raises(Stopped):
        build_tasks([str(source)], out, jobs=1, progress=stop)


@pytest.mark.long
def test_a_build_that_was_cut_off(
    make_project: MakeProject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = make_project(PLANTED), tmp_path / "out"
    stopped_after_one(source, out)
    store = TaskStore.open(out)
    assert len(store.task_ids()) == 1
    assert store.build is not None
    assert not store.build.is_complete
    for words in (
        ["stats"],
        ["show"],
        ["validate", "--repeat", "1"],
        ["split", "--heldout-fraction", "0.5", "--seed", "0"],
        ["export", store.task_ids()[0], "--out", str(tmp_path / "tree")],
    ):
        main(["tasks", words[0], str(out), *words[1:]])
        assert SENTENCE in "".join(capsys.readouterr())
    assert main(["tasks", "stats", str(out), "--json"]) == 0
    assert "the same composer-rl tasks command" in json.loads(capsys.readouterr().out)["unfinished"]
    build_tasks([str(source)], out, jobs=1)
    whole = build_tasks([str(source)], tmp_path / "whole", jobs=1)
    assert TaskStore.open(out).fingerprint == whole.fingerprint
    assert (out / "manifest.json").read_bytes() == (tmp_path / "whole" / "manifest.json").read_bytes()
    assert json.loads((out / "manifest.json").read_text())["build"] == {"is_complete": True}
    capsys.readouterr()
    assert main(["tasks", "stats", str(out)]) == 0
    assert SENTENCE not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "mark", [None, {"is_complete": False, "command": "composer-rl tasks build x --out y"}]
)
def test_the_mark_of_an_earlier_version_is_read(
    tiny_store: TaskStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], mark: dict[str, object] | None
) -> None:
    """None at all, or one with a command."""
    copy = shutil.copytree(tiny_store.root, tmp_path / "copy")
    manifest = json.loads((copy / "manifest.json").read_text())
    assert manifest.pop("build")["is_complete"]
    (copy / "manifest.json").write_text(json.dumps({**manifest, **({"build": mark} if mark else {})}))
    build = TaskStore.open(copy).build
    assert build is None if mark is None else build is not None and not build.is_complete
    assert main(["tasks", "stats", str(copy)]) == 0
    assert (SENTENCE in "".join(capsys.readouterr())) is (mark is not None)


# --- the journal: plain while a build goes on, compressed when it is done ---


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


def test_one_that_would_not_unpack_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path).keep([ONE])
    monkeypatch.setattr(build_state, "MAX_BYTES", 200)
    for _ in range(2):
        Journal(path).keep([TWO, ONE])
        assert [file.name for file in tmp_path.iterdir()] == [path.name]
        assert [row["pin"] for row in read_journal(path)] == [ONE.pin, TWO.pin]


@pytest.mark.parametrize(
    "damage", [b"no zstd", compress(b"no JSON\n"), compress(b'{"an": "older format"}\n')]
)
def test_what_cannot_be_read_is_judged_again(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "journal.jsonl.zst").write_bytes(damage)
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.find(ONE.key) is None
    journal.keep([ONE])
    assert Journal(tmp_path / "journal.jsonl").find(ONE.key) == ONE
