"""The Protocols between the folders, all on one page. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    """One jail around one task tree, used by any number of threads.

    **Commands.** ``exec`` runs ``command`` (a program with its arguments, or one text for ``/bin/sh -c``)
    with the tree as working directory, the network off and nothing of the parent's environment but
    what ``env`` names. ``stdin`` is given whole. When ``timeout_seconds`` (above 0) is over, every process
    of the command, daemons included, is killed and ``timed_out`` is set; none outlives ``exec`` either.
    Standard output and error are each cut at ``limits.output_bytes`` (``truncated``). A command that used
    more than ``limits.memory_bytes``, ``num_processes`` or ``disk_bytes`` in total is killed: exit code 137, the
    limit is named in the last line of ``stderr``, and for memory ``out_of_memory`` is set.

    **Files.** Paths are POSIX and relative to the tree, or absolute below it. Links are followed as long as
    they stay in the tree. ``read_file`` gives at most ``max_bytes`` bytes. ``write_file`` makes missing folders and
    replaces what is there; the file belongs to the user inside. ``list_files`` gives everything below
    a folder, sorted by path, links unfollowed.

    **Snapshots.** ``snapshot`` keeps the tree as it is (a copy on write where the file system can) and returns
    its name; ``restore`` brings the tree back to it, byte for byte, modes and links included, any number of
    times. HOME and TMPDIR are not part of it. Both wait until no command runs. They die with the sandbox.

    Raises:
        SandboxFailure: the jail itself broke (CR0302), is closed (CR0303), a snapshot is unknown or cannot
            be made (CR0309). Never raised for what the command did.
        SandboxFileError: a path that leads out of the tree, is missing, or is no file; a tree with more in it than is
            listed, or too deep for a snapshot (CR0309).
        CommandError: no command or program, a NUL byte, what is no text, a variable without a name or with ``=`` in it,
            a time-out that is not above 0 and finite, input that is not bytes (CR0886); a ``ValueError`` too.
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

    ``reset`` begins and answers the first message for the policy. ``call`` does what the policy asked; whatever is
    wrong with the call is a result with ``is_error``. After ``submit``, ``is_done`` is true and further calls are
    refused, as results. ``finish`` ends the attempt and says what it is worth: a judgement with the ``score`` of the
    visible tests and the ``reward``, None where the sandbox failed. ``close`` leaves nothing behind and may be called
    twice.

    Raises:
        SandboxFailure: the sandbox broke; never for what the policy did.
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

    ``hinted_turns`` answers row by row, in the order of the rollouts, with any number of turns; none where
    nothing went wrong or nothing can be said. A turn's ``prompt_ids`` and ``completion_ids`` are those of a turn
    of its rollout, id for id; ``hinted_prompt_ids`` are the same prompt with the hint's ids put in at one place;
    ``sampled_logp`` are those of that turn, or left empty. What a source adds to a mapping ``counts`` of its own, by name, is logged for each generation.
    """

    def hinted_turns(self, rollouts: Sequence[Rollout]) -> Sequence[Sequence[HintedTurn]]: ...


class Tokenizer(Protocol):
    """What is asked of a tokenizer; those of transformers fit. Its length is how many ids it has.

    ``apply_chat_template`` gives text when ``tokenize`` is false, and raises whatever the template raises
    for a conversation that it does not take.
    """

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
    """Who gives fresh prompts in the place of those whose groups taught nothing.

    ``fresh_rows`` gives at most ``num_rows`` rows of the training data's form, fewer where it has no more.
    ``without_signal`` are the rows whose group had equal rewards. The same state and the same calls give the same
    rows on every process; the state is in every checkpoint.
    """

    def fresh_rows(
        self, num_rows: int, *, without_signal: Sequence[Mapping[str, Any]]
    ) -> Sequence[Mapping[str, Any]]: ...


@runtime_checkable
class PromptChooser(PromptSource, Protocol):
    """A source that also chooses the prompts of every generation, and learns from what came of them.

    ``chosen_rows`` begins a generation: exactly ``num_rows`` rows, no two of the same task. ``fresh_rows`` then gives
    others than these. ``take_outcomes`` hands over what was graded in this process since it was last asked; ``learn`` gets
    those of all processes, the same ones on each. ``figures`` are numbers for the log.
    """

    def chosen_rows(self, num_rows: int) -> Sequence[Mapping[str, Any]]: ...

    def take_outcomes(self) -> Sequence[TaskOutcome]: ...

    def learn(self, outcomes: Sequence[TaskOutcome]) -> None: ...

    def figures(self) -> Mapping[str, float]: ...
