"""Bad input through the command line: one sentence with code, place and next step, the right exit code."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from composer_replication.cli.machine_troubles import how_to_go_on, machine_error
from composer_replication.errors import InputError
from composer_replication.run_folder import RunFolder
from composer_replication.tasks.cache import cache_folder
from composer_replication.tasks.lock import INSTALLER, resolve
from composer_replication.tasks.store import TaskStore

Command = Callable[..., Any]
TINY = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "project"


@pytest.fixture
def project(tmp_path: Path) -> Callable[[str], Path]:
    """Makes a project of one function with the given tests."""

    def make(tests: str) -> Path:
        root = tmp_path / "project"
        (root / "tests").mkdir(parents=True)
        (root / "pyproject.toml").write_text('[project]\nname = "planted"\nversion = "1"\n')
        (root / "planted.py").write_text("def double(x):\n    y = x + x\n    return y\n")
        (root / "tests" / "test_planted.py").write_text(tests)
        return root

    return make


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


# --- sources ---------------------------------------------------------------------------------


def test_a_source_that_is_no_project(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("x")
    for source, code in (("absent", "CR0402"), ("text", "CR0402"), ("folder", "CR0403")):
        answer = command("tasks", "build", tmp_path / source, "--out", out)
        assert (answer.exit_code, answer.error["code"]) == (4, code)
        assert answer.error["where"] == str(tmp_path / source)
    assert not out.exists()


def test_a_project_without_tests(command: Command, project: Callable[[str], Path], tmp_path: Path) -> None:
    answer = command("tasks", "build", project("# nothing\n"), "--out", tmp_path / "out")
    assert (answer.exit_code, answer.error["code"]) == (4, "CR0404")
    assert not (tmp_path / "out").exists()


def test_a_project_whose_tests_fail(command: Command, project: Callable[[str], Path], tmp_path: Path) -> None:
    source = project("from planted import double\ndef test_double():\n    assert double(1) == 3\n")
    answer = command("tasks", "build", source, "--out", tmp_path / "out")
    assert (answer.exit_code, answer.error["code"]) == (4, "CR0419")
    assert "red-baseline 1" in answer.error["message"]
    assert "0 of 1 tests are green twice" in answer.error["message"]


def test_no_valid_candidate_says_why_and_how_often(
    command: Command, project: Callable[[str], Path], tmp_path: Path
) -> None:
    answer = command("tasks", "build", project("def test_nothing():\n    pass\n"), "--out", tmp_path / "out")
    assert (answer.exit_code, answer.error["code"]) == (6, "CR0418")
    assert answer.error["message"] == "none of 1 candidates is a task: untested 1."


# --- recipes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("modle.name=x", "CR0204", "the nearest known key is model"),
        ("model.nmae_=x", "CR0204", "the nearest known key is model.name"),
        ("guard.ema_alhpa=0.5", "CR0204", "the nearest known key is guard.ema_alpha"),
        ("seed=abc", "CR0204", "seed: Input should be a valid integer"),
        ("trainer.checkpoint_every=true", "CR0204", "should be a valid integer"),
        ("model.lora.rank=0", "CR0204", "greater than or equal to 1"),
        ("model.name.x=1", "CR0204", "name is not a table"),
        ("trainer.alpha_sdpo=0.1", "CR0711", "alpha_sdpo must be 0"),
        ("trainer.beta_replay=2", "CR0711", "beta_replay must be 0"),
        ("sandbox.backend=bubblewarp", "CR0305", "no sandbox backend called 'bubblewarp'"),
        ("garbage", "CR0205", "'garbage' is not KEY=VALUE"),
        ("=1", "CR0205", "'=1' is not KEY=VALUE"),
        ("a..b=1", "CR0205", "'a..b=1' is not KEY=VALUE"),
    ],
)
def test_a_recipe_that_is_wrong_begins_no_run(
    command: Command, recipe: Path, tmp_path: Path, setting: str, code: str, words: str
) -> None:
    answer = command("train", recipe, "--out", tmp_path / "run", "--set", setting)
    assert (answer.exit_code, answer.error["code"]) == (2, code)
    assert words in answer.error["message"]
    if code == "CR0204":
        assert answer.error["where"] == f"--set {setting.partition('=')[0]}"
    assert not (tmp_path / "run").exists()


def test_a_guard_out_of_range(command: Command, recipe: Path, tmp_path: Path) -> None:
    recipe.write_text(recipe.read_text() + "[heldout]\n[guard]\nema_alpha = 7.0\n")
    answer = command("train", recipe, "--out", tmp_path / "run")
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0204")
    assert "ema_alpha must be in [0, 1)" in answer.error["message"]
    assert not (tmp_path / "run").exists()


def test_a_recipe_that_cannot_be_read(command: Command, recipe: Path, tmp_path: Path) -> None:
    for path, code in ((tmp_path / "absent.toml", "CR0201"), (tmp_path, "CR0201")):
        answer = command("train", path)
        assert (answer.exit_code, answer.error["code"], answer.error["where"]) == (2, code, str(path))
    recipe.write_text("[model\nname = 1")
    answer = command("train", recipe)
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0202")
    assert "line 1" in answer.error["message"]
    recipe.write_bytes(b"\xff\xfe")
    assert command("train", recipe).error["code"] == "CR0202"


@pytest.mark.parametrize(
    ("module", "function", "words"),
    [
        ("absent_module", "x", "No module named 'absent_module'"),
        ("raises", "x", "cannot be imported: RuntimeError: not today"),
        ("broken", "x", "cannot be imported: SyntaxError"),
        ("works", "absent", "has no attribute 'absent'"),
        ("works", "NUMBER", "is not callable"),
        ("works", "two", "does not take (text, answer, score)"),
    ],
)
def test_a_reward_that_cannot_be_used(
    command: Command,
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    function: str,
    words: str,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, f"reward_{module}", raising=False)
    (tmp_path / "reward_raises.py").write_text("raise RuntimeError('not today')\n")
    (tmp_path / "reward_broken.py").write_text("def (\n")
    (tmp_path / "reward_works.py").write_text("NUMBER = 1\ndef two(text, answer):\n    return 1.0\n")
    name = module if module.startswith("absent") else f"reward_{module}"
    answer = command(
        "train", recipe, "--out", tmp_path / "run", "--set", f"reward.function={name}:{function}"
    )
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0210")
    assert words in answer.error["message"]
    assert not (tmp_path / "run").exists()


# --- folders ---------------------------------------------------------------------------------


def test_a_folder_that_is_taken(command: Command, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    answer = command("train", recipe, "--out", run)
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0207")
    answer = command("tasks", "build", TINY, "--out", run)
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0415")
    assert [path.name for path in run.iterdir() if path.name != "LOCK"] == ["notes.txt"]
    assert (run / "notes.txt").read_text() == "mine"


def test_an_output_folder_that_cannot_be(command: Command, recipe: Path, store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    task_id = TaskStore.open(store).task_ids()[0]
    for words in (
        ("train", recipe),
        ("tasks", "build", TINY),
        ("tasks", "export", store, task_id),
    ):
        answer = command(*words, "--out", tmp_path / "file" / "below")
        assert (answer.exit_code, answer.error["code"]) == (2, "CR0209")
        assert f"{tmp_path / 'file'} is not a folder" in answer.error["message"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_second_build_in_one_folder(command: Command, tmp_path: Path) -> None:
    with RunFolder(tmp_path / "out").locked():
        answer = command("tasks", "build", TINY, "--out", tmp_path / "out")
    assert (answer.exit_code, answer.error["code"]) == (2, "CR0203")


# --- stores and run folders that were damaged ----------------------------------------------------


def test_a_damaged_store(command: Command, store: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "store"
    shutil.copytree(store, damaged)
    opened = TaskStore.open(damaged)
    digest = opened.record(opened.task_ids()[0]).broken_sha256
    flip_a_byte(damaged / "objects" / digest[:2] / digest)
    task_id = opened.task_ids()[0]
    for words in (
        ("tasks", "show", damaged, task_id),
        ("tasks", "export", damaged, task_id, "--out", tmp_path / "tree"),
    ):
        answer = command(*words)
        assert (answer.exit_code, answer.error["code"]) == (4, "CR0411")
        assert digest in answer.error["where"]
    (damaged / "manifest.json").unlink()
    for words in (("tasks", "stats", damaged), ("eval", "tiny-random", "--tasks", damaged)):
        answer = command(*words)
        assert (answer.exit_code, answer.error["code"]) == (4, "CR0410")
        assert answer.error["where"] == str(damaged)


def test_an_empty_store(command: Command, tmp_path: Path) -> None:
    TaskStore.create(tmp_path / "store")
    answer = command("eval", "tiny-random", "--tasks", tmp_path / "store")
    assert (answer.exit_code, answer.error["code"]) == (6, "CR0604")


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("metrics.jsonl", '{"step": 1}\nno json\n{"step": 2}\n', "CR0401"),
        ("metrics.jsonl", '{"step": "one"}\n', "CR0483"),
        ("verdicts.jsonl", "[1]\n", "CR0483"),
        ("summary.json", "{", "CR0401"),
        ("environment.json", '{"schema_version": 99}', "CR0401"),
        ("run.toml", "[model", "CR0483"),
    ],
)
def test_a_broken_file_in_a_run_folder(
    command: Command, tmp_path: Path, name: str, text: str, code: str
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    (tmp_path / name).write_text(text)
    answer = command("report", tmp_path)
    assert (answer.exit_code, answer.error["code"]) == (4, code)
    assert name in answer.error["where"]
    assert not (tmp_path / "report.html").exists()


# --- the cache -------------------------------------------------------------------------------


@pytest.fixture
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own that shares wheels and environments, which these tests do not change."""
    shared, cache = cache_folder(), tmp_path / "cache"
    resolve([], "the tests")  # the shared one has them now
    cache.mkdir()
    for name in ("wheels", "environments"):
        (shared / name).mkdir(exist_ok=True)
        (cache / name).symlink_to(shared / name)
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(cache))
    return cache


OLDER_FORMAT = json.dumps({"python": "3.11", "wheels": [["pytest", "1", "pytest-1-py3-none-any.whl", "00"]]})


@pytest.mark.parametrize("text", [OLDER_FORMAT, "{", "[]", '{"wheels": 3}', "\x00"])
def test_an_answer_of_an_older_format_in_the_cache_is_asked_again(
    private_cache: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the wheels of the cache are enough
    wanted = [Requirement("{}=={}".format(*INSTALLER))]
    lock = resolve(wanted, "the tests")
    answers = list((private_cache / "resolutions").iterdir())
    assert len(answers) == 1
    answers[0].write_text(text)
    assert resolve(wanted, "the tests") == lock
    assert json.loads(answers[0].read_text()) == json.loads(json.dumps(lock.to_json()))


def test_a_damaged_store_in_the_cache_is_built_again(
    command: Command, private_cache: Path, recipe: Path, store: Path, tmp_path: Path
) -> None:
    pins = json.dumps(["tinymath/text.py::initials"])
    table = f'source = ["{TINY}"]\nsymbols = {{ "{TINY}" = {pins} }}'
    text = recipe.read_text().replace(f'store = "{store}"', table)
    recipe.write_text(text + "[heldout]\n")  # one task cannot be parted: the run ends after the build

    def build() -> Path:
        answer = command("train", recipe, "--out", tmp_path / "run", "--resume")
        assert answer.error["code"] in ("CR0503", "CR0604"), answer.err
        (folder,) = (private_cache / "task-stores").iterdir()
        TaskStore.open(folder).verify()
        return folder

    folder = build()
    fingerprint = TaskStore.open(folder).fingerprint
    for damage in (
        lambda: (folder / "manifest.json").write_text("{"),
        lambda: flip_a_byte(max((folder / "objects").rglob("*"), key=lambda path: path.stat().st_size)),
        lambda: (folder / "journal.jsonl").write_text('{"an": "older format"}\nno json\n{}\n'),
    ):
        damage()
        assert TaskStore.open(build()).fingerprint == fingerprint


# --- the machine -----------------------------------------------------------------------------


def without(module: str, *words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter that cannot import a module."""
    code = f"import sys; sys.modules[{module!r}] = None\nfrom composer_replication.cli.main import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, words), "--json", "--quiet"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("module", ["torch", "trl", "datasets"])
def test_training_without_its_packages(recipe: Path, tmp_path: Path, module: str) -> None:
    done = without(module, "train", recipe, "--out", tmp_path / "run")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (3, "CR0101"), done.stderr
    assert error["message"] == f"training needs {module}, which is not installed."
    assert error["fix"] == "pip install 'composer-replication[train]'"
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_evaluating_without_torch(store: Path) -> None:
    done = without("torch", "eval", "tiny-random", "--tasks", store)
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (3, "CR0101"), done.stderr


def test_no_sandbox_at_all(recipe: Path, tmp_path: Path) -> None:
    for words in (("tasks", "build", TINY), ("train", recipe)):
        done = without("sandlock", *words, "--out", tmp_path / "out", PATH=str(tmp_path))
        error = json.loads(done.stdout)["error"]
        assert (done.returncode, error["code"]) == (3, "CR0301"), done.stderr
        assert "bubblewrap" in error["fix"]
        assert "sandlock" in error["fix"]
        assert not (tmp_path / "out").exists()


def test_a_reader_that_has_gone(store: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "composer_replication.cli.main", "tasks", "show", str(store)],
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_while_tasks_are_built(store: Path, tmp_path: Path) -> None:
    words = ["tasks", "build", str(TINY), "--out", str(tmp_path / "out"), "--quiet", "--json"]
    words += [f"--symbol={pin}" for pin in ("tinymath/numbers.py::clamp", "tinymath/text.py::initials")]

    def build(most_bytes: int) -> subprocess.CompletedProcess[str]:
        limit = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, -1))\n"
        code = f"{limit}from composer_replication.cli.main import main\nimport sys\nsys.exit(main())"
        return subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=110, check=False
        )

    done = build(100_000)  # less than a wheel takes
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (3, "CR0104"), done.stderr
    assert error["fix"] == "free some space; then the same command goes on where it stopped."
    assert error["where"]
    assert build(-1).returncode == 0
    assert TaskStore.open(tmp_path / "out").fingerprint == TaskStore.open(store).fingerprint


def test_a_long_name_of_the_temporary_folder(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("long" * 30)  # a socket could not lie in it
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    answer = command("sandbox", "selftest", fails=False)
    assert (answer.exit_code, json.loads(answer.out)["ok"]) == (0, True), answer.out
    assert list(folder.iterdir()) == []


def test_troubles_of_the_machine_are_told_from_bugs() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/run/model")
    found = machine_error(full, ["train", "r.toml", "--out", "run"])
    assert found is not None
    assert (found.code, found.exit_code, found.where) == ("CR0104", 3, "/run/model")
    assert "composer-rl train r.toml --out run --resume" in found.fix
    library = RuntimeError("I/O error: No space left on device (os error 28)")
    taken_for_another = InputError("CR0701", "the model cannot be loaded.")
    taken_for_another.__cause__ = library
    for error in (library, taken_for_another):
        found = machine_error(error, [])
        assert found is not None
        assert found.code == "CR0104"
    found = machine_error(PermissionError(errno.EACCES, "Permission denied", "/cache"), [])
    assert found is not None
    assert (found.code, found.exit_code, found.where) == ("CR0105", 3, "/cache")
    assert machine_error(FileNotFoundError(errno.ENOENT, "No such file", "/x"), []) is None
    assert machine_error(InputError("CR0401", "no space in this line."), []) is None


def test_how_to_go_on_depends_on_the_verb() -> None:
    assert how_to_go_on(["train", "r.toml"]).startswith("composer-rl train r.toml --resume goes on")
    assert how_to_go_on(["train", "r.toml", "--resume"]).count("--resume") == 1
    for words in (["tasks", "build", "x", "--out", "y"], ["quickstart", "--quiet"]):
        assert how_to_go_on(words) == "the same command goes on where it stopped."
    assert how_to_go_on(["doctor"]) == "type the same command again."


def test_a_cache_that_may_not_be_written(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_RL_CACHE", "/sys/composer-rl")  # not even root makes folders there
    answer = command("tasks", "build", TINY, "--out", tmp_path / "out")
    assert (answer.exit_code, answer.error["code"]) == (3, "CR0105")
    assert answer.error["where"] == "/sys/composer-rl"
