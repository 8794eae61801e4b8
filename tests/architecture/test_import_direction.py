"""Imports point down. Each contract is shown to bite; that all of them hold is asked by ``make check``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint_imports(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package below ``root/src``, with the contracts of ``root/pyproject.toml``."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "COLUMNS": "200"}
    command = [sys.executable, "-c", LINT, "--no-logo", "--no-cache", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its contracts, to plant violations in."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(
        ROOT / "src" / "composer_replication", tmp_path / "src" / "composer_replication", ignore=ignore
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def plant(root: Path, module: str, line: str) -> None:
    path = root / "src" / "composer_replication" / f"{module.replace('.', '/')}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{path.read_text() if path.is_file() else ''}\n{line}\n")


@pytest.mark.long
@pytest.mark.parametrize(
    ("contract", "module", "line", "said"),
    [
        ("layers", "records", "import composer_replication.trainer", "records -> composer_replication.trainer"),
        ("layers", "sandbox.choice", "import composer_replication.safety", "choice -> composer_replication.safety"),
        ("layers", "rollouts.rewards", "import composer_replication.cli.main", "rewards -> composer_replication.cli"),
        ("layers", "market.__init__", "PRICE = 1", "market"),
        ("safety-alone", "safety.planted", "import numpy", "safety.planted -> numpy"),
        ("safety-alone", "safety.planted", "import composer_replication.config", "planted -> composer_replication"),
        ("guard-by-protocol", "trainer.planted", "from composer_replication import safety", "trainer.planted"),
        ("guard-by-protocol", "losses.planted", "from composer_replication import safety", "losses.planted"),
        ("trainer-alone", "trainer.guard", "import composer_replication.tasks.store", "tasks.store"),
        ("torch-homes", "rollouts.planted", "import torch", "rollouts.planted -> torch"),
        ("torch-homes", "cli.planted", "def late() -> None:\n    import torch", "cli.planted -> torch"),
        ("trl-home", "report.planted", "import transformers", "report.planted -> transformers"),
        ("trl-home", "losses.planted", "from trl import GRPOConfig", "losses.planted -> trl"),
    ],
)  # fmt: skip
def test_a_planted_import_breaks_its_contract(
    copy: Path, contract: str, module: str, line: str, said: str
) -> None:
    plant(copy, module, line)
    done = lint_imports(copy, "--contract", contract)
    assert done.returncode == 1, done.stdout
    assert said in done.stdout


def test_a_planted_cycle_breaks_its_contract(copy: Path) -> None:
    plant(copy, "sandbox.hen", "from composer_replication.sandbox import egg")
    plant(copy, "sandbox.egg", "from composer_replication.sandbox import hen")
    done = lint_imports(copy, "--contract", "acyclic")
    assert done.returncode == 1, done.stdout
    assert "hen" in done.stdout


def test_the_safety_contract_names_every_dependency_of_ours() -> None:
    """A new dependency must be forbidden to safety too; the list cannot be left behind."""
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"], *extras["train"], *extras["quickstart"]]
    names = {Requirement(text).name.replace("-", "_") for text in wanted} - {"composer_replication"}
    contracts = {contract["id"]: contract for contract in project["tool"]["importlinter"]["contracts"]}
    assert names <= set(contracts["safety-alone"]["forbidden_modules"])


def loaded_with(graph: grimp.ImportGraph, module: str) -> set[str]:
    """Everything that importing the module may load: what it imports, and the packages that this lies in."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            parent = name.rpartition(".")[0]
            waiting += [*graph.find_modules_directly_imported_by(name), *([parent] if parent else [])]
    return seen


def test_importing_the_trainer_loads_nothing_of_tasks_and_sandbox() -> None:
    trainer, foreign = "composer_replication.trainer.composer_trainer", re.compile(r"\w+\.(tasks|sandbox)\b")
    graph = grimp.build_graph("composer_replication", cache_dir=None)
    assert not [name for name in loaded_with(graph, trainer) if foreign.match(name)]
    graph.add_import(importer="composer_replication.losses", imported="composer_replication.sandbox")
    assert "composer_replication.sandbox" in loaded_with(graph, trainer)
