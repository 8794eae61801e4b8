"""Git addresses against real repositories: the same bytes as a checkout, by commit, and nothing of theirs is run."""

from __future__ import annotations

import functools
import os
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from small_trees import write_tree

from composer_replication.errors import ComposerError, InputError, MissingError
from composer_replication.tasks.intake import archives, git_source
from composer_replication.tasks.intake.cache import prune
from composer_replication.tasks.intake.git_source import parse_address
from composer_replication.tasks.intake.sources import RepositorySource, is_pinned, needs_no_path, open_source

FILES = {
    "pyproject.toml": b'[project]\nname = "Some_Thing"\nversion = "2.1"\n',
    "thing/__init__.py": b"def f():\r\n    return 1\n",
    "thing/data.bin": bytes(range(256)),
    "thing/empty.py": b"",
    "tests/test_thing.py": b"def test_f():\n    pass\n",
    "tests/data/a file with spaces é.txt": b"1,2\n",
    "tests/data/a\\b.txt": b"a name that git may have",
}
PERSON = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *PERSON, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def commit(root: Path, files: Mapping[str, bytes]) -> str:
    write_tree(root, files)
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--message", "change")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("COMPOSER_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two commits: ``v1`` (an annotated tag) and the branch ``main`` after it."""
    root = tmp_path / "remote" / "thing.git"
    root.mkdir(parents=True)
    git(root, "init", "--quiet", "--initial-branch=main")
    commit(root, FILES)
    git(root, "tag", "--annotate", "v1", "--message", "one")
    commit(root, {"thing/__init__.py": b"def f():\n    return 2\n"})
    return root


def test_a_repository_that_is_given_as_a_folder(repository: Path, tmp_path: Path) -> None:
    """Its work tree is read; without one there is no project, and a ref belongs behind an address."""
    assert open_source(str(repository)).files["thing/__init__.py"].endswith(b"2\n")
    for given in (repository / ".git", f"{repository}@v1", tmp_path / "nothing@v1"):
        assert code_of(str(given)) == "CR0402"


def code_of(source: str) -> str:
    with pytest.raises(ComposerError) as caught:
        open_source(source)
    return caught.value.code


def own_files(source: RepositorySource) -> dict[str, bytes]:
    return {name: data for name, data in source.files.items() if ".dist-info" not in name}


def test_a_commit_gives_the_bytes_of_its_files_as_a_folder_does(repository: Path, tmp_path: Path) -> None:
    write_tree(tmp_path / "folder", FILES)
    folder, found = open_source(str(tmp_path / "folder")), open_source(f"git+file://{repository}@v1")
    assert (found.files, found.metadata, found.sha256) == (folder.files, folder.metadata, folder.sha256)
    assert own_files(found) == FILES
    assert (found.commit, folder.commit) == (git(repository, "rev-parse", "v1^{commit}"), "")
    assert found.repository == "some-thing==2.1"


def test_every_way_to_name_a_commit(repository: Path) -> None:
    head, old = git(repository, "rev-parse", "main"), git(repository, "rev-parse", "main~1")
    for ref in ("@main", "@refs/heads/main", "", f"@{head}"):
        found = open_source(f"git+file://{repository}{ref}")
        assert (found.commit, found.files["thing/__init__.py"]) == (head, b"def f():\n    return 2\n")
    assert code_of(f"git+file://{repository}@HEAD~0") == "CR0402"  # an expression is no name
    git(repository, "tag", "--delete", "v1")
    assert open_source(f"git+file://{repository}@{old}").commit == old  # which no ref names


def test_a_fetched_commit_needs_no_repository_any_more(repository: Path) -> None:
    source = f"git+file://{repository}@{git(repository, 'rev-parse', 'v1^{commit}')}"
    before = open_source(source)
    other = repository.with_name("other.git")
    git(repository, "init", "--quiet", "--bare", str(other))
    repository.rename(repository.with_name("gone"))
    after = open_source(source)
    assert (after.files, after.sha256, after.commit) == (before.files, before.sha256, before.commit)
    assert code_of(f"git+file://{repository}@v1") == "CR0407"  # what a tag means must be asked
    assert code_of(f"git+file://{other}@{before.commit}") == "CR0407"  # another address is another answer


def test_a_version_that_a_tool_would_compute_is_the_commit(repository: Path) -> None:
    head = commit(repository, {"pyproject.toml": b'[project]\nname = "thing"\ndynamic = ["version"]\n'})
    found = open_source(f"git+file://{repository}")
    assert found.repository == f"thing=={head[:12]}"
    written = found.files[f"thing-0+g{head[:12]}.dist-info/METADATA"].decode()
    assert written.splitlines()[2] == f"Version: 0+g{head[:12]}"


# --- addresses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "url", "ref", "name"),
    [
        ("git+https://example.org/o/thing@v1.0", "https://example.org/o/thing", "v1.0", "thing"),
        ("git+https://example.org/o/thing.git@feature/x", "https://example.org/o/thing.git", "feature/x", "thing"),
        ("https://example.org/o/thing.git", "https://example.org/o/thing.git", "", "thing"),
        ("https://example.org:8443/o/thing.git@v1", "https://example.org:8443/o/thing.git", "v1", "thing"),
        ("git+ssh://git@example.org/o/thing@v1", "ssh://git@example.org/o/thing", "v1", "thing"),
        ("git@example.org:o/thing.git", "git@example.org:o/thing.git", "", "thing"),
        ("git@example.org:thing.git@v1", "git@example.org:thing.git", "v1", "thing"),
        ("git+git@example.org:o/thing@v1", "git@example.org:o/thing", "v1", "thing"),
        ("git+file:///no/such/thing@v1", "file:///no/such/thing", "v1", "thing"),
    ],
)  # fmt: skip
def test_an_address_is_taken_apart(source: str, url: str, ref: str, name: str) -> None:
    address = parse_address(source)
    assert (address.url, address.ref, address.name) == (url, ref, name)
    assert needs_no_path(source)
    assert not is_pinned(source)
    assert is_pinned(f"{source.rpartition('@')[0] if ref else source}@{'0' * 40}")


@pytest.mark.parametrize(
    "source",
    [
        "git+ext::sh -c 'touch /tmp/x'",
        "ext::sh -c true://",
        "git+ext://sh",
        "git+http://example.org/o/thing",
        "git://example.org/o/thing.git",
        "git+https://example.org",
        "git+https://-oProxyCommand=x/o/thing",
        "git+ssh://-oProxyCommand=x/o/thing",
        "git@-oProxyCommand=x:o/thing",
        "git+file://host/o/thing",
        "git+https://example.org/o/thing@--upload-pack=x",
        "git+https://example.org/o/thing@a..b",
        "git+https://example.org/o/thing@",
        "git+https://example.org/o/thing#subdirectory=x",
        "git+https://[broken/o/thing",
        "https://example.org/o/thing",
        "git+thing",
    ],
)
def test_what_git_may_not_be_given_is_refused(source: str) -> None:
    with pytest.raises(InputError, match="CR0402"):
        open_source(source)


def test_a_damaged_copy_in_the_cache_is_fetched_again(repository: Path, private_cache: Path) -> None:
    open_source(f"git+file://{repository}")
    (kept,) = (private_cache / "git").iterdir()
    (kept / "tree.tar").write_bytes(b"x" * 1000)
    assert code_of(f"git+file://{repository}@{kept.name.partition('-')[2]}") == "CR0402"
    open_source(f"git+file://{repository}")


def test_a_password_is_not_repeated() -> None:
    for start in ("git+https://me:s3cret", "git+https://s3cret", "git+HTTPS://s3cret"):
        with pytest.raises(InputError) as caught:
            open_source(f"{start}@example.org/o/thing")
        assert "s3cret" not in str(caught.value)
        assert "password" in str(caught.value)


# --- what fails ------------------------------------------------------------------------------


def test_no_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repository: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="CR0440"):
        open_source(f"git+file://{repository}")


def test_what_cannot_be_fetched_is_one_sentence(tmp_path: Path, repository: Path) -> None:
    blob, short = (
        git(repository, "rev-parse", "main:pyproject.toml"),
        git(repository, "rev-parse", "main")[:10],
    )
    known = f"git+file://{repository}"
    for source in (
        f"git+file://{tmp_path}/absent",
        f"git+file://{tmp_path}/absent@{'a' * 40}",
        "git+https://127.0.0.1:9/o/thing@v1",  # nobody listens there
        *(f"{known}@{ref}" for ref in ("no-such-tag", "a" * 40, blob, short)),
    ):
        error = error_of(source)
        ref = source.rpartition("@")[2] if "@" in source else "HEAD"
        assert (error.code, error.message) == (
            "CR0407",
            f"git cannot fetch {ref}, or not within 600 s and 512 MiB.",
        )
        assert "all 40 digits of a commit" in error.fix


def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, repository: Path) -> None:
    monkeypatch.setattr(git_source, "_MOST_SECONDS", 0.0)
    with pytest.raises(InputError, match="CR0407: git cannot fetch HEAD, or not within 0 s"):
        open_source(f"git+file://{repository}")


def test_too_large_to_fetch(monkeypatch: pytest.MonkeyPatch, repository: Path, private_cache: Path) -> None:
    commit(repository, {"docs/large.bin": os.urandom(300_000)})
    monkeypatch.setattr(git_source, "_MOST_BYTES", 200_000)
    assert code_of(f"git+file://{repository}") == "CR0407"
    assert list((private_cache / "git").iterdir()) == []
    monkeypatch.setattr(git_source, "_MOST_BYTES", 400_000)
    assert "docs/large.bin" not in open_source(f"git+file://{repository}").files


@pytest.mark.parametrize(
    ("limit", "value"), [("MAX_MEMBERS", 3), ("MAX_MEMBER_BYTES", 255), ("MAX_TOTAL_BYTES", 300)]
)
def test_too_large_to_read(monkeypatch: pytest.MonkeyPatch, repository: Path, limit: str, value: int) -> None:
    monkeypatch.setattr(archives, limit, value)
    assert code_of(f"git+file://{repository}") == "CR0402"


def test_a_tree_that_holds_itself_many_times_over(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten levels of ten: some hundred objects that stand for ten thousand million files."""
    below = git(repository, "hash-object", "-w", "pyproject.toml")
    kind = "100644 blob"
    for _ in range(10):
        rows = "".join(f"{kind} {below}\tf{index}.py\n" for index in range(10))
        below = subprocess.run(
            ["git", "-C", str(repository), "mktree"], input=rows, text=True, capture_output=True, check=True
        ).stdout.strip()
        kind = "040000 tree"
    head = git(repository, "commit-tree", below, "-m", "bomb")
    git(repository, "update-ref", "refs/heads/bomb", head)
    monkeypatch.setattr(git_source, "_MOST_BYTES", 10_000_000)
    assert code_of(f"git+file://{repository}@bomb") == "CR0407"


def test_prune_removes_what_was_fetched(repository: Path, private_cache: Path) -> None:
    script = "import sys; from composer_replication.tasks.intake.sources import open_source; open_source(sys.argv[1])"
    subprocess.run([sys.executable, "-c", script, f"git+file://{repository}"], check=True)
    (private_cache / "git" / "fetch-killed").mkdir()
    # What other processes have left behind goes, too.
    assert sum(path.is_relative_to(private_cache) for path in prune(private_cache)[0]) == 2
    assert list((private_cache / "git").iterdir()) == []


# --- hostile repositories ----------------------------------------------------------------------


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that nothing of a repository may make."""
    return tmp_path / "marker"


def test_hooks_filters_and_attributes_are_not_run(repository: Path, marker: Path) -> None:
    for name in ("post-checkout", "post-merge", "pre-auto-gc", "reference-transaction", "post-upload-pack"):
        hook = repository / ".git" / "hooks" / name
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(f"#!/bin/sh\necho {name} >> {marker}\n")
        hook.chmod(0o755)
    keys = "filter.evil.smudge diff.evil.textconv uploadpack.packObjectsHook core.fsmonitor core.sshCommand"
    for key in keys.split():
        git(repository, "config", key, f"touch {marker}")
    attributes = b"*.py filter=evil diff=evil export-ignore\n*.toml export-subst ident\n"
    (repository / ".git" / "info" / "attributes").write_bytes(attributes)
    marker.unlink(missing_ok=True)  # git's own work here ran them: see the test below
    found = open_source(f"git+file://{repository}@v1")
    assert not marker.exists()
    assert own_files(found) == FILES


def test_git_attributes_of_a_commit_change_no_byte(repository: Path) -> None:
    files = {
        "thing/ident.py": b"# $Id$ $Format:%H$\r\n",
        ".gitattributes": b"* export-ignore ident export-subst eol=lf\n",
    }
    write_tree(repository, files)
    for name, data in files.items():
        stored = subprocess.run(
            ["git", "-C", str(repository), "hash-object", "-w", "--stdin", "--no-filters"],
            input=data, capture_output=True, check=True,
        ).stdout.decode().strip()  # fmt: skip
        git(repository, "update-index", "--add", "--cacheinfo", f"100644,{stored},{name}")
    git(repository, "commit", "--quiet", "--message", "attributes")
    assert open_source(f"git+file://{repository}").files["thing/ident.py"] == files["thing/ident.py"]


def test_settings_of_the_user_that_name_programs_are_not_read(
    repository: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "gitconfig"
    settings.write_text(
        f'[uploadpack]\n\tpackObjectsHook = "touch {marker};"\n[core]\n\tsshCommand = "touch {marker};"\n'
        f"[credential]\n\thelper = !touch {marker}\n[core]\n\taskPass = {marker}\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(settings))
    monkeypatch.setenv("GIT_SSH_COMMAND", f"touch {marker};")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    open_source(f"git+file://{repository}")
    assert code_of("git+ssh://git@127.0.0.1:9/o/thing") == "CR0407"
    assert not marker.exists()
    environment = {name: value for name, value in os.environ.items() if name != "GIT_DIR"}
    plain = ["git", "clone", "--quiet", "--bare", f"file://{repository}", str(tmp_path / "clone")]
    subprocess.run(plain, check=False, capture_output=True, env=environment)
    assert marker.exists()  # git without our precautions does run it


def test_objects_that_are_missing_are_not_fetched_by_a_program_of_the_repository(
    repository: Path, marker: Path
) -> None:
    blob = git(repository, "rev-parse", "main:thing/__init__.py")
    (repository / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    git(repository, "config", "extensions.partialClone", "origin")
    git(repository, "config", "core.repositoryFormatVersion", "1")
    git(repository, "config", "remote.origin.promisor", "true")
    git(repository, "config", "remote.origin.url", f"file://{repository}")
    git(repository, "config", "remote.origin.uploadpack", f"touch {marker};")
    assert code_of(f"git+file://{repository}") == "CR0407"
    assert not marker.exists()


def test_links_and_submodules_are_left_out(repository: Path, tmp_path: Path, marker: Path) -> None:
    (repository / "thing" / "link.py").symlink_to("/etc/passwd")
    (repository / "thing" / "loop").symlink_to("loop")
    head = git(repository, "rev-parse", "main")
    git(repository, "update-index", "--add", "--cacheinfo", f"160000,{head},thing/sub")
    modules = f'[submodule "thing/sub"]\n\tpath = thing/sub\n\turl = ext::touch {marker}\n'
    commit(repository, {".gitmodules": modules.encode()})
    found = open_source(f"git+file://{repository}")
    assert not [name for name in found.files if "link" in name or "loop" in name or "sub" in name]
    assert not marker.exists()


def test_a_path_that_leaves_the_tree_is_refused(repository: Path) -> None:
    blob = git(repository, "hash-object", "-w", "pyproject.toml")
    hash_tree = ["git", "-C", str(repository), "hash-object", "-w", "-t", "tree", "--literally", "--stdin"]
    tree = blob
    for row in (b"100644 pyproject.toml\0", b"40000 ..\0"):
        raw = row + bytes.fromhex(tree)
        tree = subprocess.run(hash_tree, input=raw, capture_output=True, check=True).stdout.decode().strip()
    head = git(repository, "commit-tree", tree, "-m", "climb")
    git(repository, "update-ref", "refs/heads/climb", head)
    assert code_of(f"git+file://{repository}@climb") == "CR0402"


# --- over https and ssh, against servers of our own: nothing ever waits ---


class Handler(BaseHTTPRequestHandler):
    """Serves a folder as git does; everything below ``private`` wants a password."""

    def __init__(self, folder: Path, *words: Any) -> None:
        self.folder = folder
        super().__init__(*words)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        environment = {
            "PATH": os.environ["PATH"], "GIT_PROJECT_ROOT": str(self.folder), "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": path, "QUERY_STRING": query, "REQUEST_METHOD": self.command,
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""), "CONTENT_TYPE": self.headers.get("Content-Type", ""),
        }  # fmt: skip
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        told = subprocess.run(
            ["git", "http-backend"], input=body, capture_output=True, env=environment, check=False
        )
        head, _, answer = told.stdout.partition(b"\r\n\r\n")
        rows = dict(row.split(": ", 1) for row in head.decode().splitlines())
        if path.startswith("/private"):
            rows, answer = {"Status": "401", "WWW-Authenticate": 'Basic realm="planted"'}, b""
        self.send_response(int(rows.pop("Status", "200")[:3]))
        for row in {**rows, "Content-Length": str(len(answer))}.items():
            self.send_header(*row)
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name of the base class
        """Say nothing."""


@pytest.fixture
def https(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server with a certificate of its own, which git is told to trust."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    monkeypatch.setenv("GIT_SSL_CAINFO", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, repository.parent))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def error_of(source: str) -> InputError:
    with pytest.raises(InputError) as caught:
        open_source(source)
    assert caught.value.where == source
    return caught.value


def test_a_repository_over_https(https: str) -> None:
    found = open_source(f"git+{https}/thing.git@v1")
    assert (found.repository, own_files(found)) == ("some-thing==2.1", FILES)


@pytest.mark.parametrize("what", ["thing.git@v9", "private/thing.git@v9", "absent.git@v9"])
def test_what_https_does_not_give(https: str, what: str) -> None:
    error = error_of(f"git+{https}/{what}")
    assert (error.code, error.message) == ("CR0407", "git cannot fetch v9, or not within 600 s and 512 MiB.")
    assert "clone it yourself" in error.fix


def test_ssh_may_ask_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of ssh keeps how it was called."""
    program, words = tmp_path / "bin" / "ssh", tmp_path / "words"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> "{words}"\nexit 255\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    error = error_of("git@127.0.0.1:o/thing.git@v1")
    assert error.code == "CR0407"
    assert "-oBatchMode=yes" in words.read_text()
