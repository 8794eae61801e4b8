"""Write into the table of ``docs/recipe-keys.md`` what ``config.py`` says of each key: type, default and range.

What a key does is written on the page itself. A key that is new there gets a row without it, at its place.

python scripts/write_recipe_keys.py            write the page
python scripts/write_recipe_keys.py --check    only say whether it is up to date
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from composer_replication.config import RunConfig, Section

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipe-keys.md"
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
ROW = re.compile(r"(?m)^\| (\**`[^|]*`\**) \|[^|]*\| ?(.*?) ?\|\n")
"""The name of a key, or of a table between two stars, and what it does."""


def page_text(page: str) -> str:
    """The page with a row for each table and each key that there is now."""
    meanings = dict(ROW.findall(page))
    rows = [f"| {name} | {facts} | {meanings.get(name, '')} |\n" for name, facts in _rows("", RunConfig)]
    before, *_, after = ROW.sub("\0", page).split("\0")
    return f"{before}{''.join(rows)}{after}"


def _rows(name: str, kind: type[Section]) -> Iterator[tuple[str, str]]:
    """Names and facts of a table's keys, and then of the tables in it."""
    inner = {key: _section_of(field.annotation) for key, field in kind.model_fields.items()}
    if name:
        yield f"**`[{name}]`**", ""
    for key, field in kind.model_fields.items():
        if inner[key] is None and key != "trl":
            facts = filter(None, (_type_text(field.annotation), _default_text(field), _range_text(field)))
            yield f"`{name}.{key}`".replace("`.", "`"), ", ".join(facts)
    for key, section in inner.items():
        if section is not None:
            yield from _rows(f"{name}.{key}".removeprefix("."), section)


def _section_of(annotation: Any) -> type[Section] | None:
    options = [annotation, *typing.get_args(annotation)]
    return next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)


def _type_text(annotation: Any) -> str:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in inner)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_text(option) for option in inner if option is not type(None))
    if origin is Annotated:
        return _type_text(inner[0])
    if origin is list:
        return f"list of {_type_text(inner[0])}"
    if origin is dict:
        return "table" if inner[1] is Any else f"table of {_type_text(inner[1])}"
    names = {str: "string", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, str(annotation))


def _default_text(field: Any) -> str:
    if field.is_required():
        return "**required**"
    if field.default is None:
        return "not set"
    shown = (
        str(field.default).lower()
        if isinstance(field.default, bool)
        else repr(field.default).replace("'", '"')
    )
    return f"`{shown}`"


def _range_text(field: Any) -> str:
    found = [
        f"{sign} {getattr(limit, name):,}"
        for limit in field.metadata
        for name, sign in BOUNDS.items()
        if hasattr(limit, name)
    ]
    return ", ".join(found)


def main(argv: list[str]) -> int:
    """Write the page, or with ``--check`` compare it."""
    old = PAGE.read_text()
    text = page_text(old)
    if "--check" in argv:
        print(f"{PAGE.name} is {'up to date' if text == old else 'out of date: make docs'}")
        return 0 if text == old else 1
    PAGE.write_text(text)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
