"""Nothing heavy is loaded by importing the package or by asking for help."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from composer_replication.cli.main import VERBS

SOURCE = Path(__file__).resolve().parents[2] / "src"
HEAVY = {
    "torch",
    "transformers",
    "trl",
    "datasets",
    "peft",
    "numpy",
    "pydantic",
    "jinja2",
    "unearth",
    "sandlock",
    "tensorboard",
}
SUB_VERBS = [
    ["tasks", "build"],
    ["recipe", "new"],
    ["cache", "prune"],
    ["sandbox", "selftest"],
    ["sandbox", "exec"],
    ["guard", "scan"],
    ["guard", "bench"],
    ["traces"],
    ["traces", "replay"],
]

REPORT = """
import sys
print("LOADED", *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""
HELP = (
    "import sys\nfrom composer_replication.cli.main import main\ncode = main(sys.argv[1:])"
    + REPORT
    + "sys.exit(code)"
)


def run(
    program: str, *words: str, source: Path = SOURCE
) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run a program that ends with REPORT; returns what it did and which heavy packages it loaded."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", program, *words], env=environment, capture_output=True, text=True, check=False
    )
    loaded = done.stderr.rpartition("LOADED")[2].split()
    assert "sys" in loaded, done.stderr
    return done, HEAVY & set(loaded)


def test_importing_the_package_loads_nothing_heavy() -> None:
    done, heavy = run("import composer_replication, composer_replication.safety" + REPORT)
    assert done.returncode == 0
    assert heavy == set()


@pytest.mark.parametrize("words", [[], *([name] for name in VERBS), *SUB_VERBS], ids=" ".join)
def test_help_is_answered_without_heavy_packages(words: list[str]) -> None:
    done, heavy = run(HELP, *words, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: {' '.join(['composer-rl', *words])}")
    assert heavy == set()


def test_a_heavy_import_at_the_top_of_the_command_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(SOURCE / "composer_replication", tmp_path / "composer_replication")
    planted = tmp_path / "composer_replication" / "cli" / "main.py"
    planted.write_text(
        planted.read_text().replace("import argparse\n", "import argparse\n\nimport pydantic.main\n", 1)
    )
    done, heavy = run(HELP, "--help", source=tmp_path)
    assert done.returncode == 0
    assert heavy == {"pydantic"}
