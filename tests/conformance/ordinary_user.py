"""Run a program with the package as a user who is not root, as whom other code paths hold."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

import composer_replication
from composer_replication.sandbox import base_python
from composer_replication.sandbox.conformance.programs import open_to_all

AS_USER = ["setpriv", "--reuid", "64123", "--regid", "64123", "--clear-groups"]


def ask_as_user(code: str, *arguments: str) -> Any:
    """What ``code`` prints as JSON, as an ordinary user with folders of its own.

    Skips where there is no Python 3.11 that such a user may start.
    """
    drop = AS_USER if os.geteuid() == 0 else []
    ask = "import os, sys; sys.exit(sys.version_info < (3, 11) or not os.access(sys.executable, os.R_OK))"
    candidates = (str(base_python()), "/usr/local/bin/python3", "/usr/bin/python3")
    usable = [
        path
        for path in candidates
        if subprocess.run([*drop, path, "-c", ask], check=False, capture_output=True, cwd="/").returncode == 0
    ]
    if not usable:
        pytest.skip("no Python 3.11 here that an ordinary user may start")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        packages = [Path(composer_replication.__file__).parent]
        try:
            import sandlock
        except ImportError:
            pass
        else:
            packages.append(Path(sandlock.__file__).parent)
        for package in packages:
            shutil.copytree(package, folder / "source" / package.name)
        (folder / "tmp").mkdir()
        open_to_all(folder)
        (folder / "tmp").chmod(0o777)
        environment = {
            "PYTHONPATH": str(folder / "source"),
            "PATH": os.defpath,
            "TMPDIR": f"{folder}/tmp",
            "HOME": f"{folder}/tmp",
        }
        command = [*drop, usable[0], "-B", "-c", code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
        assert done.returncode == 0, done.stderr
        assert list((folder / "tmp").iterdir()) == []
        return json.loads(done.stdout)
