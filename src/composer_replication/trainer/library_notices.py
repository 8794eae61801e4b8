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
_TOLD_ANYWAY = "composer_replication.trainer.guard.kl_path"  # the command prints that note itself


@contextmanager
def calm_libraries(*, quiet: bool = False) -> Iterator[None]:
    """Inside, only errors of the libraries are shown; outside, all is as it was.

    Warnings stay when the user asked for them (``-W`` or ``PYTHONWARNINGS``). The bar of a
    download stays unless ``quiet``: it can take minutes. With ``quiet`` our own notices below errors are off too.
    """
    # Sandboxes are started from this process, and tokenizers prints a page about each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():
        if not sys.warnoptions:
            for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning, UserWarning):
                warnings.simplefilter("ignore", category)
        import torch  # noqa: F401  # first: the others print a notice where it is missing
        from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

        transformers: Any = import_module("transformers.utils.logging")  # untyped, as the next one
        hub: Any = import_module("huggingface_hub.utils")
        had_bars = not are_progress_bars_disabled(), transformers.is_progress_bar_enabled()
        keeps_hub_bars = not hub.are_progress_bars_disabled()
        names = (*_LIBRARIES, _TOLD_ANYWAY, *(["composer_replication"] if quiet else []))
        levels = {name: logging.getLogger(name).level for name in names}
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        disable_progress_bars()
        transformers.disable_progress_bar()  # of the hub, too
        if keeps_hub_bars and not quiet:
            hub.enable_progress_bars()
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            on_again = (enable_progress_bars, transformers.enable_progress_bar, hub.enable_progress_bars)
            for enable, had in zip(on_again, (*had_bars, keeps_hub_bars), strict=True):
                if had:
                    enable()
