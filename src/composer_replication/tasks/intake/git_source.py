"""Read one commit of a git repository as bytes; nothing of the repository is checked out or run.

The system's git fetches a commit into a bare repository of our own, without history where the server allows it, and
writes its files into one archive (``git archive``), which is kept. No hook, filter, submodule or work tree takes part,
and no attribute of the repository: ours come before them. No settings of user or system are read either, because some of
them name programs; proxies and certificates are taken from the environment.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_replication.errors import InputError, MissingError
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.sandbox.process_tree import kill_descendants
from composer_replication.tasks.intake import cache
from composer_replication.tasks.intake.archives import (
    MAX_MEMBERS,
    MAX_TOTAL_BYTES,
    Listing,
    list_archive,
    refusal,
)

MAX_FETCH_BYTES = MAX_TOTAL_BYTES
MAX_LISTING_BYTES = 16 * 1024**2
"""Of the names of a commit's files. A tree may hold itself many times over, and git archives from memory."""
_ASK_SECONDS = 60.0
_FETCH_SECONDS = 600.0
_TREE = "tree.tar"
_TOO_MUCH = f"it is larger than {MAX_TOTAL_BYTES // 1024**2} MiB, or has more than {MAX_MEMBERS} files"
_ATTRIBUTES = "* -export-ignore -export-subst -text -ident -filter -working-tree-encoding\n"
"""So that each file is in the archive as its commit has it."""
_FULL_ID = re.compile(r"[0-9a-f]{40}")
_NAME = r"[A-Za-z0-9][A-Za-z0-9.-]*"
_HOST = rf"(?:{_NAME}|\[[0-9A-Fa-f:]+\])(?::[0-9]+)?"
_SCP = rf"[A-Za-z0-9_][\w.-]*@{_NAME}:[^/:@?\#\s][^:@?\#\s]*"
_REF = r"@(?P<ref>(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._+/-]*)"
_ADDRESS = re.compile(
    rf"""(?P<mark>git\+)?
    (?P<url>(?:https://|ssh://(?:[^\s@/:]+@)?){_HOST}/+[^/@?\#\s][^@?\#\s]*
    |file:///+[^/@?\#](?:[^?\#]*(?=@)|[^@?\#]*)
    |{_SCP})
    (?:{_REF})?""",
    re.VERBOSE,
)
_SECRET = re.compile(r"//[^/@]*:[^/@]*@|https://[^/@]*@", re.IGNORECASE)
_SYNTAX = "git+https://HOST/OWNER/REPO@REF, git+ssh://…, git+file:///FOLDER@REF or git@HOST:REPO.git@REF"


@dataclass(frozen=True, slots=True)
class GitAddress:
    """A parsed source: ``url`` as git takes it, ``ref`` a tag, a branch, a full commit id, or empty for HEAD."""

    source: str
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
    if found["url"].startswith("file:") and Path(source.partition("://")[2]).is_dir():
        return GitAddress(source, source.removeprefix("git+"), "")  # a folder may have an @ in its name
    return GitAddress(source, found["url"], found["ref"] or "")


def list_commit(source: str) -> tuple[GitAddress, str, Listing]:
    """The address of a source, the id of its commit, and its files; links and submodules are left out.

    The files are kept in the cache: a full id that is there needs no network.

    Raises:
        InputError: the source is wrong or too large (CR0402); git cannot reach it, or it has no such commit (CR0407).
        MissingError: this machine has no git (CR0440).
    """
    address = parse_address(source)
    commit = address.ref if _FULL_ID.fullmatch(address.ref) else _resolve(address)
    # By address as well as by commit: what one server may show is nobody else's answer.
    folder = cache.cache_folder() / "git" / f"{cache.sha256_of(address.url.encode())[:16]}-{commit}"
    with cache.cache_lock(f"git-{folder.name}"):
        if not (folder / _TREE).is_file():
            folder.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as temporary:
                made = Path(temporary) / "made"
                made.mkdir()
                _fetch(made / _TREE, Path(temporary) / "repository", address, commit)
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
        try:
            return address, commit, list_archive(folder / _TREE, source)
        except InputError:  # the copy may be a damaged one: the next call fetches it again
            shutil.rmtree(folder)
            raise


def _resolve(address: GitAddress) -> str:
    """The commit id of a ref; a tag wins over a branch of the same name, as in git."""
    ref = address.ref
    plain = (f"refs/tags/{ref}", f"refs/heads/{ref}") if ref else ("HEAD",)
    names = [one for name in ((ref,) if ref.startswith("refs/") else plain) for one in (f"{name}^{{}}", name)]
    try:
        listed = run_git(["ls-remote", "--quiet", "--", address.url, *names], seconds=_ASK_SECONDS)
    except GitFailed as error:
        raise _unreachable(address, error) from error
    rows = (row.partition("\t") for row in listed.decode().splitlines())
    found = {name: commit for commit, _, name in rows}
    commit = next((found[name] for name in names if _FULL_ID.fullmatch(found.get(name, ""))), "")
    if not commit:
        raise _unknown(address)
    return commit


def _fetch(tree: Path, repository: Path, address: GitAddress, commit: str) -> None:
    """Fetch the one commit (everything, where a server does not give one by its id or without history); write its files."""
    everything = ["+refs/heads/*:refs/fetched/heads/*", "+refs/tags/*:refs/fetched/tags/*"]
    failure: GitFailed | None = None
    for depth, wanted in ((["--depth=1"], [commit]), ([], everything)):
        shutil.rmtree(repository, ignore_errors=True)
        run_git(["init", "--quiet", "--bare", "--template=", str(repository)], seconds=_ASK_SECONDS)
        (repository / "info").mkdir(exist_ok=True)
        (repository / "info" / "attributes").write_text(_ATTRIBUTES)
        plain = ["fetch", "--quiet", "--no-tags", "--no-recurse-submodules"]
        fetch = [*plain, *depth, "--", address.url, *wanted]
        try:
            run_git(fetch, repository=repository, seconds=_FETCH_SECONDS, most_bytes=MAX_FETCH_BYTES)
            run_git(["cat-file", "-e", f"{commit}^{{commit}}"], repository=repository, seconds=_ASK_SECONDS)
            break
        except GitFailed as error:
            # The pack is written by a child of git, whose end is not always told.
            if error.reason == "large" or cache.tree_bytes(repository) >= MAX_FETCH_BYTES:
                raise refusal(address.source, _TOO_MUCH) from error
            if error.reason == "late":
                raise _unreachable(address, error) from error
            failure = error
    else:
        _resolve(GitAddress(address.source, address.url, ""))  # raises when nobody answers at all
        raise _unknown(address) from failure
    names = ["ls-tree", "-r", "-z", "--name-only", "--full-tree", commit]
    archive = ["archive", "--format=tar", f"--output={tree}", commit]
    try:
        listed = run_git(names, repository=repository, seconds=_ASK_SECONDS, most_bytes=MAX_LISTING_BYTES)
        if listed.count(b"\0") > MAX_MEMBERS:
            raise refusal(address.source, _TOO_MUCH)
        run_git(archive, repository=repository, seconds=_FETCH_SECONDS)
    except GitFailed as error:
        detail = _TOO_MUCH if error.reason else "git archive does not take its files"
        raise refusal(address.source, detail) from error


def _unreachable(address: GitAddress, error: GitFailed) -> InputError:
    """Git's own words are not repeated: they may hold an address with a secret."""
    problem = f"git cannot reach the repository{' in time' if error.reason == 'late' else ''}."
    fix = (
        f"GIT_CONFIG_GLOBAL=/dev/null git ls-remote {address.url} says why; git is given no password here, no settings "
        "of yours, and no key but those of an ssh agent: clone it yourself and give the folder."
    )
    return InputError("CR0407", problem, where=address.source, fix=fix)


def _unknown(address: GitAddress) -> InputError:
    what = f"nothing called {address.ref}" if address.ref else "no commit"
    fix = f"name a tag, a branch, or all 40 digits of a commit: git ls-remote {address.url}"
    return InputError("CR0407", f"the repository has {what}.", where=address.source, fix=fix)


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
    "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oStrictHostKeyChecking=yes -oClearAllForwardings=yes",
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
_TOO_LARGE = re.compile(rf"File too large|died of signal {signal.SIGXFSZ}\b")


class GitFailed(Exception):
    """Git gave an error, whose text is not kept, because it may hold an address with a secret.

    ``reason`` is ``late`` or ``large`` where it was ended for the time that it took or what it wrote, else empty.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__("git failed")
        self.reason = reason


def run_git(
    arguments: Sequence[str], *, seconds: float, repository: Path | None = None, most_bytes: int = MAX_TOTAL_BYTES
) -> bytes:  # fmt: skip
    """Run git without hooks, helpers, prompts and settings of user or system, and give what it printed.

    After ``seconds`` git and what it started are killed. ``repository`` is the bare one to work in, ``most_bytes``
    the largest file that git may write; what it prints goes to a file, too.

    Raises:
        MissingError: there is no git (CR0440).
        OSError: there was no space for what it wrote.
        GitFailed: it failed otherwise.
    """
    if shutil.which("git") is None:
        fix = "install git, or give a folder or an archive."
        raise MissingError("CR0440", "this machine has no git.", where="PATH", fix=fix)
    options = [word for setting in _SETTINGS for word in ("-c", setting)]
    with tempfile.TemporaryDirectory(prefix="git-", dir=process_folder()) as folder:
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment = {**kept, **_VARIABLES, "HOME": folder, "XDG_CONFIG_HOME": folder}
        if repository is not None:
            environment["GIT_DIR"] = str(repository)
        printed = Path(folder) / "printed"
        with printed.open("wb") as out:
            process = subprocess.Popen(
                [*_LIMITED, str(-(-most_bytes // 512)), *options, *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, cwd=folder, env=environment,
            )  # fmt: skip
            try:
                _, err = process.communicate(timeout=seconds)
            except BaseException as error:  # also an interruption: git must not go on alone
                kill_descendants(process.pid)
                process.kill()
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise GitFailed("late") from None
                raise
        if process.returncode != 0:
            text = err.decode("utf-8", "replace")
            cache.refuse_full_disk(text, repository or Path(folder))
            is_too_large = process.returncode == -signal.SIGXFSZ or bool(_TOO_LARGE.search(text))
            raise GitFailed("large" if is_too_large else "")
        return printed.read_bytes()
