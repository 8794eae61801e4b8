"""A licence is what metadata says: permissive ids are taken, everything else is to be looked at."""

from __future__ import annotations

import json

import pytest
from pydantic import TypeAdapter

from composer_replication.tasks.build import restricted_licences
from composer_replication.tasks.intake.licences import Licence, is_permissive, read_licence

read_form = TypeAdapter(Licence).validate_python
FILES = {"LICENSE": b"some text", "x.py": b""}


def pkg_info(*lines: str) -> dict[str, bytes]:
    return {"PKG-INFO": "\n".join(("Metadata-Version: 2.4", "Name: x", *lines, "", "body")).encode()}


@pytest.mark.parametrize(
    "metadata",
    [
        pkg_info("License-Expression: MIT"),
        pkg_info("License: mit"),
        pkg_info("Classifier: License :: OSI Approved", "Classifier: License :: OSI Approved :: MIT License"),
        pkg_info("License: " + "whole text " * 20, "Classifier: License :: OSI Approved :: MIT License"),
        {"pyproject.toml": b'[project]\nlicense = "MIT"\n'},
        {"pyproject.toml": b'[project]\nlicense = {text = "MIT License"}\n'},
        {"pyproject.toml": b'[tool.poetry]\nlicense = "MIT"\n'},
        {"setup.cfg": b"[metadata]\nlicense = MIT\nclassifiers =\n    License :: OSI Approved :: MIT License\n"},
        {"setup.py": b"from setuptools import setup\nsetup(name='x', license='MIT', classifiers=['License :: OSI Approved :: MIT License'])\n"},
    ],
)  # fmt: skip
def test_metadata_of_every_kind_is_read(metadata: dict[str, bytes]) -> None:
    found = read_licence(FILES, metadata)
    assert found == Licence("MIT", "LICENSE", "metadata", False)
    assert found.restriction == ""


def test_metadata_without_a_licence_file_is_named_as_such_and_a_vague_classifier_agrees() -> None:
    found = read_licence({"x.py": b""}, pkg_info("License-Expression: ZPL-2.1"))
    assert (found.spdx, found.is_copyleft, found.restriction) == ("ZPL-2.1", False, "")
    assert found.note == "no licence file; the metadata says ZPL-2.1"
    vague = "Classifier: License :: OSI Approved :: BSD License"
    assert read_licence(FILES, pkg_info("License: BSD-3-Clause", vague)).spdx == "BSD-3-Clause"


@pytest.mark.parametrize(
    ("lines", "note"),
    [
        ([], "look at LICENSE"),
        (["License: BSD"], "look at LICENSE; the metadata says BSD"),
        (["License: GPLv3+"], "look at LICENSE; the metadata says GPLv3+"),
        (["License: UNLICENSED"], "look at LICENSE; the metadata says UNLICENSED"),
        (["License: see LICENSE"], "look at LICENSE; the metadata says see LICENSE"),
        (
            ["License: MIT", "Classifier: License :: Other/Proprietary License"],
            "look at LICENSE; the metadata says MIT and Other/Proprietary License",
        ),
        (
            ["License: MIT", "Classifier: License :: OSI Approved :: ISC License (ISCL)"],
            "look at LICENSE; the metadata says ISC and MIT",
        ),
    ],
)  # fmt: skip
def test_doubt_is_to_be_looked_at(lines: list[str], note: str) -> None:
    found = read_licence(FILES, pkg_info(*lines))
    assert (found.spdx, found.file, found.read_from, found.is_copyleft) == (None, "LICENSE", "", None)
    assert found.note == found.restriction == note


def test_files_at_the_top_are_named_and_no_others() -> None:
    files = {"LICENSE-MIT": b"a", "license.apache": b"b", "COPYING": b" \n", "x/vendored/LICENSE": b"c"}
    assert read_licence(files).file == "LICENSE-MIT, license.apache"
    assert read_licence({"LICENSE": b"  \n"}) == Licence(None, "", "", None, "no licence file")


def test_what_an_earlier_version_wrote_is_read() -> None:
    by_text = {"spdx": "GPL-3.0", "file": "COPYING", "from": "file", "is_copyleft": True, "note": ""}
    assert read_form(by_text).restriction == "GPL-3.0, not among the permissive licences"
    believed = Licence("MIT", "LICENSE", "metadata", False, "LICENSE is not the text of a known licence")
    assert believed.restriction == believed.note


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True), ("Apache-2.0+", True), ("Apache-2.0 WITH LLVM-exception", True), ("MPL-2.0", False),
        ("GPL-3.0-only WITH GCC-exception-3.1", False), ("LicenseRef-MIT", False), ("MIT OR GPL-3.0-only", False),
        ("MIT AND CC-BY-NC-4.0", False), ("MIT AND Apache-2.0", True), ("JSON OR MIT AND GPL-3.0-only", False),
        ("(ISC OR MIT) AND Zlib", True), ("(JSON OR MIT) AND Zlib", False), ("", False),
    ],
)  # fmt: skip
def test_what_asks_for_no_more_than_a_notice(expression: str, expected: bool) -> None:
    assert is_permissive(expression) is expected


@pytest.mark.parametrize(
    "text",
    [
        b"project = 3\n", b"tool = 'x'\n", b"[tool]\npoetry = []\n", b"[project]\nclassifiers = 3\nlicense = 4\n",
        b"[project]\nlicense = {file = 3}\nclassifiers = [[1], 2]\n", b"\xff", b"[",
        b'[project]\nlicense = {text = """Permission is\nhereby granted"""}\n',  # a whole text in the place of a name
    ],
)  # fmt: skip
def test_metadata_of_another_shape_says_nothing(text: bytes) -> None:
    assert read_licence(FILES, {"pyproject.toml": text, "setup.cfg": text}).note == "look at LICENSE"


def test_its_json_comes_back() -> None:
    found = read_licence(FILES, pkg_info("License: MIT"))
    text = json.dumps(found.to_json())
    assert read_form(json.loads(text)) == found
    assert set(json.loads(text)) == {"spdx", "file", "from", "is_copyleft", "note"}
    for broken in ({"spdx": 3}, {"is_copyleft": "yes"}, {"file": None}):
        with pytest.raises(ValueError, match=next(iter(broken))):
            read_form({**found.to_json(), **broken})


# --- what a build says of them ---


def test_what_is_not_permissive_is_named() -> None:
    licences = {
        "free==1": Licence("MIT", "LICENSE", "file", False),
        "bought==1": Licence("LicenseRef-Proprietary", "", "metadata", False, "no licence file"),
        "either==1": Licence("MIT OR Apache-2.0", "LICENSE", "file and metadata", False),
        "unsold==1": Licence("CC-BY-NC-4.0", "LICENSE", "file and metadata", False),
        "left==1": Licence("GPL-3.0-only", "COPYING", "file", True),
        "odd==1": Licence(None, "LICENSE", "", None, "LICENSE is odd"),
        "bare==1": Licence(None, "", "", None),
    }
    assert restricted_licences(licences) == {
        "bare==1": "licence not known",
        "bought==1": "LicenseRef-Proprietary, not among the permissive licences",
        "left==1": "GPL-3.0-only, not among the permissive licences",
        "odd==1": "LICENSE is odd",
        "unsold==1": "CC-BY-NC-4.0, not among the permissive licences",
    }
