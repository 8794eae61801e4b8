"""The files that declare a Python project, each parsed once; a broken one is as good as empty. None is run."""

from __future__ import annotations

import configparser
import posixpath
import tomllib
from collections.abc import Iterator, Mapping
from email.parser import Parser
from functools import cached_property
from typing import TYPE_CHECKING, Any

from composer_replication.tasks.intake.requirement_texts import read_file, read_lines
from composer_replication.tasks.intake.setup_py import setup_arguments

if TYPE_CHECKING:
    from packaging.requirements import Requirement

TEXT_SUFFIXES = (".txt", ".in")


def parse_toml(data: bytes) -> dict[str, Any]:
    """A TOML file as a table; empty when broken."""
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return {}


def parse_ini(data: bytes) -> configparser.ConfigParser:
    """A file of sections; empty when broken."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        parser.read_string(data.decode("utf-8", "replace"))
    except configparser.Error:
        return configparser.ConfigParser(interpolation=None)
    return parser


def inner_table(table: object, *keys: str) -> dict[str, Any]:
    """The table at a path of keys; empty when absent, or when something else stands there."""
    value: Any = table
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return dict(value) if isinstance(value, Mapping) else {}


def texts(value: object) -> list[str]:
    """The strings of a list, or one string as a list."""
    if isinstance(value, str):
        return [value]
    return [item for item in value if isinstance(item, str)] if isinstance(value, list | tuple) else []


def values_at(value: object, path: str) -> Iterator[Any]:
    """Whatever stands at a path of keys with dots between, in which ``*`` is each key of a table or item of a list."""
    key, _, rest = path.partition(".")
    if not path:
        yield value
    elif key == "*":
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        for one in inner:
            yield from values_at(one, rest)
    elif isinstance(value, Mapping) and key in value:
        yield from values_at(value[key], rest)


class ProjectFiles:
    """The files of one project, each parsed once."""

    def __init__(self, files: Mapping[str, bytes], folder: str = "") -> None:
        self.files = files
        self.folder = folder
        self.start = f"{folder}/" if folder else ""

    def path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.folder, name))

    def read(self, path: str) -> bytes:
        """A file by its path from the top."""
        return self.files.get(path, b"")

    def text(self, name: str) -> str:
        """A text by its path in the project."""
        return self.read(self.path(name)).decode("utf-8", "replace")

    @cached_property
    def toml(self) -> dict[str, Any]:
        return parse_toml(self.read(self.path("pyproject.toml")))

    @cached_property
    def config(self) -> configparser.ConfigParser:
        return parse_ini(self.read(self.path("setup.cfg")))

    @cached_property
    def setup(self) -> dict[str, Any]:
        beside = [
            path.removeprefix(self.start)
            for path in self.files
            if path.startswith(self.start) and path.endswith(TEXT_SUFFIXES)
        ]
        return setup_arguments(self.read(self.path("setup.py")), beside)

    @cached_property
    def info(self) -> Mapping[str, list[str]]:
        """The header of ``PKG-INFO``: what an archive of sources says of itself. The description stays out."""
        header = Parser().parsestr(self.text("PKG-INFO"), headersonly=True)
        return {name: [str(value) for value in header.get_all(name, [])] for name in header}

    def table(self, *keys: str) -> dict[str, Any]:
        return inner_table(self.toml, *keys)

    def strings(self, *paths: str) -> list[str]:
        """The strings of ``pyproject.toml`` at some paths (``values_at``), in their order."""
        return [text for path in paths for value in values_at(self.toml, path) for text in texts(value)]

    def ini(self, section: str, key: str) -> str:
        """A value of ``setup.cfg``; either spelling of the key is read."""
        found = (self.config.get(section, one, fallback="") for one in (key, key.replace("_", "-")))
        return next(filter(None, found), "")

    @property
    def backend(self) -> str:
        return str(self.table("build-system").get("build-backend", ""))

    def lines(self, value: object) -> list[Requirement]:
        """Requirements that stand in a list of strings."""
        return read_lines(texts(value), self.folder, self.read, self.folder)

    def named(self, value: object) -> list[Requirement]:
        """Requirements of the files that a value names: one, a list, or a table with ``file``."""
        inner = value.get("file") if isinstance(value, Mapping) else value
        return [one for path in texts(inner) for one in read_file(self.path(path), self.read, self.folder)]

    def ini_lines(self, value: str) -> list[Requirement]:
        """Requirements of a value of ``setup.cfg``, which may begin with ``file:``."""
        value = value.strip()
        if value.startswith("file:"):
            return self.named([path.strip() for path in value[5:].replace("\n", ",").split(",")])
        return self.lines(value.splitlines())
