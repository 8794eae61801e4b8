"""What is written beside saved weights: where they come from, on what, and what the guard said."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path, PurePath
from typing import Any

import composer_replication
from composer_replication.report import facts
from composer_replication.report.curves import curves_svg
from composer_replication.report.page import banner_of
from composer_replication.report.run_data import RunData, table_of
from composer_replication.report.templates import template, visible
from composer_replication.run_folder import write_atomic

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_OF_ITSELF = ("train_tasks", "heldout_tasks", "split_checked")
"""What the card says in a sentence; the ids are many."""


def write_model_card(run: RunData, folder: Path) -> None:
    """Write ``README.md`` and ``curves.svg``: data, fingerprint of the split, verdict, curves, settings, versions.

    The same run gives the same bytes. Secrets are hidden, and folders of this machine are named by their last part.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomic(folder / "README.md", render_card(run))
    write_atomic(folder / "curves.svg", curves_svg(run))


def render_card(run: RunData) -> str:
    """The card as Markdown, with the metadata block that model hubs read."""
    name = _without_folders(str(table_of((run.recipe or {}).get("model")).get("name") or "a model"))
    text = template("model_card.md.j2").render(
        run=run,
        environment=run.environment or {},
        base_model=name if _HUB_NAME.fullmatch(name) else "",
        name=name,
        version=composer_replication.__version__,
        banner=banner_of(run),
        sources=_sources(table_of((run.recipe or {}).get("tasks"))),
        settings=_cells(facts.settings(run)),
        versions=_cells(fact for fact in facts.environment(run) if fact[0] not in _OF_ITSELF),
        facts=facts,
    )
    return visible(text)


def _sources(tasks: Mapping[str, Any]) -> list[str]:
    """The sources of the recipe, or the name of its store."""
    named = tasks.get("source") or [tasks.get("store")]
    names = named if isinstance(named, list) else [named]
    return [_in_cell(_without_folders(str(name))) for name in names if name]


def _without_folders(name: str) -> str:
    is_path = name.startswith(("/", ".", "~"))
    return (PurePath(name).name or "a folder") if is_path else name


def _cells(rows: Iterable[facts.Fact]) -> list[facts.Fact]:
    """Facts that stay in their cell of a table, and bring no tag of their own."""
    return [(_in_cell(name), escape(_in_cell(_without_folders(value)), quote=False)) for name, value in rows]


def _in_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'").replace("\n", " ")
