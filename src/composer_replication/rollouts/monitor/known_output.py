"""What a command prints, where its own words say it: ``echo``, ``printf``, ``base64 -d`` of a literal text."""

from __future__ import annotations

import base64
import binascii
import codecs
import operator
import re
from collections.abc import Sequence

_LONGEST = 1_000_000
_FIELD = re.compile(r"%[-\d.]*[sbqd]")


def known_output(  # noqa: PLR0911  a table of programs, one return each
    words: Sequence[str], stdin: str | None
) -> str | None:
    """The output, or None where it cannot be known from the text."""
    if not words:
        return None
    program, arguments = words[0].rpartition("/")[2], list(words[1:])
    if program == "echo":
        options = [word for word in arguments if re.fullmatch(r"-[neE]+", word)]
        text = " ".join(arguments[len(options) :])
        return _escaped(text) if any("e" in option for option in options) else text
    if program == "printf" and arguments:
        return _printed(_escaped(arguments[0]), arguments[1:])
    if program in ("cat", "tee") and all(word.startswith("-") for word in arguments):
        return stdin
    if stdin is None:
        return None
    if program in ("base64", "openssl") and {"-d", "--decode", "-D"} & set(arguments):
        return decoded_base64(stdin)
    if program == "xxd" and any("r" in word for word in arguments if word.startswith("-")):
        return _from_hex(stdin)
    if program == "rev":
        return "\n".join(line[::-1] for line in stdin.split("\n"))
    return None


def _printed(form: str, values: Sequence[str]) -> str:
    """A format with its values, in one go; it is used again while values are left."""
    left = iter(values)
    parts: list[str] = []
    length = 0
    for _ in range(len(values) or 1):
        parts.append(_FIELD.sub(lambda field: next(left, field[0] if not parts else ""), form))
        length += len(parts[-1])
        if not _FIELD.search(form) or length > _LONGEST or not operator.length_hint(left):
            break
    return "".join(parts)


def decoded_base64(text: str | bytes) -> str | None:
    """The text that a base64 text stands for, or None."""
    data = text.encode("ascii", "ignore") if isinstance(text, str) else text
    try:
        plain = base64.b64decode(data[:_LONGEST], validate=False)
    except (binascii.Error, ValueError):
        return None
    return plain.decode("utf-8", "replace")


def _from_hex(text: str) -> str | None:
    try:
        return bytes.fromhex("".join(text.split())[:_LONGEST]).decode("utf-8", "replace")
    except ValueError:
        return None


def _escaped(text: str) -> str:
    try:
        return codecs.decode(text.encode("latin-1", "backslashreplace"), "unicode_escape")
    except (UnicodeDecodeError, ValueError):
        return text
