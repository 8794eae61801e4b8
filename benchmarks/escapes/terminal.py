"""Through the screen of whoever looks: control characters in output, and the terminal itself."""

from __future__ import annotations

import unicodedata

from benchmarks.escapes.attempt import Attempt, Outcome, family
from benchmarks.escapes.drives import Stage, command_line, then
from benchmarks.escapes.scene import Scene
from composer_replication.errors import ComposerError

_HARMLESS = "\n\t"
_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def _control_characters(text: str) -> list[str]:
    found = {
        character
        for character in text
        if (unicodedata.category(character) == "Cc" and character not in _HARMLESS)
        or unicodedata.bidirectional(character) in _DIRECTIONS
    }
    return sorted(f"U+{ord(character):04X}" for character in found)


def _printed(_: Scene, outcome: Outcome) -> str:
    """What is printed for a person has a character that moves, colours, renames or turns round."""
    found = _control_characters(outcome.notes.get("printed", b"").decode(errors="surrogateescape"))
    return f"printed raw: {', '.join(found[:5])}" if found else ""


def _on_terminal(scene: Scene, outcome: Outcome) -> str:
    seen = outcome.notes.get("on_terminal", b"") + outcome.notes.get("typed", b"")
    return "it wrote to the terminal" if scene.token.encode() in seen else ""


def _reads_hostile_names(stage: Stage) -> None:
    """The parent asks for each file that it finds, and prints what goes wrong."""
    said = []
    for entry in stage.sandbox.list_files():
        try:
            stage.sandbox.read_file(entry.path + "/nothing")
        except ComposerError as error:
            said.append(str(error))
        except OSError as error:
            said.append(f"{entry.path}: {error.strerror}")
    stage.outcome.notes["printed"] = "\n".join(said).encode(errors="surrogateescape")


def _prints(text: str, stream: int = 1) -> str:
    return f"os.write({stream}, {text!r}.encode())"


ATTEMPTS: list[Attempt] = [
    *family(
        "terminal injection",
        [
            ("clearing the screen", _prints("\x1b[2J\x1b[H"), _printed),
            ("the title of the window", _prints("\x1b]0;mine\x07"), _printed),
            ("the clipboard", _prints("\x1b]52;c;cm0gLXJmIH4K\x07"), _printed),
            ("control characters of one code point", _prints("\x9b2J\x9d0;mine\x9c"), _printed),
            ("over what was printed", _prints("exit code 1\rexit code 0"), _printed),
            ("backspaces", _prints("FAIL\x08\x08\x08\x08ok  "), _printed),
            ("the direction of the text", _prints("\u202eko\u202c \u2066x\u2069"), _printed),
            ("errors", _prints("\x1b[31m\x1b[8m", 2), _printed),
            ("a line that looks like ours", _prints("\x1b[1A\x1b[2K[exit code 0]"), _printed),
        ],
        drive=command_line(),
        is_about_us=True,
    ),
    *family(
        "terminal injection by names",
        [
            (
                "a file name with a control character",
                "write('a\\x1b[2Jb')\nwrite('c\\x9bd')\nwrite('e\\rf')",
                _printed,
                {"drive": then(_reads_hostile_names)},
            ),
        ],
    ),
    *family(
        "the terminal itself",
        [
            ("writing to it by its general name", "write('/dev/tty', TOLD['token'].encode())", _on_terminal),
            (
                "writing to it by its own name",
                "write(TOLD['terminal'], TOLD['token'].encode())",
                _on_terminal,
            ),
            (
                "typing into it",
                "held = os.open('/dev/tty', os.O_RDWR)\nfor letter in TOLD['token'] + '\\n':\n    fcntl.ioctl(held, 0x5412, letter.encode())",
                _on_terminal,
            ),
            (
                "typing into it by its own name",
                "os.setsid()\nheld = os.open(TOLD['terminal'], os.O_RDWR)\nfor letter in TOLD['token'] + '\\n':\n    fcntl.ioctl(held, 0x5412, letter.encode())",
                _on_terminal,
                {"not_without_jail": "a terminal that another session has cannot be taken"},
            ),
        ],
        drive=command_line(),
        is_about_us=True,
    ),
]
