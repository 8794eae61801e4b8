"""Read one commit of a git repository as bytes; nothing of the repository is checked out or run.

The system's git fetches a commit without its history into a bare repository of our own, and writes its files into one
archive (``git archive``), which is kept. No hook, filter, submodule, attribute or work tree takes part. No settings of
user or system are read either, because some of them name programs; proxies and certificates are taken from the
environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from composer_replication.errors import InputError, MissingError
from composer_replication.sandbox.process_tree import kill_descendants
from composer_replication.tasks.intake import cache
from composer_replication.tasks.intake.archives import MAX_TOTAL_BYTES, Listing, list_archive

_MOST_BYTES = MAX_TOTAL_BYTES
"""Of what is fetched, and of the archive; a tree may hold itself many times over."""
_MOST_SECONDS = 600.0
_FULL_ID = re.compile(r"[0-9a-f]{40}")
_HOST = r"(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:]+\])(?::[0-9]+)?"
_SCP = r"[A-Za-z0-9_][\w.-]*@[A-Za-z0-9][A-Za-z0-9.-]*:[^/:@?\#\s][^:@?\#\s]*"
_ADDRESS = re.compile(
    rf"""(?P<mark>git\+)?
    (?P<url>(?:https://|ssh://(?:[^\s@/:]+@)?){_HOST}/+[^/@?\#\s][^@?\#\s]*|file:///+[^/@?\#][^@?\#]*|{_SCP})
    (?:@(?P<ref>(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._+/-]*))?""",
    re.VERBOSE,
)
_SECRET = re.compile(r"//[^/@]*:[^/@]*@|https://[^/@]*@", re.IGNORECASE)
_SYNTAX = "git+https://HOST/OWNER/REPO@REF, git+ssh://…, git+file:///FOLDER@REF or git@HOST:REPO.git@REF"


@dataclass(frozen=True, slots=True)
class GitAddress:
    """A parsed source: ``url`` as git takes it, ``ref`` a tag, a branch, a full commit id, or empty for HEAD."""

    url: str
    ref: str

    @property
    def name(self) -> str:
        """The last part of the address: what the repository is called when it does not say."""
        return re.split(r"[/:]", self.url.rstrip("/"))[-1].removesuffix(".git")

    @property
    def public(self) -> str:
        """The address as a record may keep it: without the name of a user; empty for a folder of this machine."""
        if self.url.startswith("file:"):
            return ""
        plain = re.sub(r"//[^/@]*@", "//", self.url)
        plain = plain if "://" in plain else re.sub(r"^[^@]*@([^:]*):", r"ssh://\1/", plain)
        return f"git+{plain}@{self.ref}" if self.ref else f"git+{plain}"


def is_git_source(source: str) -> bool:
    """Whether a SOURCE is an address for git, right or wrong, and not a path."""
    is_scp = re.fullmatch(rf"{_SCP}(@.*)?", source) is not None
    return source.startswith("git+") or "://" in source or is_scp


def names_commit(source: str) -> bool:
    """Whether the source is an address with the full id of a commit, so that it means the same bytes for ever."""
    return is_git_source(source) and _FULL_ID.fullmatch(source.rpartition("@")[2]) is not None


def parse_address(source: str) -> GitAddress:
    """Take a source apart.

    Raises:
        InputError: no such form, another protocol than https, ssh and file, or a password in the address, which is
            then not repeated (CR0402).
    """
    if _SECRET.search(source):
        message = "the address holds a user name or a password, which would be kept with the tasks."
        raise InputError("CR0402", message, where="", fix=_SYNTAX)
    found = _ADDRESS.fullmatch(source)
    if found is None or not (found["mark"] or found["url"].endswith(".git") or "://" not in found["url"]):
        message = "git takes git+https, git+ssh and git+file, and at most @TAG, @BRANCH or @ID behind."
        raise InputError("CR0402", message, where=source, fix=_SYNTAX)
    return GitAddress(found["url"], found["ref"] or "")


def list_commit(source: str) -> tuple[GitAddress, str, Listing]:
    """The address of a source, the id of its commit, and its files; links and submodules are left out.

    The archive stays in the cache: a full id that is there needs no network.

    Raises:
        InputError: the source is wrong, or its files cannot be taken (CR0402); git cannot fetch it (CR0407).
        MissingError: this machine has no git (CR0440).
    """
    address = parse_address(source)
    commit, shelf = address.ref, cache.cache_folder() / "git"

    def kept() -> Path:
        # By address as well as by commit: what one server may show is nobody else's answer.
        return shelf / f"{cache.sha256_of(address.url.encode())[:16]}-{commit}" / "tree.tar"

    if not (_FULL_ID.fullmatch(commit) and kept().is_file()):
        shelf.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=shelf) as folder:
            tree = Path(folder, "tree.tar")
            commit = _fetch(source, address, tree)
            kept().parent.mkdir(exist_ok=True)
            tree.replace(kept())
    return address, commit, list_archive(kept(), source)


def _fetch(source: str, address: GitAddress, tree: Path) -> str:
    """Write the files of the commit that an address means into an archive; the commit's id."""
    ref = address.ref or "HEAD"
    fetch = ["fetch", "--quiet", "--depth=1", "--no-tags", "--no-recurse-submodules", "--", address.url, ref]
    try:
        _run_git("init", "--quiet", "--bare", "--template=", folder=tree.parent)
        _run_git(*fetch, folder=tree.parent)
        commit = _run_git("rev-parse", "--verify", "FETCH_HEAD^{commit}", folder=tree.parent).decode().strip()
        # With the attributes of a work tree, which is not there, in place of the commit's own.
        archive = "archive --format=tar --prefix=tree/ --worktree-attributes".split()
        _run_git(*archive, f"--output={tree}", commit, folder=tree.parent)
    except subprocess.SubprocessError as error:
        limits = f"or not within {_MOST_SECONDS:.0f} s and {_MOST_BYTES // 1024**2} MiB"
        fix = (
            f"GIT_CONFIG_GLOBAL=/dev/null git ls-remote {address.url} shows what is there (name a tag, a branch, or all "
            "40 digits of a commit); git is given no password here, no settings of yours, and no key but those of an ssh "
            "agent, and must fetch a commit alone: clone it yourself and give the folder."
        )
        raise InputError("CR0407", f"git cannot fetch {ref}, {limits}.", where=source, fix=fix) from error
    return commit


# --- git itself, so that nothing but it is run ---

_KEPT_VARIABLES = (
    "PATH TMPDIR SSH_AUTH_SOCK http_proxy https_proxy HTTPS_PROXY all_proxy ALL_PROXY no_proxy NO_PROXY"
    " GIT_SSL_CAINFO GIT_SSL_CAPATH SSL_CERT_FILE SSL_CERT_DIR CURL_CA_BUNDLE"
).split()
_VARIABLES = {
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ASKPASS": "true",  # answers nothing, whatever is asked
    "SSH_ASKPASS": "true",
    "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oStrictHostKeyChecking=yes -oClearAllForwardings=yes -oConnectTimeout=60",
    "GIT_ALLOW_PROTOCOL": "https:ssh:file",
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_NO_REPLACE_OBJECTS": "1",
}
_SETTINGS = (
    f"core.hooksPath={os.devnull}", "credential.helper=", "gc.auto=0", "maintenance.auto=false",
    "http.lowSpeedLimit=1000", "http.lowSpeedTime=60",
    "fetch.unpackLimit=1",  # one pack, so that the limit of a file's size is one of the whole
)  # fmt: skip
_LIMITED = ("/bin/sh", "-c", 'ulimit -f "$0" 2> /dev/null; exec git "$@"')
"""Sets the limit of a file, in blocks of 512 bytes, in the child: ``preexec_fn`` is not safe beside the threads that build tasks.

Its signal ends git at once, where an error of writing would be noticed at the very end. A lower limit stays."""


def _run_git(*words: str, folder: Path) -> bytes:
    """What git prints that runs in a repository below ``folder``, without hooks, helpers, prompts and settings.

    Raises:
        MissingError: there is no git (CR0440).
        OSError: there was no space for what it wrote.
        subprocess.SubprocessError: it failed; what it said is not kept, as it may hold an address with a secret.
    """
    if shutil.which("git") is None:
        fix = "install git, or give a folder or an archive."
        raise MissingError("CR0440", "this machine has no git.", where="PATH", fix=fix)
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    places = {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "GIT_DIR": str(folder / "repository")}
    options = [word for setting in _SETTINGS for word in ("-c", setting)]
    with subprocess.Popen(
        [*_LIMITED, str(-(-_MOST_BYTES // 512)), *options, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, cwd=folder, env={**kept, **_VARIABLES, **places},
    ) as process:  # fmt: skip
        try:
            printed, said = process.communicate(timeout=_MOST_SECONDS)
        except BaseException:  # also an interruption: git must not go on alone
            kill_descendants(process.pid)
            process.kill()
            raise
    if process.returncode != 0:
        cache.refuse_full_disk(said.decode("utf-8", "replace"), folder)
        raise subprocess.CalledProcessError(process.returncode, "git")
    return printed
