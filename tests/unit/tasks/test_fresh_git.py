"""The repository of one commit that a rollout's tree has: git itself reads it, and its bytes never change."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from composer_replication.records import Task
from composer_replication.tasks.fresh_git import AUTHOR, MESSAGE, with_git
from composer_replication.tasks.planning.edits import write_files
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.swebench import Instance, base_source

FILES = {
    "a.py": b"x = 1\n",
    "a/b.py": b"",
    "a.b/c.py": b"y = 2\n",
    "a-b": b"sorts between a and a/\n",
    "same.py": b"x = 1\n",
    "crlf.txt": b"one\r\ntwo\r\n",
    "large.bin": bytes(range(256)) * 300,  # more than one stored block
    "t\u00e4st \u4e2d/n\u00fcm b.py": b"z\n",
    "deep/" * 20 + "d" * 120: b"a long path\n",
}


def git(folder: Path, *words: str) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "safe.directory=*", "-C", str(folder), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def test_git_agrees_with_every_byte(tmp_path: Path) -> None:
    tree, other = tmp_path / "tree", tmp_path / "other"
    write_files(tree, with_git(FILES))
    assert git(tree, "fsck", "--full", "--strict") == ""
    assert git(tree, "status", "--porcelain") == ""
    assert git(tree, "diff") == ""
    assert set(git(tree, "ls-files", "-z").split("\0")) == {*FILES, ""}
    # The same commit, made by git.
    write_files(other, FILES)
    git(other, "init", "-q", "-b", "main")
    git(other, "-c", "core.autocrlf=false", "add", ".")
    tree_id = git(other, "write-tree").strip()
    assert git(tree, "rev-parse", "HEAD^{tree}").strip() == tree_id
    assert git(tree, "log", "--all", "--format=raw") == (
        f"commit {git(tree, 'rev-parse', 'HEAD').strip()}\ntree {tree_id}\nauthor {AUTHOR}\n"
        f"committer {AUTHOR}\n\n    {MESSAGE}"
    )


def test_it_is_one_commit_without_history_hooks_or_names_of_the_machine(tmp_path: Path) -> None:
    found = {path: data for path, data in with_git(FILES).items() if path not in FILES}
    assert {path for path in found if "/objects/" not in path} == {
        ".git/HEAD", ".git/config", ".git/index", ".git/refs/heads/main",
    }  # fmt: skip
    write_files(tmp_path, with_git(FILES))
    kinds = git(tmp_path, "cat-file", "--batch-all-objects", "--batch-check=%(objecttype)").split()
    assert (kinds.count("commit"), kinds.count("blob")) == (1, len(set(FILES.values())))
    words = {os.uname().nodename, os.environ.get("USER", ""), str(Path.home())} - {"", "/", "task"}
    assert not any(
        word.encode() in data for word in words for path, data in found.items() if "/objects/" not in path
    )


def test_the_same_files_give_the_same_bytes() -> None:
    """By value too: a change of any byte here changes the tree of every rollout."""
    assert with_git(FILES) == with_git(dict(reversed(FILES.items())))
    assert with_git({"a.py": b"x = 1\n"})[".git/refs/heads/main"] == KNOWN_COMMIT


KNOWN_COMMIT = b"13583bbe1060fadd8ecdf2ad8415e14d5bb56f84\n"


def test_an_agent_can_work_with_it(tmp_path: Path) -> None:
    write_files(tmp_path, with_git(FILES))
    (tmp_path / "a.py").write_bytes(b"x = 2\n")
    (tmp_path / "new.py").write_bytes(b"n\n")
    (tmp_path / "same.py").unlink()
    assert git(tmp_path, "status", "--porcelain").splitlines() == [" M a.py", " D same.py", "?? new.py"]
    assert "-x = 1\n+x = 2\n" in git(tmp_path, "diff")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "work")
    assert len(git(tmp_path, "log", "--oneline").splitlines()) == 2
    git(tmp_path, "checkout", "-q", "HEAD~1", "--", ".")
    assert (tmp_path / "same.py").read_bytes() == FILES["same.py"]
    assert not (tmp_path / ".git" / "logs").exists()


def test_only_the_tree_of_a_rollout_has_it(make_store, sized_tasks, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    store: TaskStore = make_store(sized_tasks["t-function-body"])
    task: Task = store.tasks()[0]
    for view in ("rollout", "visible", "hidden", "golden"):
        store.write_tree(task, tmp_path / view, view=view)  # type: ignore[arg-type]
        assert (tmp_path / view / ".git").exists() == (view == "rollout")
    assert git(tmp_path / "rollout", "status", "--porcelain") == ""
    assert ".git" not in {path.split("/")[0] for path in store.files(task, "rollout")}
    store.write_tree(task, tmp_path / "again")
    first, again = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "rollout", tmp_path / "again")
    )
    # git status wrote times into the first one's index
    index = Path(".git/index")
    assert {**first, index: b""} == {**again, index: b""}


def test_an_exported_tree_is_a_plain_base_and_a_clone_is_none(tmp_path: Path) -> None:
    write_files(tmp_path / "thing", with_git(FILES))
    for commit, source in (
        ("0" * 64, f"{tmp_path}/thing"),
        ("0" * 40, f"git+file://{tmp_path}/thing@{'0' * 40}"),
    ):
        named = {**dict.fromkeys(Instance.__dataclass_fields__, ""), "repo": "thing", "base_commit": commit}
        assert base_source(Instance(**named), tmp_path) == source
