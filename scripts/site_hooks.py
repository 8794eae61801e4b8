"""What mkdocs needs beside ``docs/``: the README as its first page, and the files that pages link to, copied in."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from composer_replication.cli.main import build_parser

ROOT = Path(__file__).resolve().parents[1]
_OUTSIDE = re.compile(r"\]\(((?:\.\./)?)([^)#:\s]+)")
REFERENCE = "# Python\n\n" + "\n\n".join(
    f"::: composer_replication.{name}"
    for name in (
        "safety",
        "interfaces",
        "records",
        "losses",
        "trainer.composer_trainer.ComposerReplicationTrainer",
    )
)


def below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The commands of a command."""
    for action in parser._subparsers._group_actions if parser._subparsers else ():  # noqa: SLF001  no public way
        yield from dict.fromkeys((action.choices or {}).values())


def helps(parser: argparse.ArgumentParser) -> Iterator[str]:
    """What ``--help`` says of a command and of each below it."""
    yield f"## {parser.prog}\n\n```text\n{parser.format_help()}```"
    for inner in below(parser):
        yield from helps(inner)


def command_pages() -> dict[str, str]:
    """A page a verb, by its path, and one that links to all of them."""
    whole = build_parser()
    pages = {
        f"commands/{verb.prog.split()[-1]}.md": [f"# {verb.prog}", *helps(verb)] for verb in below(whole)
    }
    links = [f"- [composer-rl {Path(path).stem}]({path})" for path in pages]
    first = ["# Commands", f"```text\n{whole.format_help()}```", "\n".join(links)]
    return {path: "\n\n".join(parts) for path, parts in {"commands.md": first, **pages}.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add the first page, the reference, and each file outside ``docs/`` that a page of it links to."""
    pages = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "reference.md", content=REFERENCE))
    for path, content in command_pages().items():
        files.append(File.generated(config, path, content=content))
    linked = {target for text in pages.values() for up, target in _OUTSIDE.findall(text) if up}
    linked |= {target for _, target in _OUTSIDE.findall(readme) if not target.startswith("docs/")}
    for target in sorted(linked):
        path = ROOT / target / "README.md" if (ROOT / target).is_dir() else ROOT / target
        place = path.relative_to(ROOT).as_posix()
        is_there = place == "README.md" or place.startswith("docs/") or place in files.src_uris
        if path.is_file() and not is_there:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links out of ``docs/`` lead to the copies, and those of the copies back; why a block is in no test is its title."""
    markdown = re.sub(
        r"^```bash no-test=(\S+)$", r'```bash title="not run by a test: \1"', markdown, flags=re.MULTILINE
    )
    if (ROOT / "docs" / page.file.src_uri).is_file():
        return markdown.replace("](../README.md", "](index.md").replace("](../", "](")
    return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
