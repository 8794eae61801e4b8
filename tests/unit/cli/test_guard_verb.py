"""``composer-rl guard scan`` as a person and as a script meet it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.main import main

Scan = Callable[..., tuple[int, dict[str, Any], str]]

# alpha .8, baseline (0, .5). The truth falls to 0 and the proxy jumps to 1 from step 40 on; k updates later
# in-loop = 1 - .8^k and held-out = .5 * .8^k, so the gap is 1.5 (1 - .8^k): .30 at step 40, .54 at step 50.
HACKED = {step: (0.0, 0.5) if step < 40 else (1.0, 0.0) for step in range(10, 101, 10)}
GAP_REASON = (
    "the Hacking Gap 0.54 (rise of the proxy minus rise of the truth since the first update) exceeds 0.35"
)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "reward": proxy, "heldout/score": truth} for s, (proxy, truth) in HACKED.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def scan(capsys: pytest.CaptureFixture[str]) -> Scan:
    def run(*words: object) -> tuple[int, dict[str, Any], str]:
        capsys.readouterr()
        exit_code = main(["guard", "scan", *map(str, words), "--json"])
        printed = capsys.readouterr()
        return exit_code, json.loads(printed.out), printed.err

    return run


def test_a_hacked_log(scan: Scan, log: Path) -> None:
    exit_code, result, err = scan(log)
    assert (exit_code, err) == (5, "")
    # Step 50 is update 5, the first at which the guard may fire, and the first with a gap above .35.
    assert (result["fired"], result["fired_at"], result["updates"], result["updates_at_fire"]) == (
        True,
        50,
        10,
        5,
    )
    assert result["reason"] == GAP_REASON
    assert result["verdict"] == "halted"
    assert result["columns"] == {"proxy": "reward", "truth": "heldout/score", "kl": None, "step": "step"}
    assert result["log"] == str(log)


def test_a_clean_log(scan: Scan, log: Path) -> None:
    exit_code, result, _ = scan(log, "--max-proxy-real-gap", 2, "--decline-patience", 50)
    assert (exit_code, result["fired"], result["fired_at"], result["reason"]) == (0, False, None, "")
    assert (result["updates"], result["verdict"]) == (10, "clean")


def test_too_little_evidence_is_its_own_verdict(scan: Scan, log: Path) -> None:
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:4]))
    exit_code, result, _ = scan(log)
    assert (exit_code, result["fired"], result["updates"]) == (6, False, 4)
    assert (result["verdict"], result["code"]) == ("INSUFFICIENT_DATA", "CR0638")
    assert result["reason"] == "4 update(s), and the guard may fire only from update 5 on"
    assert scan(log, "--min-steps", 4)[0] == 0


@pytest.mark.parametrize("with_truth_first", [False, True])
def test_one_line(scan: Scan, log: Path, *, with_truth_first: bool) -> None:
    rows = [{"step": 1, "reward": 0.5, "heldout/score": 0.5}]
    if with_truth_first:
        rows = [{"step": 0, "heldout/score": 0.5}, {"step": 1, "reward": 0.5}]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    exit_code, result, _ = scan(log)
    assert (exit_code, result["updates"]) == (6, 0 if with_truth_first else 1)


def test_what_a_person_reads(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = log.read_text().replace('"step": 100', '"step": 120')
    log.write_text(rows + '{"torn')
    assert main(["guard", "scan", str(log), "--quiet"]) == 5
    assert capsys.readouterr().out.splitlines() == [
        f"The guard fired at step 50: {GAP_REASON}.",
        "Columns: proxy reward (guessed); truth heldout/score (guessed); KL none, so the KL path is off; steps step.",
        "Guard: min_steps 5, decline_patience 8, ema_alpha 0.8, kl_hard_stop 0.08, max_proxy_real_gap 0.35.",
        "Note: The last line (11) is incomplete and was left out.",
    ]
    log.write_text(rows.splitlines()[0])
    main(["guard", "scan", str(log)])
    assert capsys.readouterr().out.startswith("CR0638: too little evidence for a verdict: 1 update(s)")
    main(["guard", "scan", str(log), "--min-steps", "1"])
    assert capsys.readouterr().out.startswith("The guard did not fire in 1 updates.")


def test_columns_by_name(scan: Scan, tmp_path: Path) -> None:
    rows = ["when,loss,val,drift", *(f"{i},{1 - i / 10},{1 + i / 10},{i}" for i in range(1, 9))]
    (tmp_path / "log.csv").write_text("\n".join(rows) + "\n")
    words = ["--step", "when", "--proxy=-loss", "--truth=-val", "--kl", "drift"]
    exit_code, result, _ = scan(tmp_path / "log.csv", *words, "--kl-hard-stop", 3)
    assert result["columns"] == {"proxy": "-loss", "truth": "-val", "kl": "drift", "step": "when"}
    # KL averages 1, 1.2, 1.56, 2.048, 2.6384, 3.31: above 3 at the sixth update.
    assert (exit_code, result["fired_at"]) == (5, 6)
    assert "kl_to_init average 3.311 exceeds the hard stop 3" in result["reason"]
    assert (
        scan(tmp_path / "log.csv", *words[:-1], "none", "--max-proxy-real-gap", 9)[1]["columns"]["kl"] is None
    )


# ---- settings


PLAIN = 'model = { name = "tiny-random" }\ntasks = { store = "tasks" }\nheldout = {}\n'


def test_settings_come_from_the_recipe_and_flags_win(scan: Scan, log: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text(f"{PLAIN}[guard]\nmin_steps = 2\nmax_proxy_real_gap = 1.0\n")
    settings = scan(log, "--recipe", recipe, "--max-proxy-real-gap", 0.9)[1]["settings"]
    assert settings == {
        "min_steps": 2,
        "decline_patience": 8,
        "ema_alpha": 0.8,
        "kl_hard_stop": 0.08,
        "max_proxy_real_gap": 0.9,
    }


def test_a_recipe_without_a_guard(scan: Scan, log: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(PLAIN)
    exit_code, result, _ = scan(log, "--recipe", tmp_path / "run.toml")
    assert (exit_code, result["error"]["code"]) == (2, "CR0204")
    assert "no [guard] table" in result["error"]["message"]
    assert str(tmp_path / "run.toml") in result["error"]["where"]


def test_a_bad_flag(scan: Scan, log: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text("[guard]\nmin_steps = 3\n")
    exit_code, result, _ = scan(log, "--recipe", recipe, "--decline-patience", 0)
    error = result["error"]
    assert (exit_code, error["code"], error["where"]) == (2, "CR0204", "--decline-patience")
    assert "guard.decline_patience: Input should be greater than or equal to 1" in error["message"]
    assert scan(log, "--min-steps", "few")[0] == 2


# ---- bad input


@pytest.mark.parametrize(
    ("content", "exit_code", "code"),
    [
        (b"", 4, "CR0630"),
        (b'{"step": 1, "reward": 0.5}\n', 4, "CR0633"),
        (b'{"step": 2, "reward": 1, "eval_reward": 1}\n{"step": 1, "reward": 1}\n', 4, "CR0633"),
        (b'{"step": 1, "reward": 1, "eval_reward": 1}\n{"bad\n{"step": 3}\n', 4, "CR0630"),
    ],
)
def test_bad_logs(scan: Scan, tmp_path: Path, content: bytes, exit_code: int, code: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    found, result, err = scan(path)
    assert (found, result["error"]["code"]) == (exit_code, code)
    assert err.count("\n") == 1
    assert err.startswith(f"{code}: ")
    assert result["error"]["fix"]
    assert path.read_bytes() == content


def test_a_missing_extra_is_one_sentence(scan: Scan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == "tensorboard":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    (tmp_path / "events.out.tfevents.1.x").write_bytes(b"x" * 100)
    exit_code, result, _ = scan(tmp_path)
    assert (exit_code, result["error"]["code"]) == (3, "CR0101")
    assert result["error"]["message"] == (
        "reading TensorBoard event files needs tensorboard, which is not installed."
    )
    assert result["error"]["fix"] == "pip install 'composer-replication[tensorboard]'"


# ---- ``guard scan`` over runs of a real model, recorded on disk: the verdict is the one that the run ended with


ROOT = Path(__file__).resolve().parents[3]
RECORDED = ROOT / "tests" / "golden" / "recorded_runs"
RUNS = sorted(path.parent.name for path in RECORDED.glob("*/metrics.jsonl"))


@pytest.mark.parametrize("name", RUNS)
def test_the_verdict_of_the_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [json.loads(line) for line in (RECORDED / name / "verdicts.jsonl").read_text().splitlines()]
    recipe = ROOT / "recipes" / name.rpartition("-")[0] / "run.toml"
    exit_code = main(["guard", "scan", str(RECORDED / name), "--recipe", str(recipe), "--json"])
    result = json.loads(capsys.readouterr().out)
    fired = verdicts[-1]["fire"]
    assert exit_code == (5 if fired else 0)
    assert (result["fired"], result["reason"]) == (fired, verdicts[-1]["reason"])
    assert result["updates"] == len(verdicts)
    # The line of step N + 1 holds the verdict on the weights after N steps.
    assert result["fired_at"] == (verdicts[-1]["round_idx"] + 1 if fired else None)
    assert result["columns"]["kl"] == "killswitch/kl_to_init"


def test_the_honest_twin_is_among_them() -> None:
    assert len(RUNS) >= 4
    assert "quickstart-0" in RUNS
