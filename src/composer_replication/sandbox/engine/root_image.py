"""The root that a container starts from: empty but for links, made here, fetched from nowhere.

Programs and interpreter are those of this machine, mounted read-only, as in every other jail: a
task's environment needs the very interpreter that it was built with. What cannot be mounted is a
link of the root (``/bin`` to ``usr/bin``), so the links are the image; its tag is their digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from composer_replication.sandbox.engine.engine_client import EngineClient, EngineRefusal
from composer_replication.sandbox.jailed_tree import failure

REPOSITORY = "localhost/composer-rl-root"
_FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "usr", "var", "var/tmp")
_NOT_FOUND = 404


def root_tar(links: Mapping[Path, str]) -> bytes:
    """The root as a tar file: the same bytes for the same links."""
    buffer = io.BytesIO()
    entries: dict[str, str | None] = dict.fromkeys(_FOLDERS)
    for link, target in links.items():
        name = str(link).lstrip("/")
        for parent in reversed(Path(name).parents[:-1]):
            entries.setdefault(str(parent), None)
        entries[name] = target
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(entries):
            entry, target_of = tarfile.TarInfo(name), entries[name]
            entry.mode = 0o755
            entry.type = tarfile.DIRTYPE if target_of is None else tarfile.SYMTYPE
            entry.linkname = target_of or ""
            archive.addfile(entry)
    return buffer.getvalue()


def ensure_root_image(client: EngineClient, links: Mapping[Path, str]) -> str:
    """The image with these links, imported where the engine does not have it; its name.

    Raises:
        SandboxFailure: no engine (CR0320), or it refuses the import (CR0321).
    """
    data = root_tar(links)
    tag = hashlib.sha256(data).hexdigest()[:16]
    name = f"{REPOSITORY}:{tag}"
    try:
        client.ask("GET", f"/images/{name}/json")
        return name
    except EngineRefusal as error:
        if error.status != _NOT_FOUND:
            raise failure("CR0321", f"the engine does not look for an image: {error.message}.") from error
    query = {"fromSrc": "-", "repo": REPOSITORY, "tag": tag}
    try:
        answer = client.ask("POST", "/images/create", query=query, data=data)
    except EngineRefusal as error:
        raise failure("CR0321", f"the engine does not import an image: {error.message}.") from error
    for line in answer if isinstance(answer, list) else [answer]:
        if isinstance(line, dict) and line.get("error"):
            raise failure(
                "CR0321", f"the engine does not import an image: {json.dumps(line['error'])[:300]}."
            )
    return name
