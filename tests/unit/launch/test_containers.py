"""The container files: read by hadolint, held against this project, and their steps run in an empty environment.

No image is built: no engine is needed here.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = {
    "trainer": ROOT / "containers" / "trainer.Containerfile",
    "rollout-worker": ROOT / "containers" / "rollout-worker.Containerfile",
    "serve-env": ROOT / "examples" / "serve_env" / "Containerfile",
}
LEFT_OUT = (
    "DL3008",  # Debian takes old versions away
    "DL3013",  # pip's versions are those of the constraints
    "DL3059",  # steps that change at different times are layers of their own
)


def steps(text: str) -> list[tuple[str, str]]:
    """Instruction and rest of each, with the defaults of its arguments filled in."""
    whole = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    found = [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in whole.splitlines() if line)
    ]
    arguments = dict(rest.partition("=")[::2] for word, rest in found if word == "ARG")
    for name, value in arguments.items():
        found = [(word, re.sub(rf"\${name}\b", value, rest)) for word, rest in found]
    return found


def problems_of(text: str) -> list[str]:
    """What cannot work, as far as reading tells."""
    program = Path(sys.executable).parent / "hadolint"
    words = [program, "--no-color", *(part for rule in LEFT_OUT for part in ("--ignore", rule)), "-"]
    said = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60, check=False)
    found = (said.stdout + said.stderr).splitlines()
    lines = steps(text)
    copied = {source for word, rest in lines if word == "COPY" for source in rest.split()[:-1]}
    found += [f"{path} is not there" for path in sorted(copied) if not (ROOT / path).exists()]
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"src", "pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    needed |= {path.split("/")[0] for path in wheel["force-include"]}
    found += [f"{path} is not copied" for path in sorted(needed - copied)]
    pip = next(rest for word, rest in lines if word == "RUN" and "pip install" in rest)
    extras = re.search(r'"\.\[(.+?)\]"', pip)
    known = PROJECT["project"]["optional-dependencies"]
    found += [f"no extra {name}" for name in (extras[1].split(",") if extras else ()) if name not in known]
    if not re.search(r" -c .*constraints\.txt| -r /source/openenv\.txt", pip):
        found.append("the versions are not the tested ones")
    version = re.search(r"python:([\d.]+)", text)
    if (
        version is None
        or f"Programming Language :: Python :: {version[1]}" not in PROJECT["project"]["classifiers"]
    ):
        found.append("its Python is none of ours")
    if not any(word == "USER" and rest == "1000" for word, rest in lines):
        found.append("it runs as root, or as somebody whom a cluster cannot see to be no root")
    return found


@pytest.mark.parametrize("name", FILES)
def test_it_fits_what_it_speaks_of(name: str) -> None:
    assert problems_of(FILES[name].read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("COPY recipes ./recipes\n", "", "recipes is not copied"),
        ("COPY src ./src", "COPY source ./src", "source is not there"),
        (".[ray]", ".[rays]", "no extra rays"),
        ("-c constraints.txt", "", "not the tested ones"),
        ("USER 1000\n", "", "as root"),
        ("python:3.11", "python:3.9", "Python is none"),
        ("ENV ", "ENVIRONMENT ", "missing whitespace"),
        ("--no-cache-dir ", "", "DL3042"),
        ('CMD ["sh", "-c", ', "CMD sh -c ", "DL3025"),
    ],
)
def test_a_planted_error_is_found(old: str, new: str, said: str) -> None:
    text = FILES["rollout-worker"].read_text()
    assert old in text
    assert any(said in problem for problem in problems_of(text.replace(old, new)))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("name", "command", "lacks"),
    [
        ("rollout-worker", "ray --version && composer-rl --version", "torch"),
        ("trainer", "composer-rl doctor; composer-rl recipe show tiny-cpu", "vllm"),
    ],
)
def test_its_steps_run_in_an_empty_environment(name: str, command: str, lacks: str, tmp_path: Path) -> None:
    """What is copied and installed, by the file's own line, is enough for what the image is for; apt is left out."""
    home = tmp_path / "image"
    home.mkdir()
    for word, rest in steps(FILES[name].read_text()):
        for source in shlex.split(rest)[:-1] if word == "COPY" else ():
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, home / source)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    path = f"{tmp_path / 'venv' / 'bin'}:/usr/bin:/bin"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PATH": path, "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}

    def sh(line: str) -> str:
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
        )
        assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    sh(next(rest for word, rest in steps(FILES[name].read_text()) if word == "RUN" and "pip install" in rest))
    shutil.rmtree(home)  # the sources are not what runs
    home.mkdir()
    assert sh(command)
    sh(f"! python -c 'import {lacks}' 2>/dev/null")
