"""The plain loop and the page on the guard in foreign trainers: what is printed there runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from composer_replication.cli.main import build_parser
from composer_replication.safety import CollapseStopError, HeldOutGuard

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "hello_guard.py"
PAGE, VERL = ROOT / "docs" / "guard-anywhere.md", ROOT / "docs" / "verl.md"


def run(source: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "loop.py").write_text(source)
    command = [sys.executable, str(tmp_path / "loop.py")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def figures(said: str) -> tuple[int, float, float]:
    step, reward, truth = re.findall(r"(?:step|reward|truth) ([\d.]+\d|\d)", said)
    return int(step), float(reward), float(truth)


def test_the_loop_is_stopped_and_goes_on_to_cheat_without_the_guard(tmp_path: Path) -> None:
    source = EXAMPLE.read_text()
    done = run(source, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "; stopped: the Hacking Gap" in done.stdout
    step, reward, truth = figures(done.stdout)
    assert step < 150 and reward > truth + 0.35
    assert source.count("HeldOutGuard()") == 1
    loose = "HeldOutGuard(max_proxy_real_gap=99, decline_patience=999)"
    done = run(source.replace("HeldOutGuard()", loose), tmp_path)
    assert "never stopped" in done.stdout
    _, reward, truth = figures(done.stdout)
    assert reward > 0.95 and truth < 0.1


def test_the_loop_needs_nothing_but_us() -> None:
    found = set(re.findall(r"^(?:import|from) ([\w.]+)", EXAMPLE.read_text(), re.MULTILINE))
    assert found == {"random", "composer_replication.safety"}


def test_the_commands_of_the_page_are_understood() -> None:
    (block,) = re.findall(r"```bash no-test=needs-your-logs\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = re.findall(r"^composer-rl (guard scan [^#\n]*)", block, re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        assert build_parser().parse_args(line.split()).run.endswith(":run_scan")


# ------------------------------------------------------- the logger around verl's logger


class Recorder:
    """Has verl's signature and keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        self.rows.append((step, dict(data)))

    def finish(self, exit_code: int = 0) -> int:
        return exit_code + 1


@pytest.fixture
def guarded_tracking() -> Any:
    blocks = re.findall(r"```python\n(.*?)```", VERL.read_text(), re.DOTALL)
    (source,) = (block for block in blocks if "class GuardedTracking" in block)
    names: dict[str, Any] = {}
    exec(compile(source, str(VERL), "exec"), names)
    return names["GuardedTracking"]


def rows_of_fit(last: int, first: int = 1) -> list[tuple[int, dict[str, Any]]]:
    """Rows in the order of verl's fit: a validation before training, then one row a step, every second with one."""
    rows: list[tuple[int, dict[str, Any]]] = [(first - 1, {"val": 0.5})]
    for step in range(first, last + 1):
        row = {"reward": step / 100, "kl": 0.01}
        rows.append((step, row | ({"val": 0.5 - step / 1000} if step % 2 == 0 else {})))
    return rows


def feed(logger: Any, rows: list[tuple[int, dict[str, Any]]]) -> None:
    for step, row in rows:
        logger.log(data=row, step=step)


def test_each_row_is_logged_and_each_validation_is_folded(guarded_tracking: Any, tmp_path: Path) -> None:
    recorder, guard = Recorder(), HeldOutGuard()
    logger = guarded_tracking(recorder, guard, proxy="reward", truth="val", kl="kl", folder=tmp_path / "new")
    feed(logger, rows_of_fit(6))
    by_hand = HeldOutGuard()
    for step in (2, 4, 6):
        by_hand.update(step, in_loop_reward=step / 100, heldout_score=0.5 - step / 1000, kl_to_init=0.01)
    assert guard.state_dict() == by_hand.state_dict()
    assert [row for _, row in recorder.rows if "killswitch/fire" not in row] == [
        row for _, row in rows_of_fit(6)
    ]
    assert [step for step, row in recorder.rows if "killswitch/fire" in row] == [2, 4, 6]
    assert logger.finish(exit_code=1) == 2


def test_a_resumed_run_goes_on_with_the_state_of_its_checkpoint(
    guarded_tracking: Any, tmp_path: Path
) -> None:
    """Saved at 4, died after 8; the resumed run validates first, then trains from 5 on."""
    settings: dict[str, Any] = {"proxy": "reward", "truth": "val", "folder": tmp_path}
    whole = HeldOutGuard()
    feed(guarded_tracking(Recorder(), whole, **settings), rows_of_fit(8))
    for rows in (rows_of_fit(8, first=5), rows_of_fit(8, first=5)[1:]):  # with and without that validation
        resumed = HeldOutGuard()
        feed(guarded_tracking(Recorder(), resumed, **settings), rows)
        assert resumed.state_dict() == whole.state_dict()


def test_it_stops_after_it_has_logged(guarded_tracking: Any, tmp_path: Path) -> None:
    recorder = Recorder()
    guard = HeldOutGuard(min_steps=2, max_proxy_real_gap=0.001)
    logger = guarded_tracking(recorder, guard, proxy="reward", truth="val", folder=tmp_path)
    with pytest.raises(CollapseStopError):
        feed(logger, rows_of_fit(8))
    assert recorder.rows[-1][0] == 4
    assert recorder.rows[-1][1]["killswitch/fire"] == 1.0
