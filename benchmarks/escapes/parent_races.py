"""What the parent does with a tree in hostile hands: reads, writes, snapshots, archives."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from contextlib import suppress

from benchmarks.escapes.attempt import Attempt, Outcome, any_of, family
from benchmarks.escapes.drives import Stage, before, beside, then
from benchmarks.escapes.judges import changed, secret, survivor
from benchmarks.escapes.scene import Scene
from composer_replication.errors import SandboxFileError
from composer_replication.sandbox.pods.tree_transfer import UnsafeTreeError, unpack_tree

_FLIP_FILE = """
end = time.monotonic() + 1.6
while time.monotonic() < end:
    os.symlink(TOLD[{told!r}], 'next')
    os.rename('next', 'flip')
    write('next', b'own')
    os.rename('next', 'flip')
"""
_FLIP_FOLDER = """
os.makedirs('spot/names')
for name in ('secret.txt', 'target.txt', 'names/own'):
    write('spot/' + name, b'own')
os.symlink(TOLD['outside'], 'other')
end = time.monotonic() + 1.6
while time.monotonic() < end:
    call(316, -100, text('spot'), -100, text('other'), 2)
"""
_MAKE_TAR = """
import io, tarfile
archive = tarfile.open('a.tar', 'w')
def put(name, data=b'changed', **fields):
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    for field, value in fields.items():
        setattr(entry, field, value)
    archive.addfile(entry, io.BytesIO(data))
{body}
archive.close()
"""


def _reads(path: str) -> Callable[[Stage], None]:
    def action(stage: Stage) -> None:
        stage.outcome.said += stage.sandbox.read_file(path)

    return action


def _writes(path: str) -> Callable[[Stage], None]:
    def action(stage: Stage) -> None:
        stage.sandbox.write_file(path, b"by the parent")

    return action


def _lists(path: str) -> Callable[[Stage], None]:
    def action(stage: Stage) -> None:
        names = " ".join(entry.path for entry in stage.sandbox.list_files(path))
        stage.outcome.said += names.encode(errors="replace")

    return action


def _snapshot(stage: Stage) -> None:
    stage.outcome.notes["snapshot"] = stage.sandbox.snapshot()


def _restore(stage: Stage) -> None:
    stage.sandbox.restore(stage.outcome.notes["snapshot"])


def _both(stage: Stage) -> None:
    _snapshot(stage)
    _restore(stage)


def _without_link(stage: Stage) -> None:
    """What a link led to must not be in the copy."""
    _snapshot(stage)
    stage.run(["/bin/rm", "-f", "new"])
    _restore(stage)


def _holding(stage: Stage) -> None:
    """The parent has the secret open under a number that it would find in its own ``/proc/self``."""
    held = os.open(stage.scene.outside / "secret.txt", os.O_RDONLY)
    try:
        stage.run(stage.command(held=held))
        with suppress(SandboxFileError):
            stage.outcome.said += stage.sandbox.read_file("new")
    finally:
        os.close(held)


def _unpacks(stage: Stage) -> None:
    """The parent unpacks an archive that was made inside."""
    data = io.BytesIO(stage.sandbox.read_file("a.tar"))
    place = stage.scene.root / "work" / "unpacked"
    place.mkdir()
    if stage.backend.name == "control":
        with tarfile.open(fileobj=data) as archive, suppress(tarfile.TarError):
            if hasattr(tarfile, "fully_trusted_filter"):  # from 3.11.4 on
                archive.extraction_filter = tarfile.fully_trusted_filter
            archive.extractall(place)
    else:
        with suppress(UnsafeTreeError):
            unpack_tree(data, place)
    for path in place.rglob("*"):
        mode = path.lstat().st_mode
        if mode & (stat.S_ISUID | stat.S_ISGID) and stat.S_ISREG(mode):
            stage.outcome.notes["privileged"] = "a setuid file was unpacked"
        if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
            stage.outcome.notes["privileged"] = "a device was unpacked"
        with suppress(OSError):
            if stat.S_ISREG(mode):
                stage.outcome.said += path.read_bytes()[:4096]


def _privileged(_: Scene, outcome: Outcome) -> str:
    return str(outcome.notes.get("privileged", ""))


def _tar(body: str) -> str:
    return _MAKE_TAR.format(body=body)


_TARGET = "'../../outside/target.txt'"

ATTEMPTS: list[Attempt] = [
    *family(
        "link races with the parent",
        [
            (
                "reading a file that becomes a link",
                _FLIP_FILE.format(told="secret"),
                secret,
                {"drive": beside(_reads("flip"))},
            ),
            (
                "writing a file that becomes a link",
                _FLIP_FILE.format(told="target"),
                changed,
                {"drive": beside(_writes("flip"))},
            ),
            (
                "reading in a folder that becomes a link",
                _FLIP_FOLDER,
                secret,
                {"drive": beside(_reads("spot/secret.txt"))},
            ),
            (
                "writing in a folder that becomes a link",
                _FLIP_FOLDER,
                changed,
                {"drive": beside(_writes("spot/target.txt"))},
            ),
            (
                "new folders in a folder that becomes a link",
                _FLIP_FOLDER,
                changed,
                {"drive": beside(_writes("spot/deep/new.txt"))},
            ),
            (
                "listing a folder that becomes a link",
                _FLIP_FOLDER,
                secret,
                {"drive": beside(_lists("spot/names"))},
            ),
            ("reading through a link", "pass", secret, {"drive": then(_reads("way"))}),
            (
                "reading through a link to a folder",
                "pass",
                secret,
                {"drive": then(_reads("door/secret.txt"))},
            ),
            (
                "writing through a link to a folder",
                "pass",
                changed,
                {"drive": then(_writes("door/target.txt"))},
            ),
            ("listing through a link to a folder", "pass", secret, {"drive": then(_lists("door/names"))}),
            (
                "reading what the parent has open",
                "os.symlink(f\"/proc/self/fd/{TOLD['held']}\", 'new')",
                secret,
                {"drive": _holding},
            ),
            (
                "the tree itself becomes a link",
                "os.rename(TOLD['tree'], TOLD['tree'] + '2')\nos.symlink(TOLD['outside'], TOLD['tree'])",
                changed,
                {"drive": then(_writes("target.txt"))},
            ),
        ],
    ),
    *family(
        "hard links",
        [
            ("the parent writes over one", "pass", changed, {"drive": then(_writes("linked.txt"))}),
            (
                "to a file outside, then the parent writes",
                "os.link(TOLD['target'], 'new')",
                changed,
                {"drive": then(_writes("new"))},
            ),
            (
                "to a read-only file, then written",
                "os.link(TOLD['shown'] + '/target.txt', 'new')\nwrite('new')",
                changed,
            ),
            (
                "to the secret, then the parent reads",
                "os.link(TOLD['secret'], 'new')",
                secret,
                {"drive": then(_reads("new"))},
            ),
            (
                "to a file of another user, then the sandbox ends",
                "os.link(TOLD['private'], 'new')\nos.chmod('new', 0o644)",
                changed,
            ),
        ],
    ),
    *family(
        "snapshots",
        [
            (
                "a folder that is a link at the restore",
                "import shutil\nshutil.rmtree('folder')\nos.symlink(TOLD['outside'], 'folder')",
                changed,
                {"drive": before(_snapshot, _restore)},
            ),
            (
                "a file that is a link at the restore",
                "os.unlink('own.txt')\nos.symlink(TOLD['target'], 'own.txt')",
                changed,
                {"drive": before(_snapshot, _restore)},
            ),
            (
                "a link to the secret in a snapshot",
                "os.symlink(TOLD['secret'], 'new')",
                secret,
                {"drive": then(_without_link)},
            ),
            (
                "a link to a folder in a snapshot",
                "os.symlink(TOLD['outside'], 'new')",
                secret,
                {"drive": then(_without_link)},
            ),
            (
                "files that become links during a snapshot",
                _FLIP_FILE.format(told="secret"),
                any_of(secret, changed),
                {
                    "drive": beside(_both),
                    "not_without_jail": "a naive copy fails there on what changes under it",
                },
            ),
            (
                "a daemon that goes on during a restore",
                "if detach():\n    beat()\nawait_beat()",
                any_of(survivor, changed),
                {"drive": before(_snapshot, _restore)},
            ),
            (
                "names that look like options",
                "for name in ('-rf', '--target-directory=..', '--remove-destination', 'a\\nb', '\\udcff'):\n    write(name)\nos.symlink('../../outside', '--')",
                changed,
                {"drive": then(_both)},
            ),
            (
                "a link in the place of the tree's folder at the end",
                "import shutil\nshutil.rmtree('folder')\nos.symlink(TOLD['outside'], 'folder')\nos.chmod('own.txt', 0)",
                changed,
            ),
        ],
    ),
    *family(
        "archives",
        [
            ("a path that climbs", _tar(f"put({_TARGET})"), changed),
            ("an absolute path", _tar("put(TOLD['target'])"), changed),
            (
                "through a link to a folder",
                _tar("put('d', b'', type=b'2', linkname=TOLD['outside'])\nput('d/target.txt')"),
                changed,
            ),
            (
                "through two links",
                _tar(
                    "put('a', b'', type=b'2', linkname='..')\nput('b', b'', type=b'2', linkname='a/../outside')\nput('b/target.txt')"
                ),
                changed,
            ),
            ("over a link", _tar("put('x', b'', type=b'2', linkname=TOLD['target'])\nput('x')"), changed),
            (
                "a hard link to the outside, then over it",
                _tar(f"put('x', b'', type=b'1', linkname={_TARGET})\nput('x')"),
                changed,
            ),
            (
                "a hard link to the secret",
                _tar("put('x', b'', type=b'1', linkname='../../outside/secret.txt')"),
                secret,
            ),
            (
                "a link made by a longer header",
                _tar(f"put('harmless', pax_headers={{'path': {_TARGET}}})"),
                changed,
                {"not_without_jail": "the reader there takes the header, as it should"},
            ),
            ("a setuid file", _tar("put('x', mode=0o4755)"), _privileged),
            (
                "a device",
                _tar("put('x', b'', type=b'3', devmajor=1, devminor=3)"),
                _privileged,
                {"only_for": "root"},
            ),
        ],
        drive=then(_unpacks),
        is_about_us=True,
    ),
]
