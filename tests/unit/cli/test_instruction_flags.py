"""``tasks build --instructions-from``: asked after the build, counted in its answer, refused before it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from policy_server import PolicyServer, says

from composer_replication.cli import tasks_verb
from composer_replication.cli.main import build_parser
from composer_replication.cli.tasks_verb import have_written
from composer_replication.errors import UsageError
from composer_replication.model_endpoint import open_endpoint
from composer_replication.tasks.instructions import written_instruction
from composer_replication.tasks.store import TaskStore

TINY = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
PINS = ("tinymath/numbers.py::clamp", "tinymath/text.py::initials")
TEXT = (
    "The function `clamp` is missing: it answers the number of an interval that lies nearest to the one that it takes, "
    "which is that number itself when the interval holds it."
)


def parse(*words: str) -> argparse.Namespace:
    return build_parser("tasks").parse_args(
        ["tasks", "build", str(TINY), "--quiet", "--visible-only", *words]
    )


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)

    with PolicyServer.running(lambda _: says(TEXT)) as server:
        yield f"{server.url}/v1"


def test_a_build_with_written_texts(build_tiny: Callable[..., Path], tmp_path: Path, url: str) -> None:
    build_tiny(tmp_path / "tasks", PINS)  # what is asked after a build is asked after one that goes on, too
    asked = ["--out", str(tmp_path / "tasks"), *(f"--symbol={pin}" for pin in PINS)]
    asked += ["--instructions-from", url, "--instructions-model", "writer"]
    result, code = tasks_verb.run_build(parse(*asked))
    # The text speaks of clamp only; for initials it is refused.
    assert (code, result["instructions"]) == (0, {"without-symbol": 1, "written": 1})
    store = TaskStore.open(tmp_path / "tasks")
    store.verify()
    assert (result["fingerprint"], result["bytes"]) == (store.fingerprint, store.num_bytes())
    texts = {store.get(name).symbol: written_instruction(store, name) for name in store.task_ids()}
    assert texts["initials"] is None
    assert texts["clamp"] is not None
    assert texts["clamp"].text == TEXT + "\n"


def test_texts_are_asked_for_once(sized_store: TaskStore, url: str) -> None:
    fingerprint = sized_store.fingerprint
    changed = have_written(sized_store.root, open_endpoint(url, "writer"), None)
    store = TaskStore.open(sized_store.root)
    store.verify()
    assert changed["fingerprint"] == store.fingerprint != fingerprint
    assert changed["instructions"]["written"] > 0
    again = have_written(sized_store.root, open_endpoint(url, "writer"), None)
    assert again["fingerprint"] == store.fingerprint
    assert again["instructions"]["kept"] == changed["instructions"]["written"]


GIVEN = ("--instructions-from", "http://h", "--instructions-model", "m")


@pytest.mark.parametrize(
    "flags",
    [
        ("--instructions-from", "nowhere", "--instructions-model", "m"),
        ("--instructions-from", "http://h"),
        ("--instructions-model", "m"),
        ("--instructions-key-env", "K"),
        (*GIVEN, "--instructions-key-env", "NO_SUCH_VARIABLE"),
    ],
)
def test_flags_are_checked_before_anything_is_built(
    tmp_path: Path, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    with pytest.raises(UsageError, match="CR0206"):
        tasks_verb.run_build(parse("--out", str(tmp_path / "x"), *flags))
    assert not (tmp_path / "x").exists()
