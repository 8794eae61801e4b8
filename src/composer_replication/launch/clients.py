"""Programs of a target: run them, and give what they say in one sentence where they refuse."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from composer_replication.errors import MissingError, UsageError

_SECONDS = 300
_SHOWN = 400


def run_client(words: Sequence[str], *, install: str, folder: Path | None = None) -> str:
    """Standard output of a program of the target, run in ``folder``; ``install`` says what brings it.

    Raises:
        MissingError: the program is not installed (CR0440).
        UsageError: it refused, with what it said, or gave no answer (CR0932).
    """
    if shutil.which(words[0]) is None:
        problem = f"the program {words[0]} is not installed here."
        raise MissingError("CR0440", problem, where=words[0], fix=f"install {install}.")
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=folder, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise refusal(words[0], f"no answer within {_SECONDS} seconds") from error
    if done.returncode:
        raise refusal(words[0], done.stderr or done.stdout)
    return done.stdout


def refusal(target: str, said: str) -> UsageError:
    """The error for what a target did not do, in its own words."""
    text = " ".join(said.split()) or "nothing"
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    sentence = f"the target refused, or could not be reached; it said: {shown.rstrip('.')}."
    fix = "correct what it names (an option of the target, credentials, a quota), and launch again."
    return UsageError("CR0932", sentence, where=target, fix=fix)


@contextmanager
def aws_refusals(service: str) -> Iterator[None]:
    """Inside, what AWS or its client refuses becomes one sentence (CR0932)."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise refusal(service, str(error)) from error
