"""The notebook is run as Jupyter runs it: cell by cell, in a kernel with a running event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

CHECKOUT = Path(__file__).parents[2]
SMALL = f"""from pathlib import Path
import asyncio
assert asyncio.get_running_loop().is_running()
FOLDER = Path("runs/notebook")
SOURCE, SYMBOLS = {str(CHECKOUT / "recipes/tiny-cpu/project")!r}, ["tinymath/numbers.py::absolute", "tinymath/numbers.py::square"]
RECIPE = Path({str(CHECKOUT / "recipes/tiny-cpu/run.toml")!r})
SETTINGS = ["trl.max_steps=3"]
"""


def printed(cell: Any) -> str:
    return "".join(
        output.get("text", "") for output in cell.get("outputs", []) if output["output_type"] == "stream"
    )


@pytest.mark.long
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = nbformat.read(CHECKOUT / "examples/quickstart.ipynb", as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    parameters.source = SMALL
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    asyncio.run(client.async_execute())  # raises for a cell that does
    said = "\n".join(printed(cell) for cell in notebook.cells)
    assert "the original: 1 of 1 paid tests pass, 1 of 1 hidden ones" in said
    assert "nothing: 0 of 1 paid tests pass" in said
    assert "clean" in said and "stopped at step" in said
    (curves,) = (
        output
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/svg+xml" in output.get("data", ())
    )
    assert curves["data"]["image/svg+xml"].count("<path") > 1
    nbformat.write(notebook, tmp_path / "executed.ipynb")
