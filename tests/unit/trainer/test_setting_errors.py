"""What the training libraries raise while a trainer is made is told as what it is."""

from __future__ import annotations

import pytest

from composer_replication.errors import UsageError
from composer_replication.trainer.setting_errors import refusals


def raise_in(module: str, error: Exception) -> None:
    """Raise it in a function of that module."""
    names = {"__name__": module, "error": error}
    exec("def start():\n    raise error", names)
    names["start"]()  # type: ignore[operator]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Device string must not be empty\nmore lines"),
        ValueError("No available memory for the cache blocks. Try increasing gpu_memory_utilization."),
        ModuleNotFoundError("No module named 'flashinfer'"),
    ],
)
def test_a_vllm_that_does_not_start_is_named(error: Exception) -> None:
    with pytest.raises(UsageError) as told, refusals():
        raise_in("vllm.entrypoints.llm", error)
    assert told.value.code == "CR0211"
    assert told.value.message == f"vLLM did not start: {str(error).splitlines()[0].rstrip('.')}."
    assert told.value.where == "trl.use_vllm"
    assert "composer-rl doctor" in told.value.fix


def test_what_no_setting_can_cause_stays_what_it_is() -> None:
    with pytest.raises(RuntimeError, match="a bug"), refusals():
        raise_in("trl.trainer", RuntimeError("a bug"))
    with pytest.raises(UsageError, match="the training libraries refuse"), refusals():
        raise_in("trl.trainer", ValueError("beta must not be negative"))
