"""Is the golden body still to be read somewhere in a rollout's tree?"""

from __future__ import annotations

from collections.abc import Mapping


def distinctive_lines(body: str) -> list[str]:
    """The lines of a body without indentation, blank lines and comments."""
    lines = (line.strip() for line in body.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def find_copy(golden_body: str, files: Mapping[str, bytes]) -> str:
    """The path of the first file that holds the body line for line; empty when none does.

    Indentation, blank lines and comments do not hide a copy. A body of one line is not
    looked for: short lines repeat by nature, and neighbours are what a policy learns from.
    """
    lines = distinctive_lines(golden_body)
    if len(lines) < 2:
        return ""
    needle = "\n" + "\n".join(lines) + "\n"
    first = lines[0].encode()
    for path, data in sorted(files.items()):
        if first in data:
            text = "\n" + "\n".join(distinctive_lines(data.decode("utf-8", "replace"))) + "\n"
            if needle in text:
                return path
    return ""
