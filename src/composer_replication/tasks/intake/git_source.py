"""Read one commit of a git repository as bytes; nothing of the repository is checked out or run.

The system's git fetches a commit into a bare repository of our own, without history where the
server allows it, and writes its files into one archive (``git archive``), which is kept. No hook, filter,
submodule or work tree takes part, and no attribute of the repository: ours come before them. Git's
own settings are left out, too, because some of them name programs; of the user's, only those
are taken over that say where a server is reached.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, urlsplit

from composer_replication.errors import InputError, MissingError
from composer_replication.sandbox.process_folder import process_folder
from composer_replication.sandbox.process_tree import kill_descendants
from composer_replication.tasks.intake.archives import MAX_TOTAL_BYTES, Listing, hostile
from composer_replication.tasks.intake.cache import (
    cache_folder,
    cache_lock,
    hold,
    refuse_full_disk,
    sha256_of,
    tree_bytes,
)

MAX_FETCH_BYTES = MAX_TOTAL_BYTES
MAX_LISTING_BYTES, MAX_LISTED_FILES = 64 * 1024**2, 500_000
"""Of the list of a commit's files. A tree may hold itself many times over, and git archives from memory."""
MAX_TREE_BYTES = 4 * MAX_TOTAL_BYTES
"""Of the archive of all files of a commit, most of which may belong to no task."""
_ASK_SECONDS = 60.0
_FETCH_SECONDS = 600.0
_TREE = "tree.tar"
_ATTRIBUTES = "* -export-ignore -export-subst -text -ident -filter -working-tree-encoding\n"
"""So that each file is in the archive as its commit has it."""
_FULL_ID = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/-]*")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?|\[[0-9A-Fa-f:]+\](:[0-9]+)?")
_SCP = re.compile(r"([A-Za-z0-9_][\w.-]*)@([A-Za-z0-9][A-Za-z0-9.-]*):([^/:][^:]*)")
_SYNTAX = (
    "git+https://HOST/OWNER/REPO@REF, git+ssh://…, git+file:///FOLDER@REF or git@HOST:OWNER/REPO.git@REF"
)


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


@dataclass(frozen=True, slots=True)
class GitCommit:
    """A commit that lies in the cache: ``folder`` holds the archive of its files."""

    address: GitAddress
    commit: str
    folder: Path


def is_git_source(source: str) -> bool:
    """Whether a SOURCE is an address for git, right or wrong, and not a path."""
    return source.startswith("git+") or "://" in source or _SCP.fullmatch(source) is not None


def is_bare(folder: Path) -> bool:
    """Whether a folder is a repository without a work tree (or the ``.git`` of one): objects and no files."""
    return os.path.isfile(folder / "HEAD") and all(
        os.path.isdir(folder / part) for part in ("objects", "refs")
    )


def names_commit(source: str) -> bool:
    """Whether the source names a commit by its full id, so that it means the same bytes for ever."""
    return _FULL_ID.fullmatch(source.rpartition("@")[2]) is not None


def parse_address(source: str) -> GitAddress:
    """Take a source apart.

    Raises:
        InputError: no such form, another protocol than https, ssh and file, or a password in
            the address (CR0402); the source is then not repeated.
    """
    plain = source.removeprefix("git+")
    scp = _SCP.fullmatch(plain)
    try:
        parts = urlsplit("" if scp else plain)
    except ValueError:
        raise _bad_address(source, "the address cannot be read") from None
    path = scp[3] if scp else parts.path
    problem = "" if scp else _problem(parts)
    ref = ""
    if scp or parts.scheme != "file" or not Path(path).is_dir():  # a folder may have an @ in its name
        path, at, after = path.rpartition("@") if "@" in path else (path, "", "")
        ref = after or at
    if not problem and not scp and plain == source and not path.endswith(".git"):
        problem = "an address that does not end in .git needs git+ before it"
    if not problem and not path.strip("/"):
        problem = "the address names no repository"
    if not problem and ref and (not _REF.fullmatch(ref) or ".." in ref):
        problem = f"{ref!r} is no name of a commit"
    if problem:
        raise _bad_address("" if "password" in problem else source, problem)
    url = f"{scp[1]}@{scp[2]}:{path}" if scp else f"{parts.scheme}://{parts.netloc}{path}"
    return GitAddress(source, url, ref)


def public_address(address: GitAddress) -> str:
    """The address as a record may keep it: without the name of a user; empty for a folder of this machine."""
    scp = _SCP.fullmatch(address.url)
    if scp is not None:
        plain = f"ssh://{scp[2]}/{scp[3]}"
    else:
        parts = urlsplit(address.url)
        if parts.scheme == "file":
            return ""
        plain = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return f"git+{plain}@{address.ref}" if address.ref else f"git+{plain}"


def _problem(parts: SplitResult) -> str:
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme not in ("https", "ssh", "file"):
        return "git is asked over https, ssh and file alone"
    if parts.password is not None or (parts.scheme == "https" and parts.username is not None):
        return "the address holds a user name or a password, which would be kept with the tasks"
    if parts.query or parts.fragment:
        return "the address has a part after ? or #"
    if parts.scheme == "file":
        return "" if not parts.netloc and parts.path.startswith("/") else "file:// needs an absolute path"
    return "" if _HOST.fullmatch(host) else "the address names no host"


def _bad_address(source: str, problem: str) -> InputError:
    return InputError(
        "CR0402", f"the source is no repository that git can read: {problem}.", where=source, fix=_SYNTAX
    )


def fetch_commit(source: str) -> GitCommit:
    """The commit that a source names, in the cache; a full id that is there needs no network.

    Raises:
        InputError: the source is wrong (CR0402), git cannot reach it (CR0407), it has no such
            ref or commit (CR0407), it is too large (CR0402).
        MissingError: this machine has no git (CR0440).
    """
    address = parse_address(source)
    commit = address.ref if _FULL_ID.fullmatch(address.ref) else _resolve(address)
    folder = _folder(address, commit)
    with cache_lock(f"git-{folder.name}"):
        if not (hold(folder) and (folder / _TREE).is_file()):
            folder.parent.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as temporary:
                hold(Path(temporary))  # what a killed process leaves is pruned, what is being fetched is not
                made = Path(temporary) / "made"
                made.mkdir()
                _fetch(made / _TREE, Path(temporary) / "repository", address, commit)
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
            hold(folder)
    return GitCommit(address, commit, folder)


def _folder(address: GitAddress, commit: str) -> Path:
    """By address as well as by commit: what one server may show is nobody else's answer."""
    return cache_folder() / "git" / f"{sha256_of(address.url.encode())[:16]}-{commit}"


def _resolve(address: GitAddress) -> str:
    """The commit id of a ref; a tag wins over a branch of the same name, as in git."""
    ref = address.ref
    plain = (f"refs/tags/{ref}", f"refs/heads/{ref}") if ref else ("HEAD",)
    names = (ref,) if ref.startswith("refs/") else plain
    asked = [*names, *(f"{name}^{{}}" for name in names)]
    try:
        listed = run_git(["ls-remote", "--quiet", "--", address.url, *asked], seconds=_ASK_SECONDS)
    except GitFailed as error:
        raise _unreachable(address, error) from error
    found = {
        name: commit for commit, _, name in (row.partition("\t") for row in listed.decode().splitlines())
    }
    for name in names:
        commit = found.get(f"{name}^{{}}") or found.get(name, "")
        if _FULL_ID.fullmatch(commit):
            return commit
    raise _unknown(address)


def _fetch(tree: Path, repository: Path, address: GitAddress, commit: str) -> None:
    """Fetch the one commit; where a server does not give one by its id, or none without history, everything."""
    kind = "sha256" if len(commit) == 64 else "sha1"
    everything = ["+refs/heads/*:refs/fetched/heads/*", "+refs/tags/*:refs/fetched/tags/*"]
    failure: GitFailed | None = None
    for depth, wanted in ((["--depth=1"], [commit]), ([], everything)):
        shutil.rmtree(repository, ignore_errors=True)
        made = ["init", "--quiet", "--bare", "--template=", f"--object-format={kind}", str(repository)]
        run_git(made, seconds=_ASK_SECONDS)
        (repository / "info").mkdir(exist_ok=True)
        (repository / "info" / "attributes").write_text(_ATTRIBUTES)
        plain = ["fetch", "--quiet", "--no-tags", "--no-recurse-submodules"]
        fetch = [*plain, *depth, "--", address.url, *wanted]
        try:
            run_git(fetch, repository=repository, seconds=_FETCH_SECONDS, most_bytes=MAX_FETCH_BYTES)
            run_git(["cat-file", "-e", f"{commit}^{{commit}}"], repository=repository, seconds=_ASK_SECONDS)
        except GitFailed as error:
            # The pack is written by a child of git, whose end is not always told.
            if error.is_too_large or tree_bytes(repository) >= MAX_FETCH_BYTES:
                raise _refused(address, "it is larger than what is fetched") from error
            failure = error
        else:
            _archive(tree, repository, address, commit)
            return
    _resolve(GitAddress(address.source, address.url, ""))  # raises when nobody answers at all
    raise _unknown(address) from failure


def _archive(tree: Path, repository: Path, address: GitAddress, commit: str) -> None:
    """Write the files of a fetched commit; a tree that holds itself many times over is refused by its list of names."""
    names = ["ls-tree", "-r", "-z", "--name-only", "--full-tree", commit]
    archive = ["archive", "--format=tar", f"--output={tree}", commit]
    try:
        listed = run_git(names, repository=repository, seconds=_ASK_SECONDS, most_bytes=MAX_LISTING_BYTES)
        if listed.count(b"\0") > MAX_LISTED_FILES:
            raise _refused(address, "it holds too many files")
        for name in listed.split(b"\0"):
            if name.startswith(b"/") or b".." in name.split(b"/"):
                raise hostile(
                    address.source, f"member {name[:80].decode(errors='replace')!r} leaves the archive"
                )
        run_git(archive, repository=repository, seconds=_FETCH_SECONDS, most_bytes=MAX_TREE_BYTES)
    except GitFailed as error:
        large = error.is_too_large or error.is_late
        detail = "its files are larger than what is read" if large else "git archive does not take its files"
        raise _refused(address, detail) from error


def list_commit(found: GitCommit, *, skip: Callable[[str], bool] = lambda _: False) -> Listing:
    """The files of a fetched commit; links and submodules are left out, and so is what lies in a folder to ``skip``.

    Raises:
        InputError: the archive is damaged (CR0407).
    """
    listing = Listing({}, set(), partial(_refused, found.address))
    tree = found.folder / _TREE
    try:
        with tarfile.open(tree, "r:") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if member.issym():
                    listing.links.add(str(path))
                elif member.isfile() and not any(map(skip, path.parts[:-1])):
                    content = partial(_bytes_at, tree, member.offset_data, member.size)
                    listing.files[str(path)] = (member.size, content)
    except (tarfile.TarError, OSError) as error:
        raise InputError(
            "CR0407",
            f"what was fetched of the commit {found.commit[:12]} cannot be read.",
            where=found.address.source,
            fix=f"remove {found.folder}; then the same command fetches it again.",
        ) from error
    return listing


def _bytes_at(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as handle:
        handle.seek(start)
        return handle.read(size)


def _unreachable(address: GitAddress, error: GitFailed) -> InputError:
    """Git's own words are not repeated: they may hold an address with a secret."""
    return InputError(
        "CR0407",
        f"git cannot reach the repository{' in time' if error.is_late else ''}.",
        where=address.source,
        fix=f"git ls-remote {address.url} says why; git is given no password here, and no key but those of an ssh "
        "agent: clone it yourself and give the folder.",
    )


def _unknown(address: GitAddress) -> InputError:
    what = f"nothing called {address.ref}" if address.ref else "no commit"
    return InputError(
        "CR0407",
        f"the repository has {what}.",
        where=address.source,
        fix=f"name a tag, a branch, or all 40 digits of a commit: git ls-remote {address.url}",
    )


def _refused(address: GitAddress, detail: str) -> InputError:
    return InputError(
        "CR0402",
        f"the repository is refused: {detail}.",
        where=address.source,
        fix="clone it, remove what tests do not need, and give the folder.",
    )


# --- git itself, so that nothing but it is run ---

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
