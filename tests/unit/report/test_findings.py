"""What the trainer's checks said, read back and shown; a line of something else is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from composer_replication.errors import InputError
from composer_replication.records import Finding
from composer_replication.report import read_run, write_report
from composer_replication.report.run_data import read_findings
from composer_replication.run_folder import append_jsonl

ROW: dict[str, Any] = {
    "step": 3,
    "code": "CR0765",
    "name": "token_drift",
    "level": "warning",
    "sentence": "they part at <script>x</script>.",
    "fix": "compare temperatures.",
    "figures": {"mean": 0.25, "max": None},
}


def test_a_line_becomes_a_record(tmp_path: Path) -> None:
    append_jsonl(tmp_path / "checks.jsonl", ROW)
    (finding,) = read_findings(tmp_path / "checks.jsonl")
    assert isinstance(finding, Finding)
    assert (finding.step, finding.code, finding.figures["mean"]) == (3, "CR0765", 0.25)
    assert math.isnan(finding.figures["max"])
    assert read_findings(tmp_path / "absent.jsonl") == ()


@pytest.mark.parametrize("change", [{"step": "3"}, {"code": None}, {"figures": [1]}, {"sentence": 4}])
def test_a_line_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    append_jsonl(tmp_path / "checks.jsonl", {**ROW, **change})
    with pytest.raises(InputError) as caught:
        read_findings(tmp_path / "checks.jsonl")
    assert caught.value.code == "CR0481"
    assert caught.value.where.endswith("checks.jsonl:1")


def test_the_page_shows_them_escaped_and_counts_the_rest(make_run: Any) -> None:
    root = make_run(num_steps=4)
    assert read_run(root).findings == ()
    assert "What the checks said" not in write_report(root).read_text()
    for step in range(52):
        append_jsonl(root / "checks.jsonl", {**ROW, "step": step})
    page = write_report(root).read_text()
    assert "What the checks said" in page
    assert "they part at &lt;script&gt;x&lt;/script&gt;." in page
    assert "And 2 more in checks.jsonl." in page
