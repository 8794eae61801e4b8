"""Requirements as the ecosystem writes them: PEP 508, lines of requirement files, Poetry's tables.

Each becomes a ``packaging`` requirement without a marker: one whose marker does not hold on this machine is none.
One that is bound to a place has ``url``: ``tree:FOLDER`` for a folder of this repository, else the address as it
is written. Such a name is never asked for at the package index.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from packaging.markers import InvalidMarker, Marker, UndefinedComparison
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

IN_TREE = "tree:"
"""Before the folder of a requirement that lies in this repository."""
_COMMENT = re.compile(r"(^|\s)#.*$")
_OPTIONS_OF_A_LINE = re.compile(r"\s--?(hash|global-option|config-settings?|install-option|no-binary|C)\b.*$")
_OPTION = re.compile(r"-(r|e|-requirement|-editable)[\s=]*(.+)")
_ADDRESS = re.compile(r"([\w+]+:|\.{1,2}(/|$)|/|git@|\.\[)|.*/|\S+\.(whl|zip|tar\.gz)$")
_ELSEWHERE = re.compile(r"[\w+]+:|git@|/|~|.*\.(whl|zip|tar\.gz)$")
_NAME = re.compile(r"(?:.*[#&]egg=|(?:[^#]*/)?\.*)(\w(?:(?!-\d|\.git|\.tar|\.zip)[\w.-])*)")
"""What an address seems to lead to; only the folder or the archive tells for certain."""
_EXTRAS = re.compile(r"\[([\w., -]+)\]\s*$")
_LOCAL_FILE = re.compile(r"file:(?://(?:localhost)?)?(/?\.{1,2}(?:/.*)?|[^/].*)")
_ROOT = re.compile(r"\$\{PROJECT_ROOT\}|\{toxinidir\}|\{tox_root\}|\{root:uri\}|\{root:parent:uri\}|\{here\}")


def parsed(text: str) -> Requirement | None:
    """A requirement in PEP 508, its marker still there, or None."""
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def holds(marker: Marker | str | None, extra: str = "") -> bool:
    """Whether a marker is true on this machine for this Python, with an extra or without one; a broken one is."""
    try:
        marker = Marker(marker) if isinstance(marker, str) and marker.strip() else marker
        return not isinstance(marker, Marker) or marker.evaluate({"extra": extra})
    except (InvalidMarker, UndefinedComparison):
        return True


def as_lines(text: str) -> Iterator[tuple[str, str]]:
    """What stands in the lines of a requirement file, each with its kind: ``r`` a file, ``e`` a folder or an address."""
    for raw in "\n".join(text.splitlines()).replace("\\\n", "").splitlines():
        line = _ROOT.sub(".", _OPTIONS_OF_A_LINE.sub("", _COMMENT.sub("", raw))).strip()
        option = _OPTION.fullmatch(line)
        yield (option[1].lstrip("-")[0], option[2].strip("'\"")) if option else ("", line)


def requirement_of(line: str, folder: str, *, is_address: bool) -> Requirement | None:
    """What a line asks for here, if anything; ``folder`` is that of the project, which paths are relative to."""
    requirement = None if is_address else parsed(line)
    if requirement is None and (is_address or _ADDRESS.match(line)) and not line.startswith("-"):
        address, _, marker = line.partition(";")
        extras = _EXTRAS.search(address)
        address = _EXTRAS.sub("", address).strip().rstrip("/")
        name = _NAME.match(address)
        text = f"{name[1].rstrip('.-') if name else 'unnamed'}{extras[0] if extras else ''}"
        requirement = parsed(f"{text};{marker}" if marker.strip() else text)
        if requirement is not None:
            requirement.url = address
    if requirement is None or not holds(requirement.marker):
        return None
    requirement.url = requirement.url and bound_to(requirement.url, folder)
    requirement.marker = None
    return requirement


def bound_to(address: str, folder: str) -> str:
    """``tree:FOLDER`` for a path inside the repository, else the address itself."""
    text = _ROOT.sub(".", address).partition("#")[0]
    local = _LOCAL_FILE.fullmatch(text)
    text = local[1].lstrip("/") if local else text
    path = posixpath.normpath(posixpath.join(folder, unquote(text)))
    if _ELSEWHERE.match(text) or path.startswith(".."):
        return address
    return f"{IN_TREE}{'' if path == '.' else path}"


def table_address(value: Mapping[str, Any]) -> str:
    """Where a table of Poetry or uv binds a name to: a path, a repository, an address, another index; else empty."""
    kinds = ("path", "file", "git", "url", "hg", "svn", "source", "index")
    bound = ((key, str(value[key]).replace(" ", "%20")) for key in kinds if value.get(key))
    return next((f"{'file' if key == 'path' else key}:{place}" for key, place in bound), "")


def poetry_lines(table: Mapping[str, Any], *, with_optional: bool = True) -> list[str]:
    """What Poetry's table of dependencies asks for on this machine, as lines in PEP 508; ``python`` is none of them."""
    found = []
    for name, given in table.items():
        for one in given if isinstance(given, list) else [given]:
            value = one if isinstance(one, Mapping) else {"version": one}
            extras = value.get("extras")
            asked = f"{name}[{','.join(map(str, extras))}]" if isinstance(extras, list) else name
            address = table_address(value)
            python = poetry_range(str(value.get("python", "")))
            markers = [f"python_full_version {one.operator} '{one.version}'" for one in python]
            markers += [f"sys_platform == '{value['platform']}'"] if "platform" in value else []
            markers.append(str(value.get("markers", "")))
            is_asked = with_optional or value.get("optional") is not True
            if is_asked and canonicalize_name(name) != "python" and all(map(holds, markers)):
                bounds = poetry_range(str(value.get("version", "")))
                found.append(f"{asked} @ {address}" if address else f"{asked}{bounds}")
    return found


def poetry_range(text: str) -> SpecifierSet:
    """Poetry's range as a set of bounds, the upper one kept: ``^1.2`` is ``>=1.2,<2``, ``~1.2`` is ``>=1.2,<1.3``.

    Of alternatives (``||``) it is the range from the lowest to the highest, since a set of bounds has no "or".
    """
    alternatives = [_bounds(part) for part in re.split(r"\|\|?", text)]
    if len(alternatives) == 1:
        return alternatives[0]
    lows = [
        [Version(one.version) for one in part if one.operator in (">=", ">", "==")] for part in alternatives
    ]
    highs = [
        [(Version(one.version), one.operator != "<") for one in part if one.operator in ("<", "<=", "==")]
        for part in alternatives
    ]
    kept = []
    if all(lows):
        kept.append(f">={min(low for part in lows for low in part).public}")
    if all(highs):
        version, is_within = max(high for part in highs for high in part)
        kept.append(f"{'<=' if is_within else '<'}{version.public}")
    return SpecifierSet(",".join(kept))


def _bounds(text: str) -> SpecifierSet:
    """One alternative; nothing where it cannot be read."""
    bounds: list[str] = []
    try:
        for operator, version in re.findall(r"([\^~<>=!]*)\s*v?(\d[\w.*+!-]*)", text):
            lowest = version.removesuffix(".*")
            release = Version(lowest).release
            if operator in ("^", "^="):
                place = next((at for at, number in enumerate(release) if number), len(release) - 1)
            elif operator == "~":
                place = min(1, len(release) - 1)
            elif operator in ("", "=", "==") and lowest != version:
                place = len(release) - 1
            else:
                bounds.append(f"{'==' if operator in ('', '=') else operator}{version}")
                continue
            # The version after all that are equal up to that place: of 1.2.3 and place 1 it is 1.3.
            above = ".".join(map(str, (*release[:place], release[place] + 1)))
            bounds += [f">={lowest}", f"<{above}"]
        return SpecifierSet(",".join(bounds))
    except (InvalidSpecifier, InvalidVersion):
        return SpecifierSet()
