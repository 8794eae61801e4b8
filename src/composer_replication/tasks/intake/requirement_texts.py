"""Requirements as the ecosystem writes them: PEP 508, lines of requirement files, Poetry's tables.

Each becomes a ``packaging`` requirement whose marker is still there. One that is bound to a place has
``url``: ``tree:FOLDER`` for a folder of this repository, else the address as it is written. Such a name
is never asked for at the package index.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.markers import InvalidMarker, Marker
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

IN_TREE = "tree:"
"""Before the folder of a requirement that lies in this repository."""
_COMMENT = re.compile(r"(^|\s)#.*$")
_OPTIONS_OF_A_LINE = re.compile(r"\s--?(hash|global-option|config-settings?|install-option|no-binary|C)\b.*$")
_OPTION = re.compile(r"-(r|c|e|-requirement|-constraint|-editable)[\s=]*(.+)")
_ADDRESS = re.compile(r"([\w+]+:|\.{1,2}(/|$)|/|git@|\.\[)|.*/|\S+\.(whl|zip|tar\.gz)$")
_ARCHIVE = re.compile(r"\.(whl|zip|tar\.gz)$")
_NAME_END = re.compile(r"(?:\.git)?(?:@.*)?$|-\d.*\.(?:whl|zip|tar\.gz)$|\.(?:zip|tar\.gz)$")
_EXTRAS = re.compile(r"\[([\w., -]+)\]\s*$")
_LOCAL_FILE = re.compile(r"file:(?://(?:localhost)?)?(/?\.{1,2}(?:/.*)?|[^/].*)")
_ROOT = re.compile(r"\$\{PROJECT_ROOT\}|\{toxinidir\}|\{tox_root\}|\{root:uri\}|\{root:parent:uri\}|\{here\}")


def parsed(text: str) -> Requirement | None:
    """A requirement in PEP 508, or None."""
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def as_lines(text: str) -> Iterator[tuple[str, str]]:
    """What stands in the lines of a requirement file, each with its kind.

    ``r`` is another file, ``c`` one of bounds alone, ``e`` a folder or an address; all others are requirements.
    """
    for raw in "\n".join(text.splitlines()).replace("\\\n", "").splitlines():
        line = _ROOT.sub(".", _OPTIONS_OF_A_LINE.sub("", _COMMENT.sub("", raw))).strip()
        option = _OPTION.fullmatch(line)
        yield (option[1].lstrip("-")[0], option[2].strip("'\"")) if option else ("", line)


def requirement_of(line: str, folder: str, *, is_address: bool) -> Requirement | None:
    """What a line asks for, if anything; ``folder`` is that of the project, which paths are relative to."""
    requirement = None if is_address else parsed(line)
    if requirement is not None:
        requirement.url = requirement.url and bound_to(requirement.url, folder)
        return requirement
    if not line or line.startswith("-") or not (is_address or _ADDRESS.match(line)):
        return None
    address, _, marker = line.partition(";")
    extras = _EXTRAS.search(address)
    address = _EXTRAS.sub("", address).strip()
    requirement = parsed(_name_of(address))
    if requirement is not None:
        requirement.url = bound_to(address, folder)
        requirement.extras = {extra.strip() for extra in extras[1].split(",")} if extras else set()
        requirement.marker = _marker(marker)
    return requirement


def _name_of(address: str) -> str:
    """What an address seems to lead to; only the folder or the archive tells for certain."""
    path, _, fragment = address.partition("#")
    egg = re.search(r"(?:^|&)egg=([\w.-]+)", fragment)
    last = posixpath.basename(urlsplit(path).path.rstrip("/"))
    return egg[1] if egg else _NAME_END.sub("", last, count=1).strip(".") or "unnamed"


def bound_to(address: str, folder: str) -> str:
    """``tree:FOLDER`` for a path inside the repository, else the address itself."""
    text = _ROOT.sub(".", address).partition("#")[0]
    local = _LOCAL_FILE.fullmatch(text)
    text = local[1].lstrip("/") if local else text
    if re.match(r"[\w+]+:|git@|/|~", text):
        return address
    path = posixpath.normpath(posixpath.join(folder, unquote(text)))
    if path.startswith("..") or _ARCHIVE.search(path):
        return address
    return f"{IN_TREE}{'' if path == '.' else path}"


def _marker(text: str) -> Marker | None:
    try:
        return Marker(text) if text.strip() else None
    except InvalidMarker:
        return None


def holds(requirement: Requirement, extra: str = "") -> bool:
    """Whether it is asked for on this machine by this Python, with an extra or without one."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def with_marker(requirement: Requirement, text: str) -> Requirement:
    """The requirement, asked for only where both its marker and this one hold."""
    marker = _marker(text)
    if marker is not None:
        requirement.marker = (
            Marker(f"({requirement.marker}) and ({marker})") if requirement.marker else marker
        )
    return requirement


def poetry_requirements(table: Mapping[str, Any], folder: str) -> list[tuple[Requirement, bool]]:
    """Poetry's table of dependencies, each with whether it is optional; ``python`` is none of them."""
    found = []
    for name, given in table.items():
        for one in given if isinstance(given, list) else [given]:
            requirement = parsed(str(name))
            if requirement is None or canonicalize_name(name) == "python":
                continue
            value = one if isinstance(one, Mapping) else {"version": one}
            requirement.specifier = poetry_range(str(value.get("version", "")))
            extras = value.get("extras", [])
            requirement.extras = {str(extra) for extra in extras} if isinstance(extras, list) else set()
            requirement.url = table_address(value, folder)
            with_marker(requirement, str(value.get("markers", "")))
            with_marker(requirement, _python_marker(poetry_range(str(value.get("python", "")))))
            if "platform" in value:
                with_marker(requirement, f"sys_platform == '{value['platform']}'")
            found.append((requirement, value.get("optional") is True))
    return found


def table_address(value: Mapping[str, Any], folder: str) -> str | None:
    """Where a table of Poetry or uv binds a name to: a path, a repository, an address, another index."""
    for key in ("path", "file"):
        if isinstance(value.get(key), str):
            path = value[key]
            return bound_to(path if re.match(r"[\w+]+:|/|~", path) else f"./{path}", folder)
    for key in ("git", "url", "hg", "svn", "source", "index"):
        if value.get(key):
            return f"{key} {value[key]}"
    return None


def _python_marker(versions: SpecifierSet) -> str:
    return " and ".join(f"python_full_version {one.operator} '{one.version}'" for one in versions)


def poetry_range(text: str) -> SpecifierSet:
    """Poetry's range as a set of bounds, the upper one kept: ``^1.2`` is ``>=1.2,<2``, ``~1.2`` is ``>=1.2,<1.3``.

    Of alternatives (``||``) it is the range from the lowest to the highest, since a set of bounds has no "or".
    """
    alternatives = [_one_range(part) for part in re.split(r"\|\|?", text)]
    if len(alternatives) == 1:
        return alternatives[0]
    lows = [
        [_plain(one.version) for one in part if one.operator in (">=", ">", "==")] for part in alternatives
    ]
    highs = [
        [_bound_above(one) for one in part if one.operator in ("<", "<=", "==")] for part in alternatives
    ]
    kept = []
    if all(lows):
        kept.append(f">={min(low for part in lows for low in part).public}")
    if all(highs):
        version, is_within = max(high for part in highs for high in part)
        kept.append(f"{'<=' if is_within else '<'}{version.public}")
    return SpecifierSet(",".join(kept))


def _bound_above(one: Specifier) -> tuple[Version, bool]:
    """The bound that a part has above, and whether it is within: ``==1.*`` ends before 2."""
    if one.version.endswith(".*"):
        return Version(_next(one.version.removesuffix(".*"), -1)), False
    return _plain(one.version), one.operator != "<"


def _one_range(text: str) -> SpecifierSet:
    bounds: list[str] = []
    for operator, version in re.findall(r"([\^~<>=!]*)\s*v?([\w.*+!-]+)", text.replace(",", " ")):
        numbers = version.split(".")
        if version == "*":
            continue
        if operator in ("^", "^="):
            first = next((n for n, number in enumerate(numbers) if number.strip("0")), len(numbers) - 1)
            bounds += [f">={version}", f"<{_next(version, first)}"]
        elif operator == "~":
            bounds += [f">={version}", f"<{_next(version, min(1, len(numbers) - 1))}"]
        else:
            bounds.append(f"{'==' if operator in ('', '=') else operator}{version}")
    try:
        return SpecifierSet(",".join(bounds))
    except InvalidSpecifier:
        return SpecifierSet()


def _next(version: str, place: int) -> str:
    """The version after all that are equal up to a place: ``1.2.3`` and 1 give ``1.3``."""
    release = list(_plain(version).release)
    place = place if place >= 0 else len(release) - 1
    release += [0] * (place + 1 - len(release))
    return ".".join(map(str, [*release[:place], release[place] + 1]))


def _plain(version: str) -> Version:
    try:
        return Version(version.removesuffix(".*"))
    except InvalidVersion:
        return Version("0")
