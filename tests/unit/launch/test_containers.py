"""The container files of the trainer and of the rollout worker, read line by line. No image is built: no engine is needed here."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FILES = ("trainer", "rollout-worker")
INSTRUCTIONS = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "ENV", "CMD"}


def text_of(name: str) -> str:
    return (ROOT / "containers" / f"{name}.Containerfile").read_text()


def problems_of(text: str) -> list[str]:
    """What of a container file cannot work, as far as reading tells."""
    whole = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    lines = [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in whole.splitlines() if line)
    ]
    found = [f"{word} is no instruction" for word, _ in lines if word not in INSTRUCTIONS]
    arguments = dict(rest.partition("=")[::2] for word, rest in lines if word == "ARG")
    copied = {source for word, rest in lines if word == "COPY" for source in rest.split()[:-1]}
    found += [f"{path} is not there" for path in sorted(copied) if not (ROOT / path).exists()]
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"src", "pyproject.toml", PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]}
    needed |= {path.split("/")[0] for path in wheel["force-include"]}
    found += [f"{path} is not copied" for path in sorted(needed - copied)]
    runs = [rest for word, rest in lines if word == "RUN"]
    pip = next(rest for rest in runs if "pip install" in rest)
    extras = re.search(r'"\.\[(.+?)\]"', pip)
    names = arguments.get("EXTRAS", "") if extras and extras[1] == "$EXTRAS" else extras[1] if extras else ""
    known = PROJECT["project"]["optional-dependencies"]
    found += [f"no extra {name}" for name in names.split(",") if name not in known]
    constraints = arguments.get("CONSTRAINTS", "constraints.txt")
    if constraints not in copied or " -c " not in pip:
        found.append("the versions are not the tested ones")
    if "--no-cache-dir" not in pip or not all(
        "rm -rf /var/lib/apt/lists" in rest for rest in runs if "apt-get" in rest
    ):
        found.append("what is downloaded stays in the image")
    version = dict(lines)["FROM"].partition(":")[2].partition("-")[0]
    if f"Programming Language :: Python :: {version}" not in PROJECT["project"]["classifiers"]:
        found.append(f"Python {version} is none of ours")
    users = [rest for word, rest in lines if word == "USER"]
    if not users or not any(re.search(rf"useradd .*\b{users[-1]}\b", rest) for rest in runs):
        found.append("it runs as root, or as nobody there is")
    if lines[-1][0] != "CMD" or not isinstance(json.loads(lines[-1][1]), list):
        found.append("its command is no list of words, so that signals end at a shell")
    return found


@pytest.mark.parametrize("name", FILES)
def test_it_fits_what_it_speaks_of(name: str) -> None:
    assert problems_of(text_of(name)) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("COPY recipes ./recipes\n", "", "recipes is not copied"),
        ("COPY src ./src", "COPY source ./src", "source is not there"),
        (".[ray]", ".[rays]", "no extra rays"),
        ("-c constraints.txt", "", "not the tested ones"),
        ("USER worker\n", "", "as root"),
        ("python:3.11", "python:3.9", "Python 3.9"),
        ("ENV ", "ENVIRONMENT ", "no instruction"),
        ("--no-cache-dir ", "", "stays in the image"),
    ],
)
def test_a_planted_error_is_found(old: str, new: str, said: str) -> None:
    text = text_of("rollout-worker")
    assert old in text
    assert any(said in problem for problem in problems_of(text.replace(old, new)))
