"""What is asked from inside a real sandbox: each question finds its plant, and a missing answer is no clean one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from composer_replication.sandbox import choose_backend
from composer_replication.tasks.fresh_git import with_git
from composer_replication.tasks.intake.environment import Environment
from composer_replication.tasks.leaks import leak_scan
from composer_replication.tasks.leaks.leak_scan import targets_of
from composer_replication.tasks.store import TaskStore

TEXT, NUMBERS = "tinymath/text.py", "tinymath/numbers.py"
InsideSearch = Callable[..., "Answer"]


class Answer:
    """The answer: (channel, path) of what was found, and what could not be asked."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        self.leaks = {(channel, path) for _, channel, path in value["leaks"]}
        self.failed: list[str] = value["failed_checks"]

    def of(self, channel: str) -> set[str]:
        return {path for found, path in self.leaks if found == channel}


@pytest.fixture
def search_inside(make_store: Any, sized_tasks: Any, environment: Environment) -> InsideSearch:
    """InsideSearch from the rollout tree of a task with some files planted, ``golden`` ones by their path alone."""

    def run(
        task_id: str,
        extra: Mapping[str, bytes] | None = None,
        *,
        golden: tuple[str, ...] = (),
        where: Environment = environment,
        backend: str | None = None,
    ) -> Answer:
        store: TaskStore = make_store(sized_tasks[task_id], name=task_id)
        (task,) = store.tasks()
        targets = targets_of(store, task)
        original = store.files(task, "golden")
        files = {**store.files(task, "rollout"), **{path: original[path] for path in golden}, **(extra or {})}
        return Answer(leak_scan.search_inside(files, targets, where, backend=backend))

    return run


@pytest.fixture
def text_files(make_store: Any, sized_tasks: Any) -> tuple[bytes, bytes]:
    """``tinymath/text.py`` as it was, and with the bodies of ``t-module-body`` taken out."""
    store: TaskStore = make_store(sized_tasks["t-module-body"], name="texts")
    (task,) = store.tasks()
    return store.files(task, "golden")[TEXT], store.files(task, "rollout")[TEXT]


@pytest.mark.long
@pytest.mark.parametrize(
    "task_id", ["t-module-body", "t-feature-body", "t-class-whole", "t-module-whole", "t-feature-whole"]
)
def test_a_clean_tree_of_each_size_gives_nothing_and_answers_everything(
    search_inside: InsideSearch, task_id: str
) -> None:
    answer = search_inside(task_id)
    assert (answer.leaks, answer.failed) == (set(), [])


@pytest.mark.long
def test_without_namespaces_what_lies_in_the_tree_is_found(search_inside: InsideSearch) -> None:
    """The root of the file system and ``/proc`` are closed there, and what is shown is searched all the same."""
    if not (check := choose_backend("sandlock").is_available()).ok:
        pytest.skip(check.detail)
    clean = search_inside("t-module-body", backend="sandlock")
    assert (clean.leaks, clean.failed) == (set(), [])
    found = search_inside("t-module-body", golden=(TEXT,), backend="sandlock")
    assert found.leaks == {("copy", TEXT)}


class TestGit:
    """Repositories that git itself wrote, in the tree of a rollout."""

    @staticmethod
    def git(folder: Path, *words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "gc.auto=0"]
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        subprocess.run(
            ["git", *who, "-C", str(folder), *words], check=True, capture_output=True, env=environment
        )

    @staticmethod
    def read(folder: Path) -> dict[str, bytes]:
        """Its files, without the folder's own: only history can tell."""
        paths = (path for path in (folder / ".git").rglob("*") if path.is_file())
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return {path: data for path, data in found.items() if "hooks" not in path}

    def committed(self, repository: Path, text: bytes) -> Path:
        """A repository of one commit."""
        repository.mkdir()
        self.git(repository, "init", "-q", "-b", "main")
        (repository / "text.py").write_bytes(text)
        self.git(repository, "add", ".")
        self.git(repository, "commit", "-q", "-m", "first")
        return repository

    @pytest.mark.parametrize("how", ["only a reflog names it", "nothing names it"])
    def test_whatever_git_keeps_is_found(
        self, search_inside: InsideSearch, tmp_path: Path, text_files: tuple[bytes, bytes], how: str
    ) -> None:
        golden, broken = text_files
        repository = self.committed(tmp_path / "repository", broken if how == "nothing names it" else golden)
        if how == "nothing names it":
            (repository / "text.py").write_bytes(golden)
            self.git(repository, "hash-object", "-w", "text.py")
        else:
            (repository / "text.py").write_bytes(broken)
            self.git(repository, "commit", "-q", "-a", "-m", "after")
            # One commit without a parent takes the place of both; the reflog still names them.
            self.git(repository, "update-ref", "-d", "HEAD")
            self.git(repository, "commit", "-q", "-a", "-m", "squashed")
            self.git(repository, "repack", "-adkq")
        assert ".git/objects" in search_inside("t-module-body", self.read(repository)).of("git")

    def test_a_repository_that_git_cannot_read_is_said(self, search_inside: InsideSearch) -> None:
        answer = search_inside("t-module-body", {".git/HEAD": b"nothing\n"})
        assert answer.failed == ["git cat-file: no answer"]

    def test_the_fresh_repository_of_a_rollout_is_clean(
        self, search_inside: InsideSearch, text_files: tuple[bytes, bytes]
    ) -> None:
        answer = search_inside("t-module-body", with_git({TEXT: text_files[1]}))
        assert (answer.leaks, answer.failed) == (set(), [])
        planted = {**with_git({TEXT: text_files[0]}), TEXT: text_files[1]}
        assert search_inside("t-module-body", planted).of("git") >= {".git/objects"}


class TestWalk:
    """Folders that one sandbox walks for all tasks."""

    @pytest.fixture
    def walk(self, make_store: Any, sized_tasks: Any, environment: Environment) -> Callable[..., Any]:
        def run(folders: list[Path], where: Environment = environment) -> set[tuple[str, str]]:
            store: TaskStore = make_store(sized_tasks["t-module-body"])
            (task,) = store.tasks()
            roots = list(map(str, folders))
            return Answer(leak_scan.search_inside({}, targets_of(store, task), where, roots=roots)).leaks

        return run

    @pytest.mark.long
    def test_the_walk_of_an_environment_finds_text(
        self, walk: Callable[..., Any], own_environment: Environment, text_files: tuple[bytes, bytes]
    ) -> None:
        packages = next(own_environment.root.glob("lib/python*/site-packages"))
        (packages / "old.py").write_bytes(text_files[0])
        # A folder in another one, and a second name of it, are walked once.
        assert walk([own_environment.root, packages], own_environment) == {
            ("installed", str(packages / "old.py"))
        }

    def test_what_lies_in_another_folder_that_is_shown_is_found(
        self,
        walk: Callable[..., Any],
        environment: Environment,
        text_files: tuple[bytes, bytes],
        tmp_path: Path,
    ) -> None:
        shown = tmp_path / "share"
        shown.mkdir()
        where = replace(environment, read_only=(*environment.read_only, shown))
        assert str(shown) in leak_scan._shown(where)[0]
        found = {("visible-copy", str(shown / "old.txt"))}
        for text, expected in zip(text_files, (found, set()), strict=True):
            (shown / "old.txt").write_bytes(text)
            assert walk([shown], where) == expected
