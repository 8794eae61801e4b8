"""``tasks export`` and ``tasks import``: arguments, JSON keys, files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from composer_replication.cli.main import build_parser, main, rendered
from composer_replication.errors import InputError, NothingToDoError, UsageError
from composer_replication.tasks.intake.licences import Licence, read_licence
from composer_replication.tasks.store import TaskStore

TINY = Path(__file__).parents[3] / "recipes" / "tiny-cpu" / "project"
PIN = "tinymath/numbers.py::clamp"


def call(*words: str) -> tuple[dict[str, Any], int, str]:
    args = build_parser("tasks").parse_args(["tasks", *words])
    result, code = resolve_name(args.run)(args)
    json.dumps(result, allow_nan=False)
    return result, code, rendered(args.run, result)


@pytest.fixture(scope="module")
def folder(build_tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = build_tiny(tmp_path_factory.mktemp("sets") / "tasks", [PIN])  # the command goes on with it
    call("build", str(TINY), "--out", str(out), "--quiet", "--visible-only", f"--symbol={PIN}")
    return out


def test_rows_hold_no_secret_without_golden(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, golden in (("public", []), ("secret", ["--golden"])):
        lines = tmp_path / f"{name}.jsonl"
        result, code, text = call("export", str(folder), "--format", "swebench", "--out", str(lines), *golden)
        assert (code, result) == (
            0,
            {
                "tasks": 1, "out": str(lines), "bytes": lines.stat().st_size,
                "restricted_licences": {"tinymath==1.0": "no licence file"},
            },
        )  # fmt: skip
        assert {"1", str(lines), str(lines.stat().st_size)} <= set(text.split())
        assert "1/1" in capsys.readouterr().err  # a set of hundreds takes a minute: there is a bar
        rows[name] = [json.loads(line) for line in lines.read_text().splitlines()]
    assert "patch" not in rows["public"][0]
    assert "return min(x, high)" in rows["secret"][0]["patch"]
    assert "return min(x, high)" not in json.dumps(rows["public"])


def test_folders_of_harbor(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "harbor"
    result, code, _ = call("export", str(folder), "--format", "harbor", "--out", str(out))
    assert (code, result["tasks"], result["out"]) == (0, 1, str(out))
    assert result["restricted_licences"] == {"tinymath==1.0": "no licence file"}
    assert [path.name for path in out.iterdir()] == TaskStore.open(folder).task_ids()
    with pytest.raises(UsageError, match="CR0231"):
        call("export", str(folder), "--format", "harbor", "--out", str(out))


@pytest.mark.long
def test_a_round_trip_through_the_command_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "set.jsonl"
    call("export", str(folder), "--format", "swebench", "--golden", "--out", str(path))
    (task,) = TaskStore.open(folder).tasks()
    row = json.loads(path.read_text())
    with path.open("a") as handle:
        handle.write(json.dumps({**row, "instance_id": "nowhere", "repo": "nothing"}) + "\n")
    base = tmp_path / "bases" / f"tinymath-{row['base_commit']}"
    call("export", str(folder), task.task_id, "--out", str(base))
    out = tmp_path / "imported"
    result, code, text = call(
        "import", str(path), "--format", "swebench", "--out", str(out), "--repositories", str(base.parent)
    )
    assert code == 0
    assert (result["tasks"], result["candidates"], result["rejected"]) == (1, 2, {"no-repository": 1})
    built = json.loads((folder / "summary.json").read_text())
    assert set(result) - {"refused_rows"} | {"schema_version"} == set(built)
    assert " ".join(text.split()).startswith("tasks 1 candidates 2 ")
    assert "no-repository: there is no repository for nothing" in result["refused_rows"]["nowhere"]
    assert TaskStore.open(out).tasks()[0].fail_to_pass == task.fail_to_pass


def test_no_usable_row_is_nothing_to_do(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    call("export", str(folder), "--format", "swebench", "--golden", "--out", str(path))
    with pytest.raises(NothingToDoError, match="CR0418") as caught:
        call("import", str(path), "--format", "swebench", "--out", str(tmp_path / "out"))
    assert "no-repository 1" in caught.value.message


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    (task_id,) = TaskStore.open(folder).task_ids()
    taken = tmp_path / "taken"
    taken.write_text("precious")
    for words, code in (
        (("export", str(folder), "--out", str(tmp_path / "x")), "CR0206"),
        (("export", str(folder), task_id, "--format", "swebench", "--out", str(tmp_path / "x")), "CR0206"),
        (("export", str(folder), task_id, "--format", "harbor", "--out", str(tmp_path / "x")), "CR0206"),
        (("export", str(folder), "--format", "swebench", "--out", str(taken)), "CR0231"),
        (("export", str(folder), "--format", "harbor", "--out", str(taken)), "CR0231"),
        (("export", str(folder), "--format", "swebench", "--out", str(taken / "x")), "CR0209"),
        (("import", str(taken), "--format", "swebench", "--out", str(taken / "x")), "CR0209"),
    ):
        with pytest.raises(UsageError, match=code):
            call(*words)
    with pytest.raises(InputError, match="CR0460"):
        call("import", str(taken), "--format", "swebench", "--out", str(tmp_path / "y"))
    with pytest.raises(UsageError, match="CR0206"):
        call("export", str(folder), "--format", "other", "--out", str(tmp_path / "y"))
    with pytest.raises(UsageError, match="CR0206"):
        call("import", str(taken), "--format", "other", "--out", str(tmp_path / "y"))
    assert taken.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken"]


# ---- whoever passes tasks on is told of licences that are not permissive or unknown, whatever the format; of others nothing is said


GPL = read_licence({}, {"pyproject.toml": b'[project]\nlicense = "GPL-3.0-only"\n'})
UNKNOWN = read_licence({"LICENSE": b"Ask me first.\n"})
MIT = read_licence({}, {"pyproject.toml": b'[project]\nlicense = "MIT"\n'})
WAYS = [["--golden"], ["--format", "swebench"]]


def under(store: TaskStore, licence: Licence) -> None:
    """The licence of the tasks' repository; another one without tasks is under the GPL."""
    record = store.repository("tinymath-1.0")
    store.put_repository("tinymath-1.0", replace(record, licence=licence))
    store.put_repository("other-1.0", replace(record, repository="other==1.0", licence=GPL))


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
@pytest.mark.parametrize(
    ("licence", "reason"),
    [(GPL, "GPL-3.0-only, not among the permissive licences"), (UNKNOWN, "look at LICENSE"), (MIT, "")],
    ids=["copyleft", "unknown", "permissive"],
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
    assert main([*words, "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["restricted_licences"] == wanted
    assert main([*words, "--out", str(tmp_path / "again"), "--quiet"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("restricted licences")]
    assert told == ([f"restricted licences tinymath==1.0 {reason}"] if reason else [])
