from __future__ import annotations

import stat
import sys
import tempfile
from pathlib import Path

import pytest

from composer_replication.cli.machine_troubles import STRUCK_OUT, redact, write_crash_bundle


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def bundle_of(*argv: str, message: str = "broken") -> Path:
    path = write_crash_bundle(ValueError(message), argv)
    assert path is not None
    return path


def test_versions_arguments_and_traceback_are_there(own_folder: Path) -> None:
    try:
        {}["missing key"]  # type: ignore[index]
    except KeyError as error:
        path = write_crash_bundle(error, ["train", "run.toml"])
    assert path is not None
    text = path.read_text()
    assert path.parent == own_folder
    assert f"python {sys.version.split()[0]}" in text
    assert "composer-replication 0." in text
    assert "arguments train run.toml" in text
    assert "test_crash_bundle.py" in text
    assert "KeyError: 'missing key'" in text


def test_only_its_owner_may_read_it() -> None:
    assert stat.S_IMODE(bundle_of().stat().st_mode) == 0o600


def test_no_environment_variable_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSER_TEST_PLACE", "a-value-that-must-not-be-seen")
    assert "a-value-that-must-not-be-seen" not in bundle_of("doctor").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "--api-key SECRETWORD",
        "--set trl.hub_token=SECRETWORD",
        "{'password': 'SECRETWORD'}",
        'client_secret: "SECRETWORD"',
        "https://name:SECRETWORD@host/path",
        "the value was hf_SECRETWORD1234",
        "sk-SECRETWORD1234",
        "ghs_SECRETWORD1234",
    ],
)
def test_what_looks_like_a_secret_is_struck_out(text: str) -> None:
    for found in (redact(text), bundle_of(*text.split(), message=text).read_text()):
        assert "SECRETWORD" not in found
        assert STRUCK_OUT in found


def test_the_value_of_a_secret_variable_is_struck_out_wherever_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "plainword42")
    monkeypatch.setenv("OTHER_TOKEN", "a")
    assert redact("a value plainword42 here") == f"a value {STRUCK_OUT} here"


def test_ordinary_text_stays() -> None:
    text = "ValueError: max_completion_length=64 in run.toml:3, see https://example.org/page"
    assert redact(text) == text


def test_where_nothing_can_be_written_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert write_crash_bundle(ValueError("x"), []) is None


def test_two_crashes_are_two_files() -> None:
    assert bundle_of() != bundle_of()
