"""Recipes are package data in a wheel and ``recipes/`` in a checkout."""

from __future__ import annotations

from pathlib import Path

from composer_replication.errors import MissingError


def shipped_recipe(name: str) -> Path:
    """Path of ``NAME/run.toml``.

    Raises:
        MissingError: the installation has no such recipe (CR0101).
    """
    package = Path(__file__).resolve().parent.parent
    for root in (package / "recipes", package.parent.parent / "recipes"):
        recipe = root / name / "run.toml"
        if recipe.is_file():
            return recipe
    raise MissingError(
        "CR0101", f"the recipe {name} is not in this installation.", fix="reinstall composer-replication."
    )
