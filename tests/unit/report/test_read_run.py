"""Reading a run folder: whole, partial, and not one at all."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import InputError
from composer_replication.report import read_run, write_report
from composer_replication.run_folder import append_jsonl


def replace_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_whole_run_is_read(make_run: Any) -> None:
    run = read_run(make_run(num_steps=12))
    assert list(run.metrics) == list(range(1, 13))
    assert len(run.guard_updates) == 12
    assert {row["step"] for row in run.rollouts} == {8, 9, 10, 11, 12}
    assert run.halt is None
    assert run.guard_settings is not None
    assert run.guard_settings["decline_patience"] == 3
    with pytest.raises(FrozenInstanceError):
        run.root = Path()  # type: ignore[misc]


def test_a_verdict_stands_at_the_step_whose_reward_it_judged(make_run: Any) -> None:
    """Its ``round_idx`` is one less: the age of the weights."""
    assert [update.step for update in read_run(make_run(num_steps=4)).guard_updates] == [1, 2, 3, 4]


def test_a_verdict_without_its_line_keeps_the_known_distance(make_run: Any) -> None:
    root = make_run(num_steps=4)
    rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    replace_lines(root / "metrics.jsonl", rows[:3])
    assert [update.step for update in read_run(root).guard_updates] == [1, 2, 3, 4]


def test_the_latched_prefix_is_not_part_of_the_reason(make_run: Any) -> None:
    root = make_run(num_steps=3)
    line = {"round_idx": 1, "fire": True, "reason": "latched: the gap"}
    replace_lines(root / "verdicts.jsonl", [line])
    halt = read_run(root).halt
    assert halt is not None
    assert halt.reason == "the gap"


def test_null_nan_and_absent_are_told_apart_from_numbers(make_run: Any) -> None:
    root = make_run(num_steps=3)
    (root / "metrics.jsonl").write_text(
        '{"step": 1, "reward": NaN, "loss": Infinity}\n{"step": 2, "reward": null}\n{"step": 3, "loss": 0.5, "halted": true}\n'
    )
    run = read_run(root)
    assert run.column("reward") == [(1, None), (2, None)]
    assert run.column("loss") == [(1, None), (3, 0.5)]


def test_a_torn_last_line_is_left_out(make_run: Any) -> None:
    root = make_run(num_steps=3)
    with (root / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 4, "rew')
    assert list(read_run(root).metrics) == [1, 2, 3]


def test_rollouts_carry_nothing_but_the_named_fields(make_run: Any) -> None:
    root = make_run(num_steps=1)
    row = {"task_id": "t", "step": 1, "text": "x", "reward": 1.0, "outcomes": {"n": "passed"}}
    replace_lines(
        root / "rollouts" / "step-000001.jsonl",
        [{**row, "golden": "SECRET", "hidden_outcomes": {"SECRET": "x"}}],
    )
    assert "SECRET" not in repr(read_run(root))


def test_pass_rates_of_an_interrupted_run_are_found(make_run: Any) -> None:
    root = make_run(num_steps=2)
    summary = json.loads((root / "summary.json").read_text())
    (root / "before.json").write_text(json.dumps({"schema_version": 1, **summary["before"]}))
    (root / "summary.json").unlink()
    run = read_run(root)
    assert run.before is not None
    assert run.before["train"]["visible_pass"] == 0.22
    assert run.after is None


@pytest.mark.parametrize("kind", ["absent", "empty", "file"])
def test_what_is_no_run_folder_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    if kind == "empty":
        path.mkdir()
    elif kind == "file":
        path.write_text("metrics.jsonl")
    with pytest.raises(InputError, match="not a run folder") as caught:
        read_run(path)
    assert (caught.value.code, caught.value.exit_code) == ("CR0630", 4)
    assert caught.value.fix


@pytest.mark.parametrize("text", [None, "", '{"step": 1'])
def test_a_run_without_metrics_is_refused(make_run: Any, text: str | None) -> None:
    metrics = make_run(num_steps=1) / "metrics.jsonl"
    metrics.unlink()
    if text is not None:
        metrics.write_text(text)
    with pytest.raises(InputError, match="no metrics") as caught:
        read_run(metrics.parent)
    assert caught.value.code == "CR0630"


@pytest.mark.parametrize(
    ("file", "data", "code"),
    [
        ("metrics.jsonl", b'[1]\n{"step": 1}\n', "CR0630"),
        ("metrics.jsonl", b'{"reward": 1}\n', "CR0630"),
        ("metrics.jsonl", b'{"step": 1.5}\n', "CR0630"),
        ("metrics.jsonl", b'{"step": true}\n', "CR0630"),
        ("metrics.jsonl", b"\xff\xfe{}\n", "CR0630"),
        ("metrics.jsonl", b'{"step": 1\n{"step": 2}\n', "CR0401"),
        ("verdicts.jsonl", b'{"fire": true}\n', "CR0630"),
        ("run.toml", b"[guard\n", "CR0630"),
        ("run.toml", b"name = '\xff'\n", "CR0630"),
        ("rollouts/step-000002.jsonl", b"3\n4\n", "CR0630"),
        ("summary.json", b"{", "CR0401"),
        ("environment.json", b'{"schema_version": 99}', "CR0401"),
    ],
)
def test_a_damaged_file_is_named(make_run: Any, file: str, data: bytes, code: str) -> None:
    root = make_run(num_steps=2)
    (root / file).write_bytes(data)
    with pytest.raises(InputError) as caught:
        read_run(root)
    assert caught.value.code == code
    assert Path(file).name in caught.value.where


def test_the_last_steps_are_read_of_every_process(make_run: Any) -> None:
    root = make_run(num_steps=7)
    for file in list((root / "rollouts").iterdir()):
        file.with_name(f"{file.stem}-rank1.jsonl").write_text(file.read_text())
    run = read_run(root)
    assert {row["step"] for row in run.rollouts} == {3, 4, 5, 6, 7}
    assert (len(run.rollouts), run.num_ungraded) == (2 * 5 * 4, 2 * 5)


ROW: dict[str, Any] = {
    "step": 3,
    "code": "CR0765",
    "name": "token_drift",
    "level": "warning",
    "sentence": "they part at <script>x</script>.",
    "fix": "compare temperatures.",
    "figures": {"mean": 0.25, "max": None},
}


def test_the_page_shows_findings_escaped_and_counts_the_rest(make_run: Any) -> None:
    root = make_run(num_steps=4)
    assert read_run(root).findings == ()
    assert "What the checks said" not in write_report(root).read_text()
    append_jsonl(root / "checks.jsonl", {"step": 1})
    for step in range(51):
        append_jsonl(root / "checks.jsonl", {**ROW, "step": step})
    page = write_report(root).read_text()
    assert "What the checks said" in page
    assert "they part at &lt;script&gt;x&lt;/script&gt;." in page
    assert "And 2 more in checks.jsonl." in page
