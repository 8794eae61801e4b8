"""Keep the libraries' notices, small bars and deprecation warnings off the terminal."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

_LIBRARIES = ("transformers", "trl", "accelerate", "peft", "datasets", "huggingface_hub", "torch")


@contextmanager
def calm_libraries(*, quiet: bool = False) -> Iterator[None]:
    """Inside, only errors of the libraries are shown; their bars stay off afterwards.

    Warnings stay when the user asked for them (``-W`` or ``PYTHONWARNINGS``). The bar of a
    download stays unless ``quiet``: it can take minutes. With ``quiet`` our own notices below errors are off too.
    """
    # Sandboxes are started from this process, and tokenizers prints a page about each fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings(), ExitStack() as afterwards:
        if not sys.warnoptions:
            for category in (FutureWarning, DeprecationWarning, PendingDeprecationWarning, UserWarning):
                warnings.simplefilter("ignore", category)
        import torch  # noqa: F401  # first: the others print a notice where it is missing
        from datasets.utils import disable_progress_bars

        transformers: Any = import_module("transformers.utils.logging")  # untyped, as the next one
        hub: Any = import_module("huggingface_hub.utils")
        for name in (*_LIBRARIES, *(["composer_replication"] if quiet else [])):
            afterwards.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
            logging.getLogger(name).setLevel(logging.ERROR)
        has_hub_bars = not hub.are_progress_bars_disabled()
        disable_progress_bars()
        transformers.disable_progress_bar()  # of the hub, too
        if has_hub_bars and not quiet:
            hub.enable_progress_bars()
        yield
