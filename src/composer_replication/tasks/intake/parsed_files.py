"""The files that declare a Python project, each parsed once; a broken one is as good as empty. None is run."""

from __future__ import annotations

import configparser
import posixpath
import tomllib
from collections.abc import Mapping
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


class ProjectFiles:
    """The files of one project, each parsed once."""

    def __init__(self, files: Mapping[str, bytes], folder: str = "") -> None:
        self.files = files
        self.folder = folder

    def path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self.folder, name))

    def read(self, path: str) -> bytes:
        """A file by its path from the top."""
        return self.files.get(path, b"")

    @cached_property
    def toml(self) -> dict[str, Any]:
        return parse_toml(self.read(self.path("pyproject.toml")))

    @cached_property
    def config(self) -> configparser.ConfigParser:
        return parse_ini(self.read(self.path("setup.cfg")))

    @cached_property
    def setup(self) -> dict[str, Any]:
        start = f"{self.folder}/" if self.folder else ""
        beside = [
            path.removeprefix(start)
            for path in self.files
            if path.startswith(start) and path.endswith(TEXT_SUFFIXES)
        ]
        return setup_arguments(self.read(self.path("setup.py")), beside)

    @cached_property
    def info(self) -> Mapping[str, list[str]]:
        """The header of ``PKG-INFO``: what an archive of sources says of itself. The description stays out."""
        header = Parser().parsestr(
            self.read(self.path("PKG-INFO")).decode("utf-8", "replace"), headersonly=True
        )
        return {name: [str(value) for value in header.get_all(name, [])] for name in header}

    def table(self, *keys: str) -> dict[str, Any]:
        return inner_table(self.toml, *keys)

    def ini(self, section: str, key: str) -> str:
        """A value of ``setup.cfg``; either spelling of the key is read."""
        for name in (key, key.replace("_", "-")):
            found = self.config.get(section, name, fallback="")
            if found:
                return found
        return ""

    @property
    def backend(self) -> str:
        return str(self.table("build-system").get("build-backend", ""))

    def lines(self, value: object) -> list[Requirement]:
        """Requirements that stand in a list of strings."""
        return read_lines(texts(value), self.folder, self.read, self.folder)

    def named(self, value: object) -> list[Requirement]:
        """Requirements of the files that a value names: one, a list, or a table with ``file``."""
        inner = value.get("file") if isinstance(value, Mapping) else value
        found = [read_file(self.path(path), self.read, self.folder) for path in texts(inner)]
        return [requirement for part in found for requirement in part]

    def ini_lines(self, value: str) -> list[Requirement]:
        """Requirements of a value of ``setup.cfg``, which may begin with ``file:``."""
        if value.strip().startswith("file:"):
            return self.named([path.strip() for path in value.strip()[5:].replace("\n", ",").split(",")])
        return self.lines(value.splitlines())
