"""Why a repository whose tests are green gives no candidate at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from composer_replication.tasks.intake.tree_rules import is_subject_path
from composer_replication.tasks.syntax_trees import parse_syntax


def nothing_found(files: Mapping[str, bytes], sizes: Iterable[tuple[str, str]]) -> str:
    """A sentence's part: what was looked for, in how many files, and which of them could not be cut.

    Args:
        files: the files of the task tree by path.
        sizes: the (granularity, removal) pairs that were planned.
    """
    subjects = [path for path in sorted(files) if is_subject_path(path)]
    unread = {path: why for path in subjects if (why := _why_unread(files[path]))}
    asked = ", ".join(f"{size}/{way}" for size, way in sizes)
    said = f"its {len(subjects)} source files hold nothing of the sizes {asked} that can be deleted"
    if not unread:
        return said
    first, why = next(iter(unread.items()))
    return f"{said}; {len(unread)} of them cannot be cut, the first is {first}, which {why}"


def _why_unread(content: bytes) -> str:
    if content.startswith(b"\xef\xbb\xbf"):
        return "starts with a byte order mark"
    try:
        parse_syntax(content.decode())
    except UnicodeDecodeError:
        return "is not UTF-8"
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"does not parse ({type(error).__name__})"
    return ""
