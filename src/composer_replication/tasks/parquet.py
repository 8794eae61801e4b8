"""The tasks of a store as a Parquet file, derived from its records.

A store has ``tasks.parquet``: what may be known, for any reader of SWE-bench rows. The rows with golden patch,
test patch and hidden tests are written on demand alone (``write_instances``), since they repeat at three
times its size what the records say; stores of version 3 and earlier have them too, as ``secrets.parquet``.

The same records and the same pyarrow give the same bytes. The manifest lists the file by
sha256, its fingerprint does not cover it: it adds nothing to the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

from composer_replication.errors import needs_extra
from composer_replication.tasks.store import TaskStore
from composer_replication.tasks.swebench_rows import PUBLIC_COLUMNS, Row, iter_rows

TASKS_FILE = "tasks.parquet"
_INTEGERS = frozenset({"num_body_lines"})
_ROW_GROUP = 1000
_ZSTD_LEVEL = 19


def has_pyarrow() -> bool:
    """Whether Parquet can be written and read here."""
    from importlib.util import find_spec

    return find_spec("pyarrow") is not None


def write_parquet(store: TaskStore) -> None:
    """Write ``tasks.parquet`` into the store and name it in the manifest, in place of all derived files.

    Raises:
        InputError: the store is damaged (CR0411).
        MissingError: pyarrow is not installed; the store is whole without this file (CR0101).
    """
    _require_pyarrow()
    rows = [public for public, _ in iter_rows(store)]
    store.put_derived(TASKS_FILE, parquet_bytes(rows, PUBLIC_COLUMNS))


def parquet_bytes(rows: Sequence[Row], columns: Sequence[str]) -> bytes:
    """A Parquet file of these rows: zstd, format 2.6, no time, so equal rows give equal bytes.

    Args:
        rows: each with a value for every column; text, or an integer for ``num_body_lines``.
        columns: in the order of the file.

    Raises:
        MissingError: pyarrow is not installed (CR0101).
    """
    _require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.int64() if name in _INTEGERS else pa.string()) for name in columns])
    table = pa.Table.from_pylist([{name: row[name] for name in columns} for row in rows], schema=schema)
    out = BytesIO()
    pq.write_table(
        table,
        out,
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=_ZSTD_LEVEL,
        use_dictionary=False,
        write_statistics=False,  # the least and the greatest patch, whole, in every footer
        store_schema=False,
        row_group_size=_ROW_GROUP,
    )
    return out.getvalue()


def read_parquet(data: bytes) -> list[dict[str, Any]]:
    """The rows of a Parquet file.

    Raises:
        ValueError: not a Parquet file, or a damaged one.
        MissingError: pyarrow is not installed (CR0101).
    """
    _require_pyarrow()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # A thread of pyarrow that still gives back a file of Python's when the interpreter ends aborts the process.
        rows: list[dict[str, Any]] = pq.read_table(BytesIO(data), use_threads=False).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(str(error).splitlines()[0]) from error
    return rows


def _require_pyarrow() -> None:
    with needs_extra("parquet", "a Parquet file, without which the task store is whole,"):
        import pyarrow as pa  # noqa: F401
