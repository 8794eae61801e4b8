"""Several replicas of one recipe through the real command line, over an object store in a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.main import main
from composer_replication.cli.replicas_verb import _together
from composer_replication.run_folder import RunFolder, read_jsonl

from .launcher import SETTINGS, Launcher

pytestmark = [pytest.mark.long, pytest.mark.promise, pytest.mark.timeout(3600)]

STEPS = {"trl.max_steps": 4, "trainer.checkpoint_every": 2}


def train(
    capsys: pytest.CaptureFixture[str], recipe: Path, out: Path, *words: str, **more: Any
) -> tuple[int, dict[str, Any]]:
    settings = SETTINGS | STEPS | {key.replace("__", "."): json.dumps(value) for key, value in more.items()}
    flags = [f"--set={key}={value}" for key, value in settings.items()]
    code = main(["train", str(recipe), "--out", str(out), *flags, *words, "--json", "--quiet"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def out(tiny_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Launched on this machine; a second launch of the same run finds it done."""
    folder = tmp_path_factory.mktemp("replicas")
    launcher = Launcher(folder, "local", recipe=tiny_recipe)
    store = {"replicas.transport": f"file://{folder}/runs/pair/store", "replicas.sync_every": 2}
    store["curriculum"] = "{}"
    for _ in range(2):
        launcher.launch("pair", "--replicas", 2, **STEPS, **store)
        assert launcher.ended("pair", 0)["state"] == "succeeded"
        (folder / "jobs" / "pair" / "job.json").unlink()
        (folder / "jobs" / "pair" / "exit_code").unlink()
    return folder / "runs" / "pair"


def test_what_they_did_together_is_told(out: Path, tmp_path: Path) -> None:
    rows = [read_jsonl(out / f"replica-{n}" / "outer_steps.jsonl") for n in range(2)]
    sent = sum(n for own in rows for name, n in own[-1]["bytes"].items() if name.startswith("sent/"))
    folders = [RunFolder(out / f"replica-{n}") for n in range(2)]
    assert _together(folders) == {"outer_steps": 2, "fragments_equal": True, "bytes_sent": sent}
    assert sent > 0
    (tmp_path / "outer_steps.jsonl").write_text(
        (out / "replica-1" / "outer_steps.jsonl").read_text().replace(rows[1][0]["outer_sha256"], "0" * 64)
    )
    assert not _together([folders[0], RunFolder(tmp_path)])["fragments_equal"]


def test_two_replicas_end_with_the_same_weights(out: Path) -> None:
    runs = [out / f"replica-{n}" for n in range(2)]
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert len({one["parameter_sha256"] for one in summaries}) == 1
    assert [read_jsonl(run / "outer_steps.jsonl")[-1]["outer_step"] for run in runs] == [2, 2]
    assert [len(read_jsonl(run / "metrics.jsonl")) for run in runs] == [4, 4]
    tasks = [set(json.loads((run / "environment.json").read_text())["train_tasks"]) for run in runs]
    assert all(tasks)
    assert not tasks[0] & tasks[1]


def test_the_report_joins_them(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(out), "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert [(row["outer_step"], row["present"], row["agreed"]) for row in table["outer_steps"]] == [
        (1, [0, 1], "equal"),
        (2, [0, 1], "equal"),
    ]
    assert all(row["sent"] > 0 and row["received"] > 0 for row in table["replicas"])
    tasks = [json.loads((out / f"replica-{n}" / "environment.json").read_text()) for n in range(2)]
    assert sum(table["curriculum"].values()) == sum(len(one["train_tasks"]) for one in tasks)
    page = (out / "report.html").read_text()
    assert f"{table['curriculum']['active']} active" in page
    assert "After 2 of 2 outer steps" in page
    assert (out / "replica-1" / "report.html").is_file()


def test_another_recipe_is_refused_before_the_first_step(
    out: Path, tiny_recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    where = {
        "replicas__transport": f"file://{out}/store",
        "replicas__sync_every": 2,
        "curriculum": {},
        "trl__learning_rate": 0.5,
    }
    code, result = train(capsys, tiny_recipe, tmp_path / "other", "--replica", "1", "--of", "2", **where)
    assert (code, result["error"]["code"]) == (2, "CR1103")
    assert "recipe" in result["error"]["message"]
    assert not (tmp_path / "other" / "metrics.jsonl").exists()


def test_one_replica_is_the_plain_run_bit_for_bit(
    tiny_recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, plain = train(capsys, tiny_recipe, tmp_path / "plain", trl__max_steps=2)
    assert code == 0
    transport = {"replicas__transport": "s3://never-asked/x", "trl__max_steps": 2}
    code, alone = train(capsys, tiny_recipe, tmp_path / "alone", "--replica", "0", "--of", "1", **transport)
    assert code == 0
    assert alone["parameter_sha256"] == plain["parameter_sha256"]
    assert not (tmp_path / "alone" / "outer_steps.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "more", "code", "says"),
    [
        ("--replica 0", {}, "CR0206", "needs a [replicas] table"),
        ("--replica 2 --of 2", {"transport": "file:///x"}, "CR0206", "no replica 2 of 2"),
        ("--replica 0 --of 2", {"transport": "ftp://x/y"}, "CR1101", "none of s3"),
        ("--replica 0", {"transport": "torchft://h:1", "delay": 100}, "CR0204", "delay is not below"),
        ("--replica 0 --of 2", {"transport": "torchft://127.0.0.1:9"}, "CR1101", "token is missing"),
        ("--replica 0 --of 2", {"transport": "torchft://127.0.0.1:9", "token": "a"}, "CR1101", "the lighthouse"),
    ],
)  # fmt: skip
def test_refusals_leave_nothing_behind(
    tiny_recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    words: str, more: dict[str, Any], code: str, says: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("COMPOSER_REPLICAS_TOKEN", raising=False)
    if "token" in more:
        monkeypatch.setenv("COMPOSER_REPLICAS_TOKEN", more["token"])
    given = {f"replicas__{key}": value for key, value in more.items() if key != "token"}
    exit_code, result = train(capsys, tiny_recipe, tmp_path / "run", *words.split(), **given)
    assert exit_code in {2, 3}
    assert result["error"]["code"] == code
    assert says in result["error"]["message"]
    assert not (tmp_path / "run").exists()
