"""The container file of the OpenEnv server, read line by line: each has to fit what it speaks of. No image is built."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from composer_replication.cli.main import build_parser

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "serve_env" / "Containerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {"bwrap": "bubblewrap", "git": "git"}
"""Programs that the server starts, by the package of Debian that has them."""


def lines_of(text: str) -> list[tuple[str, str]]:
    """(instruction, what stands behind it), continued lines joined."""
    whole = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in whole.splitlines() if line)
    ]


def problems_of(text: str) -> list[str]:
    """What of a container file cannot work, as far as reading tells."""
    lines = lines_of(text)
    of = dict(lines)
    runs = " && ".join(rest for word, rest in lines if word == "RUN")
    copied = {source for word, rest in lines if word == "COPY" for source in rest.split()[:-1]}
    problems = [f"{path} is not there" for path in sorted(copied) if not (ROOT / path).exists()]
    needed = {"src", "pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    needed |= {
        path.split("/")[0] for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    }
    problems += [f"{path} is not copied" for path in sorted(needed - copied)]
    version = of["FROM"].partition(":")[2].partition("-")[0]
    if f"Programming Language :: Python :: {version}" not in PROJECT["project"]["classifiers"]:
        problems.append(f"Python {version} is none of ours")
    installed = runs.partition("apt-get install")[2].partition("&&")[0].split()
    problems += [f"{name} is not installed" for name in PACKAGES.values() if name not in installed]
    users = [rest for word, rest in lines if word == "USER"]
    if not users or users[-1] in ("root", "0") or f"useradd --create-home --uid {users[-1]} " not in runs:
        problems.append("the server would run as root, or as nobody there is")
    words = json.loads(of["ENTRYPOINT"])
    command, verb, *flags = words
    if command not in PROJECT["project"]["scripts"] or verb != "serve-env":
        problems.append(f"there is no {command} {verb}")
    known = build_parser(verb).parse_args([verb, *flags])
    mounts = [path for path in re.findall(r"-v \S+?:(\S+?):ro", text) if Path(path) == known.tasks]
    if not mounts or f"127.0.0.1:{known.port}:{known.port}" not in text or int(of["EXPOSE"]) != known.port:
        problems.append("what is mounted or published is not what is served")
    if known.host != "0.0.0.0":
        problems.append("nobody outside could reach it")
    _, _, health = of["HEALTHCHECK"].partition("CMD ")
    program, _, code = json.loads(health)
    if program != "python" or f"'http://127.0.0.1:{known.port}/health'" not in code:
        problems.append("the health check asks somebody else")
    compile(code, "HEALTHCHECK", "exec")
    return problems


def test_every_line_of_the_container_file_fits_what_it_speaks_of() -> None:
    assert problems_of(FILE.read_text()) == []


@pytest.mark.parametrize(
    ("part", "other", "problem"),
    [
        ("COPY recipes", "COPY formulas", "formulas is not there"),
        (" LICENSE ", " ", "LICENSE is not copied"),
        ("python:3.11", "python:3.9", "Python 3.9 is none of ours"),
        ("bubblewrap git", "git", "bubblewrap is not installed"),
        ("USER 1000", "USER root", "the server would run as root, or as nobody there is"),
        ('["composer-rl"', '["composer"', "there is no composer serve-env"),
        ('"--port", "8000"', '"--port", "8001"', "what is mounted or published is not what is served"),
        ("/health", "/healthz", "the health check asks somebody else"),
    ],
)
def test_a_line_that_does_not_fit_is_found(part: str, other: str, problem: str) -> None:
    text = FILE.read_text()
    assert part in text
    assert problem in problems_of(text.replace(part, other))


def test_pins_of_the_image_have_what_the_server_needs() -> None:
    """It is installed with the pins alone, so they have to hold the extra and every dependency, in its range."""
    from packaging.requirements import Requirement

    pins = dict(
        line.split("==")
        for line in (ROOT / "tests" / "interop" / "openenv.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["openenv"]]
    for requirement in map(Requirement, wanted):
        assert pins[requirement.name] in requirement.specifier, requirement
