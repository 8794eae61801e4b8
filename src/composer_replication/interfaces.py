"""The Protocols between the folders, all on one page. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from composer_replication.records import Check, Completion, ExecResult, HeldoutReading, SandboxSpec


@runtime_checkable
class Stateful(Protocol):
    """State that must survive a restart; the dictionary is JSON-safe and versioned."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Sandbox(Protocol):
    """One jail around one task tree.

    ``exec`` runs ``argv`` with the tree as working directory, the network off and
    nothing of the parent's environment but what ``env`` names. ``stdin`` is given
    whole. When ``timeout_seconds`` (above 0) is over, every process of the jail,
    daemons included, is killed and ``timed_out`` is set. Standard output and error
    are each cut at ``limits.output_bytes`` (``truncated``). A process killed by the
    memory limit sets ``out_of_memory`` where the backend can tell.

    Raises:
        SandboxFailure: the jail itself broke. Never raised for what the command did.
    """

    tree: Path

    def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_seconds: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult: ...

    def close(self) -> None: ...

    def __enter__(self) -> Sandbox: ...

    def __exit__(self, *error: object) -> None: ...


class SandboxBackend(Protocol):
    """A kind of jail, chosen by name or by dotted path."""

    name: str

    def is_available(self) -> Check: ...

    def open(self, spec: SandboxSpec) -> Sandbox: ...


class Policy(Protocol):
    """Something that answers prompts.

    ``generate`` returns ``num_samples`` completions for each prompt, in order. A row
    ends at an end-of-sequence token, at ``max_new_tokens``, or as soon as
    ``is_finished(text so far)`` is true. The same seed and weights give the same answers.
    """

    def generate(
        self,
        prompts: Sequence[str],
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        is_finished: Callable[[str], bool] | None = None,
    ) -> list[list[Completion]]: ...


class GuardStatus(Protocol):
    """What the trainer reads from a guard's status.

    A status may also have ``evidence_figures``, a mapping of name to number; the trainer
    logs them as ``killswitch/evidence_NAME``.
    """

    @property
    def fire(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def in_loop_ema(self) -> float | None: ...
    @property
    def heldout_ema(self) -> float | None: ...
    @property
    def kl_ema(self) -> float | None: ...
    @property
    def proxy_real_gap(self) -> float: ...


class Guard(Stateful, Protocol):
    """The run-level kill switch, as the trainer sees it."""

    def update(
        self, round_idx: int, *, in_loop_reward: float, heldout_score: float, kl_to_init: float | None = None
    ) -> GuardStatus: ...

    def should_halt(self) -> bool: ...

    def raise_if_fired(self, status: Any = None) -> None: ...


@runtime_checkable
class ReadingGuard(Guard, Protocol):
    """A guard that judges whole readings.

    Where ``heldout_eval_fn`` gives a ``HeldoutReading`` the trainer calls ``update_from_reading``
    in the place of ``update``.
    """

    def update_from_reading(
        self,
        round_idx: int,
        reading: HeldoutReading,
        *,
        in_loop_reward: float,
        kl_to_init: float | None = None,
    ) -> GuardStatus: ...


class Teacher(Protocol):
    """A policy under a hint, or another model, that scores given tokens."""

    def score(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]: ...
