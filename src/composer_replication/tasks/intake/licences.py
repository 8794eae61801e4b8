"""Under which licence a repository says that it comes, and whether somebody must look before copies are passed on.

Metadata is read; of licence files only the names, for the person who looks. A licence on a short list
of permissive ones is taken as said; everything else, doubt included, is "look at it". It is no legal advice.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from pydantic import Field, StrictBool, TypeAdapter

from composer_replication.tasks.intake.project_files import Project
from composer_replication.tasks.intake.tree_rules import is_licence_text

_PERMISSIVE = frozenset(
    """0BSD AFL-3.0 Apache-1.1 Apache-2.0 BlueOak-1.0.0 BSD-1-Clause BSD-2-Clause BSD-2-Clause-Patent BSD-3-Clause
    BSD-3-Clause-Clear BSD-4-Clause BSL-1.0 CC-BY-4.0 CC0-1.0 CNRI-Python ECL-2.0 HPND ISC MIT MIT-0 MS-PL NCSA
    PostgreSQL PSF-2.0 Python-2.0 Python-2.0.1 Unicode-3.0 Unlicense UPL-1.0 WTFPL X11 Zlib ZPL-2.0 ZPL-2.1""".split()
)
"""Licences that ask for no more than a notice. One that is missing here is named once too often."""
_WORDS = {
    "mit": "MIT", "new bsd": "BSD-3-Clause", "bsd 3-clause": "BSD-3-Clause", "3-clause bsd": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0", "isc iscl": "ISC", "python foundation": "PSF-2.0", "unlicense unlicense": "Unlicense",
    "zpl 2.1": "ZPL-2.1", "bsd": "BSD", "apache": "Apache", "zope public": "ZPL",
}  # fmt: skip
"""What metadata and classifiers (after the last `` :: ``) write for the common permissive licences; the last three are families."""
_FILLERS = frozenset("the license licence version software".split())
"""Words that are not looked at in what is written there."""
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Licence:
    """What is known of a repository's licence.

    ``spdx`` is an SPDX id or expression, None when unknown; ``file`` the licence files at the top, joined by ``, ``;
    ``read_from`` is ``metadata`` or empty (in stores of earlier versions also ``file``, ``file and metadata``);
    ``is_copyleft`` False for a permissive licence, else None (earlier: True); ``note`` one sentence about doubt.
    """

    spdx: str | None
    file: str
    read_from: Annotated[str, Field(alias="from")]
    is_copyleft: StrictBool | None
    note: str = ""

    @property
    def restriction(self) -> str:
        """Why somebody must look at it before copies are passed on; empty where no more than a notice is asked for."""
        if self.spdx is None or (self.file and self.note):
            return self.note or "licence not known"
        return "" if is_permissive(self.spdx) else f"{self.spdx}, not among the permissive licences"

    def to_json(self) -> dict[str, Any]:
        """With the short keys ``spdx``, ``file``, ``from``, ``is_copyleft``, ``note``."""
        value: dict[str, Any] = _FORM.dump_python(self, by_alias=True)
        return value


_FORM = TypeAdapter(Licence)


def is_permissive(expression: str) -> bool:
    """Whether every licence of an SPDX expression asks for no more than a notice; what stands after WITH permits more."""
    words = re.sub(r"\bWITH\s+[^\s()]+|[()]", " ", expression).split()
    ids = {word.removesuffix("+") for word in words if word not in ("AND", "OR")}
    return bool(ids) and ids <= _PERMISSIVE


def read_licence(files: Mapping[str, bytes], metadata: Mapping[str, bytes] | None = None) -> Licence:
    """The licence that a repository's ``metadata`` (by path) declares, and the names of the licence files at its top."""
    names = sorted(name for name in files if is_licence_text(PurePosixPath(name)) and files[name].strip())
    file = ", ".join(names)
    read = Project(metadata or {})
    fields = read.strings("project.license", "project.license.text")
    classifiers = (line.strip() for text in read.strings("project.classifiers") for line in text.splitlines())
    meant = set(
        filter(None, map(_meant, (*fields, *(one for one in classifiers if one.startswith("License ::")))))
    )
    # The name of a family (BSD) counts only where no licence of that family is named.
    claims = sorted(one for one in meant if not any(other.startswith(f"{one}-") for other in meant))
    if len(claims) != 1 or not (spdx := _expression(claims[0])):
        note = f"look at {file}" if file else "no licence file"
        said = f"; the metadata says {' and '.join(claims)}" if claims else ""
        return Licence(None, file, "", None, note + said)
    note = "" if file else f"no licence file; the metadata says {spdx}"
    return Licence(spdx, file, "metadata", False if is_permissive(spdx) else None, note)


def _meant(text: str) -> str:
    """An SPDX id or expression, or the words themselves where they are those of no permissive licence."""
    words = text.strip().rpartition(" :: ")[2].strip()
    # Some write the whole text where the name belongs.
    if "\n" in words or len(words) > _LONGEST_NAME or words == "OSI Approved":
        return ""
    parts = (part.strip(".,") for part in re.split(r"[\s()/,]+", words.lower()))
    known = _WORDS.get(" ".join(part for part in parts if part and part not in _FILLERS))
    return known or _expression(words) or words


def _expression(words: str) -> str:
    """A well-formed SPDX expression in its usual spelling; empty for anything else."""
    try:
        return str(canonicalize_license_expression(words))
    except InvalidLicenseExpression:
        return ""
