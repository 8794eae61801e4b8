"""Which kind of jail, by name, by dotted path, or the first that works here."""

from __future__ import annotations

import difflib
import importlib
from typing import Any, Protocol, runtime_checkable

from composer_replication.errors import MissingError, UsageError
from composer_replication.records import Check, SandboxSpec
from composer_replication.sandbox.acceptance import WITHOUT_ISOLATION, require_accepted
from composer_replication.sandbox.local_sandbox import LocalSandbox

BACKENDS = {
    "bubblewrap": "composer_replication.sandbox.bubblewrap:Bubblewrap",
    "sandlock": "composer_replication.sandbox.keeper_process:Sandlock",
    "bubblewrap-warm": "composer_replication.sandbox.bubblewrap:WarmBubblewrap",
    "none": "composer_replication.sandbox.keeper_process:NoIsolation",
}
"""Known names, best first; each is imported only when it is chosen."""

ONLY_BY_NAME = ("bubblewrap-warm", WITHOUT_ISOLATION)
"""Those that are never chosen without being named, as no service is either."""

_HARBOR = "composer_replication.sandbox.harbor_backend:Harbor"
_WARM = "-warm"  # the name of a backend, and this, is the name of its warm kind


@runtime_checkable
class SandboxBackend(Protocol):
    """A kind of jail, chosen by name or by dotted path."""

    name: str

    def is_available(self) -> Check: ...

    def open(self, spec: SandboxSpec) -> LocalSandbox: ...


def choose_backend(name: str | None = None) -> SandboxBackend:
    """The backend called ``name``, or the first that can start a jail here and needs no naming.

    Args:
        name: a key of ``BACKENDS``; ``harbor:NAME`` for an environment of Harbor's, or ``harbor:package.module:Class`` for
            one of yours; or ``package.module:Class`` whose class takes no arguments and fulfils ``SandboxBackend``.

    Raises:
        UsageError: an unknown name, or a dotted path that leads nowhere (CR0305); ``none``, and nobody
            has accepted to do without isolation (CR0340).
        MissingError: no backend works here (CR0301).
    """
    if name is None:
        return _first_available()
    kind, _, environment = name.partition(":")
    if kind == "harbor" and environment:
        return _load(_HARBOR, environment)
    path = BACKENDS.get(name, name)
    if ":" not in path:
        jails = [known for known in BACKENDS if known != WITHOUT_ISOLATION]  # nobody is led to that one
        near = difflib.get_close_matches(name, jails, n=1, cutoff=0.6)
        known = f"choose one of {', '.join(BACKENDS)}, or harbor:NAME, as harbor:docker and harbor:podman."
        guess = f"did you mean {near[0]}?" if near else known
        why = f"there is no sandbox backend called {name!r}."
        raise UsageError("CR0305", why, where="backend", fix=guess)
    if path == BACKENDS.get(WITHOUT_ISOLATION):
        require_accepted(name)
    return _load(path)


def _first_available() -> SandboxBackend:
    problems: list[str] = []
    for name in (known for known in BACKENDS if known not in ONLY_BY_NAME):
        backend = _load(BACKENDS[name])
        check = backend.is_available()
        if check.ok:
            return backend
        problems.append(f"{backend.name}: {check.detail}")
    raise MissingError(
        "CR0301",
        f"no sandbox works on this machine ({' '.join(problems)})",
        fix="apt install bubblewrap, or pip install sandlock (Linux 6.12 or newer)",
    )


def _load(path: str, *words: str) -> SandboxBackend:
    module_name, _, class_name = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module_name), class_name)(*words)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        why = f"the sandbox backend {path!r} cannot be loaded: {error}."
        raise UsageError("CR0305", why, where="backend") from error
    if not isinstance(found, SandboxBackend):
        why = f"the sandbox backend {path!r} lacks one of name, is_available and open."
        raise UsageError("CR0305", why, where="backend")
    return found


def open_sandbox(spec: SandboxSpec, backend: str | SandboxBackend | None = None) -> LocalSandbox:
    """Open a sandbox by a backend, by its name as in ``choose_backend``, or (None) by the first that works.

    Raises:
        UsageError, MissingError: as ``choose_backend``.
        SandboxFailure: the jail cannot be prepared.
    """
    chosen = choose_backend(backend) if backend is None or isinstance(backend, str) else backend
    return chosen.open(spec)


def warm_kind(backend: SandboxBackend) -> SandboxBackend | None:
    """The kind of ``backend`` that keeps one process inside between commands; None where there is none.

    Itself where it is warm already. A backend of somebody else's has none, whatever its name: ours has other walls.
    """
    if backend.name.endswith(_WARM):
        return backend
    name = name_of(backend) + _WARM
    return _load(BACKENDS[name]) if name in BACKENDS else None


def name_of(backend: SandboxBackend) -> str:
    """What ``choose_backend`` knows it by: a name of ours, or the dotted path of somebody else's."""
    path = f"{type(backend).__module__}:{type(backend).__qualname__}"
    if path == _HARBOR:
        return backend.name
    return next((name for name, ours in BACKENDS.items() if ours == path), path)
