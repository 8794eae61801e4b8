"""The contract that ships with the package, held up to every backend of this machine, and to fakes of services."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import composer_replication
from composer_replication.sandbox import base_python
from composer_replication.sandbox.choice import BACKENDS, ONLY_BY_NAME
from composer_replication.sandbox.conformance.programs import open_to_all
from composer_replication.sandbox.conformance.test_bad_input import *  # noqa: F403  the tests are the names
from composer_replication.sandbox.conformance.test_commands import *  # noqa: F403
from composer_replication.sandbox.conformance.test_ends import *  # noqa: F403
from composer_replication.sandbox.conformance.test_files import *  # noqa: F403
from composer_replication.sandbox.conformance.test_limits import *  # noqa: F403
from composer_replication.sandbox.conformance.test_walls import *  # noqa: F403

SOURCE = Path(composer_replication.__file__).parents[1]


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
@pytest.mark.parametrize("name", sorted(set(BACKENDS) - set(ONLY_BY_NAME)))
def test_every_guard_holds_for_an_ordinary_user(name: str) -> None:
    """The self-test again, without root: other code paths protect an ordinary user."""
    as_user = ["setpriv", "--reuid", "64123", "--regid", "64123", "--clear-groups"]
    ask = "import os, sys; sys.exit(sys.version_info < (3, 11) or not os.access(sys.executable, os.R_OK))"
    candidates = [str(base_python()), "/usr/local/bin/python3", "/usr/bin/python3"]
    usable = [
        p
        for p in candidates
        if subprocess.run([*as_user, p, "-c", ask], check=False, capture_output=True).returncode == 0
    ]
    if not usable:
        pytest.skip("no Python 3.11 here that an ordinary user may start")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        shutil.copytree(SOURCE / "composer_replication", source / "composer_replication")
        if name == "sandlock":
            sandlock = pytest.importorskip("sandlock")
            shutil.copytree(Path(sandlock.__file__).parent, source / "sandlock")
        (Path(folder) / "tmp").mkdir()
        open_to_all(Path(folder))
        (Path(folder) / "tmp").chmod(0o777)
        code = (
            "import json; from composer_replication.sandbox import choose_backend, run_selftest\n"
            f"backend = choose_backend({name!r}); check = backend.is_available()\n"
            "print(json.dumps([check.ok, check.detail, [(c.name, c.ok, c.detail) for c in run_selftest(backend)]]))"
        )
        environment = {
            "PYTHONPATH": str(source),
            "PATH": os.defpath,
            "TMPDIR": f"{folder}/tmp",
            "HOME": f"{folder}/tmp",
        }
        done = subprocess.run(
            [*as_user, usable[0], "-B", "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        is_available, detail, checks = json.loads(done.stdout)
        if not is_available:
            pytest.skip(f"{name} is not available to an ordinary user here: {detail}")
        assert [check for check in checks if not check[1]] == []
        assert len(checks) >= 12
        assert list((Path(folder) / "tmp").iterdir()) == []
