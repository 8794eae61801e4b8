"""Text for a person's screen: what would act on a terminal is shown, and does not act.

The output of hostile code goes through here: it could otherwise rename the window, write into the
clipboard, or move the cursor over a line that says what the code really did.
"""

from __future__ import annotations

_KEPT = "\n\t"
_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_SURROGATES = range(0xD800, 0xE000)  # of a file name that is not UTF-8; no stream can be given them
_SHOWN = {number: f"\\x{number:02x}" for number in _CONTROLS if chr(number) not in _KEPT} | {
    number: f"\\u{number:04x}" for number in (*_DIRECTIONS, *_SURROGATES)
}


def visible(text: str) -> str:
    r"""The text with control characters, changes of direction and lone surrogates written out, as ``\x1b`` or ``\u202e``.

    New lines and tabs stay; a carriage return before a new line is dropped.
    Reference: ECMA-48 (C0 and C1 sets), Unicode Bidirectional Algorithm (explicit formatting characters).
    """
    return text.replace("\r\n", "\n").translate(_SHOWN)
