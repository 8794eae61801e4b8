"""Runs inside swesmith's own environment: draws rewrites from its Python modifiers.

    PYTHON modifiers.py --check                    # prints swesmith's version
    PYTHON modifiers.py REQUEST.json ANSWER.json

The request names a folder, the files in it that may be changed, a number and a seed. The
modifiers are swesmith's own list with its own likelihoods, entities are found, judged
(``can_change``), changed (``modify``) and written back (``apply_code_change``) by its own
code. The order of the entities is drawn by the seed for each modifier; the modifiers take
turns, each giving its next rewrite, until there are enough or none has one left. Not counted
as candidates, to the peer's favour: an entity for which a modifier gives nothing, a rewrite
that is the same text as an earlier one, and one in which its code raises.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def swesmith(name: str) -> Any:
    """A module of swesmith: this file is also read where swesmith is not installed."""
    return importlib.import_module(f"swesmith.{name}")


class Rewrites:
    """The rewrites that one modifier has for a repository, in drawn order."""

    def __init__(self, root: Path, modifier: Any, entities: list[Any], seed: int) -> None:
        self.root = root
        self.modifier = modifier
        self.entities = [entity for entity in entities if modifier.can_change(entity)]
        random.Random(f"{seed}/{modifier.name}").shuffle(self.entities)
        self.num_raised = 0

    def __iter__(self) -> Iterator[dict[str, str]]:
        bug_gen = swesmith("bug_gen.utils")
        for entity in self.entities:
            path = Path(entity.file_path)
            original = path.read_bytes()
            try:
                bug = self.modifier.modify(entity)
                patch = bug_gen.generate_patch_fast(entity, bug, str(self.root)) if bug else None
                if patch:
                    bug_gen.apply_code_change(entity, bug)
            except Exception:  # noqa: BLE001  whatever its transformers raise: its own command would end here
                self.num_raised += 1
                patch = None
            text = path.read_bytes()
            path.write_bytes(original)
            if patch and text != original:
                yield {
                    "path": path.relative_to(self.root).as_posix(),
                    "entity": entity.name,
                    "modifier": self.modifier.name,
                    "new_text": text.decode(),
                    "patch": patch,
                }


def drawn(columns: list[Rewrites], number: int) -> list[dict[str, str]]:
    """The rewrites of all modifiers in turn, each text once."""
    found: list[dict[str, str]] = []
    seen: set[tuple[str, str]] = set()
    sources = [iter(column) for column in columns]
    while sources and len(found) < number:
        for source in list(sources):
            rewrite = next((each for each in source if (each["path"], each["new_text"]) not in seen), None)
            if rewrite is None:
                sources.remove(source)
            elif len(found) < number:
                seen.add((rewrite["path"], rewrite["new_text"]))
                found.append(rewrite)
    return found


def main(arguments: list[str]) -> None:
    """See the top of this file."""
    modifiers = swesmith("bug_gen.procedural.python").MODIFIERS_PYTHON
    adapter = swesmith("bug_gen.adapters.python")
    version = importlib.metadata.version("swesmith")
    if arguments == ["--check"]:
        print(version)
        return
    request = json.loads(Path(arguments[0]).read_text())
    started = time.monotonic()
    root = Path(request["root"])
    entities: list[Any] = []
    for path in request["paths"]:
        adapter.get_entities_from_file_py(entities, str(root / path))
    columns = [Rewrites(root, modifier, entities, request["seed"]) for modifier in modifiers]
    rewrites = drawn(columns, request["number"])
    answer = {
        "version": version,
        "num_modifiers": len(modifiers),
        "num_entities": len(entities),
        "num_raised": sum(column.num_raised for column in columns),
        "seconds": time.monotonic() - started,
        "rewrites": rewrites,
    }
    Path(arguments[1]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
