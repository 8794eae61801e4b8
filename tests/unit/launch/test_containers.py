"""The container files: read by hadolint, and held against this project. No image is built: no engine is needed here."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from finished import finished
from packaging.requirements import Requirement
from ray_head import free_port

from composer_replication.cli.main import build_parser

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


def steps_of(text: str) -> list[tuple[str, str]]:
    """(instruction, what stands behind it): continued lines joined, arguments at their defaults."""
    whole = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    lines = [line.partition(" ")[::2] for line in whole.splitlines() if line]
    for name, value in [rest.split("=", 1) for word, rest in lines if word == "ARG"]:
        lines = [(word, re.sub(rf"\${name}\b", value, rest)) for word, rest in lines]
    return lines


def problems_of(text: str) -> list[str]:
    """What cannot work, as far as reading tells."""
    program = Path(sys.executable).parent / "hadolint"
    words = [program, "--no-color", *(part for rule in LEFT_OUT for part in ("--ignore", rule)), "-"]
    said = finished(words, input=text, timeout=60)
    found = (said.stdout + said.stderr).splitlines()
    lines = steps_of(text)
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
    version = text.partition("python:")[2].partition("-")[0]
    if f"Programming Language :: Python :: {version}" not in PROJECT["project"]["classifiers"]:
        found.append("its Python is none of ours")
    if ("USER", "1000") not in lines or "useradd --create-home --uid 1000 " not in text:
        found.append("it runs as root, or as somebody whom a cluster cannot see to be no root")
    return found


def problems_of_server(text: str) -> list[str]:
    """What of the OpenEnv server's own file does not fit the verb: programs, command, ports, mount and health check."""
    of, found = dict(steps_of(text)), []
    found += [f"{name} is not installed" for name in ("bubblewrap", "git") if f" {name} " not in text]
    program, verb, *flags = json.loads(of["ENTRYPOINT"])
    if program not in PROJECT["project"]["scripts"] or verb != "serve-env":
        found.append(f"there is no {program} {verb}")
    known = build_parser("serve-env").parse_args(["serve-env", *flags])
    mounts = [path for path in re.findall(r"-v \S+?:(\S+?):ro", text) if Path(path) == known.tasks]
    if not mounts or f"127.0.0.1:{known.port}:{known.port}" not in text or int(of["EXPOSE"]) != known.port:
        found.append("what is mounted or published is not what is served")
    if known.host != "0.0.0.0":
        found.append("nobody outside could reach it")
    program, _, code = json.loads(of["HEALTHCHECK"].partition("CMD ")[2])
    compile(code, "HEALTHCHECK", "exec")
    if program != "python" or f"'http://127.0.0.1:{known.port}/health'" not in code:
        found.append("the health check asks somebody else")
    return found


def command_of(text: str) -> str:
    """The file's own command, for a shell."""
    return shlex.join(json.loads(next(rest for word, rest in steps_of(text) if word == "CMD")))


@pytest.mark.parametrize(
    ("name", "problems"), [*((name, problems_of) for name in FILES), ("serve-env", problems_of_server)]
)
def test_it_fits_what_it_speaks_of(name: str, problems: Callable[[str], list[str]]) -> None:
    assert problems(FILES[name].read_text()) == []


def test_pins_of_the_servers_image_have_what_it_needs() -> None:
    """It is installed with the pins alone, so they have to hold the extra and every dependency, in its range."""
    lines = (ROOT / "tests" / "interop" / "openenv.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["openenv"]]
    for requirement in map(Requirement, wanted):
        assert pins[requirement.name] in requirement.specifier, requirement


OF_WORKER = [
    ("COPY recipes ./recipes\n", "", "recipes is not copied"),
    (".[ray]", ".[rays]", "no extra rays"),
    ("-c constraints.txt", "", "not the tested ones"),
    ("USER 1000\n", "", "as root"),
    ("--no-cache-dir ", "", "DL3042"),
]
OF_SERVER = [
    ("bubblewrap git", "git", "bubblewrap is not installed"),
    ('["composer-rl"', '["composer"', "there is no composer serve-env"),
    ('"--port", "8000"', '"--port", "8001"', "what is mounted or published is not what is served"),
    ("/health", "/healthz", "the health check asks somebody else"),
]


@pytest.mark.parametrize(
    ("name", "problems", "change"),
    [
        *(("rollout-worker", problems_of, change) for change in OF_WORKER),
        *(("serve-env", problems_of_server, change) for change in OF_SERVER),
    ],
)
def test_a_planted_error_is_found(
    name: str, problems: Callable[[str], list[str]], change: tuple[str, str, str]
) -> None:
    text, (old, new, said) = FILES[name].read_text(), change
    assert old in text
    assert any(said in problem for problem in problems(text.replace(old, new)))


WORKS = {
    "trainer": """
        composer-rl replicas start recipes/tiny-cpu/run.toml --local 2 --out run --set replicas.sync_every=1 \\
          --set trl.max_steps=1""",
    "rollout-worker": f"""
        set -e
        export RAY_HEAD=127.0.0.1:{free_port()}
        ray start --head --port=${{RAY_HEAD#*:}} --include-dashboard=false --disable-usage-stats
        {command_of(FILES["rollout-worker"].read_text())} & worker=$!
        python -c "
import time, ray
ray.init(address='auto')
while sum(node['Alive'] for node in ray.nodes()) < 2:
    time.sleep(1)
"
        kill $worker
        ray stop""",
    "serve-env": f"""
        set -e
        composer-rl tasks build {ROOT}/recipes/tiny-cpu/project --out store --max-tasks 1 --quiet
        port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
        composer-rl serve-env store --port $port & server=$!
        python -c "
import time, urllib.request
for _ in range(120):
    try:
        urllib.request.urlopen('http://127.0.0.1:$port/health').read()
    except OSError:
        time.sleep(1)
    else:
        break
else:
    raise SystemExit('no answer')
" || {{ kill $server; exit 1; }}
        kill $server
        wait $server || true""",
}
"""What a job runs in each: two replicas, a worker that joins a head, a server that is asked whether it is well."""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", WORKS)
def test_its_steps_run_in_an_empty_environment(name: str, tmp_path: Path) -> None:
    """All but the base image, Debian's packages and the user: files are copied, packages installed, a job is done."""
    venv.create(tmp_path / "python", with_pip=True)
    folder, home = tmp_path / "folder", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    environment = {"PATH": f"{tmp_path}/python/bin:/usr/bin:/bin", "HOME": str(home), "LANG": "C.UTF-8"}
    environment |= {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "SSL_"))}

    def run(words: str) -> str:
        done = finished(["sh", "-c", words], cwd=folder, env=environment)
        assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    for word, rest in steps_of(re.sub(r"(?<= )/source\b", f"{folder}/source", FILES[name].read_text())):
        if word == "COPY":
            *sources, target = rest.split()
            (folder / target).mkdir(parents=True, exist_ok=True)
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, folder / target, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / source, folder / target)
        elif word == "RUN" and "pip install" in rest:
            run(rest)
        elif word == "ENV":
            environment |= dict([rest.split("=", 1)])
    installed = {each["name"] for each in json.loads(run("pip list --format json"))}
    assert ("torch" in installed) == (name == "trainer")
    checks = json.loads(run("composer-rl doctor --json || test $? = 3"))["checks"]
    assert [check["ok"] for check in checks if check["name"] == "sandbox"] == [True]
    run(WORKS[name])
