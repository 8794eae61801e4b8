"""One self-contained HTML file from a ``RunData``."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import jinja2

import composer_replication
from composer_replication.errors import InputError
from composer_replication.report import curves, facts
from composer_replication.report.run_data import RunData, read_run
from composer_replication.report.transcripts import chosen_transcripts
from composer_replication.report.verdict_banner import banner_of
from composer_replication.run_folder import RunFolder, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

# C0 and C1 controls but tab and newline, marks that reorder or hide text, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)

MAX_FINDINGS = 50


def write_report(run: RunData | Path) -> Path:
    """Write ``report.html`` into the run's folder, atomically, and return its path.

    The same folder gives the same bytes. The page runs no script and loads nothing: its
    policy allows one style sheet, named by its hash.

    Args:
        run: what ``read_run`` gave, or the folder itself. Write ``summary.json`` first:
            a folder without it is reported as interrupted.

    Raises:
        InputError: the folder cannot be read (as ``read_run``) or written (CR0484).
    """
    data = run if isinstance(run, RunData) else read_run(run)
    path = RunFolder(data.root).report
    page = render_page(data)
    try:
        write_atomic(path, page)
    except OSError as error:
        raise InputError(
            "CR0484",
            f"the report cannot be written: {error.strerror or error}.",
            where=str(path),
            fix="copy the run folder to a place that you may write to, and ask for the report there.",
        ) from error
    return path


def render_page(run: RunData) -> str:
    """The page as text. Everything from the run is hostile: escaped, and shown as it is."""
    css = report_resource("report.css")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    page = _template().render(
        css=css,
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        version=composer_replication.__version__,
        name=run.root.name,
        banner=banner_of(run),
        isolation_note=facts.isolation_note(run),
        figures=facts.key_figures(run),
        rewards=curves.reward_figure(run),
        margins=curves.guard_margins(run),
        guard_note=_guard_note(run),
        findings=run.findings[:MAX_FINDINGS],
        num_more_findings=max(len(run.findings) - MAX_FINDINGS, 0),
        comparisons=facts.before_and_after(run),
        transcripts=chosen_transcripts(run),
        is_halted=run.halt is not None,
        num_ungraded=sum(row.reward is None for row in run.rollouts),
        numbers=facts.numbers_table(run),
        num_steps=len(run.steps),
        has_recipe=run.recipe is not None,
        settings=facts.settings(run),
        has_environment=run.environment is not None,
        environment=facts.environment(run),
        fingerprints=facts.fingerprints(run),
    )
    return visible(page)


def visible(page: str) -> str:
    r"""Make characters that reorder, hide or break text readable: U+202E becomes ``\u202e``."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape", "surrogatepass").decode(), page)


def _guard_note(run: RunData) -> str:
    """One sentence on the guard when there is no chart of it, or on what fired."""
    if run.halt is not None:
        return f"Fired at step {run.halt.step}: {(run.halt.reason or 'the reason was not recorded').rstrip('.')}."
    if run.guard_updates:
        num_updates = len(run.guard_updates)
        return f"{num_updates} {'update' if num_updates == 1 else 'updates'}; none fired."
    if run.guard_settings is not None:
        return "A guard was configured, but no update of it was recorded."
    if run.recipe is not None:
        return "No guard was configured."
    return "No guard update was recorded, and run.toml is missing, so it is unknown whether a guard was configured."


def report_resource(name: str) -> str:
    """A style sheet or template that lies beside this module."""
    return resources.files("composer_replication.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.from_string(report_resource("report.html.j2"))
