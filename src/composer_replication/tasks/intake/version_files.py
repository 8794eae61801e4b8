"""Version files that only a build writes: where its tools name them, and what they would say. No code is run."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from itertools import product

from composer_replication.tasks.intake.parsed_files import ProjectFiles, inner_table, values_at
from composer_replication.tasks.syntax_trees import parsed

_PYTHON = """\
__version__ = version = "{version}"
__version_tuple__ = version_tuple = {tuple}
__commit_id__ = commit_id = None
__git_version__ = git_version = full_version = short_version = __version__
release = True
TYPE_CHECKING = False


def get_versions():
    return {{"version": version, "full-revisionid": None, "dirty": False, "error": None, "date": None}}
"""
_TABLES = (
    "setuptools_scm", "setuptools-scm", "hatch.build.hooks.*", "hatch.build.targets.*.hooks.*", "pdm.version",
    "versioningit.write", "scikit-build.generate.*", "versioneer",
)  # fmt: skip
"""Below ``tool``: where a tool names its file by one of the keys below, with a template by one of the others."""
_KEYS = ("version_file", "write_to", "version-file", "file", "path", "versionfile_source")
_TEMPLATES = ("version_file_template", "write_to_template", "write_template", "template")
_PLACE = re.compile(r"\{(\w++)[^{}]*+\}|\$\{\w++\}|@\w++@")
_MESON_CALL = re.compile(r"\b(configure_file|vcs_tag|custom_target)\s*\(((?:[^()]|\([^()]*\))*)\)")
_MESON_PATH = r"%s\s*:\s*\[?\s*(?:files\()?\s*'([^']+)'"


def version_files(read: ProjectFiles, version: str) -> dict[str, bytes]:
    """The missing files by path, for all tools that the project's files name; they say ``version``."""
    folders = {posixpath.dirname(path) for path in read.files}
    found: dict[str, bytes] = {}
    for declared, template in _declared(read):
        path = read.path(declared)
        is_inside = declared.strip() and ".." not in declared.split("/") and not path.startswith("/")
        is_free = not any(f"{one}/".startswith(f"{path}/") for one in read.files)
        if is_inside and is_free and declared.isprintable() and posixpath.dirname(path) in folders:
            found[path] = _filled(path, template, version).encode()
    return found


def _filled(path: str, template: str, version: str) -> str:
    release = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]] or [0]
    names = _PYTHON.format(version=version, tuple=(*release,))
    if not template:
        return names if path.endswith(".py") else f"{version}\n"

    def value(match: re.Match[str]) -> str:
        return str((*release,)) if match[1] == "version_tuple" else version

    filled = _PLACE.sub(value, template.replace("{}", version)).replace("{{", "{").replace("}}", "}")
    return names if path.endswith(".py") and parsed(filled) is None else filled


def _declared(read: ProjectFiles) -> Iterator[tuple[str, str]]:
    """Paths from the project's folder, each with its template (empty: the tool's own)."""
    for name, said in product(_TABLES, read.declared):
        for table in map(inner_table, values_at(said, f"tool.{name}")):
            template = next((table[key] for key in _TEMPLATES if isinstance(table.get(key), str)), "")
            # Some count from the place of import; a file that is there is the one that is meant.
            paths = [path for path in map(table.get, _KEYS) if isinstance(path, str) and path.strip()]
            for base, path in product(("", "src", "python"), paths):
                if read.path(path) not in read.files:
                    yield posixpath.join(base, path), template
    for path, table in read.table("tool.poetry-dynamic-versioning.files").items():
        yield path, str(inner_table(table).get("initial-content") or "")
    for path in read.strings("tool.poetry-dynamic-versioning.substitution.files"):
        if "*" not in path:
            yield path, ""
    start = f"{read.folder}/" if read.folder else ""
    for path in sorted(read.files):
        if path.startswith(start) and posixpath.basename(path) == "meson.build":
            yield from _of_meson(read, posixpath.dirname(path.removeprefix(start)))


def _of_meson(read: ProjectFiles, folder: str) -> Iterator[tuple[str, str]]:
    """Python files that a ``meson.build`` makes: of a template with ``@NAMES@``, or a version by some command.

    A build may write them elsewhere than where they are imported from: then beside the template.
    """
    for call in _MESON_CALL.finditer(read.text(posixpath.join(folder, "meson.build"))):
        output, source = (re.search(_MESON_PATH % key, call[2]) for key in ("output", "input"))
        if output is not None and output[1].endswith(".py") and "version" in output[1]:
            template = posixpath.join(folder, source[1] if source and call[1] != "custom_target" else "")
            for place in dict.fromkeys((folder, posixpath.dirname(template))):
                yield posixpath.join(place, output[1]), read.text(template)
