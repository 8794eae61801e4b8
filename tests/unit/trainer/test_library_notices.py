"""The libraries' notices are off inside and as before outside."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from composer_replication.trainer.library_notices import calm_libraries

if TYPE_CHECKING:
    import pytest


def test_notices_are_off_inside_and_back_outside(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import logging as transformers_logging

    monkeypatch.setattr("sys.warnoptions", [])
    logging.getLogger("transformers").setLevel(logging.WARNING)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with calm_libraries():
            assert not transformers_logging.is_progress_bar_enabled()
            warnings.warn("old name", FutureWarning, stacklevel=1)
            logging.getLogger("transformers.trainer").warning("a hint")
            logging.getLogger("composer_replication.trainer").warning("ours")
        assert [str(warning.message) for warning in seen] == []
        warnings.warn("old name", FutureWarning, stacklevel=1)
        assert [str(warning.message) for warning in seen] == ["old name"]
    assert [record.message for record in caplog.records] == ["ours"]
    assert logging.getLogger("transformers").level == logging.WARNING


def test_quiet_keeps_our_own_notices_back_but_no_error(caplog: pytest.LogCaptureFixture) -> None:
    ours = logging.getLogger("composer_replication.trainer")
    with calm_libraries(quiet=True):
        ours.warning("a notice")
        ours.error("a trouble")
    assert [record.message for record in caplog.records] == ["a trouble"]


def test_warnings_that_were_asked_for_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.warnoptions", ["default"])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with calm_libraries():
            warnings.warn("old name", FutureWarning, stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["old name"]
