"""``composer-rl explain CODE``: what an error code means, why it happens, what to do."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from composer_replication.errors import UsageError


def load_explanations() -> dict[str, dict[str, Any]]:
    """Every entry of ``explanations/*.toml`` by code, in order."""
    entries: dict[str, dict[str, Any]] = {}
    folder = files("composer_replication.cli") / "explanations"
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".toml"):
            continue
        for code, entry in tomllib.loads(file.read_text(encoding="utf-8")).items():
            if code in entries:
                raise ValueError(f"{code} is explained twice, the second time in {file.name}")
            entries[code] = entry
    return dict(sorted(entries.items()))


def run(args: argparse.Namespace) -> tuple[dict[str, object], int]:
    entries = load_explanations()
    code = args.code.strip().upper()
    if code not in entries:
        digits = int("".join(filter(str.isdecimal, code)) or 0)
        near = min(entries, key=lambda known: abs(int(known[2:]) - digits))
        fix = f"composer-rl explain {near}"
        raise UsageError("CR0206", f"there is no error code {args.code!r}.", where="CODE", fix=fix)
    entry = entries[code]
    return {"code": code, **{key: entry[key] for key in ("meaning", "causes", "fixes")}}, 0


def render(result: Mapping[str, Any]) -> str:
    lines = [f"{result['code']}: {result['meaning']}", "", "Why it happens"]
    lines += [f"  - {cause}" for cause in result["causes"]]
    return "\n".join([*lines, "", "What to do", *(f"  - {fix}" for fix in result["fixes"])])
