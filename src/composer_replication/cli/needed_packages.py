"""Turn a package that is not installed into the ``pip install`` that brings it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from composer_replication.errors import MissingError

_OWN = "composer_replication"


@contextmanager
def needs_extra(extra: str, purpose: str) -> Iterator[None]:
    """Inside, an import that fails is answered by the extra that brings the package.

    Args:
        extra: of ``composer-replication``.
        purpose: what the packages are needed for, as the subject of a sentence.

    Raises:
        MissingError: a package is absent, or installed and broken (CR0101).
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == _OWN:
            raise  # a module of ours that is gone is no missing extra
        problem = (
            f"{purpose} needs {package}, which is not installed"
            if isinstance(error, ModuleNotFoundError) and package
            else f"{purpose} needs packages that cannot be imported here: {_first_line(error)}"
        )
        raise MissingError(
            "CR0101",
            f"{problem}.",
            where=package,
            fix=f"pip install 'composer-replication[{extra}]'",
        ) from error


def _first_line(error: ImportError) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:300] if lines else type(error).__name__
