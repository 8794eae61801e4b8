"""``composer-rl doctor``: what this machine has, what it lacks, and what to type about it.

Each check is a small function; none imports torch, none goes to the network.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer_replication.errors import ComposerError, MissingError, UsageError
from composer_replication.records import Check

if TYPE_CHECKING:
    from composer_replication.interfaces import SandboxBackend

MISSING_EXIT_CODE = 3
GIGABYTE = 10**9
QUICKSTART_MEMORY_BYTES = 6 * GIGABYTE
CACHE_DISK_BYTES = 4 * GIGABYTE
TRAINING_PACKAGES = ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "gguf")
VLLM_PAIR = "pip install vllm==0.32.0 transformers==5.19.0 trl==1.16.0"
"""The newest that fit each other and this package; TRL 1.16 warns that it knows vLLM up to 0.31, which wants older transformers."""
_INSTALL = "pip install 'composer-replication[quickstart]'"
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check; ``doctor`` is ok when all that are required are."""

    check: Check
    is_required: bool = True


def add_parser(subparsers: Any, common: argparse.ArgumentParser) -> None:
    """Register the verb; ``common`` carries ``--json`` and ``--quiet``."""
    parser = subparsers.add_parser(
        "doctor",
        parents=[common],
        help="what this machine has and what it lacks",
        description="Check this machine: Python, memory, disk, packages, and every sandbox backend by trying to "
        "break out of it. Exit code 3 when something that the quick start needs is missing, or the server does not fit.",
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="ask this sampling server, too: version, model, settings"
    )
    parser.add_argument("--endpoint-key-env", default="", metavar="VARIABLE", help="holds the server's key")
    parser.set_defaults(run="composer_replication.cli.doctor_verb:run")


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    """All checks; exit code 0 when all that are required hold, else 3. A failing check is a result, not an error.

    Raises:
        UsageError: a key for no server (CR0206).
    """
    if args.endpoint_key_env and not args.endpoint:
        raise UsageError(
            "CR0206", "a key without a server.", where="--endpoint-key-env", fix="give --endpoint URL, too."
        )
    findings = all_checks((lambda _: None) if args.quiet else partial(print, file=sys.stderr, flush=True))
    if args.endpoint:
        findings.append(Finding(check_server(args.endpoint, args.endpoint_key_env)))
    is_ok = all(finding.check.ok for finding in findings if finding.is_required)
    return {
        "ok": is_ok,
        "checks": [asdict(finding.check) for finding in findings],
    }, 0 if is_ok else MISSING_EXIT_CODE


def render(result: Mapping[str, Any]) -> str:
    """What a person reads: one line a check, the next step below those that fail."""
    lines: list[str] = []
    for check in result["checks"]:
        lines.append(f"{'ok  ' if check['ok'] else 'NO  '} {check['name']:<20} {check['detail']}")
        if not check["ok"] and check["fix"]:
            lines.append(f"{'':<25} -> {check['fix']}")
    lines += [
        "",
        "ready for composer-rl quickstart"
        if result["ok"]
        else "what is marked NO and has a next step is missing, or does not fit",
    ]
    return "\n".join(lines)


# --------------------------------------------------------------------------- the checks


def all_checks(progress: Callable[[str], None]) -> list[Finding]:
    """Every check in the order in which a person should read them; ``progress`` hears of the slow ones."""
    return [
        Finding(check_platform()),
        Finding(check_python()),
        Finding(check_cores()),
        Finding(check_memory(available_memory_bytes())),
        *check_cache(),
        *(Finding(check_package(name)) for name in TRAINING_PACKAGES),
        *(Finding(check, is_required=False) for check in [check_vllm()] if check is not None),
        *check_sandboxes(progress),
        Finding(check_loopback()),
        *(Finding(check_program(name), is_required=False) for name in ("git", "make")),
        Finding(check_gpu(), is_required=False),
    ]


def check_platform(system: str = sys.platform) -> Check:
    """Rollouts run on Linux; elsewhere only what needs no jail does. Said first."""
    found = f"{platform.system()} {platform.machine()}"
    if system == "linux":
        return Check("platform", True, found)
    return Check(
        "platform",
        False,
        f"{found}: guard and reports run here, rollouts and training need Linux",
        "run inside a Linux container: docker or podman with the python:3.12 image",
    )


def check_python() -> Check:
    """Which one; an older one than 3.11 does not come so far."""
    return Check("python", True, f"{platform.python_version()} at {sys.executable}")


def check_cores() -> Check:
    """Cores this process may use; one is enough, two grade while the model samples."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cores", True, f"{num_cores} usable")


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int | None:
    """Memory that can be used now: of the machine, or of this container when that is less; None when unknown."""
    rooms: list[int] = []
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # no such file outside Linux: reported as unknown
        lines = []
    rooms += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        rooms.append(max(0, limit - used))
    return min(rooms) if rooms else None


def check_memory(available_bytes: int | None) -> Check:
    """Room for the quick start."""
    if available_bytes is None:
        return Check("memory", True, "unknown on this system; the quick start needs 6 GB")
    detail = f"{available_bytes / GIGABYTE:.1f} GB free, the quick start needs {QUICKSTART_MEMORY_BYTES / GIGABYTE:.0f} GB"
    is_enough = available_bytes >= QUICKSTART_MEMORY_BYTES
    return Check(
        "memory", is_enough, detail, "" if is_enough else "close other programs or use a larger machine"
    )


def check_cache() -> Iterator[Finding]:
    """Where fetched and made things live, how large they are, and the room left beside them."""
    from composer_replication.tasks.intake.cache import CACHE_VARIABLE, cache_folder

    try:
        folder = cache_folder()
    except OSError as error:
        fix = f"set {CACHE_VARIABLE} to a folder that you may write to"
        yield Finding(Check("cache", False, f"cannot be made: {error}", fix))
        return
    is_writable = os.access(folder, os.W_OK | os.X_OK)
    fix = "" if is_writable else f"set {CACHE_VARIABLE} to a folder that you may write to"
    yield Finding(Check("cache", is_writable, f"{folder}, {_tree_bytes(folder) / GIGABYTE:.2f} GB", fix))
    yield Finding(check_disk(shutil.disk_usage(folder).free))


def check_disk(free_bytes: int) -> Check:
    """Room for environments, models and checkpoints."""
    is_enough = free_bytes >= CACHE_DISK_BYTES
    detail = f"{free_bytes / GIGABYTE:.1f} GB free beside the cache, {CACHE_DISK_BYTES / GIGABYTE:.0f} GB are needed"
    return Check("disk", is_enough, detail, "" if is_enough else "free some space, or move COMPOSER_RL_CACHE")


def check_package(name: str) -> Check:
    """An installed distribution, looked up without importing it."""
    try:
        return Check(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Check(name, False, "not installed; training needs it", _INSTALL)


def check_vllm() -> Check | None:
    """Whether an installed vLLM goes with the installed transformers, which it bounds; None where there is no vLLM."""
    from packaging.requirements import Requirement

    found = {}
    for name in ("vllm", "transformers", "trl"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    if not found["vllm"]:
        return None
    detail = f"{found['vllm']} beside transformers {found['transformers']} and trl {found['trl']}"
    bounds = [Requirement(text) for text in importlib.metadata.requires("vllm") or ()]
    bounds = [each for each in bounds if each.name == "transformers" and each.marker is None]
    if all(each.specifier.contains(found["transformers"]) for each in bounds):
        return Check("vllm", True, detail)
    wanted = ", ".join(str(each.specifier) for each in bounds)
    return Check("vllm", False, f"{detail}; it needs transformers {wanted}", VLLM_PAIR)


def check_sandboxes(progress: Callable[[str], None]) -> Iterator[Finding]:
    """Every backend's self-test; required is that the one holds which a run takes when none is named."""
    if sys.platform != "linux":
        yield Finding(Check("sandbox", False, "needs Linux", "run inside a Linux container"))
        return
    from composer_replication.sandbox.acceptance import WITHOUT_ISOLATION
    from composer_replication.sandbox.choice import BACKENDS, ONLY_BY_NAME, choose_backend

    tried: dict[str, Check] = {}
    for name in (name for name in BACKENDS if name != WITHOUT_ISOLATION):
        progress(f"trying to break out of {name}")
        tried[name] = _check_backend(name, choose_backend(name))
        yield Finding(tried[name], is_required=False)
    yield Finding(_check_default({name: tried[name] for name in tried if name not in ONLY_BY_NAME}))


def _check_default(tried: Mapping[str, Check]) -> Check:
    """What a run would take, by the very function that it asks, and whether that one holds."""
    from composer_replication.sandbox.choice import choose_backend

    try:
        backend = choose_backend()
    except MissingError as error:
        return Check("sandbox", False, error.message, error.fix)
    name = backend.name
    if tried[name].ok:
        return Check("sandbox", True, f"rollouts would use {name}: {backend.is_available().detail}")
    detail = f"rollouts would use {name}, and its self-test fails, so that no reward would be given"
    holding = [other for other, check in tried.items() if check.ok]
    if holding:
        fix = f'--backend {holding[0]} (in a recipe: backend = "{holding[0]}" under [sandbox]), which holds here'
    else:
        fix = f"composer-rl sandbox selftest --backend {name}"
    return Check("sandbox", False, detail, fix)


def check_server(url: str, key_variable: str = "") -> Check:
    """What a sampling server says of itself; that it fits a recipe, ``train`` asks before its first step."""
    from composer_replication.rollouts.episodes.served_policy import (
        find_server,
        has_sampled_logps,
        open_server,
    )

    try:
        served = find_server(open_server(url, key_variable=key_variable))
    except ComposerError as error:
        return Check("server", False, error.message, error.fix)
    if not served.version:
        return Check(
            "server",
            False,
            f"what answers at {url} does not say that it is vLLM",
            "give the address of vllm serve",
        )
    length = "unknown" if served.max_context_tokens is None else served.max_context_tokens
    mode = served.setting("logprobs_mode") or "not told without VLLM_SERVER_DEV_MODE=1"
    detail = (
        f"vLLM {served.version}, model {served.endpoint.model}, context {length}, log-probabilities {mode}"
    )
    return Check("server", has_sampled_logps(served), detail, "serve with --logprobs-mode processed_logprobs")


def check_loopback() -> Check:
    """A free port on the loopback address, for servers that a later verb starts."""
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            return Check("ports", True, "a loopback port can be opened")
    except OSError as error:
        return Check("ports", True, f"no loopback port ({error}); only servers need one")


def check_program(name: str) -> Check:
    """A program that is convenient, not needed."""
    path = shutil.which(name)
    return Check(name, path is not None, path or "not found; optional", "" if path else f"apt install {name}")


def check_gpu() -> Check:
    """What nvidia-smi names; the quick start runs on the processor."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("gpu", True, "none found; the quick start needs none")
    try:
        done = subprocess.run(
            [program, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Check(
            "gpu", False, f"nvidia-smi fails: {error}", "check the driver; the quick start needs no GPU"
        )
    return Check("gpu", True, "; ".join(done.stdout.split("\n")).strip("; ") or "none found")


def _check_backend(name: str, backend: SandboxBackend) -> Check:
    from composer_replication.sandbox.selftest import run_selftest

    label = f"sandbox {name}"
    try:
        available = backend.is_available()
        if not available.ok:
            return Check(label, False, f"optional: {available.detail}", available.fix)
        guards = run_selftest(backend)
    except ComposerError as error:
        return Check(label, False, f"optional: {error.message}", error.fix)
    broken = [guard for guard in guards if not guard.ok]
    if broken:
        detail = "; ".join(f"{guard.name}: {guard.detail}" for guard in broken)
        return Check(label, False, f"optional: {detail}", f"composer-rl sandbox selftest --backend {name}")
    return Check(label, True, f"all {len(guards)} guards hold; {available.detail}")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no such control group: no limit to respect
        return None
    return int(text) if text.isdigit() else None


def _tree_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # a build beside us removes some, and some may be closed to us
                info = Path(root, name).lstat()
                total += 0 if stat.S_ISLNK(info.st_mode) else info.st_size
    return total
