"""Moves the fragments of ``changes/`` to the top of CHANGELOG.md's newest version; with ``--check`` only says what is wrong.

A fragment is a file ``changes/WHAT-CHANGED.md``: one paragraph that says what a user notices, on one line.

    python scripts/collect_changes.py [--check]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_CHARACTERS = 900
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*\.md")


def fragments(folder: Path) -> list[Path]:
    """The files of a folder of fragments but its README, by name."""
    return sorted(path for path in folder.iterdir() if path.name != "README.md")


def problem_of(path: Path) -> str:
    """What is wrong with a fragment; an empty text where nothing is."""
    text = path.read_text(encoding="utf-8")
    if not _NAME.fullmatch(path.name):
        return "its name is not words in lower case with hyphens between them, and .md"
    if not text.strip() or text != text.strip() + "\n" or "\n" in text.strip():
        return "it is not one line with its end"
    if text.startswith(("-", "*", "#")) or not text.strip().endswith("."):
        return "it is not a sentence: it begins with a sign of Markdown, or ends without a full stop"
    if len(text) > MAX_CHARACTERS:
        return f"it has {len(text)} characters, more than {MAX_CHARACTERS}: say what a user notices"
    return ""


def collected(changelog: str, paths: list[Path]) -> str:
    """The change log with a line for each fragment under its first version."""
    heading = re.search(r"^## .+\n\n", changelog, re.MULTILINE)
    if heading is None:
        sys.exit("CHANGELOG.md has no version to put them under.")
    lines = "".join(f"- {path.read_text(encoding='utf-8')}" for path in paths)
    return changelog[: heading.end()] + lines + changelog[heading.end() :]


def main() -> None:
    """Check the fragments; without ``--check`` move them into the change log."""
    if unknown := set(sys.argv[1:]) - {"--check"}:
        sys.exit(f"{min(unknown)} is no option; --check is the only one.")
    paths, changelog = fragments(ROOT / "changes"), ROOT / "CHANGELOG.md"
    if problems := [f"{path}: {problem}." for path in paths if (problem := problem_of(path))]:
        sys.exit("\n".join(problems))
    if "--check" not in sys.argv[1:] and paths:
        changelog.write_text(collected(changelog.read_text(encoding="utf-8"), paths), encoding="utf-8")
        for path in paths:
            path.unlink()
    print(f"{len(paths)} fragment(s)")


if __name__ == "__main__":
    main()
