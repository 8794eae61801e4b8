"""Shell text into words and operators: quotes, expansions, substitutions, here-documents. Never raises.

Only what bash and dash agree on is told apart, and what is left open at the end of the text is closed there.
``shlex`` is not enough: it knows neither substitutions nor here-documents, and raises for open quotes.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, field
from typing import Literal

_OPERATORS = (
    "<<<", "&>>", "<<-", "&&", "||", ";;", "|&", "<<", ">>", ">&", "<&", "&>", "<>", ">|", "|", "&", ";", "(", ")",
    "<", ">", "\n",
)  # fmt: skip
LONGEST = 1_000_000
"""Characters of one text that are read."""
REDIRECTIONS = frozenset({"<<<", "&>>", "<<-", "<<", ">>", ">&", "<&", "&>", "<>", ">|", "<", ">"})
_NAME = re.compile(r"[A-Za-z_]\w*|[@*#?$!0-9]")
_PIECES = Literal["text", "variable", "command"]


@dataclass(slots=True)
class Word:
    """Pieces of text, names of variables and texts of substituted commands, in order."""

    pieces: list[tuple[_PIECES, str]] = field(default_factory=list)
    is_quoted: bool = False

    def add(self, kind: _PIECES, text: str) -> None:
        self.pieces.append((kind, text))

    @property
    def plain(self) -> str:
        """The text that stands in it, expansions left out."""
        return "".join(text for kind, text in self.pieces if kind == "text")


@dataclass(slots=True)
class Token:
    """A word or an operator. A here-document's operator is followed by a word that is its text."""

    operator: str = ""
    word: Word | None = None


def shell_tokens(text: str) -> list[Token]:
    """The words and operators of a shell text, here-documents in the place of their delimiters."""
    return _Lexer(text[:LONGEST]).run()


class _Lexer:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.tokens: list[Token] = []
        self.open_documents: list[tuple[Token, bool]] = []

    def run(self) -> list[Token]:
        text = self.text
        while self.at < len(text):
            character = text[self.at]
            if character == "\n":
                self.at += 1
                self.tokens.append(Token(operator="\n"))
                self._read_documents()
            elif character.isspace():
                self.at += 1
            elif character == "#":
                end = text.find("\n", self.at)
                self.at = len(text) if end < 0 else end
            elif text.startswith("\\\n", self.at):
                self.at += 2
            else:
                self._read_token()
        for token, _ in self.open_documents:
            token.word = Word([("text", "")])
        return self.tokens

    def _read_token(self) -> None:
        if self.text.startswith(("<(", ">("), self.at):
            word = Word()
            self.at += 1
            word.add("text", "/dev/fd/63")
            word.add("command", self._balanced())
            word.is_quoted = True
            self.tokens.append(Token(word=word))
            return
        operator = next((each for each in _OPERATORS if self.text.startswith(each, self.at)), "")
        if not operator:
            word = self._read_word()
            is_descriptor = word.plain.isdigit() and self.text[self.at : self.at + 1] in ("<", ">")
            if not is_descriptor:
                self.tokens.append(Token(word=word))
            return
        self.at += len(operator)
        self.tokens.append(Token(operator=operator))
        if operator in ("<<", "<<-"):
            while self.text[self.at : self.at + 1] in (" ", "\t"):
                self.at += 1
            token = Token(word=self._read_word())
            self.tokens.append(token)
            self.open_documents.append((token, operator == "<<-"))

    def _read_documents(self) -> None:
        for token, strips_tabs in self.open_documents:
            delimiter = token.word.plain if token.word else ""
            is_literal = bool(token.word and token.word.is_quoted)
            lines: list[str] = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line = self.text[self.at : end]
                self.at = end + 1
                line = line.lstrip("\t") if strips_tabs else line
                if line.rstrip("\r") == delimiter:
                    break
                lines.append(line)
            body = "".join(f"{line}\n" for line in lines)
            token.word = Word([("text", body)]) if is_literal else _expanded(body)
        self.open_documents.clear()

    def _read_word(self) -> Word:
        word = Word()
        while self.at < len(self.text):
            character = self.text[self.at]
            if character.isspace() or character in "|&;()<>":
                break
            self._read_piece(word, character)
        return word

    def _read_piece(self, word: Word, character: str) -> None:
        text = self.text
        if character == "\\":
            if text[self.at + 1 : self.at + 2] != "\n":
                word.add("text", text[self.at + 1 : self.at + 2])
            word.is_quoted = True
            self.at += 2
        elif character == "'":
            word.add("text", self._until("'", self.at + 1))
            word.is_quoted = True
        elif character == '"':
            self.at += 1
            self._read_double_quoted(word)
        elif character == "$" and text.startswith("$'", self.at):
            word.add("text", _unescaped(self._until("'", self.at + 2, escapes=True)))
            word.is_quoted = True
        elif character in "$`":
            self.read_expansion(word)
        else:
            word.add("text", character)
            self.at += 1

    def _read_double_quoted(self, word: Word) -> None:
        word.is_quoted = True
        word.add("text", "")
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == '"':
                self.at += 1
                return
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('$`"\\\n'):
                following = self.text[self.at + 1]
                word.add("text", "" if following == "\n" else following)
                self.at += 2
            elif character in "$`":
                self.read_expansion(word)
            else:
                word.add("text", character)
                self.at += 1

    def read_expansion(self, word: Word) -> None:
        text = self.text
        if text[self.at] == "`":
            word.add("command", self._until("`", self.at + 1, escapes=True))
        elif text.startswith("$((", self.at):
            self.at += 1
            word.add("text", f"$({self._balanced()})")
        elif text.startswith("$(", self.at):
            self.at += 1
            word.add("command", self._balanced())
        elif text.startswith("${", self.at):
            inside = self._until("}", self.at + 2)
            name = _NAME.match(inside)
            word.add("variable", name.group() if name else inside)
        else:
            name = _NAME.match(text, self.at + 1)
            if name:
                word.add("variable", name.group())
                self.at = name.end()
            else:
                word.add("text", "$")
                self.at += 1

    def _until(self, closing: str, start: int, *, escapes: bool = False) -> str:
        """The text up to a character, which is passed; to the end where there is none."""
        at = start
        while at < len(self.text) and self.text[at] != closing:
            at += 2 if escapes and self.text[at] == "\\" else 1
        self.at = min(at + 1, len(self.text))
        return self.text[start : min(at, len(self.text))]

    def _balanced(self) -> str:
        """What stands between this parenthesis and the one that closes it, quotes respected."""
        start = self.at + 1
        depth, quote, at = 0, "", self.at
        while at < len(self.text):
            character = self.text[at]
            if character == "\\" and quote != "'":
                at += 1
            elif quote:
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            elif character == "(":
                depth += 1
            elif character == ")":
                depth -= 1
                if depth == 0:
                    break
            at += 1
        self.at = min(at + 1, len(self.text))
        return self.text[start : min(at, len(self.text))]


def _expanded(body: str) -> Word:
    """A here-document whose delimiter is not quoted: as between double quotes, but that quotes stand for themselves."""
    lexer = _Lexer(body)
    word = Word()
    while lexer.at < len(body):
        character = body[lexer.at]
        if character == "\\" and body[lexer.at + 1 : lexer.at + 2] in tuple("$`\\"):
            word.add("text", body[lexer.at + 1])
            lexer.at += 2
        elif character in "$`":
            lexer.read_expansion(word)
        else:
            word.add("text", character)
            lexer.at += 1
    return word


def _unescaped(text: str) -> str:
    try:
        return codecs.decode(text.encode("latin-1", "backslashreplace"), "unicode_escape")
    except (UnicodeDecodeError, ValueError):
        return text
