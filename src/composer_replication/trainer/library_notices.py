"""Keep the libraries' notices, small bars and deprecation warnings off the terminal."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

_LIBRARIES = ("transformers", "trl", "accelerate", "peft", "datasets", "huggingface_hub", "torch")
_CATEGORIES = (FutureWarning, DeprecationWarning, PendingDeprecationWarning, UserWarning)
_OWN = "composer_replication"
_TOLD_ANYWAY = "composer_replication.trainer.guard.kl_path"  # the command prints that note itself


@contextmanager
def calm_libraries(*, quiet: bool = False) -> Iterator[None]:
    """Inside, only errors of the libraries are shown; outside, all is as it was.

    Warnings stay when the user asked for them (``-W`` or ``PYTHONWARNINGS``). The bar of a
    download stays unless ``quiet``: it can take minutes.

    Args:
        quiet: our own notices below errors are off too.
    """
    # Sandboxes are started from this process, and tokenizers prints a page about each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():
        if not sys.warnoptions:
            for category in _CATEGORIES:
                warnings.simplefilter("ignore", category)
        import torch  # noqa: F401, I001  # first: the others print a notice where it is missing
        import datasets
        from transformers.utils import logging as transformers_logging

        hub: Any = import_module("huggingface_hub.utils")  # comes with transformers, and is untyped
        names = (*_LIBRARIES, _TOLD_ANYWAY, *((_OWN,) if quiet else ()))
        levels = {name: logging.getLogger(name).level for name in names}
        had_datasets_bars = not datasets.utils.are_progress_bars_disabled()
        had_hub_bars = not hub.are_progress_bars_disabled()
        had_bars = transformers_logging.is_progress_bar_enabled()
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        datasets.utils.disable_progress_bars()
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers has no types for it
        if had_hub_bars and not quiet:
            hub.enable_progress_bars()
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            if had_datasets_bars:
                datasets.utils.enable_progress_bars()
            if had_bars:
                transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
            if had_hub_bars:
                hub.enable_progress_bars()
