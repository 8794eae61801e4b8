"""Under which licence a repository comes: the text of its licence file, its own metadata as a cross-check.

The file is what counts in law, and metadata is what people typed once; where the two
differ, or the text is that of no known licence, that is said and nothing is guessed. It is
a help for a person who decides what to redistribute, and no legal advice.
"""

from __future__ import annotations

import difflib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from composer_replication.sandbox.process_folder import process_folder
from composer_replication.tasks.intake.cache import sha256_of
from composer_replication.tasks.intake.licence_claims import read_claims
from composer_replication.tasks.intake.licence_expressions import is_copyleft, is_permissive
from composer_replication.tasks.intake.tree_rules import is_licence_text

_GRANT = re.compile(
    r"^(Permission is hereby granted|Permission to use, copy|Redistribution and use in|1\. This LICENSE AGREEMENT is between)",
    re.MULTILINE,
)
_BY_WORDS = {
    "e346226f724fe8824ec298b131141ac14247f6f4088234703d649df5d5cd25e7": "Apache-2.0",  # the terms, no appendix
    "c4d1db125e46bab84cbbe8b89d34ff0691ca15231a1a4d71277534b6da50fdc5": "Apache-2.0",  # these and the line of their end
    "a181c333030f65ebcf2eabeca3493225b6b03fce6907bdd3e59e7a8a37180fbd": "MIT-0",
    "05e3b8c258e576ea668d063908c94f3d0bdafe69119646de3bac796a34b6636e": "PSF-2.0",  # the agreement alone
    "cfaa637a20048a8eec658df885015ee621fe90c1535a951f9416754fc2b3f888": "PSF-2.0",  # all of Python 3.6
    "8d0f76a904d51952bb6b499b077f3d9d194d85bd10d476374fed7041ff5d6101": "PSF-2.0",  # of Python 3.8
    "561b6376472a31f5d4acc7a37c031b45fc02fa2897505c51697497f8f2b54d48": "PSF-2.0",  # of Python 3.10
}
"""Common texts that the table of ``identify`` lacks, by the sha256 of their words; see ``_words``."""
_TERMS = re.compile(
    r"\b(may|must|shall|only|not|terms|conditions|granted|permi\w+|commercial\w*|except\w*|exclu\w+|prohibit\w*|subject|unless"
    r"|provided|restrict\w*|under)\b",
    re.IGNORECASE,
)
"""Words that a list of authors does not hold: a text before the grant which has one may add a condition."""
_CONDITION = frozenset(
    "not no non shall must may only except excluding unless prohibited forbidden commercial sell restricted required".split()
)
_MIN_CONDITION_WORDS = 3


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

    @property
    def restriction(self) -> str:
        """Why somebody must look at it before copies are passed on; empty where no more than a notice is asked for."""
        if self.spdx is None:
            return self.note or "licence not known"
        if self.file and self.read_from == "metadata":
            return self.note  # an earlier version believed metadata beside a text that it did not know
        if self.is_copyleft:
            return f"{self.spdx}, copyleft"
        return "" if is_permissive(self.spdx) else f"{self.spdx}, not among the permissive licences"

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
    metadata. Where there is no text, metadata that speaks clearly is taken, and the note says so. A
    text that is not known may forbid what metadata allows: the licence is unknown then.

    Args:
        files: paths and bytes of the tree.
        metadata: those of the files that declare; without them only the text counts.
    """
    names = sorted(name for name in files if is_licence_text(PurePosixPath(name)) and files[name].strip())
    found = {name: _text_id(files[name]) for name in names}
    claims = read_claims(metadata or {})
    file = ", ".join(names)
    if names and all(found.values()):
        return _from_texts(file, sorted({str(spdx) for spdx in found.values()}), claims)
    if names:
        known = [spdx for spdx in found.values() if spdx]
        return _of_unknown_text(file, _first_unknown(found), known, claims)
    exact = sorted({ids[0] for ids in claims if len(ids) == 1})
    if len(exact) == 1 and all(_family(exact[0]) in map(_family, ids) for ids in claims):
        note = f"no licence file; the metadata says {exact[0]}"
        return Licence(exact[0], file, "metadata", is_copyleft(exact[0]), note)
    note = "no licence file" + (f"; the metadata says {_said(claims)}" if claims else "")
    return Licence(None, file, "", _worst(" or ".join(ids) for ids in claims), note)


def _of_unknown_text(file: str, unknown: str, known: Iterable[str], claims: list[tuple[str, ...]]) -> Licence:
    """No licence, since nobody has read that text; what the other texts are and the metadata claims is told."""
    texts = sorted(set(known))
    note = f"{unknown} is not the text of a known licence"
    note += f"; other files are {' and '.join(texts)}" if texts else ""
    note += f"; the metadata says {_said(claims)}" if claims else ""
    return Licence(None, file, "", _worst([*texts, *(" or ".join(ids) for ids in claims)]), note)


def _text_id(data: bytes) -> str | None:
    """The id of a licence text, by exact match or an edit distance below 5%."""
    from identify.identify import license_id

    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    with tempfile.TemporaryDirectory(prefix="licence-", dir=process_folder()) as folder:
        path = Path(folder) / "LICENSE"
        for variant in _variants(text):
            by_words = _BY_WORDS.get(sha256_of(_words(variant).encode()))
            if by_words is not None:
                return by_words
            path.write_text(variant, encoding="utf-8")
            spdx = license_id(str(path))
            if spdx is not None and not _adds_a_condition(text, spdx):
                return spdx
    return "Apache-2.0" if _is_apache_notice(text) else None


def _words(text: str) -> str:
    """The words of a text without years, numbers and marks; an address may be spelt with https."""
    found = re.findall(r"[^\W\d_]+", text.lower())
    return " ".join(word for word in found if word not in ("http", "https"))


def _is_apache_notice(text: str) -> bool:
    """Whether a text is, but for names and years, the notice that the Apache licence asks to be put on top of files."""
    from identify.vendor.licenses import LICENSES

    apache = " ".join(dict(LICENSES)["Apache-2.0"].split())
    notice = apache[
        apache.rindex("Licensed under the Apache") : apache.rindex("limitations under the License.")
    ]
    read = " ".join(line for line in text.splitlines() if not line.strip().lower().startswith("copyright"))
    return " ".join(read.split()).removesuffix("limitations under the License.") == notice


def _adds_a_condition(text: str, spdx: str) -> bool:
    """Whether words are added to a known text that a mere change of names does not bring.

    "The Software shall be used for Good, not Evil" is less than 5% of the MIT licence.
    """
    from identify.vendor.licenses import LICENSES

    known, read = (re.findall(r"[a-z0-9]+", words.lower()) for words in (dict(LICENSES)[spdx], text))
    changes = difflib.SequenceMatcher(None, known, read, autojunk=False).get_opcodes()
    added = [read[start:end] for kind, _, _, start, end in changes if kind in ("insert", "replace")]
    return any(len(run) >= _MIN_CONDITION_WORDS and _CONDITION.intersection(run) for run in added)


def _variants(text: str) -> Iterator[str]:
    """The text; the same with a line for each paragraph; that without names and title before it.

    The comparison leaves out lines that begin with "Copyright", and in a wrapped text "COPYRIGHT
    HOLDERS BE LIABLE …" may be such a line, so paragraphs are joined. What stands before the first
    words that grant something is left out only when it is made of names and a title.
    """
    yield text
    joined = "\n\n".join(" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    yield joined
    grant = _GRANT.search(joined)
    if grant is not None and not _TERMS.search(joined[: grant.start()]):
        yield joined[grant.start() :]


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
    """An id without its version's reach; the licence of Python goes by two names, with and without its history."""
    if spdx in ("Python-2.0", "Python-2.0.1"):
        return "PSF-2.0"
    return re.sub(r"(-only|-or-later|\+)$", "", spdx)


def _parts(expression: str) -> set[str]:
    words = re.sub(r"\bWITH\s+\S+", "", expression).replace("(", " ").replace(")", " ").split()
    return {_family(word) for word in words if word not in ("AND", "OR")}
