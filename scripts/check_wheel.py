"""Build the wheel and check that it stands on its own.

    python scripts/check_wheel.py [--fresh [PYTHON ...]]

With the base dependencies only: everything imports that should, every verb answers
``--help`` without torch and without pydantic, and data files are there. Without any
dependency at all: ``composer_replication.safety`` imports and judges. The wheel is unpacked
and run by this interpreter, from which every distribution is hidden that the base
dependencies do not bring; with ``--fresh``, before a release, it is installed by pip into
an environment of its own, of each interpreter that is named, else of this one.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

HELP_OF_EVERY_VERB = """
import contextlib, io, sys
from composer_replication.cli.main import VERBS, main
for words in [["--help"], *([verb, "--help"] for verb in VERBS)]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    assert code == 0 and "usage: composer-rl" in out.getvalue(), words
heavy = sorted({"torch", "transformers", "trl", "numpy", "pydantic"} & set(sys.modules))
assert not heavy, f"--help loads {heavy}"
print(f"--help of {len(VERBS)} verbs loads nothing heavy")
"""

BASE_INSTALL = """
import importlib.util, sys
import composer_replication, composer_replication.safety
from composer_replication import ComposerError, HeldOutGuard, HeldoutSplit
from composer_replication.cli.doctor_verb import load_explanations
from composer_replication.cli.main import main
from composer_replication.cli.train_verb import shipped_recipe
from composer_replication.config import load_config
import composer_replication.report, composer_replication.rollouts, composer_replication.tasks
import composer_replication.sandbox
for name in ("torch", "transformers", "trl", "datasets", "peft", "pytest"):
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    assert found is None, f"the base install brings {name}"
assert load_explanations(), "the explanations are not in the wheel"
assert load_config(shipped_recipe("quickstart")).model.name, "the quick start's recipe is not in the wheel"
assert main(["explain", "CR0204"]) == 0
print("the base install imports, has its data files, and brings no torch")
"""

ONLY_BASE = """
import importlib.metadata as metadata, re, sys
from packaging.requirements import Requirement

def needed(name, found):
    if name not in found:
        found.add(name)
        for text in metadata.requires(name) or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                needed(re.sub("[-_.]+", "-", wanted.name).lower(), found)
    return found

allowed = needed("composer-replication", set())
hidden = {
    module for module, names in metadata.packages_distributions().items()
    if not allowed & {re.sub("[-_.]+", "-", name).lower() for name in names}
} - {"composer_replication", "composer_replication_verifiers"}

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in [name for name in sys.modules if name.partition(".")[0] in hidden]:
    del sys.modules[name]
sys.meta_path.insert(0, Hidden())
sys.path.insert(0, sys.argv[1])
import composer_replication
assert composer_replication.__file__.startswith(sys.argv[1]), composer_replication.__file__
sys.argv[:] = ["composer-rl"]
"""

SAFETY_ALONE = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import composer_replication.safety as safety
for module in pkgutil.iter_modules(safety.__path__, "composer_replication.safety."):
    importlib.import_module(module.name)
status = safety.HeldOutGuard().update(1, in_loop_reward=0.5, heldout_score=0.5)
assert status.fire is False
own = {"composer_replication", "__main__"}
foreign = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - own
assert not foreign, f"safety loads {sorted(foreign)}"
print("safety judges with the standard library alone")
"""


def build_wheel(out: Path) -> Path:
    """The wheel of this checkout, built with the tools of this environment."""
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT))
    (wheel,) = out.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """No tests and no caches inside; licence, type marker and data files are."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    strangers = [
        n
        for n in names
        if not n.startswith(
            ("composer_replication/", "composer_replication-", "composer_replication_verifiers.py")
        )
        or "__pycache__" in n
    ]
    assert not strangers, f"the wheel holds {strangers}"
    needed = ["composer_replication/py.typed", "composer_replication/recipes/quickstart/run.toml"]
    missing = [n for n in needed if n not in names]
    assert not missing, f"the wheel lacks {missing}"
    assert any(n.endswith("licenses/LICENSE") for n in names), "the wheel lacks its licence"


def check_fresh(wheel: Path, venv: Path, interpreter: str) -> None:
    """The same in an environment that pip made."""
    _run(interpreter, "-m", "venv", str(venv))
    python = str(venv / "bin" / "python")
    pins = ["-c", str(ROOT / "constraints.txt")]
    _run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *pins, str(wheel))
    _run(python, "-I", "-c", BASE_INSTALL)
    _run(python, "-I", "-c", HELP_OF_EVERY_VERB)
    _run(str(venv / "bin" / "composer-rl"), "--version")


def main(words: Sequence[str]) -> int:
    """All checks; the first that fails ends the script with its sentence."""
    with tempfile.TemporaryDirectory(prefix="check-wheel-") as folder:
        wheel = build_wheel(Path(folder, "dist"))
        check_contents(wheel)
        bare = Path(folder, "bare")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(bare)
        _run(sys.executable, "-I", "-S", "-c", SAFETY_ALONE, str(bare))
        _run(sys.executable, "-I", "-c", ONLY_BASE + BASE_INSTALL, str(bare))
        _run(sys.executable, "-I", "-c", ONLY_BASE + HELP_OF_EVERY_VERB, str(bare))
        if "--fresh" in words:
            for number, interpreter in enumerate(words[words.index("--fresh") + 1 :] or [sys.executable]):
                check_fresh(wheel, Path(folder, f"venv-{number}"), interpreter)
    print("the wheel stands on its own")
    return 0


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, cwd=tempfile.gettempdir(), capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"check_wheel: {' '.join(command[:4])} failed\n{done.stdout}{done.stderr}")
    *_, last = ["", *done.stdout.splitlines()]
    if last.startswith(("the base", "safety", "--help", "composer-rl")):
        print(last)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
