from __future__ import annotations

import json

import pytest

from composer_replication.cli import doctor_verb
from composer_replication.cli.main import main


@pytest.mark.parametrize("given", ["CR0204", "cr0204", " CR0204 "])
def test_a_code_is_explained(capsys: pytest.CaptureFixture[str], given: str) -> None:
    assert main(["explain", given, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["code", "meaning", "causes", "fixes"]
    assert result["code"] == "CR0204"
    assert result == {"code": "CR0204", **doctor_verb.load_explanations()["CR0204"]}


def test_a_person_reads_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "CR0231"]) == 0
    out = capsys.readouterr().out
    entry = doctor_verb.load_explanations()["CR0231"]
    assert out.startswith(f"CR0231: {entry['meaning']}\n")
    for text in [*entry["causes"], *entry["fixes"]]:
        assert f"  - {text}\n" in out


@pytest.mark.parametrize(
    ("given", "nearest"), [("CR0200", "CR0201"), ("CR0215", "CR0211"), ("0206x", "CR0206"), ("x", "CR0100")]
)
def test_an_unknown_code_names_the_nearest(
    capsys: pytest.CaptureFixture[str], given: str, nearest: str
) -> None:
    assert main(["explain", given]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"CR0206: there is no error code {given!r}.")
    assert f"composer-rl explain {nearest}" in err
