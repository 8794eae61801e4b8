"""One instance of every way in which a deleted function was ever had back; a clean tree has none of them."""

from __future__ import annotations

import gzip
import io
import json
import marshal
import pickle
import sqlite3
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_replication.records import Task
from composer_replication.tasks.fresh_git import with_git
from composer_replication.tasks.leaks.leak_fingerprints import fingerprints
from composer_replication.tasks.leaks.leak_forms import forms_of
from composer_replication.tasks.leaks.leak_search import Search
from composer_replication.tasks.store import TaskStore

SALT = "salt"
PATH = "tinymath/numbers.py"
HIDDEN = "tests/test_numbers.py::test_clamp_above"


@pytest.fixture
def store(make_store: Any, sized_tasks: Any) -> TaskStore:
    return make_store(sized_tasks["t-function-body"])  # type: ignore[no-any-return]


@pytest.fixture
def task(store: TaskStore) -> Task:
    return store.tasks()[0]


@pytest.fixture
def search(store: TaskStore, task: Task) -> Callable[..., Search]:
    targets = [known.target for known in fingerprints(store, task, SALT)]
    return lambda: Search(targets, SALT, unmarshal=True)


def zipped(text: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(PATH, text)
    return out.getvalue()


def tarred(text: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo(f"tinymath-1.0/{PATH}")
        info.size = len(text.encode())
        archive.addfile(info, io.BytesIO(text.encode()))
    return out.getvalue()


def compiled(text: str, name: str = PATH) -> bytes:
    return b"0" * 16 + marshal.dumps(compile(text, name, "exec", dont_inherit=True))


def loose_object(text: str) -> bytes:
    return zlib.compress(b"blob %d\0" % len(text.encode()) + text.encode())


def packed(text: str) -> bytes:
    (pack,) = [data for path, data in with_git({PATH: text.encode()}).items() if path.endswith(".pack")]
    return pack


def notebook(text: str) -> bytes:
    """The code stands in an output only, as ``inspect.getsource`` printed it."""
    output = {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
    cell = {"cell_type": "code", "source": ["print(getsource(clamp))"], "outputs": [output]}
    return json.dumps({"cells": [cell], "nbformat": 4}).encode()


def database(statements: list[tuple[str, tuple[object, ...]]]) -> bytes:
    base = sqlite3.connect(":memory:")
    for statement, values in statements:
        base.execute(statement, values)
    base.commit()
    data = base.serialize()
    base.close()
    return data


def mypy_database(_: str) -> bytes:
    """Large enough that a value goes on in other pages of the file."""
    names = {f"filler_{number}": {"type": "def ()"} for number in range(400)}
    tree = json.dumps({".class": "MypyFile", "names": {**names, "clamp": {"type": "def (x, low, high)"}}})
    return database([
        ("CREATE TABLE files2 (path TEXT UNIQUE NOT NULL, mtime REAL, data TEXT)", ()),
        ("INSERT INTO files2 VALUES (?, 1.0, ?)", ("tinymath/numbers.data.json", tree)),
    ])  # fmt: skip


def history_database(text: str) -> bytes:
    """In UTF-16, so that only its values, not the file's own bytes, can be read as text."""
    return database([
        ("PRAGMA encoding = 'UTF-16le'", ()),
        ("CREATE TABLE history (session INTEGER, source TEXT)", ()),
        ("INSERT INTO history VALUES (1, ?)", (text,)),
    ])  # fmt: skip


def cached_response(text: str) -> bytes:
    """The format of CacheControl: a mark, and the answer with its body as msgpack."""
    body = tarred(text)
    return b"cc=4,\x82\xa8response\x87\xa4body\xc5" + len(body).to_bytes(2, "big") + body + b"\xa7headers\x80"


# In the order of the list in the design; the name says what was left behind.
PLANTS: dict[str, tuple[str, Callable[[str], bytes], str]] = {
    "stale pyc": ("tinymath/__pycache__/numbers.cpython-311.pyc", compiled, "pyc"),
    "loose git object": (".git/objects/aa/bb", loose_object, "git"),
    "packed git object": (".git/objects/pack/pack-1.pack", packed, "git"),
    "build folder": ("build/lib/tinymath/numbers.py", str.encode, "copy"),
    "dist wheel": ("dist/tinymath-1.0-py3-none-any.whl", zipped, "wheel"),
    "dist sdist": ("dist/tinymath-1.0.tar.gz", tarred, "archive"),
    "egg": ("dist/tinymath-1.0-py3.11.egg", zipped, "wheel"),
    "zip": ("tinymath.zip", zipped, "archive"),
    "site-packages copy": (".venv/lib/python3.11/site-packages/tinymath/numbers.py", str.encode, "installed"),
    "egg-info": ("tinymath.egg-info/SOURCES.txt", lambda _: f"setup.py\n{PATH}\n".encode(), "metadata"),
    "pip cache of answers": (".cache/pip/http-v2/a/b/ab.body", zipped, "package-cache"),
    "older pip cache": (".cache/pip/http/a/b/ab", cached_response, "package-cache"),
    "pip cache of wheels": (".cache/pip/wheels/a/tinymath-1.0-py3-none-any.whl", zipped, "package-cache"),
    "uv cache": (".cache/uv/archive-v0/x/tinymath/numbers.py", str.encode, "package-cache"),
    "wheel in some cache": ("cache/ab12", zipped, "archive"),
    "mypy database": (".mypy_cache/3.11/cache.db", mypy_database, "type-checker-cache"),
    # ``0`` is the length before a name; it looks like a part of it.
    "mypy binary": (
        ".mypy_cache/3.11/tinymath/numbers.data.ff", lambda _: b"\2\0\x50\x000clamp\0", "type-checker-cache",
    ),
    "pytype stub": (
        ".pytype/pyi/tinymath/numbers.pyi", lambda _: b"def clamp(x, low, high): ...\n", "type-checker-cache",
    ),
    "pytype pickle": (
        ".pytype/pickled/numbers.pickled", lambda _: pickle.dumps({"functions": ["clamp"]}), "type-checker-cache",
    ),
    "pyre": (".pyre/tinymath.cache", lambda _: b"\0\1\5clamp\0", "type-checker-cache"),
    "pyright stub": (
        "typings/tinymath/numbers.pyi", lambda _: b"def clamp(x, low, high) -> float: ...\n", "type-checker-cache",
    ),
    "pytest cache": (".pytest_cache/v/cache/lastfailed", lambda _: json.dumps({HIDDEN: True}).encode(), "test-cache"),
    "compiled hidden test": (
        "tests/__pycache__/test_numbers.cpython-311-pytest-9.pyc",
        lambda _: compiled("def test_clamp_above():\n    pass\n", "/home/a/tests/test_numbers.py"), "pyc",
    ),
    "notebook with output": ("numbers.ipynb", notebook, "notebook"),
    "documentation": ("docs/api.md", lambda text: f"```python\n{text}\n```\n".encode(), "docs"),
    "database": ("tests/history.sqlite", history_database, "database"),
    "pickle of lines": ("tests/parso.pkl", lambda text: pickle.dumps(text.splitlines(keepends=True)), "pickle"),
}  # fmt: skip
NAMES_ONLY = ("type-checker-cache", "test-cache", "metadata")


@pytest.mark.parametrize("name", PLANTS)
def test_every_channel_is_found(name: str, store: TaskStore, task: Task, search: Any) -> None:
    path, make, channel = PLANTS[name]
    data = make(store.files(task, "golden")[PATH].decode())
    found = search().search_bytes(path, data, in_tree=True)
    assert {(leak.task_id, leak.channel, leak.path.partition("!")[0]) for leak in found} == {
        (task.task_id, channel, path)
    }


@pytest.mark.parametrize(
    "name",
    [name for name, plant in PLANTS.items() if plant[2] not in NAMES_ONLY and "hidden test" not in name],
)
def test_the_broken_code_left_behind_in_the_same_way_is_none(
    name: str, store: TaskStore, task: Task, search: Any
) -> None:
    path, make, _ = PLANTS[name]
    assert search().search_bytes(path, make(store.broken_text(task)), in_tree=True) == set()


def test_a_whole_tree_with_everything_planted_and_a_clean_one(
    store: TaskStore, task: Task, search: Any, tmp_path: Path
) -> None:
    clean = with_git(store.files(task, "rollout"))
    text = store.files(task, "golden")[PATH].decode()
    planted = {path: make(text) for path, make, _ in PLANTS.values()}
    assert len(planted) == len(PLANTS)
    for name, files in (("clean", clean), ("used", {**clean, **planted})):
        for path, data in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_bytes(data)
    searches = {name: search() for name in ("clean", "used")}
    found = {
        name: {leak.path.partition("!")[0] for leak in one.search_folder(str(root), tree=str(root))}
        for name, one in searches.items()
        for root in [tmp_path / name]
    }
    assert found == {"clean": set(), "used": set(planted)}
    assert searches["clean"].num_files == len(clean)
    assert searches["clean"].not_searched == searches["used"].not_searched == []


@pytest.mark.parametrize("name", [name for name, plant in PLANTS.items() if plant[2] == "package-cache"])
def test_a_package_cache_outside_the_tree_is_found(
    name: str, store: TaskStore, task: Task, search: Any, tmp_path: Path
) -> None:
    path, make, _ = PLANTS[name]
    for source, expected in (
        (store.files(task, "golden")[PATH].decode(), {"package-cache"}),
        ("x = 1\n", set()),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(make(source))
        found = search().search_folder(str(tmp_path), tree="/nowhere")
        assert {leak.channel for leak in found} == expected


def test_a_stub_beside_its_module_or_of_another_one_is_no_cache(search: Any) -> None:
    stub = b"def clamp(x, low, high) -> float: ...\n"
    for path in ("tinymath/numbers.pyi", "typings/other/numbers.pyi", "src/tinymath/numbers.pyi"):
        assert search().search_bytes(path, stub, in_tree=True) == set()
    other = b"def mean(values): ...\n"
    assert search().search_bytes("typings/tinymath/numbers.pyi", other, in_tree=True) == set()


def test_a_squashed_repository_is_found_by_its_objects(
    store: TaskStore, task: Task, search: Any, tmp_path: Path
) -> None:
    """Nothing but the reflog still names them."""

    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "gc.auto=0"]
        subprocess.run(["git", *who, "-C", str(tmp_path), *words], check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for text in (store.files(task, "golden")[PATH], store.broken_text(task).encode()):
        (tmp_path / "numbers.py").write_bytes(text)
        git("add", ".")
        git("commit", "-q", "-m", "x")
    git("update-ref", "-d", "HEAD")
    git("commit", "-q", "-a", "-m", "squashed")
    git("repack", "-adq")  # keeps what a reflog names
    found = search().search_folder(str(tmp_path), tree=str(tmp_path))
    assert {leak.channel for leak in found} == {"git"}
    git("reflog", "expire", "--expire=now", "--all")
    git("repack", "-adq")
    git("prune", "--expire=now")
    assert search().search_folder(str(tmp_path), tree=str(tmp_path)) == set()


@pytest.mark.parametrize("bait", [b"PK\x05\x06", b"\x80\x04.", b"cc=\x1f\x8b\x08", b"\x78\x01"])
def test_what_looks_like_an_archive_hides_nothing_else(
    bait: bytes, store: TaskStore, task: Task, search: Any
) -> None:
    """One reader that gives up must not end the others."""
    text = store.files(task, "golden")[PATH]
    data = bait + b"\n" + text.hex().encode() + b"\n" + bait
    assert {leak.channel for leak in search().search_bytes("tests/x", data, in_tree=True)} == {"hex"}


def test_a_database_that_is_broken_or_hostile(search: Any) -> None:
    whole = history_database("x = 1\n")
    problems = [form.problem for form in forms_of("x.db", whole[:5000]) if form.problem]
    assert len(problems) == 1
    assert "DatabaseError" in problems[0]
    view = database([("CREATE TABLE t (a TEXT)", ()), ("CREATE VIEW v AS SELECT load_extension('x')", ())])
    assert [form.problem for form in forms_of("x.db", view)] == [""]
    quoted = database([('CREATE TABLE "a""b" (a TEXT)', ()), ('INSERT INTO "a""b" VALUES (?)', ("kept",))])
    assert b"kept" in {form.data for form in forms_of("x.db", quoted) if form.kind == "database"}


def test_a_cut_off_gzip_is_counted(search: Any) -> None:
    one = search()
    assert one.search_bytes("a", gzip.compress(b"x" * 9000)[:-12], in_tree=True) == set()
    assert len(one.not_searched) == 1
