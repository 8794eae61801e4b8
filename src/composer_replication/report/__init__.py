"""What does a person see?

One self-contained HTML file for a run: how it ended and why, the reward beside the
truth, the guard's margins, before and after, and three attempts to read. Missing
pieces are said, never invented. ``model_card`` describes saved weights. Logs
of other trainers are read by ``run_logs``; ``guard_scan`` says what the guard would have said; ``guard_bench`` measures the guard.
"""

from __future__ import annotations

from composer_replication.report.model_card import write_model_card
from composer_replication.report.page import write_report
from composer_replication.report.run_data import RunData, read_run

__all__ = ["RunData", "read_run", "write_model_card", "write_report"]
