"""Whoever passes tasks on is told of licences that are not permissive or unknown, whatever the format; of others nothing is said."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from composer_replication.cli.main import main
from composer_replication.cli.show_command import render_build
from composer_replication.tasks.intake.licences import Licence, read_licence
from composer_replication.tasks.store import TaskStore

GPL = read_licence({}, {"pyproject.toml": b'[project]\nlicense = "GPL-3.0-only"\n'})
UNKNOWN = read_licence({"LICENSE": b"Ask me first.\n"})
UNSOLD = read_licence({}, {"pyproject.toml": b'[project]\nlicense = "CC-BY-NC-4.0"\n'})
MIT = read_licence({}, {"pyproject.toml": b'[project]\nlicense = "MIT"\n'})
LINE = "  look at the licence before you pass these tasks on: tinymath==1.0: "
WAYS = [
    [],
    ["--golden"],
    ["--format", "swebench"],
    ["--format", "swebench", "--golden"],
    ["--format", "parquet"],
    ["--format", "parquet", "--golden"],
]


def under(store: TaskStore, licence: Licence) -> None:
    """The licence of the tasks' repository; another one without tasks is under the GPL."""
    record = store.repository("tinymath-1.0")
    store.put_repository("tinymath-1.0", replace(record, licence=licence))
    store.put_repository("other-1.0", replace(record, repository="other==1.0", licence=GPL))


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@pytest.mark.parametrize(
    ("licence", "reason"),
    [
        (GPL, "GPL-3.0-only, not among the permissive licences"),
        (UNSOLD, "CC-BY-NC-4.0, not among the permissive licences"),
        (UNKNOWN, "look at LICENSE"),
        (Licence(None, "", "", None), "licence not known"),
        (MIT, ""),
    ],
    ids=["copyleft", "non-commercial", "unknown", "nothing", "permissive"],
)
def test_every_export_tells(
    sized_store: TaskStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    way: list[str],
    licence: Licence,
    reason: str,
) -> None:
    under(sized_store, licence)
    task = [] if "--format" in way else ["t-class-body"]
    words = ["tasks", "export", str(sized_store.root), *task, *way]
    wanted = {"tinymath==1.0": reason} if reason else {}
    for number, flags in enumerate((["--json"], ["--quiet"])):
        assert main([*words, "--out", str(tmp_path / f"out-{number}"), *flags]) == 0
        out, err = capsys.readouterr()
        said = f"{LINE}{reason}\n" if reason else ""
        assert err == said or (
            flags == ["--json"] and err.endswith(f"]\n{said}") and err.count(LINE) == bool(said)
        )
        assert LINE not in out
        if flags == ["--json"]:
            assert json.loads(out)["restricted_licences"] == wanted


def test_it_is_the_line_of_the_build(
    sized_store: TaskStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    under(sized_store, GPL)
    main(["tasks", "export", str(sized_store.root), "t-class-body", "--out", str(tmp_path / "out"), "--json"])
    out, err = capsys.readouterr()
    built = {
        "tasks": 1, "candidates": 1, "seconds": 1.0, "rejected": {}, "unusable": {}, "flaky": {}, "unrecorded": {},
        "fingerprint": "f", "restricted_licences": json.loads(out)["restricted_licences"],
    }  # fmt: skip
    assert err.removesuffix("\n") in render_build(built).splitlines()
