"""Licences against texts and metadata: equal ids agree, doubt is said, copyleft is found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest
from identify.vendor.licenses import LICENSES

from composer_replication.tasks.intake.licence_expressions import is_copyleft, is_permissive
from composer_replication.tasks.intake.licences import Licence, read_licence

TEXTS = dict(LICENSES)
NAMES = "Copyright (c) 2014 Ada Example\nBob Example\n\n"
PSF = """PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2
--------------------------------------------

1. This LICENSE AGREEMENT is between the Python Software Foundation
("PSF"), and the Individual or Organization ("Licensee") accessing and
otherwise using this software ("Python") in source or binary form and
its associated documentation.

2. Subject to the terms and conditions of this License Agreement, PSF hereby
grants Licensee a nonexclusive, royalty-free, world-wide license to reproduce,
analyze, test, perform and/or display publicly, prepare derivative works,
distribute, and otherwise use Python alone or in any derivative version,
provided, however, that PSF's License Agreement and PSF's notice of copyright,
i.e., "Copyright (c) 2001-2023 Python Software Foundation;
All Rights Reserved" are retained in Python alone or in any derivative version
prepared by Licensee.

3. In the event Licensee prepares a derivative work that is based on
or incorporates Python or any part thereof, and wants to make
the derivative work available to others as provided herein, then
Licensee hereby agrees to include in any such work a brief summary of
the changes made to Python.

4. PSF is making Python available to Licensee on an "AS IS"
basis.  PSF MAKES NO REPRESENTATIONS OR WARRANTIES, EXPRESS OR
IMPLIED.  BY WAY OF EXAMPLE, BUT NOT LIMITATION, PSF MAKES NO AND
DISCLAIMS ANY REPRESENTATION OR WARRANTY OF MERCHANTABILITY OR FITNESS
FOR ANY PARTICULAR PURPOSE OR THAT THE USE OF PYTHON WILL NOT
INFRINGE ANY THIRD PARTY RIGHTS.

5. PSF SHALL NOT BE LIABLE TO LICENSEE OR ANY OTHER USERS OF PYTHON
FOR ANY INCIDENTAL, SPECIAL, OR CONSEQUENTIAL DAMAGES OR LOSS AS
A RESULT OF MODIFYING, DISTRIBUTING, OR OTHERWISE USING PYTHON,
OR ANY DERIVATIVE THEREOF, EVEN IF ADVISED OF THE POSSIBILITY THEREOF.

6. This License Agreement will automatically terminate upon a material
breach of its terms and conditions.

7. Nothing in this License Agreement shall be deemed to create any
relationship of agency, partnership, or joint venture between PSF and
Licensee.  This License Agreement does not grant permission to use PSF
trademarks or trade name in a trademark sense to endorse or promote
products or services of Licensee, or any third party.

8. By copying, installing or otherwise using Python, Licensee
agrees to be bound by the terms and conditions of this License
Agreement.
"""
MIT = TEXTS["MIT"].replace("[year] [fullname]", "2014 Ada Example")


def pkg_info(*lines: str) -> dict[str, bytes]:
    return {"PKG-INFO": "\n".join(("Metadata-Version: 2.4", "Name: x", *lines, "", "body")).encode()}


def read(text: str, metadata: Mapping[str, bytes] | None = None, name: str = "LICENSE") -> Licence:
    return read_licence({name: text.encode(), "x.py": b""}, metadata)


@pytest.mark.parametrize(
    "spdx", ["MIT", "BSD-3-Clause", "BSD-2-Clause", "Apache-2.0", "ISC", "GPL-3.0", "MPL-2.0"]
)
def test_a_text_alone_is_an_answer(spdx: str) -> None:
    found = read(TEXTS[spdx])
    assert (found.spdx, found.file, found.read_from, found.note) == (spdx, "LICENSE", "file", "")
    assert found.is_copyleft is (spdx in ("GPL-3.0", "MPL-2.0"))


@pytest.mark.parametrize(
    "text",
    [
        MIT.replace("MIT License", "The MIT License (MIT)"),
        MIT.replace("\n", "\r\n"),
        NAMES + MIT[MIT.index("Permission is") :],
        "(c) 2001-2026\n  " + "\n  ".join(f"Author Number {n} <n{n}@example.org>" for n in range(20)) + "\n\n"
        + MIT[MIT.index("Permission is") :],
        "\ufeff" + MIT,
        MIT.replace("COPYRIGHT HOLDERS BE LIABLE", "\nCOPYRIGHT HOLDERS BE LIABLE"),
        MIT.replace("OR\nCOPYRIGHT", "OR COPYRIGHT").replace("AUTHORS OR COPYRIGHT", "AUTHORS OR\nCOPYRIGHT"),
    ],
)  # fmt: skip
def test_names_titles_and_line_breaks_do_not_matter(text: str) -> None:
    assert read(text).spdx == "MIT"


def test_an_old_encoding() -> None:
    text = MIT.replace("Ada", "Adä").encode("latin-1")
    assert read_licence({"LICENSE": text}).spdx == "MIT"


@pytest.mark.parametrize(
    "text",
    [
        "All rights reserved.\n",
        "This software is for non-commercial use only; you may not sell it.\n\n" * 2
        + MIT[MIT.index("Permission is") :],
        MIT + "\nThe Software shall be used for Good, not Evil, by small companies only.\n" * 2,
        MIT.replace(
            "\nTHE SOFTWARE IS", "\nThe Software shall be used for Good, not Evil.\n\nTHE SOFTWARE IS"
        ),
        MIT + "Not for sale.\n",
        TEXTS["Apache-2.0"]
        + "\nCommons Clause: the grant of rights does not include the right to sell the Software.\n",
        TEXTS["BSD-3-Clause"] + "\n" + TEXTS["MIT"],
        "see https://example.org/licence\n",
    ],
)
def test_a_text_with_conditions_of_its_own_is_unknown(text: str) -> None:
    found = read(text)
    assert (found.spdx, found.is_copyleft, found.read_from) == (None, None, "")
    assert found.note == "LICENSE is not the text of a known licence"


@pytest.mark.parametrize(
    "metadata",
    [
        pkg_info("License-Expression: MIT"),
        pkg_info("License: MIT"),
        pkg_info("Classifier: License :: OSI Approved :: MIT License"),
        {"pyproject.toml": b'[project]\nlicense = "MIT"\n'},
        {"pyproject.toml": b'[project]\nlicense = {text = "MIT License"}\n'},
        {"pyproject.toml": b'[tool.poetry]\nlicense = "MIT"\n'},
        {"setup.cfg": b"[metadata]\nlicense = MIT\nclassifiers =\n    License :: OSI Approved :: MIT License\n"},
        {"setup.py": b"from setuptools import setup\nsetup(name='x', license='MIT', classifiers=['License :: OSI Approved :: MIT License'])\n"},
    ],
)  # fmt: skip
def test_metadata_that_agrees_is_said(metadata: dict[str, bytes]) -> None:
    assert read(MIT, metadata) == Licence("MIT", "LICENSE", "file and metadata", False)
    other = read(TEXTS["Apache-2.0"], metadata)
    assert (other.spdx, other.read_from, other.is_copyleft) == (None, "", None)
    assert other.note == "the text is Apache-2.0, the metadata says MIT"


APACHE_NOTICE = """Copyright (c) 2014-2017, A Foundation

Licensed under the Apache License, Version 2.0 (the "License");
you may not use this file except in compliance with the License.
You may obtain a copy of the License at

    http://www.apache.org/licenses/LICENSE-2.0

Unless required by applicable law or agreed to in writing, software
distributed under the License is distributed on an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
See the License for the specific language governing permissions and
limitations under the License.
"""


@pytest.mark.parametrize(
    ("text", "spdx"),
    [
        (APACHE_NOTICE, "Apache-2.0"),
        (f"{APACHE_NOTICE}\nIt may not be sold.\n", None),
        (APACHE_NOTICE.replace("either express", "express"), None),
    ],
)
def test_the_notice_of_the_apache_licence_stands_for_it(text: str, spdx: str | None) -> None:
    assert read_licence({"LICENSE": text.encode()}).spdx == spdx


def test_a_disagreement_with_copyleft_is_taken_for_copyleft() -> None:
    for text, said in ((MIT, "GPL-3.0-or-later"), (TEXTS["GPL-3.0"], "MIT")):
        found = read(text, pkg_info(f"License-Expression: {said}"))
        assert (found.spdx, found.is_copyleft) == (None, True)
        assert said in found.note


def test_metadata_says_whether_later_versions_are_allowed() -> None:
    found = read(TEXTS["GPL-2.0"], pkg_info("License-Expression: GPL-2.0-or-later"), name="COPYING")
    assert found == Licence("GPL-2.0-or-later", "COPYING", "file and metadata", True)
    classifier = "Classifier: License :: OSI Approved :: GNU General Public License v2 or later (GPLv2+)"
    assert read(TEXTS["GPL-2.0"], pkg_info("License: GPL", classifier)).spdx == "GPL-2.0-or-later"


def test_a_vague_classifier_agrees_and_does_not_decide() -> None:
    vague = pkg_info("License: BSD", "Classifier: License :: OSI Approved :: BSD License")
    assert read(TEXTS["BSD-3-Clause"], vague) == Licence(
        "BSD-3-Clause", "LICENSE", "file and metadata", False
    )
    found = read("Do what is right.\n", vague)
    assert found.spdx is None
    assert "BSD-2-Clause or BSD-3-Clause" in found.note
    assert read(MIT, vague).spdx is None


def test_metadata_alone_is_said_to_be_alone() -> None:
    found = read_licence({"x.py": b""}, pkg_info("License-Expression: ZPL-2.1"))
    assert (found.spdx, found.read_from, found.is_copyleft) == ("ZPL-2.1", "metadata", False)
    assert (found.note, found.restriction) == ("no licence file; the metadata says ZPL-2.1", "")
    nothing = read_licence({"x.py": b""}, pkg_info("License-Expression: AGPL-3.0-only"))
    assert (nothing.file, nothing.is_copyleft) == ("", True)
    assert nothing.note == "no licence file; the metadata says AGPL-3.0-only"


@pytest.mark.parametrize("said", ["MIT", "LicenseRef-Proprietary", "MPL-2.0"])
def test_an_unknown_text_beats_the_metadata(said: str) -> None:
    found = read("All rights reserved. Copying is prohibited.\n", pkg_info(f"License-Expression: {said}"))
    assert (found.spdx, found.read_from) == (None, "")
    assert found.note == f"LICENSE is not the text of a known licence; the metadata says {said}"
    assert found.restriction == found.note
    assert found.is_copyleft is (True if said == "MPL-2.0" else None)


def test_what_an_earlier_version_took_from_the_metadata_is_not_believed() -> None:
    kept = Licence("MIT", "LICENSE", "metadata", False, "LICENSE is not the text of a known licence")
    assert kept.restriction == kept.note


@pytest.mark.parametrize(
    "metadata",
    [
        pkg_info("Classifier: License :: Other/Proprietary License"),
        pkg_info("Classifier: License :: Free for non-commercial use"),
        pkg_info("License: Proprietary"),
        pkg_info("License: UNLICENSED"),
        pkg_info("License-Expression: CC-BY-NC-4.0"),
    ],
)
def test_metadata_that_restricts_a_free_text_is_a_contradiction(metadata: dict[str, bytes]) -> None:
    found = read(MIT, metadata)
    assert found.spdx is None
    assert found.restriction.startswith("the text is MIT, the metadata says ")


def test_metadata_that_contradicts_itself_is_unknown() -> None:
    both = pkg_info("License: MIT", "Classifier: License :: OSI Approved :: ISC License (ISCL)")
    assert read("text\n", both).spdx is None
    assert read(MIT, both).spdx is None


def test_nothing_at_all() -> None:
    assert read_licence({"x.py": b"", "LICENSE": b"  \n"}) == Licence(None, "", "", None, "no licence file")


def test_two_texts_need_an_expression() -> None:
    files = {"LICENSE-MIT": MIT.encode(), "LICENSE.APACHE": TEXTS["Apache-2.0"].encode()}
    found = read_licence(files)
    assert found.spdx is None
    assert "Apache-2.0, MIT" in found.note
    said = read_licence(files, pkg_info("License-Expression: MIT OR Apache-2.0"))
    assert (said.spdx, said.file) == ("MIT OR Apache-2.0", "LICENSE-MIT, LICENSE.APACHE")


def test_the_lesser_licence_brings_the_general_one_along() -> None:
    files = {"COPYING": TEXTS["GPL-3.0"].encode(), "COPYING.LESSER": TEXTS["LGPL-3.0"].encode()}
    assert read_licence(files).spdx == "LGPL-3.0"


def test_files_below_the_top_are_those_of_others() -> None:
    assert (
        read_licence({"x/vendored/LICENSE": TEXTS["GPL-3.0"].encode(), "License.txt": MIT.encode()}).spdx
        == "MIT"
    )


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", False), ("Apache-2.0 WITH LLVM-exception", False), ("ZPL-2.1", False), ("CC-BY-4.0", False),
        ("GPL-2.0-only WITH Classpath-exception-2.0", True), ("LGPL-2.1", True), ("AGPL-3.0-only", True),
        ("MPL-2.0", True), ("CC-BY-SA-4.0", True), ("MIT OR GPL-3.0-only", False), ("GPL-2.0-only OR GPL-3.0-only", True),
        ("MIT AND GPL-3.0-only", True), ("(MIT OR GPL-3.0-only) AND ISC", False), ("(MIT AND MPL-2.0) OR EPL-2.0", True),
        ("MIT AND (ISC OR MPL-2.0)", False), ("", False), ("(MIT", False),
    ],
)  # fmt: skip
def test_copyleft_of_an_expression(expression: str, expected: bool) -> None:
    assert is_copyleft(expression) is expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True), ("0BSD", True), ("Apache-2.0+", True), ("PSF-2.0", True), ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-only WITH GCC-exception-3.1", False), ("LGPL-2.1", False), ("MPL-2.0", False), ("CC-BY-NC-4.0", False),
        ("CC-BY-ND-4.0", False), ("CC-BY-NC-ND-4.0", False), ("BUSL-1.1", False), ("PolyForm-Noncommercial-1.0.0", False),
        ("Elastic-2.0", False), ("Hippocratic-2.1", False), ("JSON", False), ("SSPL-1.0", False),
        ("BSD-3-Clause-No-Nuclear-License", False), ("LicenseRef-Proprietary", False), ("LicenseRef-MIT", False),
        ("MIT OR GPL-3.0-only", True), ("LicenseRef-Proprietary OR MIT", True), ("MIT AND CC-BY-NC-4.0", False),
        ("MIT AND Apache-2.0", True), ("GPL-2.0-only OR MPL-2.0", False), ("MIT AND (GPL-3.0-only OR ISC)", True),
        ("JSON OR MIT AND GPL-3.0-only", False), ("(JSON OR MIT) AND Zlib", True), ("", False),
    ],
)  # fmt: skip
def test_what_asks_for_no_more_than_a_notice(expression: str, expected: bool) -> None:
    assert is_permissive(expression) is expected
    assert not (is_permissive(expression) and is_copyleft(expression))


def test_texts_that_the_table_lacks() -> None:
    terms = TEXTS["Apache-2.0"][: TEXTS["Apache-2.0"].index("END OF TERMS")]
    for text in (terms, f"{terms}END OF TERMS AND CONDITIONS\n", terms.replace("http:", "https:")):
        assert read(text).spdx == "Apache-2.0"
        assert read(f"{text}\nIt may not be sold.\n").spdx is None
    grant, rest = MIT[: MIT.index(", subject to")], MIT[MIT.index("THE SOFTWARE IS PROVIDED") :]
    assert read(f"{grant}.\n\n{rest}".replace("MIT License", "MIT No Attribution")).spdx == "MIT-0"
    assert read(PSF).spdx == "PSF-2.0"
    assert read(PSF.replace("2023", "2023, 2024")).spdx == "PSF-2.0"
    assert read(PSF.replace("royalty-free, ", "")).spdx is None


@pytest.mark.parametrize("said", ["PSF-2.0", "Python-2.0"])
def test_the_licence_of_python_goes_by_two_names(said: str) -> None:
    found = read(PSF, pkg_info(f"License-Expression: {said}"))
    assert (found.spdx, found.read_from, found.restriction) == (said, "file and metadata", "")


def test_every_known_text_is_filed() -> None:
    copyleft = (
        "AGPL-3.0 CC-BY-SA-4.0 EPL-1.0 EPL-2.0 EUPL-1.1 EUPL-1.2 GPL-2.0 GPL-3.0 LGPL-2.1 LGPL-3.0"
        " LPPL-1.3c MPL-2.0 MS-RL OFL-1.1 OSL-3.0"
    )
    assert {spdx for spdx in TEXTS if is_copyleft(spdx)} == set(copyleft.split())
    assert {spdx for spdx in TEXTS if not is_permissive(spdx)} == {*copyleft.split(), "Artistic-2.0"}


@pytest.mark.parametrize(
    "text",
    [
        b"project = 3\n", b"tool = 'x'\n", b"[tool]\npoetry = []\n", b"[project]\nclassifiers = 3\nlicense = 4\n",
        b"[project]\nlicense = {file = 3}\nclassifiers = [[1], 2]\n", b"\xff", b"[",
    ],
)  # fmt: skip
def test_metadata_of_another_shape_says_nothing(text: bytes) -> None:
    assert read(MIT, {"pyproject.toml": text, "setup.cfg": text}).read_from == "file"


def test_setup_py_is_read_and_not_run(tmp_path) -> None:
    marker = tmp_path / "marker"
    setup = f"open({str(marker)!r}, 'w')\nfrom setuptools import setup\nsetup(license=f(), classifiers=f())\n"
    assert read(MIT, {"setup.py": setup.encode()}).read_from == "file"
    assert read(MIT, {"setup.py": b"def ("}).read_from == "file"
    assert not marker.exists()


def test_its_json_comes_back() -> None:
    for found in (read(MIT), read("unknown\n"), read(TEXTS["GPL-3.0"], pkg_info("License: GPLv3+"))):
        text = json.dumps(found.to_json())
        assert Licence.from_json(json.loads(text)) == found
        assert set(json.loads(text)) == {"spdx", "file", "from", "is_copyleft", "note"}
    for broken in ({"spdx": 3}, {"is_copyleft": "yes"}, {"file": None}):
        with pytest.raises(TypeError):
            Licence.from_json({**read(MIT).to_json(), **broken})


def test_no_import_before_it_is_needed() -> None:
    code = "import sys, composer_replication.tasks.intake.licences; sys.exit('ukkonen' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_expression_that_nobody_writes_is_not_permissive() -> None:
    endless = "(" * 5000 + "MIT"
    assert not is_permissive(endless)
    assert not is_copyleft(endless)
