"""What is written down elsewhere agrees with the code: pins, extras, verbs, pages."""

from __future__ import annotations

import argparse
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import composer_replication
from composer_replication.cli.main import VERBS, build_parser

ROOT = Path(__file__).resolve().parents[2]
INTEROP = ROOT / "tests" / "interop"


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return table


@pytest.fixture(scope="module")
def recipe_keys() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "write_recipe_keys", ROOT / "scripts" / "write_recipe_keys.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(path: Path = ROOT / "constraints.txt") -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), (
        "name==version, without local labels"
    )
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_every_dependency_is_pinned_within_its_range(project: dict[str, Any]) -> None:
    """In constraints.txt; what an extra of an environment of its own needs, in that environment's file."""
    groups = {"": project["project"]["dependencies"], **project["project"]["optional-dependencies"]}
    own_files = {path.stem: path for path in INTEROP.glob("*.txt")}
    num_wanted = 0
    for extra, texts in groups.items():
        pinned = pins(own_files[extra]) if extra in own_files else pins()
        for requirement in map(Requirement, texts):
            if requirement.name != "composer-replication":
                version = pinned[canonicalize_name(requirement.name)]
                assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"
                num_wanted += 1
    assert num_wanted > 20


def test_the_environment_of_deepspeed_has_the_pins_of_everybody() -> None:
    for name in ("accelerate", "peft", "pytest", "torch", "transformers", "trl"):
        assert pins(INTEROP / "deepspeed.txt")[name] == pins()[name]


def test_every_environment_of_interop_is_made_and_fits_ours(project: dict[str, Any]) -> None:
    """Each has its folder of tests and its name in the Makefile, and pins all that the package itself needs."""
    files = {path.stem: pins(path) for path in INTEROP.glob("*.txt")}
    listed = re.search(r"^INTEROP := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed is not None
    assert set(listed[1].split()) == set(files)
    assert files
    for name, pinned in files.items():
        assert (INTEROP / name).is_dir()
        for requirement in map(Requirement, project["project"]["dependencies"]):
            assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), name


def test_ci_runs_what_the_makefile_has_and_installs_nothing_by_hand() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    assert not re.search(r"\b(apt|apt-get|pip|dpkg|sudo)\b(?! brings)", text)
    targets = re.findall(r"^timed make ([\w-]+)", text, re.MULTILINE)
    assert {"check", "test", "test-sandlock", "interop"} == set(targets)
    assert 'make test MARKED="not long or promise"' in text
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_every_verb_file_is_registered() -> None:
    files = {path.stem for path in (ROOT / "src" / "composer_replication" / "cli").glob("*_verb.py")}
    assert {run.partition(":")[0].rpartition(".")[2] for run in runs(build_parser())} == files


def runs(parser: argparse.ArgumentParser) -> Iterator[str]:
    """What each verb of the parser names as its function, sub-verbs too."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser.get_default("run")
    for group in groups:
        for inner in group.choices.values():
            yield from runs(inner)


def test_every_declared_verb_runs_a_function_that_there_is() -> None:
    found = list(runs(build_parser()))
    assert len(found) == len(set(found)) > len(VERBS)
    assert all(callable(resolve_name(name)) for name in found)


def test_every_ignored_rule_has_its_reason() -> None:
    """Each code of an ignore list carries a comment, or follows one that does."""
    text = (ROOT / "pyproject.toml").read_text()
    lint = text[text.index("\nignore = [") : text.index("[tool.ruff.lint.mccabe]")]
    for block in re.findall(r"= \[\n(.*?)\n\]", lint, flags=re.DOTALL):
        first, *_ = block.splitlines()
        assert "#" in first, f"{first.strip()} has no reason"


def test_the_page_of_recipe_keys_is_up_to_date(recipe_keys: ModuleType) -> None:
    text = recipe_keys.PAGE.read_text()
    assert text == recipe_keys.page_text(text), "make docs"
    unsaid = [name for name, meaning in recipe_keys.ROW.findall(text) if not meaning]
    assert unsaid == []


def pages(root: Path) -> list[Path]:
    return [*root.glob("*.md"), *(root / "docs").glob("*.md"), *(root / "recipes").rglob("*.md")]


def broken_links(root: Path) -> list[str]:
    """Links of Markdown pages to files and headings that are not there."""
    found = []
    for page in pages(root):
        for path, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            if path.startswith(("http://", "https://", "mailto:")):
                continue
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                found.append(f"{page.name}: {path}{'#' if anchor else ''}{anchor}")
    return found


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub and the site name them; they differ in blanks beside a sign."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {re.sub(blanks, "-", heading) for heading in plain for blanks in (" ", " +")}


def test_every_link_of_a_page_leads_somewhere(tmp_path: Path) -> None:
    assert broken_links(ROOT) == []
    text = (
        "# A & b\n[a](page.md#a--b) [b](gone.md#part) [c](https://example.org#d) [d](#part) [e](page.md#a-b)"
    )
    (tmp_path / "page.md").write_text(text)
    assert broken_links(tmp_path) == ["page.md: gone.md#part", "page.md: #part"]


def test_no_page_is_longer_than_400_lines() -> None:
    lines = {page.name: len(page.read_text().splitlines()) for page in pages(ROOT)}
    assert {name: number for name, number in lines.items() if number > 400} == {}


def test_the_citation_has_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (composer_replication.__version__, "Apache-2.0")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_every_paper_of_a_docstring_is_in_the_index() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    cited = set(re.findall(r"(?:arXiv |\()(\d{4}\.\d{5})\b", sources))
    assert len(cited) > 10
    listed = set(re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})\)", (ROOT / "docs" / "papers.md").read_text()))
    assert cited <= listed


def test_the_page_how_it_fits_names_every_folder() -> None:
    text = (ROOT / "docs" / "how-it-fits.md").read_text()
    package = ROOT / "src" / "composer_replication"
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    assert {name for name in folders if not re.search(rf"\b{name}\b", text)} == set()
    assert len(folders) >= 11
    sources = "".join(path.read_text() for path in package.rglob("*.py"))
    defined = set(re.findall(r"\b(?:def|class) (\w+)\b", sources))
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    missing = [each for each in named if not defined.issuperset(each)]
    assert len(named) > 15 and missing == []
    sources = "".join(
        path.read_text() for name in ("trainer", "cli") for path in (package / name).glob("*.py")
    )
    titles = ("One `composer-rl train`", "One training step, function by function")
    for section in (text.partition(f"## {title}\n")[2].partition("\n## ")[0] for title in titles):
        words = {name.rpartition(".")[2] for name in re.findall(r"`([\w.]+)`", section)}
        functions = words & set(re.findall(r"(?<!@property\n    )def (\w+)\b", sources))
        assert 5 < len(functions) <= 10, sorted(functions)
