"""Is the golden code still to be read somewhere in a rollout's tree?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def distinctive_lines(body: str) -> list[str]:
    """The lines of a body without indentation, blank lines and comments."""
    lines = (line.strip() for line in body.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def copied_share(bodies: Sequence[str], files: Mapping[str, bytes]) -> tuple[float, str]:
    """Which share of the lines of some bodies stands in a tree once more, and a file that has it.

    A body counts as copied when a file holds it line for line; indentation, blank lines and
    comments do not hide it. One of a single line is not looked for: short lines repeat by
    nature, and neighbours are what a policy learns from.
    """
    lines_of = [distinctive_lines(body) for body in bodies]
    total = sum(len(lines) for lines in lines_of)
    plain: dict[str, str] = {}
    copied, example = 0, ""
    for lines in lines_of:
        path = _copy_of(lines, files, plain) if len(lines) > 1 else ""
        copied += len(lines) if path else 0
        example = example or path
    return (copied / total if total else 0.0), example


def _copy_of(lines: Sequence[str], files: Mapping[str, bytes], plain: dict[str, str]) -> str:
    """The first file that holds the lines; ``plain`` keeps files that were read, as one text each."""
    needle = "\n" + "\n".join(lines) + "\n"
    first = lines[0].encode()
    for path, data in sorted(files.items()):
        if first in data:
            if path not in plain:
                plain[path] = "\n" + "\n".join(distinctive_lines(data.decode("utf-8", "replace"))) + "\n"
            if needle in plain[path]:
                return path
    return ""
