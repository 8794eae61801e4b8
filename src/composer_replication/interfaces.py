"""The Protocols between the folders, all on one page. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from composer_replication.records import (
    Check,
    Completion,
    ExecResult,
    FileEntry,
    HintedTurn,
    Rollout,
    SandboxSpec,
    TaskOutcome,
    ToolCall,
    ToolResult,
    ToolSpec,
)


@runtime_checkable
class Stateful(Protocol):
    """State that must survive a restart; the dictionary is JSON-safe and versioned."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Sandbox(Protocol):
    """One jail around one task tree, used by any number of threads; docs/sandbox.md has the contract in full.

    ``exec`` runs a program with its arguments, or one text for ``/bin/sh -c``, in the tree, without a network and with no variable
    but those of ``env``. After ``timeout_seconds`` all that it started is killed (``timed_out``); a command that passed a limit is
    killed with exit code 137. Paths are POSIX and relative to the tree, or absolute below it; links are followed inside of it.
    ``write_file`` makes missing folders, ``list_files`` gives all below a folder, sorted, links unfollowed. ``restore`` brings a
    ``snapshot`` back byte for byte, modes and links included, any number of times; both wait until no command runs.

    Raises:
        SandboxFailure: the jail broke (CR0302), is closed (CR0303), a snapshot is unknown or cannot be made (CR0309); never
            for what the command did.
        SandboxFileError: a path that leads out of the tree, is missing, or is no file; a tree too large or deep (CR0309).
        CommandError: what no command can be, such as a NUL byte or no finite time-out (CR0886); a ``ValueError`` too.
    """

    tree: Path

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        timeout_seconds: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
    ) -> ExecResult: ...

    def read_file(self, path: str, *, max_bytes: int = 4 * 1024**2) -> bytes: ...

    def write_file(self, path: str, data: bytes, *, is_executable: bool = False) -> None: ...

    def list_files(self, path: str = ".") -> list[FileEntry]: ...

    def snapshot(self) -> str: ...

    def restore(self, snapshot: str) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Sandbox: ...

    def __exit__(self, *error: object) -> None: ...


class SandboxBackend(Protocol):
    """A kind of jail, chosen by name or by dotted path."""

    name: str

    def is_available(self) -> Check: ...

    def open(self, spec: SandboxSpec) -> Sandbox: ...


class TokenPolicy(Protocol):
    """Something that continues token ids; many calls may wait at the same time on one event loop.

    ``sample`` ends at an end-of-sequence token, which is the last of ``token_ids`` then (``FINISHED``), or at
    ``max_new_tokens`` (``LENGTH``). The ids are those that were sampled: nobody decodes and encodes them again.

    Raises:
        SandboxFailure: the policy cannot be reached or broke, after its own retries; never for what it wrote.
    """

    async def sample(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float, seed: int
    ) -> Completion: ...


class AgentEnvironment(Protocol):
    """One attempt at one task, as an agent loop drives it: blocking, used by one thread at a time.

    ``reset`` begins and answers the first message for the policy. ``call`` does what the policy asked; whatever is wrong with
    the call is a result with ``is_error``. After ``submit``, ``is_done`` is true and further calls are refused, as results.
    ``finish`` ends the attempt with a judgement: the ``score`` of the visible tests and the ``reward``, None where the sandbox
    failed. ``close`` may be called twice. ``SandboxFailure`` is never raised for what the policy did.
    """

    @property
    def tools(self) -> tuple[ToolSpec, ...]: ...

    @property
    def is_done(self) -> bool: ...

    def reset(self, task_id: str) -> str: ...

    def call(self, call: ToolCall) -> ToolResult: ...

    def finish(self) -> Any: ...

    def close(self) -> None: ...


class GuardStatus(Protocol):
    """What the trainer reads from a guard's status; numbers of a mapping ``evidence_figures`` are logged, too."""

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
    """The run-level kill switch, as the trainer sees it.

    A guard that judges whole readings also has ``update_from_reading(round_idx, reading, *, in_loop_reward, kl_to_init)``,
    which is called in the place of ``update`` where ``heldout_eval_fn`` gives a ``HeldoutReading``.
    """

    def update(
        self, round_idx: int, *, in_loop_reward: float, heldout_score: float, kl_to_init: float | None = None
    ) -> GuardStatus: ...

    def should_halt(self) -> bool: ...

    def raise_if_fired(self, status: Any = None) -> None: ...


class HintGenerator(Protocol):
    """Finds the turns of rollouts that went wrong and puts a hint before each: a trainer's ``hint_source``.

    ``hinted_turns`` answers row by row, in the order of the rollouts, with any number of turns. ``prompt_ids``,
    ``completion_ids`` and ``sampled_logp`` are those of a turn of its rollout, id for id; ``hinted_prompt_ids`` are the same
    prompt with the hint's ids put in at one place. What a source adds to a mapping ``counts`` is logged for each generation.
    """

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> Sequence[Sequence[HintedTurn]]: ...


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers fit. Its length is how many ids it has."""

    def __len__(self) -> int: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(
        self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        tokenize: bool,
        add_generation_prompt: bool,
        **template_options: Any,
    ) -> Any: ...


@runtime_checkable
class PromptSource(Stateful, Protocol):
    """Who gives at most ``num_rows`` fresh rows in the place of those ``without_signal``, whose groups had equal rewards.

    The same state and the same calls give the same rows on every process; the state is in every checkpoint.
    """

    def fresh_rows(
        self, num_rows: int, *, without_signal: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]: ...


@runtime_checkable
class PromptChooser(PromptSource, Protocol):
    """A source that also chooses the prompts of every generation, and learns from what came of them.

    ``chosen_rows`` begins a generation: exactly ``num_rows`` rows, no two of the same task; ``fresh_rows`` gives others.
    ``take_outcomes`` hands over what was graded in this process; ``learn`` gets those of all. ``figures`` are for the log.
    """

    def chosen_rows(self, num_rows: int) -> Sequence[Mapping[str, Any]]: ...

    def take_outcomes(self) -> Sequence[TaskOutcome]: ...

    def learn(self, outcomes: Sequence[TaskOutcome]) -> None: ...

    def figures(self) -> Mapping[str, float]: ...
