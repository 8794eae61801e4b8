"""Turn a library that is not installed into the ``pip install`` that brings it."""

from __future__ import annotations

from composer_replication.errors import MissingError


def missing_library(extra: str, purpose: str, error: ImportError) -> MissingError:
    """The one sentence for an import that failed.

    Args:
        extra: of ``composer-replication``.
        purpose: what the library is needed for, as the subject of a sentence.
        error: what the import raised; a part of the library that is missing or broken is named too.
    """
    package = (error.name or "").partition(".")[0]
    problem = (
        f"{purpose} needs {package}, which is not installed"
        if isinstance(error, ModuleNotFoundError) and package
        else f"{purpose} needs packages that cannot be imported here: {str(error).splitlines()[0][:300]}"
    )
    return MissingError(
        "CR0101", f"{problem}.", where=package, fix=f"pip install 'composer-replication[{extra}]'"
    )
