"""What a project's metadata says about its licence: expressions, free texts and classifiers, as SPDX ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from composer_replication.tasks.intake.parsed_files import ProjectFiles, texts

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
    read = ProjectFiles(metadata)
    expressions: list[Any] = []  # a broken file may hold anything in these places
    classifiers: list[Any] = [*read.info.get("Classifier", []), *texts(read.setup.get("classifiers"))]
    expressions += [*read.info.get("License-Expression", []), *read.info.get("License", [])]
    for project in (read.table("project"), read.table("tool", "poetry")):
        licence = project.get("license", "")
        expressions.append(licence.get("text", "") if isinstance(licence, dict) else licence)
        classifiers += texts(project.get("classifiers"))
    expressions += [read.ini("metadata", "license"), read.setup.get("license")]
    classifiers += read.ini("metadata", "classifiers").splitlines()
    found = [text for text in expressions if isinstance(text, str) and text.strip()]
    return found, [text.strip() for text in classifiers]
