"""Builds are repeatable, resumable and say why they took nothing."""

from __future__ import annotations

import base64
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from small_trees import contents, write_tree

from composer_replication.cli.main import main
from composer_replication.errors import InputError, SandboxFailure, UsageError
from composer_replication.records import Check, SandboxSpec
from composer_replication.run_folder import read_jsonl
from composer_replication.sandbox import LocalSandbox
from composer_replication.tasks import build, repository
from composer_replication.tasks.build import Build, BuildSummary, Journal, build_tasks
from composer_replication.tasks.candidate import Decision, Settings
from composer_replication.tasks.intake.sources import open_source
from composer_replication.tasks.leaks.leak_scan import scan_store
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_manifest import is_settled
from composer_replication.tasks.validate import validate_store

PYPROJECT = '[project]\nname = "planted"\nversion = "1.0"\n'

MakeProject = Callable[[Mapping[str, str]], Path]
PLANTED = {
    "planted.py": "def one():\n    return 11\n\n\ndef two():\n    return 22\n\n\ndef zero():\n    return 0\n\n\ndef unused():\n    return 9\n",
    "test_planted.py": "import planted\n\n\ndef test_one():\n    assert planted.one() == 11\n\n\ndef test_two():\n    assert planted.two() == 22\n"
    "\n\ndef test_zero():\n    assert not planted.zero()\n\n\ndef test_nothing():\n    pass\n",
}


class Spy:
    """Counts which functions are really judged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.judged: list[str] = []
        real = build.judge_deletion

        def judge(deletion: Any, *rest: Any, **options: Any) -> Any:
            self.judged.append(deletion.symbol)
            return real(deletion, *rest, **options)

        monkeypatch.setattr(build, "judge_deletion", judge)


class Whole(NamedTuple):
    """An uninterrupted build of ``PLANTED``; its folder is to be read only."""

    folder: Path
    summary: BuildSummary
    told: list[tuple[int, int, str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    write_tree(root / "planted", {"pyproject.toml": PYPROJECT, **PLANTED})
    told: list[tuple[int, int, str]] = []
    summary = build_tasks(
        [str(root / "planted")], root / "out", jobs=1, progress=lambda *step: told.append(step)
    )
    return Whole(root / "out", summary, told)


def test_counts_and_reasons(whole: Whole) -> None:
    _, summary, told = whole
    assert (summary.tasks, summary.valid, summary.candidates) == (2, 2, 4)
    assert dict(summary.rejected) == {"stub-passes": 1, "untested": 1}
    assert "planted.py::zero" in summary.examples["stub-passes"]
    assert summary.bytes > 1000
    assert told[-1] == (4, 4, "2 tasks")
    summary.require_tasks()


@pytest.mark.long
def test_a_class_that_is_mostly_called_by_no_test_is_no_task(
    make_project: MakeProject, tmp_path: Path
) -> None:
    head = "class {}:\n    def first(self):\n        return 11\n\n    def second(self):\n"
    code = (
        head.format("Called")
        + "        return 22\n\n\n"
        + head.format("Idle")
        + "        two = 2\n        return 10 * two\n"
    )
    tests = "".join(
        f"\n\ndef test_{name}():\n    assert planted.{name}().first() == 11\n" for name in ("Called", "Idle")
    )
    source = str(make_project({"planted.py": code, "test_planted.py": f"import planted\n{tests}"}))
    summary = build_tasks(
        [source], tmp_path / "out", jobs=1, granularities=["class"], with_truth=False, hidden_share=0.0
    )
    assert (summary.valid, dict(summary.rejected)) == (1, {"mostly-untested": 1})
    pinned = build_tasks(
        [source], tmp_path / "pinned", symbols={source: ["planted.py::Idle@class/body"]}, jobs=1, with_truth=False, hidden_share=0.0
    )  # fmt: skip
    assert pinned.valid == 1  # asked for by name
    # To note calls takes time, of which a suite has only so much.
    assert [one.called for one in TaskStore.open(tmp_path / "pinned").repositories()] == [None]
    again = build_tasks(
        [source], tmp_path / "out", symbols={source: ["planted.py::Idle@class/body"]}, jobs=1, with_truth=False, hidden_share=0.0
    )  # fmt: skip
    assert again.fingerprint == pinned.fingerprint  # whatever lay there before


def test_what_leaks_is_refused_and_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leaking = "def one():\n    eleven_by_long_way = sum([1, 2, 3, 5])\n    return eleven_by_long_way\n"
    files = {**PLANTED, "planted.py": f"{leaking}\n\ndef two():\n    return 22\n"}
    files["tests/old.txt"] = base64.b64encode(leaking.encode()).decode()
    write_tree(tmp_path / "planted", {**files, "pyproject.toml": PYPROJECT})
    put = Mock(wraps=TaskStore.put_task)
    monkeypatch.setattr(TaskStore, "put_task", lambda *task: put(*task))
    summary = build_tasks([str(tmp_path / "planted")], tmp_path / "out", jobs=1)
    assert (summary.valid, dict(summary.rejected)) == (1, {"leak": 1})
    assert "tests/old.txt tells the code" in summary.examples["leak"]
    assert [call.args[1].symbol for call in put.call_args_list] == ["two"]


def test_a_second_call_judges_nothing_again(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(whole.folder.parent / "planted")
    shutil.copytree(whole.folder, tmp_path / "out")
    before = contents(tmp_path / "out")
    spy = Spy(monkeypatch)
    again = build_tasks([source], tmp_path / "out")
    assert spy.judged == []
    assert again.tasks == 2
    assert contents(tmp_path / "out") == before


@pytest.mark.long
def test_a_build_that_was_cut_off_says_so_and_goes_on_to_the_same_bytes(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends in the middle, as by a full disk: the first task is there, and the second where it was being judged."""

    class Stopped(Exception):
        pass

    def stop(_done: int, _total: int, what: str) -> None:
        if what == "1 tasks":
            raise Stopped

    source, torn = str(whole.folder.parent / "planted"), tmp_path / "torn"
    spy = Spy(monkeypatch)
    with pytest.raises(Stopped):
        build_tasks([source], torn, jobs=1, progress=stop)
    store = TaskStore.open(torn)
    store.verify()
    assert (len(store.task_ids()) in (1, 2), is_settled(torn)) == (True, False)
    assert main(["tasks", "stats", str(torn), "--json"]) == 0
    assert "the same composer-rl tasks command" in json.loads(capsys.readouterr().out)["unfinished"]
    with (torn / "journal.jsonl").open("a") as journal:
        journal.write('{"key": "half a li')
    done, spy.judged = spy.judged, []
    build_tasks([source], torn, jobs=1)
    assert set(spy.judged).isdisjoint(done)
    assert contents(torn) == contents(whole.folder)
    assert is_settled(torn)
    assert main(["tasks", "stats", str(torn), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unfinished"] == ""


@pytest.mark.long
def test_once_enough_are_found_the_others_are_given_up() -> None:
    begun: list[str] = []

    def decide(name: str) -> Decision:
        begun.append(name)
        time.sleep(0.1)
        return Decision(name, "r==1", name, task_id=name)

    with ThreadPoolExecutor(2) as pool:
        run: Any = SimpleNamespace(
            settings=Settings(max_tasks=3), jobs=2, pool=pool, _decide=decide, progress=lambda *_: None
        )
        candidates: Any = [f"r.py::f{number}" for number in range(9)]
        Build._judge_until_enough(run, candidates)
    assert [decision.pin for decision in run.decisions] == ["r.py::f0", "r.py::f1", "r.py::f2"]
    assert len(begun) <= 6  # one beside the last of three, and what began meanwhile


def test_a_cut_does_not_depend_on_jobs_and_can_grow_to_the_same_bytes(whole: Whole, tmp_path: Path) -> None:
    source = str(whole.folder.parent / "planted")
    shutil.copytree(whole.folder, tmp_path / "a")  # nothing is judged again
    one = build_tasks([source], tmp_path / "a", max_tasks=1, jobs=1)
    many = build_tasks([source], tmp_path / "b", max_tasks=1, jobs=4)
    assert (one.tasks, one.fingerprint, one.candidates) == (1, many.fingerprint, many.candidates)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert build_tasks([source], tmp_path / "b", max_tasks=5, jobs=2).fingerprint == whole.summary.fingerprint
    assert contents(tmp_path / "b") == contents(whole.folder)


@pytest.mark.long
def test_a_changed_source_is_built_anew(whole: Whole, tmp_path: Path) -> None:
    root = Path(shutil.copytree(whole.folder.parent / "planted", tmp_path / "planted"))
    out = shutil.copytree(whole.folder, tmp_path / "out")
    (root / "planted.py").write_text((root / "planted.py").read_text().replace("return 9", "return 8"))
    assert build_tasks([str(root)], out).fingerprint != whole.summary.fingerprint
    TaskStore.open(out).verify()
    assert len(TaskStore.open(out).tasks()) == 2


def test_a_store_whose_tree_an_earlier_version_chose_otherwise_is_measured_anew(
    tiny_store: TaskStore, tiny_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MeasuredAnew(Exception):
        pass

    def lock(*_: object) -> None:
        raise MeasuredAnew

    monkeypatch.setattr(repository, "lock_repository", lock)
    store = TaskStore.open(Path(shutil.copytree(tiny_store.root, tmp_path / "out")))
    source = open_source(str(tiny_project))
    slug = repository.slug_of(source.repository)
    prepare = partial(repository.prepare, source, store, with_calls=False)  # as for the store, which has pins
    prepared = prepare()  # the same files: nothing is measured
    assert prepared.record.called is None
    with pytest.raises(MeasuredAnew):  # whom tests call is asked for now
        repository.prepare(source, store)
    # What was not reached in the time is left out, so another time gives other tests.
    with pytest.raises(MeasuredAnew):
        prepare(suite_seconds=60.0)
    files = dict(prepared.record.files)
    files.popitem()
    store.put_repository(slug, replace(prepared.record, files=files))
    with pytest.raises(MeasuredAnew):
        prepare()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring cannot be taken away")
def test_a_suite_that_takes_the_recorder_of_calls_away_is_not_measured_again(
    make_project: MakeProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = "import sys\n\nimport planted\n\n\ndef test_one():\n    sys.setprofile(None)\n    assert planted.one() == 11\n"
    source = open_source(str(make_project({**PLANTED, "test_planted.py": tests})))
    store = TaskStore.create(tmp_path / "out")
    prepared = repository.prepare(source, store)
    assert {prepared.record.called_share(deletion) for deletion in prepared.deletions} == {1.0}
    monkeypatch.setattr(repository, "lock_repository", lambda *_: pytest.fail("it is measured again"))
    assert repository.prepare(source, store).record == prepared.record


def test_other_sources_do_not_replace_what_is_there(
    make_project: MakeProject, tiny_store: TaskStore, tmp_path: Path
) -> None:
    shutil.copytree(tiny_store.root, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(UsageError, match="CR0231"):
        build_tasks([str(make_project(PLANTED))], tmp_path / "out")
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("sources", "options"),
    [
        ([], {}),
        (["a", "a"], {}),
        (["a"], {"symbols": {"b": ["x"]}}),
        (["a"], {"hidden_share": 1.0}),
        (["a"], {"jobs": 0}),
        (["a"], {"max_tasks": 0}),
    ],
)
def test_arguments_that_do_not_fit(sources: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="CR0206"):
        build_tasks(sources, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_same_repository_twice_is_refused(make_project: MakeProject, tmp_path: Path) -> None:
    root = make_project(PLANTED)
    shutil.copytree(root, tmp_path / "again")
    with pytest.raises(UsageError, match=r"CR0206.*planted and .*again are both the repository planted==1"):
        build_tasks([str(root), str(tmp_path / "again")], tmp_path / "out")


@pytest.mark.parametrize(("strange", "code"), [("notes.txt", "CR0231"), ("manifest.json", "CR0411")])
def test_a_refused_folder_stays_as_it_was(make_project: MakeProject, strange: str, code: str) -> None:
    source = make_project({"pyproject.toml": PYPROJECT, **PLANTED, strange: '{"name": "a web page"}'})
    before = contents(source)
    with pytest.raises((InputError, UsageError), match=code):
        build_tasks([str(source)], source)
    assert contents(source) == before


def with_tests(tests: str, code: str = "x = 1\n") -> dict[str, str]:
    return {"planted.py": code, "test_planted.py": tests}


@pytest.mark.long
@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            with_tests("def test_a():\n    assert False\n\n\ndef test_b():\n    assert False\n"),
            "red-baseline",
        ),
        (with_tests("import os\nos._exit(0)\n\n\ndef test_a():\n    pass\n"), "red-baseline"),
        (
            with_tests("import pytest\npytest.importorskip('no_such')\ndef test_a(): pass\n"),
            "missing-requirement .*no_such",
        ),
        (
            with_tests("def test_a():\n    pass\n", "\ufeffdef one():\n    return 7\n"),
            "nothing-to-delete .*anything of the sizes function/body; a file .*begins with a byte order mark",
        ),
    ],
)
def test_a_repository_that_cannot_be_used(
    make_project: MakeProject, tmp_path: Path, files: dict[str, str], reason: str
) -> None:
    summary = build_tasks([str(make_project(files))], tmp_path / "out")
    assert dict(summary.rejected) == {reason.partition(" ")[0]: 1}
    with pytest.raises(InputError, match=f"CR0419.*{reason}"):
        summary.require_tasks()


# --- no code of a repository runs before the self-test has passed ---


class NoJail:
    """A backend whose jail cannot be tried, so nothing is known to hold."""

    name = "open"

    def is_available(self) -> Check:
        return Check(self.name, True, "it is here.")

    def open(self, spec: SandboxSpec) -> LocalSandbox:
        raise SandboxFailure("CR0302", "it does not start.")


PATH = f"{__name__}:NoJail"


@pytest.mark.parametrize(
    "use",
    [
        lambda folder, _, out: build_tasks([str(folder)], out, backend=PATH),
        lambda _, store, __: validate_store(store, backend=PATH),
        lambda _, store, __: scan_store(store, backend=PATH),
    ],
    ids=["build", "validate", "leakscan"],
)
def test_nothing_of_a_repository_runs_before(
    use: Callable[[Path, Path, Path], object],
    tiny_project: Path,
    tiny_store: TaskStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SandboxFailure, match=r"CR0306.*the sandbox open does not hold: network"):
        use(tiny_project, tiny_store.root, tmp_path / "out")
    assert not (tmp_path / "out" / "journal.jsonl").exists()


# --- the journal: appended while a build goes on, sorted when it is done ---


ONE = Decision("a" * 32, "r==1", "r.py::one", task_id="r-1--one")
TWO = Decision("b" * 32, "r==1", "r.py::two", reason="leak", detail="ünïcode\u2028")


def test_it_is_sorted_at_the_end_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    for decision in (TWO, ONE):
        journal.add(decision)
    rows = read_jsonl(path)
    path.write_bytes(path.read_bytes() + b'{"key": "half a li')
    again = Journal(path)
    assert [again.find(one.key) for one in (ONE, TWO)] == [ONE, TWO]
    again.keep([TWO, ONE])
    assert read_jsonl(path) == rows[::-1]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("damage", ["no JSON\n{}\n", '{"an": "older format"}\n', "[]\n"])
def test_what_cannot_be_read_is_judged_again(tmp_path: Path, damage: str) -> None:
    (tmp_path / "journal.jsonl").write_text(damage)
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.find(ONE.key) is None
    journal.keep([ONE])
    assert Journal(tmp_path / "journal.jsonl").find(ONE.key) == ONE
