"""Every code in the source is explained, and every explanation belongs to a code that is raised."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from pathlib import Path
from typing import cast

import pytest

from composer_replication.cli import doctor_verb
from composer_replication.config import RunConfig, parse_config
from composer_replication.errors import UsageError

SOURCE = Path(doctor_verb.__file__).resolve().parents[1]
CODE = re.compile(r"CR\d{4}")
KEY = re.compile(rf"(?<![\w./-])(?:{'|'.join(RunConfig.model_fields)})(?:\.[a-z_]\w*)+\b(?![(\w])")


def mentioned_codes(root: Path) -> set[str]:
    """Every code in any source file, docstrings and comments included."""
    return {code for path in root.rglob("*.py") for code in CODE.findall(path.read_text())}


@functools.cache
def codes_and_keys(root: Path) -> tuple[set[str], set[str]]:
    """What stands in the code below a folder.

    Codes that are a string of their own, which is how they are handed to an error; keys of a recipe in the texts
    that say where an error is and how to mend it.
    """
    codes, texts = set(), []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str(value)) if CODE.fullmatch(value):
                    codes.add(value)
                case ast.Call(keywords=keywords):
                    texts += [keyword.value for keyword in keywords if keyword.arg in {"where", "fix"}]
                case ast.Assign(targets=[ast.Name(id="fix"), *_], value=value):
                    texts.append(value)
    words = [node.value for text in texts for node in ast.walk(text) if isinstance(node, ast.Constant)]
    return codes, {key for word in words if isinstance(word, str) for key in KEY.findall(word)}


def is_key(dotted: str) -> bool:
    """Whether a recipe takes it; one with this key alone is refused in any case."""
    table: object = None
    for part in reversed(dotted.split(".")):
        table = {part: table}
    with pytest.raises(UsageError) as caught:
        parse_config(cast("dict[str, object]", table), where="run.toml")
    return "unknown key" not in caught.value.message


def test_errors_name_keys_that_there_are() -> None:
    _, found = codes_and_keys(SOURCE)
    assert "heldout.sample_size" in found
    assert sorted(key for key in found if not is_key(key)) == []


def test_every_code_is_explained() -> None:
    assert sorted(mentioned_codes(SOURCE) - set(doctor_verb.load_explanations())) == []


def test_every_explanation_is_raised_somewhere() -> None:
    assert sorted(set(doctor_verb.load_explanations()) - codes_and_keys(SOURCE)[0]) == []


def test_every_entry_is_whole() -> None:
    for code, entry in doctor_verb.load_explanations().items():
        assert CODE.fullmatch(code)
        assert set(entry) == {"meaning", "causes", "fixes"}, code
        assert entry["meaning"].endswith("."), code
        for key in ("causes", "fixes"):
            assert entry[key], code
            assert all(isinstance(text, str) and text.strip() for text in entry[key]), code


def test_the_search_finds_what_it_should(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(
        '"""See CR9901."""\nraise E("CR9902", f"not CR9903 {1}")  # CR9904\n'
    )
    assert mentioned_codes(tmp_path) == {"CR9901", "CR9902", "CR9903", "CR9904"}
    assert codes_and_keys(tmp_path)[0] == {"CR9902"}


def test_codes_and_keys_stay_few() -> None:
    page = (SOURCE.parents[1] / "docs" / "recipe-keys.md").read_text().splitlines()
    assert len(doctor_verb.load_explanations()) <= 90
    assert 0 < sum(line.startswith("| `") for line in page) <= 77


def test_no_code_is_explained_twice() -> None:
    """Within one file TOML itself refuses it."""
    files = (SOURCE / "cli" / "explanations").glob("*.toml")
    assert sum(len(tomllib.loads(file.read_text())) for file in files) == len(doctor_verb.load_explanations())
