"""Python code as tokens, blind to how it is laid out.

A small scanner instead of the standard ``tokenize``: that one cuts f-strings differently from
Python 3.12 on, and refuses the body of a function on its own, which is what a golden is. One set
of rules for every text, parsable or not, gives the same tokens and hashes on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_STRING = r'''
      """[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""
    | \'\'\'[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*\'\'\'
    | "(?:\\.|[^"\\\n])*"
    | '(?:\\.|[^'\\\n])*'
'''
_STRING_OR_COMMENT = re.compile(rf"{_STRING}| (?P<comment>\#[^\n]*)", re.DOTALL | re.VERBOSE)
_TOKEN = re.compile(
    rf"""
      (?P<string>[rRbBuUfFtT]{{0,2}}(?:{_STRING}))
    | (?P<comment>\#[^\r\n]*)
    | (?P<number>(?:\d|\.\d)(?:[eE][+-]\d|[\w.])*)
    | (?P<name>[^\W\d]\w*)
    | (?P<newline>[\r\n]+)
    | (?P<space>[^\S\r\n]+|\\\r?\n)
    | (?P<operator>\*\*=|//=|>>=|<<=|\.\.\.|->|:=|==|!=|<=|>=|\*\*|//|<<|>>|[-+*/%&|^@]=|.)
    """,
    re.DOTALL | re.VERBOSE,
)
_KEYWORDS = frozenset(
    "False None True and as assert async await break class continue def del elif else except finally for from global "
    "if import in is lambda nonlocal not or pass raise return try while with yield".split()
)
_COMPOUND = frozenset("async case class def elif else except finally for if match try while with".split())


class Token(NamedTuple):
    """``kind`` is string, number, name or operator; the text of a string has no prefix and no quotes."""

    kind: str
    text: str


Line = list[Token]


def normalised_text(text: str, *, is_python: bool) -> str:
    """Text without white space, in strings too, and for Python without comments."""
    if is_python:
        text = _STRING_OR_COMMENT.sub(lambda match: "" if match["comment"] else match[0], text)
    return "".join(text.replace("\ufeff", "").split())


def logical_lines(text: str) -> list[Line]:
    """The statements of a text as tokens: one line each, however many lines they are written on.

    Comments, white space, docstrings and commas before a closing bracket are gone. The
    head of a block and what follows it after the colon are two lines.
    """
    lines: list[Line] = [[]]
    depth = 0
    for match in _TOKEN.finditer(text.replace("\ufeff", "")):
        kind, word = str(match.lastgroup), match[0]
        if kind in ("comment", "space"):
            continue
        if depth == 0 and (kind == "newline" or word == ";" or _ends_head(lines[-1], word)):
            lines.append([])
            continue
        if kind == "newline":
            continue
        if word in ("(", "[", "{"):
            depth += 1
        elif word in (")", "]", "}"):
            depth = max(0, depth - 1)
            if lines[-1] and lines[-1][-1] == ("operator", ","):
                lines[-1].pop()
        lines[-1].append(Token(kind, _spelled(kind, word)))
    return [line for line in lines if any(token.kind != "string" for token in line)]


def line_words(line: Line, *, blind: bool) -> list[str]:
    """The tokens of a line; round brackets, which formatters add and take away, are left out.

    ``blind`` to the names of variables and the values of constants, it keeps keywords and the names of
    what is called, of attributes and of keyword arguments: they tell foreign code apart.
    """
    words = []
    depth = 0
    for place, (kind, text) in enumerate(line):
        follows = line[place + 1 : place + 2]
        if kind == "operator":
            depth += (text in ("(", "[", "{")) - (text in (")", "]", "}"))
            if text not in ("(", ")"):
                words.append(text)
        elif kind == "name" and text not in _KEYWORDS and follows == [("operator", "(")]:
            words.append(f"{text}(")  # called
        elif not blind:
            words.append(f"'{text}" if kind == "string" else text)
        elif kind == "name":
            is_argument = depth > 0 and follows == [("operator", "=")]
            is_attribute = line[place - 1 : place] == [("operator", ".")]
            words.append(text if text in _KEYWORDS or is_argument or is_attribute else "variable")
        else:
            words.append(f"a {kind}")
    return words


def num_words(line: Line) -> int:
    """How much a line says: its different names, numbers and non-empty strings.

    Keywords, operators, ``self`` and ``cls`` say nothing: ``return self._x`` has one word.
    """
    silent = _KEYWORDS | {"self", "cls", ""}
    return len({token for token in line if token.kind != "operator" and token.text not in silent})


def _ends_head(line: Sequence[Token], word: str) -> bool:
    """Whether this colon ends the head of a block."""
    return word == ":" and bool(line) and line[0].text in _COMPOUND and ("name", "lambda") not in line


def _spelled(kind: str, word: str) -> str:
    if kind == "number":
        return word.lower().replace("_", "")
    if kind != "string":
        return word
    quoted = word.lstrip("rRbBuUfFtT")
    num_quotes = 3 if quoted[:3] in ('"""', "'''") else 1
    return quoted[num_quotes:-num_quotes].replace("\\'", "'").replace('\\"', '"')
