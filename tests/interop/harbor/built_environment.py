"""A container of ours with what the Dockerfile of an exported task asks for: its tree and its wheels, made by its own command."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from bubblewrap_environment import BubblewrapEnvironment

from composer_replication.tasks.intake.cache import cache_folder


class BuiltEnvironment(BubblewrapEnvironment):
    """An image has the folders of Docker's ``COPY`` and ``WORKDIR``; the network of its ``RUN`` is the cache of wheels."""

    @property
    def _image(self) -> Path:
        """Beside the container's own files, and seen by it under the same path."""
        return self._folder / "image"

    @property
    def _path(self) -> str:
        return f"{self._image}/bin:{super()._path}"

    async def start(self, force_build: bool) -> None:
        await super().start(force_build)
        for folder in ("app", "logs/verifier", "logs/agent", "logs/artifacts", "tests", "solution"):
            (self._root / folder).mkdir(parents=True, exist_ok=True)
        shutil.copytree(self.environment_dir / "tree", self._root / "app", dirs_exist_ok=True)

    def _programs(self) -> list[str]:
        dockerfile = (self.environment_dir / "Dockerfile").read_text()
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        assert f"FROM python:{version}-slim\n" in dockerfile
        assert "COPY tree /app\nWORKDIR /app\n" in dockerfile
        (command,) = re.findall(r"^RUN python -m pip (.*)$", dockerfile, re.MULTILINE)
        requirements = str(self.environment_dir / "requirements.txt")
        words = shlex.split(command.replace("/opt/requirements.txt", shlex.quote(requirements)))
        wheels = self._folder / "wheels"
        wheels.mkdir()
        for wheel in (cache_folder() / "wheels").glob("*/*.whl"):
            (wheels / wheel.name).symlink_to(wheel)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._image], check=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "--quiet", "--python", self._image / "bin" / "python", *words],
            env={**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)},
            check=True,
        )
        (self._root / str(self._image)[1:]).mkdir(parents=True)
        return [*super()._programs(), "--bind", str(self._image), str(self._image)]
