"""Nothing heavy is loaded by importing the package or by asking for help."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

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

# After each line of words: its exit code, what it printed, and every package that is loaded by then.
HELP = """
import contextlib, io, json, sys
import composer_replication, composer_replication.safety
from composer_replication.cli.main import main
answers = []
for words in [None, *json.loads(sys.argv[1])]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = 0 if words is None else main([*words, "--help"])
    answers.append([code, said.getvalue(), sorted({name.partition(".")[0] for name in sys.modules})])
print(json.dumps(answers))
"""


def answers_to(lines: list[list[str]], source: Path = SOURCE) -> list[tuple[int, str, set[str]]]:
    """Exit code, text and heavy packages after the import alone, and after the help of each line, in one process."""
    done = subprocess.run(
        [sys.executable, "-c", HELP, json.dumps(lines)],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [(code, said, HEAVY & set(loaded)) for code, said, loaded in json.loads(done.stdout)]


def test_import_and_help_load_nothing_heavy() -> None:
    lines = [[], *([name] for name in VERBS), *SUB_VERBS]
    (_, _, of_import), *told = answers_to(lines)
    assert of_import == set()
    for words, (code, said, heavy) in zip(lines, told, strict=True):
        assert (code, heavy) == (0, set()), words
        assert said.startswith(f"usage: {' '.join(['composer-rl', *words])}")


def test_a_heavy_import_at_the_top_of_the_command_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(SOURCE / "composer_replication", tmp_path / "composer_replication")
    planted = tmp_path / "composer_replication" / "cli" / "main.py"
    planted.write_text(
        planted.read_text().replace("import argparse\n", "import argparse\n\nimport pydantic.main\n", 1)
    )
    assert answers_to([[]], tmp_path)[1][2] == {"pydantic"}
