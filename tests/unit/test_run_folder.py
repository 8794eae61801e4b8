from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer_replication import run_folder
from composer_replication.errors import InputError, UsageError
from composer_replication.run_folder import (
    RunFolder,
    append_jsonl,
    read_json,
    read_jsonl,
    rewrite_jsonl,
    write_atomic,
    write_json,
)

HOLD = textwrap.dedent("""
    import sys
    from pathlib import Path
    from composer_replication.run_folder import RunFolder
    with RunFolder(Path(sys.argv[1])).locked():
        print("held", flush=True)
        sys.stdin.read()
""")


def test_paths_are_absolute_and_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(Path("runs/a"))
    assert folder.root == tmp_path / "runs" / "a"
    inside = [value for name, value in vars(folder).items() if name != "root"]
    assert len(inside) == 13
    assert all(path.parent == folder.root for path in inside)


def test_occupied_means_more_than_a_lock(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert not folder.is_occupied
    with folder.locked():
        assert not folder.is_occupied
    write_json(folder.summary, {})
    assert folder.is_occupied


def test_what_a_killed_writer_left_does_not_occupy(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    (folder.root / ".run.toml.4711.tmp").write_text("ha")
    assert not folder.is_occupied
    (folder.root / ".mine.tmp").write_text("mine")
    assert folder.is_occupied


def test_another_live_process_is_refused_and_a_dead_one_is_not(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(UsageError) as refused, folder.locked():
            pass
        assert refused.value.code == "CR0203"
        assert refused.value.where == str(folder.root)
        other.kill()
    with folder.locked():
        write_json(folder.summary, {"a": 1})
    assert read_json(folder.summary)["a"] == 1


def test_the_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(ZeroDivisionError), folder.locked():
        raise ZeroDivisionError
    with folder.locked():
        assert folder.root.is_dir()


def test_writing_replaces_whole_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_atomic(path, "one")
    write_atomic(path, "zwei – ü")
    assert path.read_text() == "zwei – ü"
    assert [entry.name for entry in path.parent.iterdir()] == ["file.txt"]


def test_a_crash_while_writing_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    write_json(path, {"a": 1})

    def power_cut(descriptor: int) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(run_folder.os, "fsync", power_cut)
    with pytest.raises(OSError, match="power cut"):
        write_json(path, {"a": 2})
    assert read_json(path)["a"] == 1


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "3", '{"a": 1}', '{"schema_version": 2}', '{"schema_version": "1"}', "\udcff"]
)
def test_another_file_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError) as refused:
        read_json(path)
    assert (refused.value.code, refused.value.where) == ("CR0401", str(path))


def test_appended_lines_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    for number in range(3):
        append_jsonl(path, {"n": number})
    assert read_jsonl(path) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert read_jsonl(tmp_path / "none.jsonl") == []


@pytest.mark.long
@given(st.lists(st.dictionaries(st.text(), st.integers() | st.text()), min_size=1), st.data())
def test_a_torn_last_line_costs_only_itself(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, object]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    rewrite_jsonl(path, rows)
    whole = path.read_bytes()
    last = json.dumps(rows[-1], sort_keys=True).encode()
    cut = data.draw(st.integers(1, len(last)))
    path.write_bytes(whole[: len(whole) - 1 - cut])
    assert read_jsonl(path) == rows[:-1]


def test_separators_inside_a_text_do_not_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"text": "a\u2028b\u2029c\x85d"}] * 2
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    assert read_jsonl(path) == rows


def test_a_broken_line_before_the_last_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 0}\n{"n": \n{"n": 2}\n')
    with pytest.raises(InputError) as refused:
        read_jsonl(path)
    assert (refused.value.code, refused.value.where) == ("CR0401", f"{path}:2")


def test_rewriting_cuts_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rewrite_jsonl(path, [{"n": 0}, {"n": 1}])
    rewrite_jsonl(path, [{"n": 0}])
    assert read_jsonl(path) == [{"n": 0}]
    rewrite_jsonl(path, [])
    assert path.read_text() == ""


def test_what_is_not_a_number_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range"):
        append_jsonl(tmp_path / "rows.jsonl", {"n": float("nan")})
