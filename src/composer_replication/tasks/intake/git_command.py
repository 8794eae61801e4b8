"""Start the system's git so that nothing but git itself is run, within limits of time and size."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from composer_replication.errors import MissingError
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.sandbox.process_tree import kill_descendants
from composer_replication.tasks.intake.archives import MAX_TOTAL_BYTES
from composer_replication.tasks.intake.full_disk import refuse_full_disk

_KEPT_VARIABLES = (
    "PATH TMPDIR SSH_AUTH_SOCK http_proxy https_proxy HTTPS_PROXY all_proxy ALL_PROXY no_proxy NO_PROXY"
    " GIT_SSL_CAINFO GIT_SSL_CAPATH SSL_CERT_FILE SSL_CERT_DIR CURL_CA_BUNDLE"
).split()
_KEPT_SETTINGS = r"^(http\.(.*\.)?(proxy|sslcainfo|sslcapath)|url\..*\.insteadof)$"
_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.attributesFile": os.devnull,
    "credential.helper": "",
    "fetch.recurseSubmodules": "false",
    "fetch.unpackLimit": "1",  # one pack, so that the limit of a file's size is one of the whole
    "gc.auto": "0",
    "maintenance.auto": "false",
    "transfer.bundleURI": "false",
    "http.lowSpeedLimit": "1000",
    "http.lowSpeedTime": "60",
}
_LIMITED = (
    "import os, signal, sys; from resource import RLIMIT_FSIZE, getrlimit, setrlimit; "
    "limits = [int(sys.argv[1]), *(limit for limit in getrlimit(RLIMIT_FSIZE) if limit >= 0)]; "
    "setrlimit(RLIMIT_FSIZE, (min(limits),) * 2); signal.signal(signal.SIGXFSZ, signal.SIG_DFL); os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Sets the limit in the child: ``preexec_fn`` is not safe beside the threads that build tasks.

The signal ends git at once, where an error of writing would be noticed at the very end."""
_TOO_LARGE = re.compile(rf"File too large|died of signal {signal.SIGXFSZ}\b")


class GitFailed(Exception):
    """Git gave an error. Its text is not kept, because it may hold an address with a secret."""

    def __init__(self, *, is_late: bool = False, is_too_large: bool = False) -> None:
        super().__init__("git failed")
        self.is_late = is_late
        self.is_too_large = is_too_large


def run_git(
    arguments: Sequence[str],
    *,
    seconds: float,
    repository: Path | None = None,
    most_bytes: int = MAX_TOTAL_BYTES,
) -> bytes:
    """Run git and give what it printed.

    No hook, no credential helper, no prompt, no user or system configuration but proxies,
    certificates and address rewriting; the protocols https, ssh and file alone.

    Args:
        arguments: sub-command and its arguments.
        seconds: afterwards git and what it started are killed.
        repository: the bare repository to work in.
        most_bytes: the largest file that git may write; what it prints goes to a file, too.

    Raises:
        MissingError: there is no git (CR0440).
        GitFailed: any failure but
        OSError: there was no space for what it wrote.
    """
    if shutil.which("git") is None:
        raise MissingError(
            "CR0440",
            "this machine has no git.",
            where="PATH",
            fix="install git, or give a folder or an archive.",
        )
    settings = [*_SETTINGS.items(), *_user_settings()]
    options = [word for key, value in settings for word in ("-c", f"{key}={value}")]
    with tempfile.TemporaryDirectory(prefix="git-", dir=process_folder()) as folder:
        environment = _environment(Path(folder))
        if repository is not None:
            environment["GIT_DIR"] = str(repository)
        printed = Path(folder) / "printed"
        with printed.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LIMITED, str(most_bytes), "git", *options, *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, cwd=folder, env=environment,
            )  # fmt: skip
            try:
                _, err = process.communicate(timeout=seconds)
            except BaseException as error:  # also an interruption: git must not go on alone
                kill_descendants(process.pid)
                process.kill()
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise GitFailed(is_late=True) from None
                raise
        if process.returncode != 0:
            text = err.decode("utf-8", "replace")
            refuse_full_disk(text, repository or Path(folder))
            is_too_large = process.returncode == -signal.SIGXFSZ or bool(_TOO_LARGE.search(text))
            raise GitFailed(is_too_large=is_too_large)
        return printed.read_bytes()


def _environment(home: Path) -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "true",  # answers nothing, whatever is asked
        "SSH_ASKPASS": "true",
        "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oStrictHostKeyChecking=yes -oClearAllForwardings=yes",
        "GIT_ALLOW_PROTOCOL": "https:ssh:file",
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
    }


@cache
def _user_settings() -> tuple[tuple[str, str], ...]:
    """The settings of user and system that say where a server is reached; none of them names a program."""
    command = ["git", "config", "--null", "--get-regexp", _KEPT_SETTINGS]
    try:
        # From the root folder, so that no repository around us is asked.
        done = subprocess.run(command, capture_output=True, check=False, timeout=10, cwd="/")
    except (OSError, subprocess.TimeoutExpired):
        return ()
    rows = (row.partition("\n") for row in done.stdout.decode("utf-8", "replace").split("\0"))
    return tuple((key, value) for key, newline, value in rows if newline and not re.search(r"[\n=]", key))
