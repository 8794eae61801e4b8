"""What is written down when the fault is ours: versions, arguments, traceback; no secret.

Environment variables are never written. The values of those whose name speaks of a
secret are looked up only to strike them out of the text, as are words that look like one.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from composer_replication import __version__

PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "datasets",
    "pydantic",
    "sandlock",
    "unearth",
)
STRUCK_OUT = "[struck out]"

_SECRET_NAME = (
    r"[\w.-]*(?:token|secret|passw|api[_-]?key|access[_-]?key|private[_-]?key|credential|auth)[\w.-]*"  # noqa: S105  a pattern
)
_PATTERNS = (
    re.compile(rf"(?i)(--{_SECRET_NAME}\s+)\S+"),
    re.compile(rf"(?i)({_SECRET_NAME}['\"]?\s*[=:]\s*)['\"]?[^\s'\"]+['\"]?"),
    re.compile(r"(://)[^/\s@]+(?=@)"),
    re.compile(r"()\b(?:hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[abp]-|AKIA)[A-Za-z0-9_-]{8,}"),
)
_SHORTEST_SECRET = 6  # a shorter value would strike ordinary words out of the traceback


def redact(text: str) -> str:
    """Strike out what looks like a secret: ``key=value``, URL credentials, known token shapes, known values."""
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST_SECRET and re.fullmatch(f"(?i){_SECRET_NAME}", name):
            text = text.replace(value, STRUCK_OUT)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{STRUCK_OUT}", text)
    return text


def write_crash_bundle(error: BaseException, argv: Sequence[str]) -> Path | None:
    """Write one text file, readable by its owner alone.

    Returns:
        Its path: in ``crash/`` of the cache folder, else in the temporary folder; None
        when neither can be written.
    """
    text = redact(_describe(error, argv))
    for folder_of in (_cache_crash_folder, _temporary_folder):
        path = _try_write(folder_of, text)
        if path is not None:
            return path
    return None


def _describe(error: BaseException, argv: Sequence[str]) -> str:
    lines = [
        f"composer-replication {__version__}",
        f"python {platform.python_version()} ({platform.python_implementation()})",
        f"platform {platform.platform()}",
        *(f"{name} {version}" for name in PACKAGES if (version := _version(name))),
        f"arguments {' '.join(argv)}",
        "",
        *traceback.format_exception(error),
    ]
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _try_write(folder_of: Callable[[], Path], text: str) -> Path | None:
    try:
        folder = folder_of()
        stamp = time.strftime("%Y%m%dT%H%M%S")
        descriptor, name = tempfile.mkstemp(prefix=f"composer-rl-crash-{stamp}-", suffix=".txt", dir=folder)
    except (OSError, ImportError):  # the next folder is tried; the caller says so when none is left
        return None
    try:
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as handle:
            handle.write(text)
    except OSError:  # the disk is full
        Path(name).unlink(missing_ok=True)
        return None
    return Path(name)


def _cache_crash_folder() -> Path:
    from composer_replication.tasks.intake.cache import cache_folder

    folder = cache_folder() / "crash"
    folder.mkdir(exist_ok=True)
    return folder


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir())
