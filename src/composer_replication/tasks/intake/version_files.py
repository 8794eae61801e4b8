"""Version files that only a build writes: written here with version 0, so that the package can be imported.

Each tool names the file in its own table; what stands in it are the names that the tool defines, or its
own template with the version put in. No code is run, and a file that is there is never changed.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Any

from composer_replication.tasks.intake.parsed_files import ProjectFiles, inner_table, texts

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
_PLACE = re.compile(r"\{(\w+)[^{}]*\}|\$\{\w+\}|@\w+@")
_MESON_CALL = re.compile(r"\b(configure_file|vcs_tag|custom_target)\s*\(((?:[^()]|\([^()]*\))*)\)")
_MESON_PATH = r"%s\s*:\s*\[?\s*(?:files\()?\s*'([^']+)'"


def version_files(read: ProjectFiles, version: str) -> dict[str, bytes]:
    """The missing files by path, for all tools that the project's files name.

    Args:
        read: the files of the project.
        version: what they say; 0 where nobody knows one.
    """
    found: dict[str, bytes] = {}
    for declared, template in _declared(read):
        path = posixpath.normpath(posixpath.join(read.folder, declared))
        parent = posixpath.dirname(path)
        has_folder = any(posixpath.dirname(one) == parent for one in read.files)
        if (
            declared.strip()
            and ".." not in declared.split("/")
            and path not in read.files
            and not path.startswith("/")
            and has_folder
        ):
            found[path] = _filled(path, template, version).encode()
    return found


def _filled(path: str, template: str, version: str) -> str:
    release = [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]] or [0]
    if not template:
        return _PYTHON.format(version=version, tuple=(*release,)) if path.endswith(".py") else f"{version}\n"

    def value(match: re.Match[str]) -> str:
        return str((*release,)) if match[1] == "version_tuple" else version

    filled = _PLACE.sub(value, template.replace("{}", version)).replace("{{", "{").replace("}}", "}")
    if not path.endswith(".py"):
        return filled
    try:
        ast.parse(filled)  # noqa: TID251
    except (SyntaxError, ValueError):
        return _PYTHON.format(version=version, tuple=(*release,))
    return filled


def _declared(read: ProjectFiles) -> Iterator[tuple[str, str]]:
    """Paths from the project's folder, each with its template (empty: the tool's own)."""
    use_scm = read.setup.get("use_scm_version")
    for table in (
        read.table("tool", "setuptools_scm"),
        read.table("tool", "setuptools-scm"),
        use_scm if isinstance(use_scm, Mapping) else {},
    ):
        yield from _at(
            table,
            ("version_file", "write_to", "version-file"),
            ("version_file_template", "write_to_template"),
        )
    for hooks in (
        read.table("tool", "hatch", "build"),
        *read.table("tool", "hatch", "build", "targets").values(),
    ):
        for name in ("vcs", "version"):
            hook = inner_table(hooks, "hooks", name)
            yield from _at(hook, ("version-file", "path"), ("template",))
    pdm = read.table("tool", "pdm", "version")
    package_dir = next(iter(texts(read.table("tool", "pdm", "build").get("package-dir"))), "")
    for path, template in _at(pdm, ("write_to",), ("write_template",)):
        bases = (package_dir, "src", "") if not package_dir else (package_dir,)
        yield from ((posixpath.join(base, path), template) for base in bases)
    for path, table in read.table("tool", "poetry-dynamic-versioning", "files").items():
        yield path, str(inner_table(table).get("initial-content") or "")
    for path in texts(read.table("tool", "poetry-dynamic-versioning", "substitution").get("files")):
        if "*" not in path:
            yield path, ""
    yield from _at(read.table("tool", "versioningit", "write"), ("file",), ("template",))
    made = read.table("tool", "scikit-build").get("generate")
    for table in made if isinstance(made, list) else ():
        for path, template in _at(inner_table(table), ("path",), ("template",)):
            yield from ((posixpath.join(base, path), template) for base in ("", "src", "python"))
    versioneer = read.table("tool", "versioneer").get("versionfile_source")
    for path in (*texts(versioneer), read.ini("versioneer", "versionfile_source")):
        yield path, ""
    yield from _meson(read)


def _at(
    table: Mapping[str, Any], keys: tuple[str, ...], templates: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    template = next((table[key] for key in templates if isinstance(table.get(key), str)), "")
    for key in keys:
        if isinstance(table.get(key), str):
            yield table[key], template


def _meson(read: ProjectFiles) -> Iterator[tuple[str, str]]:
    """Python files that a ``meson.build`` makes: of a template with ``@NAMES@``, or a version by some command."""
    start = f"{read.folder}/" if read.folder else ""
    for path in sorted(read.files):
        if not path.startswith(start) or posixpath.basename(path) != "meson.build":
            continue
        folder = posixpath.dirname(path.removeprefix(start))
        for call in _MESON_CALL.finditer(read.read(path).decode("utf-8", "replace")):
            output, source = (re.search(_MESON_PATH % key, call[2]) for key in ("output", "input"))
            if output is None or not output[1].endswith(".py") or "version" not in output[1]:
                continue
            template = read.read(posixpath.join(start, folder, source[1])) if source else b""
            text = template.decode("utf-8", "replace") if call[1] != "custom_target" else ""
            yield posixpath.join(folder, output[1]), text
