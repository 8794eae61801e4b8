"""Fetch archives and wheels from the package index that pip is set up for; nothing is run.

Indexes, link folders and certificates are read from pip's own settings (variables and files), so that a mirror or an
offline folder that works for pip works here. Addresses are never shown.
"""

from __future__ import annotations

import logging
import ssl
import subprocess
import sys
import warnings
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from composer_replication.errors import InputError, MissingError
from composer_replication.tasks.intake import cache
from composer_replication.tasks.intake.cache import sha256_of, sha256_of_file

FETCH_FIX = "check the network and pip's index settings, or build once where there is a network."


def pip_command() -> list[str]:
    """How to call the pip of this environment."""
    if find_spec("pip") is None:
        problem, fix = "this Python environment has no pip.", f"{sys.executable} -m ensurepip"
        raise MissingError("CR0440", problem, where=sys.executable, fix=fix)
    return [sys.executable, "-m", "pip"]


@lru_cache
def index_settings() -> dict[str, str]:
    """Pip's settings by their names, read once: configuration files first, ``PIP_*`` variables over them."""
    command = [*pip_command(), "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found: dict[str, str] = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, key = name.strip().rpartition(".")
        value = value.strip().strip("'\"").replace("\\n", " ")
        if value and section in ("global", "install", "download", ":env:"):
            found[key] = value  # pip passes over an empty one, too
    return found


def _finder(*, wheels: bool) -> Any:
    from unearth import PackageFinder
    from unearth.auth import MultiDomainBasicAuth
    from unearth.fetchers.sync import PyPIClient

    # It warns about each index without the package, with its address; our own sentence follows.
    logging.getLogger("unearth").setLevel(logging.ERROR)
    settings = index_settings()
    plain, more = settings.get("index-url", "https://pypi.org/simple"), settings.get("extra-index-url", "")
    has_none = settings.get("no-index", "").lower() in ("1", "true", "yes", "on")
    indexes = [] if has_none else [plain, *more.split()]
    links = [link for link in settings.get("find-links", "").split() if "://" in link or Path(link).exists()]
    hosts = settings.get("trusted-host", "").split()
    context = ssl.create_default_context(cafile=settings.get("cert"))
    session = PyPIClient(trusted_hosts=hosts, verify=context, timeout=60.0, follow_redirects=True)
    session.auth = MultiDomainBasicAuth(prompting=False, index_urls=indexes)
    return PackageFinder(
        session=session,  # type: ignore[arg-type]  # its own default session is of this very class
        index_urls=indexes,
        find_links=links,
        trusted_hosts=hosts,
        no_binary=() if wheels else (":all:",),
        only_binary=(":all:",) if wheels else (),
    )


def _download(label: str, *, wheels: bool) -> tuple[str, bytes]:
    """Name and bytes of the best file of ``NAME==VERSION`` that the index has."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            finder = _finder(wheels=wheels)
            package = finder.find_best_match(label).best
        if package is None:
            raise LookupError(label)
        with finder.session.get_stream(package.link.normalized.partition("#")[0]) as response:
            response.raise_for_status()
            data = b"".join(response.iter_bytes())
    except Exception as error:  # whatever the transport raises: one sentence, the cause attached
        kind = "wheel" if wheels else "source distribution"
        problem = f"the package index gives no {kind} of {label} ({type(error).__name__})."
        fix = f"pip index versions {label.partition('==')[0]}; {FETCH_FIX}"
        raise InputError("CR0407", problem, where=label, fix=fix) from error
    promised = dict(package.link.hash_option or {}).get("sha256", [""])[0]
    if promised:
        check_hash(label, promised, sha256_of(data))
    return urlsplit(package.link.normalized).path.rpartition("/")[2], data


def check_hash(label: str, expected: str, found: str) -> None:
    """Refuse bytes that are not the pinned ones (CR0408)."""
    if found != expected:
        fix = "check the pin; if it is right, somebody changed the file: do not use it."
        raise InputError("CR0408", f"{label} has sha256 {found}, expected {expected}.", where=label, fix=fix)


def fetch_sdist(name: str, version: str) -> Path:
    """A source distribution as a file in the cache; InputError where it is not to be had (CR0407) or is another (CR0408)."""
    return fetch_wheel(name, version, wheels=False)


def fetch_wheel(name: str, version: str, sha256: str = "", *, wheels: bool = True) -> Path:
    """A wheel for this interpreter as a file in the cache; errors as ``fetch_sdist``, also for other bytes than ``sha256``."""
    label = f"{name}=={version}"
    shelf = cache.cache_folder() / ("wheels" if wheels else "sdists")
    shelf.mkdir(exist_ok=True)
    folder = shelf / f"{canonicalize_name(name)}-{version}"
    record = folder / "SHA256"
    with cache.cache_lock(f"fetch-{folder.name}"):
        recorded, _, filename = record.read_text().strip().partition("  ") if record.is_file() else [""] * 3
        path = folder / filename
        is_whole = path.is_file() and sha256_of_file(path) == recorded
        if not is_whole or (wheels and not fits_this_machine(filename)):
            filename, data = _download(label, wheels=wheels)
            path, recorded = folder / filename, sha256_of(data)
            if sha256:
                check_hash(label, sha256, recorded)  # nothing else is kept
            cache.put_file(record, f"{recorded}  {filename}\n".encode())
            cache.put_file(path, data)
    if sha256:
        check_hash(label, sha256, recorded)
    return path


def fits_this_machine(wheel_name: str) -> bool:
    """Whether this interpreter can install a wheel of that file name."""
    return not parse_wheel_filename(wheel_name)[3].isdisjoint(sys_tags())
