"""Under which licence a repository comes: the text of its licence file, its own metadata as a cross-check.

The file is what counts in law, and metadata is what people typed once; where the two
differ, or the text is that of no known licence, that is said and nothing is guessed. It is
a help for a person who decides what to redistribute, and no legal advice.
"""

from __future__ import annotations

import ast
import configparser
import fnmatch
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.sources import read_toml
from composer_replication.tasks.tree_rules import LICENCE_TEXTS

_COPYLEFT = re.compile(
    r"(A?GPL|LGPL|MPL|EPL|EUPL|CDDL|CPL|IPL|OSL|MS-RL|CC-BY(-NC)?-SA|CECILL-[12]|CECILL-C|RPL|SSPL|Sleepycat|LPPL|OFL|APSL"
    r"|SISSL|QPL|NPOSL|RPSL|Watcom|Parity|ODbL|GFDL|FDL)(-.*|$)",
    re.IGNORECASE,
)
"""Licences that ask for changed copies to stay under them, in whole or file by file."""
_BSD = ("BSD-2-Clause", "BSD-3-Clause", "BSD-4-Clause", "0BSD")
_CLASSIFIERS = {
    "MIT License": ("MIT",),
    "MIT No Attribution License (MIT-0)": ("MIT-0",),
    "BSD License": _BSD,
    "Apache Software License": ("Apache-2.0", "Apache-1.1"),
    "ISC License (ISCL)": ("ISC",),
    "Mozilla Public License 2.0 (MPL 2.0)": ("MPL-2.0",),
    "Mozilla Public License 1.1 (MPL 1.1)": ("MPL-1.1",),
    "GNU General Public License (GPL)": ("GPL-1.0", "GPL-2.0", "GPL-3.0"),
    "GNU General Public License v2 (GPLv2)": ("GPL-2.0-only",),
    "GNU General Public License v2 or later (GPLv2+)": ("GPL-2.0-or-later",),
    "GNU General Public License v3 (GPLv3)": ("GPL-3.0-only",),
    "GNU General Public License v3 or later (GPLv3+)": ("GPL-3.0-or-later",),
    "GNU Library or Lesser General Public License (LGPL)": ("LGPL-2.0", "LGPL-2.1", "LGPL-3.0"),
    "GNU Lesser General Public License v2 (LGPLv2)": ("LGPL-2.0-only", "LGPL-2.1-only"),
    "GNU Lesser General Public License v2 or later (LGPLv2+)": ("LGPL-2.0-or-later", "LGPL-2.1-or-later"),
    "GNU Lesser General Public License v3 (LGPLv3)": ("LGPL-3.0-only",),
    "GNU Lesser General Public License v3 or later (LGPLv3+)": ("LGPL-3.0-or-later",),
    "GNU Affero General Public License v3": ("AGPL-3.0-only",),
    "GNU Affero General Public License v3 or later (AGPLv3+)": ("AGPL-3.0-or-later",),
    "Python Software Foundation License": ("PSF-2.0", "Python-2.0"),
    "Zope Public License": ("ZPL-2.0", "ZPL-2.1"),
    "The Unlicense (Unlicense)": ("Unlicense",),
    "zlib/libpng License": ("Zlib",),
    "Boost Software License 1.0 (BSL-1.0)": ("BSL-1.0",),
    "Eclipse Public License 2.0 (EPL-2.0)": ("EPL-2.0",),
    "European Union Public Licence 1.2 (EUPL 1.2)": ("EUPL-1.2",),
    "CC0 1.0 Universal (CC0 1.0) Public Domain Dedication": ("CC0-1.0",),
}
"""Trove classifiers after the last `` :: ``; several ids where one classifier stands for several licences."""
_FREE_TEXTS = {
    "mit": ("MIT",),
    "mit license": ("MIT",),
    "the mit license": ("MIT",),
    "bsd": _BSD,
    "bsd license": _BSD,
    "new bsd": ("BSD-3-Clause",),
    "bsd 3-clause": ("BSD-3-Clause",),
    "3-clause bsd": ("BSD-3-Clause",),
    "apache": ("Apache-2.0", "Apache-1.1"),
    "apache 2.0": ("Apache-2.0",),
    "apache license 2.0": ("Apache-2.0",),
    "apache license, version 2.0": ("Apache-2.0",),
    "apache software license": ("Apache-2.0", "Apache-1.1"),
    "lgpl": ("LGPL-2.0", "LGPL-2.1", "LGPL-3.0"),
    "gpl": ("GPL-1.0", "GPL-2.0", "GPL-3.0"),
    "gpl-2+": ("GPL-2.0-or-later",),
    "gplv2+": ("GPL-2.0-or-later",),
    "gplv3": ("GPL-3.0",),
    "gplv3+": ("GPL-3.0-or-later",),
    "isc": ("ISC",),
    "mpl 2.0": ("MPL-2.0",),
    "zpl 2.1": ("ZPL-2.1",),
}


@dataclass(frozen=True, slots=True)
class Licence:
    """What is known of a repository's licence.

    ``spdx`` is an SPDX id or expression, None when unknown; ``file`` the file that was read
    (several: joined by ``, ``), empty when there is none; ``read_from`` one of ``file``,
    ``metadata``, ``file and metadata`` and ``""``; ``is_copyleft`` None when unknown; ``note``
    one sentence about doubt, else empty.
    """

    spdx: str | None
    file: str
    read_from: str
    is_copyleft: bool | None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """With the short keys ``spdx``, ``file``, ``from``, ``is_copyleft``, ``note``."""
        return {
            "spdx": self.spdx,
            "file": self.file,
            "from": self.read_from,
            "is_copyleft": self.is_copyleft,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Licence:
        """The inverse of ``to_json``; raises KeyError or TypeError for something else."""
        spdx, is_copyleft = value["spdx"], value["is_copyleft"]
        texts = (value["file"], value["from"], value["note"])
        if not all(isinstance(text, str) for text in texts) or not isinstance(spdx, str | None):
            raise TypeError("a licence is made of texts")
        if not isinstance(is_copyleft, bool | None):
            raise TypeError("is_copyleft is true, false or null")
        return cls(spdx, texts[0], texts[1], is_copyleft, texts[2])


def read_licence(files: Mapping[str, bytes], metadata: Mapping[str, bytes] | None = None) -> Licence:
    """The licence of a repository.

    Every ``LICENSE*``, ``LICENCE*``, ``COPYING*`` and ``UNLICENSE*`` at the top is compared with
    the known texts (at most 5% of the characters may differ, names and years left out); then with
    what ``PKG-INFO``, ``pyproject.toml``, ``setup.cfg`` and ``setup.py`` (literals only) declare. Equal
    ids are one answer. A text does not say whether later versions are allowed: that comes from
    metadata. Where only metadata speaks clearly it is taken, and the note says so.

    Args:
        files: paths and bytes of the tree.
        metadata: those of the files that declare; without them only the text counts.
    """
    names = sorted(name for name in files if _is_licence_file(name) and files[name].strip())
    found = {name: _text_id(files[name]) for name in names}
    claims = list(_claims(metadata or {}))
    file = ", ".join(names)
    if names and all(found.values()):
        return _from_texts(file, sorted({str(spdx) for spdx in found.values()}), claims)
    note = "no licence file" if not names else f"{_first_unknown(found)} is not the text of a known licence"
    exact = sorted({ids[0] for ids in claims if len(ids) == 1})
    known = [spdx for spdx in found.values() if spdx]
    if len(exact) == 1 and all(_family(exact[0]) in map(_family, ids) for ids in claims) and not known:
        return Licence(
            exact[0], file, "metadata", is_copyleft(exact[0]), f"{note}; the metadata says {exact[0]}"
        )
    said = sorted({*known, *(" or ".join(ids) for ids in claims)})
    return Licence(None, file, "", _worst(said), note + (f"; else it says {', '.join(said)}" if said else ""))


def is_copyleft(expression: str) -> bool:
    """Whether an SPDX expression binds changed copies: one part of an AND, or every side of an OR."""
    words = re.findall(r"\(|\)|[^\s()]+", expression)

    def either() -> bool:
        value = both()
        while words and words[0].upper() == "OR":
            words.pop(0)
            value = both() and value
        return value

    def both() -> bool:
        value = one()
        while words and words[0].upper() == "AND":
            words.pop(0)
            value = one() or value
        return value

    def one() -> bool:
        word = words.pop(0) if words else ""
        if word == "(":
            value = either()
            if words:
                words.pop(0)
            return value
        if words and words[0].upper() == "WITH":
            del words[:2]
        return _COPYLEFT.match(word) is not None

    return either()


def _is_licence_file(name: str) -> bool:
    path = PurePosixPath(name)
    return len(path.parts) == 1 and any(
        fnmatch.fnmatchcase(path.name.upper(), text) for text in LICENCE_TEXTS
    )


def _text_id(data: bytes) -> str | None:
    """The id of a licence text, by exact match or an edit distance below 5%."""
    from identify.identify import license_id

    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    with tempfile.TemporaryDirectory(prefix="licence-", dir=process_folder()) as folder:
        path = Path(folder) / "LICENSE"
        path.write_text(text, encoding="utf-8")
        return license_id(str(path))


def _first_unknown(found: Mapping[str, str | None]) -> str:
    return next(name for name, spdx in found.items() if spdx is None)


def _from_texts(file: str, texts: list[str], claims: list[tuple[str, ...]]) -> Licence:
    if texts == ["GPL-3.0", "LGPL-3.0"]:
        texts = ["LGPL-3.0"]  # its text is an addition to that of the GPL and comes together with it
    families = {_family(text) for text in texts}
    fitting = [ids for ids in claims if any(_parts(spdx) == families for spdx in ids)]
    if len(fitting) < len(claims):
        said = sorted({*texts, *(" or ".join(ids) for ids in claims)})
        note = f"the text is {' and '.join(texts)}, the metadata says {_said(claims)}"
        return Licence(None, file, "", _worst(said), note)
    exact = sorted({ids[0] for ids in fitting if len(ids) == 1}, key=len)
    if exact:  # the longest one says most: GPL-3.0-or-later beside GPL-3.0
        return Licence(exact[-1], file, "file and metadata", is_copyleft(exact[-1]))
    if len(texts) > 1:
        note = f"several licences, and nothing says how they belong together: {', '.join(texts)}"
        return Licence(None, file, "", _worst(texts), note)
    return Licence(texts[0], file, "file and metadata" if claims else "file", is_copyleft(texts[0]))


def _said(claims: Iterable[tuple[str, ...]]) -> str:
    return " and ".join(sorted({" or ".join(ids) for ids in claims}))


def _worst(expressions: Iterable[str]) -> bool | None:
    """True when any reading is copyleft, else unknown: doubt is never taken for permission."""
    return True if any(map(is_copyleft, expressions)) else None


def _family(spdx: str) -> str:
    return re.sub(r"(-only|-or-later|\+)$", "", spdx)


def _parts(expression: str) -> set[str]:
    words = re.sub(r"\bWITH\s+\S+", "", expression).replace("(", " ").replace(")", " ").split()
    return {_family(word) for word in words if word not in ("AND", "OR")}


def _claims(metadata: Mapping[str, bytes]) -> Iterator[tuple[str, ...]]:
    """What each declaration can mean; one that means nothing known is left out."""
    expressions, classifiers = _declared(metadata)
    for text in expressions:
        ids = _FREE_TEXTS.get(text.strip().lower().removesuffix(".")) or _expression(text)
        if ids:
            yield ids
    for classifier in classifiers:
        ids = _CLASSIFIERS.get(classifier.rpartition(" :: ")[2])
        if classifier.startswith("License :: ") and ids:
            yield ids


def _expression(text: str) -> tuple[str, ...]:
    if "\n" in text.strip() or len(text) > 200:
        return ()  # a whole licence text
    try:
        return (str(canonicalize_license_expression(text.strip())),)
    except InvalidLicenseExpression:
        return ()


def _declared(metadata: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """Licence fields and classifiers of all metadata files."""
    expressions: list[str] = []
    classifiers: list[str] = []
    header = Parser().parsestr(metadata.get("PKG-INFO", b"").decode("utf-8", "replace"), headersonly=True)
    expressions += [header.get("License-Expression", ""), header.get("License", "")]
    classifiers += header.get_all("Classifier", [])
    table = read_toml(metadata, "pyproject.toml")
    for project in (table.get("project", {}), table.get("tool", {}).get("poetry", {})):
        licence = project.get("license", "") if isinstance(project, dict) else ""
        expressions.append(licence.get("text", "") if isinstance(licence, dict) else licence)
        classifiers += project.get("classifiers", []) if isinstance(project, dict) else []
    config = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        config.read_string(metadata.get("setup.cfg", b"").decode("utf-8", "replace"))
    except configparser.Error:
        config = configparser.ConfigParser(interpolation=None)
    expressions.append(config.get("metadata", "license", fallback=""))
    classifiers += config.get("metadata", "classifiers", fallback="").splitlines()
    for name, value in _setup_literals(metadata.get("setup.py", b"")):
        (expressions if name == "license" else classifiers).extend(
            [value] if isinstance(value, str) else value
        )
    texts = [text for text in expressions if isinstance(text, str) and text.strip()]
    return texts, [text.strip() for text in classifiers if isinstance(text, str)]


def _setup_literals(data: bytes) -> Iterator[tuple[str, Any]]:
    """``license`` and ``classifiers`` in a call of ``setup``, where they are literals; nothing is run."""
    try:
        module = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(module):
        if isinstance(node, ast.keyword) and node.arg in ("license", "classifiers"):
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError, RecursionError, MemoryError):
                continue
            if isinstance(value, str | list | tuple):
                yield node.arg, value
