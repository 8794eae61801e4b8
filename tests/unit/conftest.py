"""A store with one task of every size and way, its records written by hand from a project of a few files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from composer_replication.records import Edit
from composer_replication.tasks.intake.licences import Licence
from composer_replication.tasks.planning.body_cuts import find_body_cuts
from composer_replication.tasks.planning.edits import line_edits
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.store_records import RepositoryRecord, SecretRecord, TaskRecord

TINY = Path(__file__).parents[2] / "recipes" / "tiny-cpu" / "project"
REPOSITORY = "tinymath==1.0"
SLUG = "tinymath-1.0"


@dataclass(frozen=True)
class HandTask:
    """What a test says of a task; new texts of files become edits."""

    task_id: str
    path: str
    symbol: str
    granularity: str
    removal: str
    functions: tuple[str, ...] = ()
    """``path::Name`` of functions inside."""
    texts: Mapping[str, str] | None = None
    removed_files: tuple[str, ...] = ()
    test_texts: Mapping[str, str] | None = None
    visible: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    without_hidden: Mapping[str, str] | None = None


MakeStore = Callable[..., TaskStore]


def tiny_files() -> dict[str, bytes]:
    paths = (path for path in TINY.rglob("*") if path.suffix in (".py", ".toml"))
    return {path.relative_to(TINY).as_posix(): path.read_bytes() for path in paths}


def places_of(files: Mapping[str, bytes]) -> dict[str, tuple[str, int, str]]:
    """Node ids as pytest gives them, without parametrisations."""
    places = {}
    for path, data in files.items():
        if not Path(path).name.startswith("test_"):
            continue
        for node in ast.parse(data).body:
            inside = node.body if isinstance(node, ast.ClassDef) else [node]
            for function in inside:
                if isinstance(function, ast.FunctionDef):
                    owner = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
                    line = min([function.lineno, *(d.lineno for d in function.decorator_list)])
                    places[f"{path}::{owner}{function.name}"] = (path, line, function.name)
    return places


def put_hand_task(store: TaskStore, files: Mapping[str, bytes], task: HandTask) -> None:
    originals = {path: data.decode() for path, data in files.items()}

    def edits(texts: Mapping[str, str] | None) -> tuple[Edit, ...]:
        return tuple(e for p, new in sorted((texts or {}).items()) for e in line_edits(p, originals[p], new))

    cuts = {c.pin: c.edit for path in originals for c in find_body_cuts(path, originals[path])}
    bodies = tuple(sorted((cuts[pin] for pin in task.functions), key=lambda e: (e.path, e.start)))
    is_body = task.removal == "body"
    record = TaskRecord(
        task_id=task.task_id,
        repository=REPOSITORY,
        repository_record=SLUG,
        path=task.path,
        symbol=task.symbol,
        granularity=task.granularity,
        removal=task.removal,
        edits=bodies if is_body else edits(task.texts),
        stub_edits=() if is_body else bodies,
        removed_files=task.removed_files,
        test_edits=edits(task.test_texts),
        visible_edits=edits({**(task.test_texts or {}), **(task.without_hidden or {})}),
        visible=task.visible,
        environment="e" * 64,
        num_body_lines=9,
        statement="",
        instance_id="",
        strength=None,
    )
    store.put_task(record, SecretRecord(task.task_id, task.hidden, (), None))


@pytest.fixture(scope="session")
def make_store(tmp_path_factory: pytest.TempPathFactory) -> MakeStore:
    """A store of the given tasks over some files (default: the tiny project); nothing of it is run."""

    def make(
        *tasks: HandTask, files: Mapping[str, bytes] | None = None, name: str = "hand-made"
    ) -> TaskStore:
        files, folder = files or tiny_files(), tmp_path_factory.mktemp("store") / name
        store = TaskStore.create(folder)
        hashes = {path: store.put_blob(data) for path, data in files.items()}
        places = places_of(files)
        store.put_repository(
            SLUG,
            RepositoryRecord(
                REPOSITORY,
                "s" * 64,
                "e" * 64,
                hashes,
                places,
                len(places),
                (),
                (),
                Licence(None, "", "", None),
                "",
            ),
        )
        for task in tasks:
            put_hand_task(store, files, task)
        return TaskStore.open(folder)

    return make


def without(text: str, *pieces: str) -> str:
    for piece in pieces:
        assert text.count(piece) == 1, piece
        text = text.replace(piece, "")
    return text


@pytest.fixture(scope="session")
def sized_tasks() -> dict[str, HandTask]:
    """By ``granularity/removal``."""
    files = {path: data.decode() for path, data in tiny_files().items()}
    init, numbers, vector = (files[f"tinymath/{name}.py"] for name in ("__init__", "numbers", "vector"))
    tests = files["tests/test_numbers.py"]
    clamp = numbers[numbers.index("def clamp") : numbers.index("def mean")]
    methods = tuple(f"tinymath/vector.py::Vector.{m}" for m in ("__init__", "dot", "scaled", "length"))
    texts = tuple(f"tinymath/text.py::{n}" for n in ("shout", "repeat", "initials", "is_palindrome"))
    clamp_tests = tuple(f"tests/test_numbers.py::test_clamp_{n}" for n in ("inside", "below", "above"))
    vector_tests = ("tests/test_vector.py::test_dot", "tests/test_vector.py::test_length")
    hidden_clamp = tests[tests.index("def test_clamp_above") : tests.index("def test_mean():")]
    moved = tests.replace("clamp, ", "").replace(
        "inside():\n", "inside():\n    from tinymath import clamp\n\n"
    ).replace("below():\n", "below():\n    from tinymath import clamp\n\n")  # fmt: skip
    moved_all = moved.replace("above():\n", "above():\n    from tinymath import clamp\n\n")
    hand = [
        HandTask(
            "t-function-body", "tinymath/numbers.py", "clamp", "function", "body",
            functions=("tinymath/numbers.py::clamp",), visible=clamp_tests[:2], hidden=clamp_tests[2:],
            without_hidden={"tests/test_numbers.py": without(tests, hidden_clamp)},
        ),
        HandTask(
            "t-class-body", "tinymath/vector.py", "Vector", "class", "body", functions=methods,
            visible=vector_tests, hidden=("tests/test_vector.py::test_scaled",),
        ),
        HandTask(
            "t-module-body", "tinymath/text.py", "tinymath.text", "module", "body", functions=texts,
            visible=("tests/test_text.py::test_shout", "tests/test_text.py::TestInitials::test_two_words"),
        ),
        HandTask(
            "t-feature-body", "tinymath/numbers.py", "clamp", "feature", "body",
            functions=("tinymath/numbers.py::clamp", "tinymath/text.py::shout"), visible=clamp_tests,
        ),
        HandTask(
            "t-function-whole", "tinymath/numbers.py", "clamp", "function", "whole",
            functions=("tinymath/numbers.py::clamp",),
            texts={
                "tinymath/numbers.py": without(numbers, clamp),
                "tinymath/__init__.py": init.replace("absolute, clamp, is", "absolute, is").replace('    "clamp",\n', ""),
            },
            test_texts={"tests/test_numbers.py": moved_all},
            without_hidden={"tests/test_numbers.py": without(moved, hidden_clamp)},
            visible=clamp_tests[:2], hidden=clamp_tests[2:],
        ),
        HandTask(
            "t-method-whole", "tinymath/vector.py", "Vector.length", "function", "whole",
            functions=("tinymath/vector.py::Vector.length",),
            texts={"tinymath/vector.py": vector[: vector.index("\n    @property")]},
            visible=("tests/test_vector.py::test_length",), hidden=("tests/test_vector.py::test_length_of_zero",),
        ),
        HandTask(
            "t-class-whole", "tinymath/vector.py", "Vector", "class", "whole", functions=methods,
            texts={
                "tinymath/vector.py": vector[: vector.index("\n\nclass")],
                "tinymath/__init__.py": without(init, "from tinymath.vector import Vector\n", '    "Vector",\n'),
            },
            visible=vector_tests,
        ),
        HandTask(
            "t-module-whole", "tinymath/text.py", "tinymath.text", "module", "whole", functions=texts,
            texts={
                "tinymath/__init__.py": without(
                    init, "from tinymath.text import initials, is_palindrome, repeat, shout\n",
                    *(f'    "{name}",\n' for name in ("initials", "is_palindrome", "repeat", "shout")),
                )
            },
            removed_files=("tinymath/text.py",),
            visible=("tests/test_text.py::test_shout", "tests/test_text.py::TestInitials::test_two_words"),
        ),
        HandTask(
            "t-feature-whole", "tinymath/numbers.py", "clamp", "feature", "whole",
            functions=("tinymath/numbers.py::clamp", "tinymath/text.py::shout"),
            texts={
                "tinymath/numbers.py": without(numbers, clamp),
                "tinymath/text.py": without(
                    files["tinymath/text.py"],
                    files["tinymath/text.py"][files["tinymath/text.py"].index("def shout") :].split("\n\n\n")[0] + "\n\n\n",
                ),
                "tinymath/__init__.py": init.replace("absolute, clamp, is", "absolute, is").replace('    "clamp",\n', ""),
            },
            visible=clamp_tests,
        ),
    ]  # fmt: skip
    return {task.task_id: task for task in hand}


@pytest.fixture
def sized_store(make_store: MakeStore, sized_tasks: dict[str, HandTask]) -> TaskStore:
    return make_store(*sized_tasks.values())
