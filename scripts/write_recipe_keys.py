"""Write ``docs/recipe-keys.md`` from ``config.py``: every key, its type, default and range.

python scripts/write_recipe_keys.py            write the page
python scripts/write_recipe_keys.py --check    only say whether it is up to date
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

from composer_replication.config import RunConfig, Section

PAGE = Path(__file__).resolve().parent.parent / "docs" / "recipe-keys.md"
BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
HEAD = """# Every key of a recipe

Made from `src/composer_replication/config.py` by `make docs`; a test checks that it is up to date.

A recipe is a TOML file. An unknown key is an error that names the nearest known one; values are not
converted (`"3"` is not `3`). `--set KEY=VALUE` overrides one key for one run: `--set trl.max_steps=2`.
Paths are relative to the recipe's own folder. A key stands with its type, its default and its range.
"""
TRL_NOTE = """
These keys go unchanged to TRL's `GRPOConfig`; see TRL's own documentation for all of them. A key that TRL does
not know is an error (CR0211), and so are the few that the run folder decides: `output_dir`, `save_strategy`,
`save_steps`, `save_only_model`, `ignore_data_skip`, `resume_from_checkpoint`, `seed`,
`remove_unused_columns`, `model_init_kwargs` (the model is set under `[model]`);
those of a hub have no use here. Values of another type, and those that TRL itself refuses, are refused before tasks are built or a
model is loaded; settings of optimizer and schedule when training begins.
"""


def page_text() -> str:
    """The whole page."""
    parts = [HEAD, _section_text("Top level", RunConfig, "")]
    for name, field in RunConfig.model_fields.items():
        kind = _section_of(field.annotation)
        if kind is not None:
            parts.append(_tables_text(name, kind, is_optional=field.default is None))
    parts.append(f"## `[trl]`\n{TRL_NOTE}")
    return "\n".join(parts)


def _tables_text(name: str, kind: type[Section], *, is_optional: bool) -> str:
    note = " Off unless the table is there." if is_optional else ""
    text = _section_text(f"`[{name}]`", kind, note)
    for key, field in kind.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            text += "\n" + _tables_text(f"{name}.{key}", inner, is_optional=field.default is None)
    return text


def _section_text(title: str, kind: type[Section], note: str) -> str:
    keys = [
        f"`{key}` ({', '.join(filter(None, (_type_text(field.annotation), _default_text(field), _range_text(field))))})"
        for key, field in kind.model_fields.items()
        if _section_of(field.annotation) is None and key != "trl"
    ]
    about = inspect.cleandoc(kind.__doc__ or "").replace("``", "`")
    return f"## {title}\n\n{about}{note}\n\n**Keys:** {' · '.join(keys) or 'none'}\n"


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
        return f"table of {_type_text(inner[1])}"
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
    text = page_text()
    if "--check" in argv:
        is_current = PAGE.is_file() and PAGE.read_text() == text
        print(f"{PAGE.name} is {'up to date' if is_current else 'out of date: make docs'}")
        return 0 if is_current else 1
    PAGE.write_text(text)
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
