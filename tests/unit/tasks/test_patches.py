"""A patch written here and applied by git gives the other tree, to the byte; a bad one is refused."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer_replication.errors import InputError, MissingError
from composer_replication.tasks.patches import (
    MAX_READABLE_BYTES,
    MAX_READABLE_CHARACTERS,
    apply_patch,
    make_patch,
    readable_patch,
)

NAMES = st.sampled_from(
    "a.py|b c.py|pkg/mod.py|pkg/ünïcode ✓.txt|x b/x.py|.gitattributes|deep/er/still/f|-dash".split("|")
)
LINES = st.sampled_from("x = 1||def f():|    return 'ü✓'|\ttab|--- a|+++ b|\\ No|a\rb".split("|"))
ENDS = st.sampled_from(["\n", "\r\n"])


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """A file of few different lines, so that two files share some; often without a last newline."""
    lines = draw(st.lists(st.tuples(LINES, ENDS), max_size=20))
    text = "".join(line + end for line, end in lines)
    return (text if draw(st.booleans()) else text.rstrip("\r\n")).encode()


TREES = st.dictionaries(
    NAMES, texts() | st.text().map(lambda text: text.encode("utf-8", "replace")), max_size=5
)


@pytest.mark.long
@given(old=TREES, new=TREES)
@settings(max_examples=150, deadline=None)
def test_the_patch_of_two_trees_turns_one_into_the_other(
    old: dict[str, bytes], new: dict[str, bytes]
) -> None:
    assert apply_patch(old, make_patch(old, new)) == new


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_block_cut_out_of_repeating_lines_comes_back(data: st.DataObject) -> None:
    """Many equal lines around the gap: the end of a hunk must not be paired with earlier lines."""
    repeating = st.sampled_from([b"\n", b"\n", b"class A:\n", b"    x\n", b"    return 1\n"])
    before, cut, after = (data.draw(st.lists(repeating, max_size=12)) for _ in range(3))
    stub = data.draw(st.lists(repeating, max_size=2))
    broken, whole = ({"f.py": b"".join(before + middle + after)} for middle in (stub, cut))
    assert apply_patch(broken, make_patch(broken, whole)) == whole


def test_the_text_is_the_one_that_git_writes(tmp_path: Path) -> None:
    """Written down by hand: hunk ranges, headers, the tab after a name with a space."""
    assert (make_patch({"a": b"x"}, {"a": b"x"}), apply_patch({"a": b"x"}, " \n")) == ("", {"a": b"x"})
    old = {"a b.py": b"1\n2\n3\n4\n5\n6\n7\n8\n", "gone": b"x", "same": b"s\n"}
    new = {"a b.py": b"1\n2\n3\n4\nfive\n6\n7\n8\n", "empty": b"", "same": b"s\n"}
    assert make_patch(old, new) == (
        "diff --git a/a b.py b/a b.py\n"
        "--- a/a b.py\t\n+++ b/a b.py\t\n"
        "@@ -2,7 +2,7 @@\n 2\n 3\n 4\n-5\n+five\n 6\n 7\n 8\n"
        "diff --git a/empty b/empty\nnew file mode 100644\n"
        "diff --git a/gone b/gone\ndeleted file mode 100644\n"
        "--- a/gone\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\\ No newline at end of file\n"
    )


def test_a_patch_of_git_diff_applies(tmp_path: Path) -> None:
    """The other way round: git writes, with renames, and we read."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    text = "".join(f"line {number}\n" for number in range(20))
    (tmp_path / "old" / "a.py").write_text(text)
    (tmp_path / "new" / "b.py").write_text(text.replace("line 7", "line seven"))
    words = ["git", "diff", "--no-index", "-M", "old", "new"]
    patch = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    for folder in ("old/", "new/"):
        patch = patch.replace(f"/{folder}", "/").replace(f" {folder}", " ")
    assert "rename from" in patch
    renamed = {"b.py": text.replace("line 7", "line seven").encode()}
    assert apply_patch({"a.py": text.encode()}, patch) == renamed


def test_attributes_and_settings_of_the_tree_or_user_change_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitconfig").write_text("[core]\n\tautocrlf = true\n[apply]\n\twhitespace = fix\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "apply.whitespace")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "error-all")
    old = {".gitattributes": b"*.py text eol=crlf ident\n", "a.py": b"x\n$Id$\ny \n"}
    new = {**old, "a.py": b"x\r\n$Id$\nz  \n\n\n"}
    assert apply_patch(old, make_patch(old, new)) == new


NEW_FILE = "diff --git a/{0} b/{0}\nnew file mode {1}\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+x\n"


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (make_patch({"a": b"other\n"}, {"a": b"new\n"}), "does not apply, patch failed: a:1"),
        ("just words\n", "No valid patches"),
        (NEW_FILE.format("../evil", "100644"), "invalid path '../evil'"),
        (NEW_FILE.format(".git/hooks/x", "100644"), "invalid path"),
        ("--- /dev/null\n+++ b//etc/evil\n@@ -0,0 +1 @@\n+x\n", "invalid path '/etc/evil'"),
        (
            "diff --git a/a b/a\nindex 1..2 100644\nBinary files a/a and b/a differ\n",
            "cannot apply binary patch",
        ),
        (make_patch({}, {"a": b"twice\n"}), "already exists"),
        (make_patch({"a": b"1\n"}, {"a": b"2\n"}) + make_patch({"b": b"1\n"}, {}), "does not apply"),
    ],
)
def test_a_bad_patch_is_refused(patch: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        apply_patch({"a": b"1\n"}, patch)
    assert caught.value.code == "CR0446"
    assert said in caught.value.message


def test_a_link_is_its_text_and_a_submodule_nothing(tmp_path: Path) -> None:
    link = "diff --git a/link b/link\nnew file mode 120000\n--- /dev/null\n+++ b/link\n@@ -0,0 +1 @@\n+/etc/passwd\n"
    commit = f"Subproject commit {'0' * 40}"
    sub = (
        f"diff --git a/sub b/sub\nnew file mode 160000\n--- /dev/null\n+++ b/sub\n@@ -0,0 +1 @@\n+{commit}\n"
    )
    assert apply_patch({"a": b"1\n"}, link + sub) == {"a": b"1\n", "link": b"/etc/passwd\n"}


def test_an_absolute_path_lands_inside() -> None:
    """Git takes the first part away, which is the one before the first slash."""
    assert apply_patch({}, "--- /dev/null\n+++ /etc/evil\n@@ -0,0 +1 @@\n+x\n") == {"etc/evil": b"x\n"}
    assert not Path("/etc/evil").exists()


@pytest.mark.parametrize(
    "path", ["/abs", "../up", "a/../b", "", "a//b", ".git/config", "a/.GIT/x", "nul\0", "\udcff"]
)
def test_a_path_that_leaves_the_tree_is_refused(path: str) -> None:
    for act in (lambda: make_patch({}, {path: b"x"}), lambda: apply_patch({path: b"x"}, "x")):
        with pytest.raises(InputError, match="CR0446"):
            act()


@pytest.mark.parametrize(
    "path", [" lead.py", "trail ", 'na"me.py', "back\\slash.py", "tab\there.py", "new\nline.py"]
)
def test_a_name_that_git_would_quote_stays_in_the_tree_and_is_in_no_patch(path: str) -> None:
    patch = make_patch({"a": b"1\n"}, {"a": b"2\n"})
    assert apply_patch({path: b"1\n", "a": b"1\n"}, patch) == {path: b"1\n", "a": b"2\n"}
    with pytest.raises(InputError, match=r"CR0446.*the name holds signs"):
        make_patch({}, {path: b"x\n"})
    assert "the name holds signs" in readable_patch({}, {path: b"x\n"})


def test_bytes_that_are_no_text_are_refused_unless_they_stay() -> None:
    binary = {"a.bin": b"\xff\xfe\n"}
    assert make_patch(binary, {**binary, "b": b""})
    with pytest.raises(InputError, match="not UTF-8 text") as caught:
        make_patch({}, binary)
    assert caught.value.where == "a.bin"


def test_without_git_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="CR0440"):
        apply_patch({}, make_patch({}, {"a": b"x"}))


def test_a_patch_for_a_person_refuses_nothing() -> None:
    old = {"a.py": b"x = 1\n", "same.py": b"y\n", "binary": b"\xff"}
    new = {"a.py": b"x = 2\n", "same.py": b"y\n", "long.py": b"z\n" * MAX_READABLE_BYTES, "../out": b"1\n"}
    patch = readable_patch(old, new)
    assert "-x = 1\n+x = 2\n" in patch
    assert "'binary': the file is not UTF-8 text" in patch
    assert "'long.py': the file is too long for a diff.\n" in patch
    assert "'../out': the path leaves the tree" in patch
    assert "same.py" not in patch
    lines = {"a.py": b"".join(b"%d\n" % number for number in range(9_000))}
    assert len(readable_patch({}, lines)) == MAX_READABLE_CHARACTERS
