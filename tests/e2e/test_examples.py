"""What the files in ``examples`` say when they are run."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_one_file.py"


@pytest.mark.long
@pytest.mark.parametrize(("words", "code"), [(["--weak"], 5), ([], 0)], ids=["weak", "honest"])
def test_one_file_learns_and_its_guard_stops_what_only_looks_right(words: list[str], code: int) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *words], capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == code, done.stderr
    rewards, truths = (
        [float(value) for value in re.findall(rf"{name} ([\d.]+)", done.stdout)]
        for name in ("reward", "truth")
    )
    assert rewards[-1] > rewards[0] + 0.5
    assert ("stopped: the Hacking Gap" in done.stdout) == (code == 5)
    assert truths[-1] < 0.2 if code else truths[-1] > 0.8


# --- the notebook ---


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
    kept = CHECKOUT / "build" / "notebook"  # to be looked at
    kept.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, kept / "executed.ipynb")
