"""What a command answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from composer_replication.cli.main import main


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs ``composer-rl WORDS --quiet --json``: its exit code, and the one object that it prints. A refusal is one sentence."""

    def run(*words: object) -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        code = main([*map(str, words), "--quiet", "--json"])
        out, err = capsys.readouterr()
        result = json.loads(out)
        assert "error" not in result or err.count("\n") == 1, err
        return code, result

    return run
