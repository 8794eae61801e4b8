"""``composer-rl doctor``, ``explain`` and ``cache``: what is missing here, what an error means, how room is made; without torch."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.cli.machine_troubles import package_version
from composer_replication.cli.terminal import note
from composer_replication.errors import ComposerError, MissingError, UsageError
from composer_replication.records import Check

if TYPE_CHECKING:
    from composer_replication.sandbox import SandboxBackend

MISSING_EXIT_CODE = 3
GIGABYTE = 10**9
QUICKSTART_MEMORY_BYTES = 6 * GIGABYTE
CACHE_DISK_BYTES = 4 * GIGABYTE
TRAINING_PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "gguf")
_LINUX = "run inside a Linux container: docker or podman with the python:3.12 image"
_CGROUP = Path("/sys/fs/cgroup")


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """All checks; exit code 0 when all that are required hold, else 3. GPU and ports may fail, and single backends."""
    checks = list(all_checks((lambda _: None) if args.quiet else note))
    is_ok = all(check.ok or check.name.startswith(("gpu", "ports", "sandbox ")) for check in checks)
    return {"ok": is_ok, "checks": list(map(asdict, checks))}, 0 if is_ok else MISSING_EXIT_CODE


def render(result: Mapping[str, Any]) -> str:
    """One line a check, the next step below those that fail."""
    lines: list[str] = []
    for check in result["checks"]:
        lines.append(f"{'ok  ' if check['ok'] else 'NO  '} {check['name']:<20} {check['detail']}")
        if not check["ok"] and check["fix"]:
            lines.append(f"{'':<25} -> {check['fix']}")
    missing = "what is marked NO and has a next step is missing, or does not fit"
    return "\n".join([*lines, "", "ready for composer-rl quickstart" if result["ok"] else missing])


def all_checks(progress: Callable[[str], None]) -> Iterator[Check]:
    """Every check in the order in which a person should read them; ``progress`` hears of the slow ones."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield check_platform()
    yield Check("python", True, f"{platform.python_version()} at {sys.executable}")
    yield Check("cores", True, f"{num_cores} usable")
    smaller = "close other programs or use a larger machine"
    yield check_room("memory", available_memory_bytes(), QUICKSTART_MEMORY_BYTES, smaller)
    yield from check_cache()
    yield from map(check_package, TRAINING_PACKAGES)
    yield from check_sandboxes(progress)
    yield check_loopback()
    yield check_gpu()


def _check(name: str, ok: bool, good: str, bad: str = "", fix: str = "") -> Check:  # noqa: FBT001
    """``good`` is said where it holds, else ``bad``, or the same, with the next step."""
    return Check(name, True, good) if ok else Check(name, False, bad or good, fix)


def check_platform(system: str = sys.platform) -> Check:
    """Rollouts run on Linux; elsewhere only what needs no jail does."""
    found = f"{platform.system()} {platform.machine()}"
    elsewhere = f"{found}: guard and reports run here, rollouts and training need Linux"
    return _check("platform", system == "linux", found, elsewhere, _LINUX)


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int | None:
    """Memory that can be used now: of the machine, or of this container when that is less; None when unknown."""

    def text(path: Path) -> str:
        with suppress(OSError):  # outside Linux there is no such file
            return path.read_text().strip()
        return ""

    rooms = [int(x.split()[1]) * 1024 for x in text(meminfo).splitlines() if x.startswith("MemAvailable:")]
    limit, used = text(cgroup / "memory.max"), text(cgroup / "memory.current")
    if limit.isdigit() and used.isdigit():
        rooms.append(max(0, int(limit) - int(used)))
    return min(rooms, default=None)


def check_room(name: str, free_bytes: int | None, needed_bytes: int, fix: str) -> Check:
    """Whether the quick start has room: for the model in memory; for environments, models and checkpoints beside the cache."""
    needs = f"the quick start needs {needed_bytes / GIGABYTE:.0f} GB"
    if free_bytes is None:
        return Check(name, True, f"unknown on this system; {needs}")
    free = f"{free_bytes / GIGABYTE:.1f} GB free"
    return _check(name, free_bytes >= needed_bytes, f"{free}, {needs}", fix=fix)


def check_cache() -> Iterator[Check]:
    """Where fetched and made things live, and the room left beside them."""
    from composer_replication.tasks.intake.cache import CACHE_VARIABLE, cache_folder

    fix = f"set {CACHE_VARIABLE} to a folder that you may write to"
    try:
        folder = cache_folder()
    except OSError as error:
        yield Check("cache", False, f"cannot be made: {error}", fix)
        return
    yield _check("cache", os.access(folder, os.W_OK | os.X_OK), str(folder), fix=fix)
    free_bytes = shutil.disk_usage(folder).free
    yield check_room("disk", free_bytes, CACHE_DISK_BYTES, f"free some space, or move {CACHE_VARIABLE}")


def check_package(name: str) -> Check:
    """An installed distribution, looked up without importing it."""
    version, fix = package_version(name), "pip install 'composer-replication[quickstart]'"
    return _check(name, bool(version), version, "not installed; training needs it", fix)


def check_sandboxes(progress: Callable[[str], None]) -> Iterator[Check]:
    """Every backend's self-test; required is that the one holds which a run takes when none is named."""
    if sys.platform != "linux":
        yield Check("sandbox", False, "needs Linux", _LINUX)
        return
    from composer_replication.sandbox.acceptance import WITHOUT_ISOLATION
    from composer_replication.sandbox.choice import BACKENDS, ONLY_BY_NAME, choose_backend

    tried: dict[str, Check] = {}
    for name in (name for name in BACKENDS if name != WITHOUT_ISOLATION):
        progress(f"trying to break out of {name}")
        tried[name] = _tried_backend(name, choose_backend(name))
        yield tried[name]
    try:  # what a run would take, by the very function that it asks
        backend = choose_backend()
    except MissingError as error:
        yield Check("sandbox", False, error.message, error.fix)
        return
    name, fix = backend.name, f"composer-rl sandbox selftest --backend {backend.name}"
    if other := next((other for other in tried if tried[other].ok and other not in ONLY_BY_NAME), ""):
        fix = f'--backend {other} (in a recipe: backend = "{other}" under [sandbox]), which holds here'
    good = f"rollouts would use {name}: {backend.is_available().detail}"
    bad = f"rollouts would use {name}, and its self-test fails, so that no reward would be given"
    yield _check("sandbox", tried[name].ok, good, bad, fix)


def _tried_backend(name: str, backend: SandboxBackend) -> Check:
    from composer_replication.sandbox.selftest import run_selftest

    fix = f"composer-rl sandbox selftest --backend {name}"
    try:
        available = backend.is_available()
        if not available.ok:
            return Check(f"sandbox {name}", False, f"optional: {available.detail}", available.fix)
        guards = run_selftest(backend)
    except ComposerError as error:
        return Check(f"sandbox {name}", False, f"optional: {error.message}", error.fix)
    broken = "; ".join(f"{guard.name}: {guard.detail}" for guard in guards if not guard.ok)
    good = f"all {len(guards)} guards hold; {available.detail}"
    return _check(f"sandbox {name}", not broken, good, f"optional: {broken}", fix)


def check_loopback() -> Check:
    """A free port on the loopback address; servers and replicas need one, a single training does not."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        return Check("ports", False, f"optional: no loopback port opens: {error}", "ip link set lo up")
    return Check("ports", True, "a loopback port can be opened")


def check_gpu() -> Check:
    """What nvidia-smi names; the quick start runs on the processor."""
    words = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    if shutil.which(words[0]) is None:
        return Check("gpu", True, "none found; the quick start needs none")
    try:
        found = subprocess.check_output(words, stderr=subprocess.DEVNULL, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        fix = "check the driver; the quick start needs no GPU"
        return Check("gpu", False, f"nvidia-smi fails: {error}", fix)
    return Check("gpu", True, "; ".join(found.split("\n")).strip("; ") or "none found")


def load_explanations() -> dict[str, dict[str, Any]]:
    """Every entry of ``explanations/*.toml`` by code, in order."""
    files = Path(__file__).with_name("explanations").glob("*.toml")
    tables = [tomllib.loads(file.read_text(encoding="utf-8")) for file in files]
    return dict(sorted((code, entry) for table in tables for code, entry in table.items()))


def run_explain(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    entries = load_explanations()
    code = args.code.strip().upper()
    if code not in entries:
        digits = int("".join(filter(str.isdecimal, code)) or 0)
        near = min(entries, key=lambda known: abs(int(known[2:]) - digits))
        fix = f"composer-rl explain {near}"
        raise UsageError("CR0206", f"there is no error code {args.code!r}.", where="CODE", fix=fix)
    return {"code": code, **{key: entries[code][key] for key in ("meaning", "causes", "fixes")}}, 0


def render_explain(result: Mapping[str, Any]) -> str:
    lines = [f"{result['code']}: {result['meaning']}", "", "Why it happens"]
    lines += [f"  - {cause}" for cause in result["causes"]]
    return "\n".join([*lines, "", "What to do", *(f"  - {fix}" for fix in result["fixes"])])


def run_prune(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """Empty the folder of fetched and made things."""
    from composer_replication.tasks.intake.cache import CACHE_VARIABLE, cache_folder, prune

    try:
        folder = cache_folder()
    except OSError as error:
        problem = f"the cache folder cannot be made: {error.strerror}."
        fix = f"set {CACHE_VARIABLE} to a folder that you may write, or unset it."
        raise UsageError("CR0209", problem, where=str(error.filename or CACHE_VARIABLE), fix=fix) from error
    removed, is_in_use = prune(folder, is_dry_run=args.dry_run)
    return {
        "folder": str(folder),
        "freed_bytes": sum(removed.values()),
        "dry_run": args.dry_run,
        "paths": list(map(str, removed)),
        "in_use": is_in_use,
    }, 0
