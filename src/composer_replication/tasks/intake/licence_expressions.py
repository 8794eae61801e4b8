"""What an SPDX expression asks of whoever passes a copy on: no more than a notice, or that changed copies stay under it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

_COPYLEFT = re.compile(
    r"(A?GPL|LGPL|MPL|EPL|EUPL|CDDL|CPL|IPL|OSL|MS-RL|CC-BY(-NC)?-SA|CECILL-[12]|CECILL-C|RPL|SSPL|Sleepycat|LPPL|OFL|APSL"
    r"|SISSL|QPL|NPOSL|RPSL|Watcom|Parity|ODbL|GFDL|FDL)(-.*|$)",
    re.IGNORECASE,
)
"""Licences that ask for changed copies to stay under them, in whole or file by file."""
_PERMISSIVE = frozenset(
    """0BSD AFL-1.1 AFL-1.2 AFL-2.0 AFL-2.1 AFL-3.0 Apache-1.0 Apache-1.1 Apache-2.0 BlueOak-1.0.0 BSD-1-Clause BSD-2-Clause
    BSD-2-Clause-Patent BSD-3-Clause BSD-3-Clause-Clear BSD-3-Clause-LBNL BSD-4-Clause BSL-1.0 CC-BY-4.0 CC0-1.0 CNRI-Python
    ECL-1.0 ECL-2.0 EFL-1.0 EFL-2.0 Fair FTL HPND ICU Intel ISC MIT MIT-0 MIT-Modern-Variant MS-PL MulanPSL-2.0 NCSA NTP
    PHP-3.01 PostgreSQL PSF-2.0 Python-2.0 Python-2.0.1 SMLNJ Unicode-3.0 Unicode-DFS-2016 Unlicense UPL-1.0 W3C WTFPL X11
    Xnet Zlib zlib-acknowledgement ZPL-2.0 ZPL-2.1""".lower().split()
)
"""A list of what is allowed, since what a licence forbids has no end: approved by the OSI or free for the FSF,
and no more is asked of a copy than a notice. A licence that is missing here is named once too often."""


def is_copyleft(expression: str) -> bool:
    """Whether an SPDX expression binds changed copies: one part of an AND, or every side of an OR."""
    return _judge(expression, lambda word: _COPYLEFT.match(word) is not None, either=all, both=any)


def is_permissive(expression: str) -> bool:
    """Whether an SPDX expression asks for no more than a notice: every part of an AND, or one side of an OR.

    What stands after WITH permits more, so it is left out.
    """
    return _judge(expression, lambda word: _without_later(word) in _PERMISSIVE, either=any, both=all)


def _without_later(word: str) -> str:
    return word.lower().removesuffix("+")


def _judge(
    expression: str,
    one: Callable[[str], bool],
    *,
    either: Callable[[Iterable[bool]], bool],
    both: Callable[[Iterable[bool]], bool],
) -> bool:
    """Read an expression: ``one`` judges a licence, ``either`` the sides of an OR, ``both`` the parts of an AND."""
    words = re.findall(r"\(|\)|[^\s()]+", expression)

    def joined(operator: str, part: Callable[[], bool], judge: Callable[[Iterable[bool]], bool]) -> bool:
        values = [part()]
        while words and words[0].upper() == operator:
            words.pop(0)
            values.append(part())
        return judge(values)

    def sides() -> bool:
        return joined("OR", parts, either)

    def parts() -> bool:
        return joined("AND", single, both)

    def single() -> bool:
        word = words.pop(0) if words else ""
        if word == "(":
            value = sides()
            if words:
                words.pop(0)
            return value
        if words and words[0].upper() == "WITH":
            del words[:2]
        return one(word)

    try:
        return sides()
    except RecursionError:
        return False  # nobody writes such a one
