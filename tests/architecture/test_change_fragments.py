"""What a user notices of a change is a fragment in ``changes/``, which a release moves into the change log."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SENTENCE = "A report says what the time went into.\n"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_file_location("collect_changes", ROOT / "scripts/collect_changes.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_fragment_is_well_formed(script: Any) -> None:
    problems = {path.name: script.problem_of(path) for path in script.fragments(ROOT / "changes")}
    assert {name: problem for name, problem in problems.items() if problem} == {}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("report-time.md", SENTENCE, ""),
        ("Report_time.md", SENTENCE, "its name"),
        ("report-time.txt", SENTENCE, "its name"),
        ("empty.md", "\n", "one line"),
        ("two-lines.md", SENTENCE * 2, "one line"),
        ("no-end.md", SENTENCE.strip(), "one line"),
        ("a-list.md", f"- {SENTENCE}", "sentence"),
        ("no-stop.md", "A report\n", "sentence"),
        ("a-novel.md", f"{'long ' * 200}.\n", "characters"),
    ],
)
def test_a_fragment_that_is_not_is_told_why(
    tmp_path: Path, script: Any, name: str, text: str, problem: str
) -> None:
    (tmp_path / name).write_text(text)
    said = script.problem_of(tmp_path / name)
    assert problem in said
    assert bool(said) == bool(problem)


def test_fragments_come_under_the_newest_version(tmp_path: Path, script: Any) -> None:
    (tmp_path / "README.md").write_text("what this is")
    for name in ("b", "a"):
        (tmp_path / f"{name}.md").write_text(f"{name.upper()} is new.\n")
    log = "# Changes\n\nNewest first.\n\n## 0.2.0\n\n- Old.\n\n## 0.1.0\n\n- Older.\n"
    text = script.collected(log, script.fragments(tmp_path))
    assert text == log.replace("- Old.", "- A is new.\n- B is new.\n- Old.")
