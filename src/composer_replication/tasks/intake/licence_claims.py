"""What a project's metadata says about its licence: expressions, free texts and classifiers, as SPDX ids."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterator, Mapping
from email.parser import Parser
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from composer_replication.tasks.intake.sources import inner_table, read_toml
from composer_replication.tasks.syntax_trees import parse_syntax

_BSD = ("BSD-2-Clause", "BSD-3-Clause", "BSD-4-Clause", "0BSD")
_PROPRIETARY = ("LicenseRef-Proprietary",)
_CLASSIFIERS = {
    "Other/Proprietary License": _PROPRIETARY,
    "Free for non-commercial use": ("LicenseRef-Non-Commercial",),
    "Free For Educational Use": ("LicenseRef-Educational-Use",),
    "Free For Home Use": ("LicenseRef-Home-Use",),
    "Free To Use But Restricted": ("LicenseRef-Restricted",),
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
"""Trove classifiers after the last `` :: ``; several ids where one classifier stands for several licences.
One that restricts has an id of our own: beside the text of a free licence it is a contradiction."""
_FREE_TEXTS = {
    "proprietary": _PROPRIETARY,
    "other/proprietary license": _PROPRIETARY,
    "commercial": _PROPRIETARY,
    "all rights reserved": _PROPRIETARY,
    "unlicensed": _PROPRIETARY,
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


def read_claims(metadata: Mapping[str, bytes]) -> list[tuple[str, ...]]:
    """The SPDX ids that each declaration can mean; one that means nothing known is left out.

    Args:
        metadata: ``PKG-INFO``, ``pyproject.toml``, ``setup.cfg`` and ``setup.py`` as bytes, where there.
    """
    return list(_claims(metadata))


def _claims(metadata: Mapping[str, bytes]) -> Iterator[tuple[str, ...]]:
    expressions, classifiers = _declared(metadata)
    for text in expressions:
        ids = _FREE_TEXTS.get(text.strip().lower().removesuffix(".")) or _expression(text)
        if ids:
            yield ids
    for classifier in classifiers:
        meant = _CLASSIFIERS.get(classifier.rpartition(" :: ")[2])
        if classifier.startswith("License :: ") and meant:
            yield meant


def _expression(text: str) -> tuple[str, ...]:
    if "\n" in text.strip() or len(text) > 200:
        return ()  # a whole licence text
    try:
        return (str(canonicalize_license_expression(text.strip())),)
    except InvalidLicenseExpression:
        return ()


def _declared(metadata: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """Licence fields and classifiers of all metadata files."""
    expressions: list[Any] = []  # a broken file may hold anything in these places
    classifiers: list[Any] = []
    header = Parser().parsestr(metadata.get("PKG-INFO", b"").decode("utf-8", "replace"), headersonly=True)
    expressions += [header.get("License-Expression", ""), header.get("License", "")]
    classifiers += header.get_all("Classifier", [])
    table = read_toml(metadata, "pyproject.toml")
    for project in (inner_table(table, "project"), inner_table(table, "tool", "poetry")):
        licence = project.get("license", "")
        expressions.append(licence.get("text", "") if isinstance(licence, dict) else licence)
        listed = project.get("classifiers", [])
        classifiers += listed if isinstance(listed, list) else []
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
        module = parse_syntax(data)
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
