"""Frozen records that cross the border of a folder. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

MonitorMode = Literal["mask", "report", "off"]
"""What comes of dishonest moves: the attempt is not paid, it is only said, or nobody looks."""


class StopReason(StrEnum):
    """Why a generation, an episode or a run ended."""

    FINISHED = "finished"
    STOP_RULE = "stop_rule"
    LENGTH = "length"
    SUBMITTED = "submitted"
    TURNS = "turns"
    CONTEXT = "context"
    DEADLINE = "deadline"
    GUARD = "guard"
    INFRASTRUCTURE = "infrastructure"


class Outcome(StrEnum):
    """What one test did."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Hole:
    """The span that the policy has to write: ``broken[:start] + answer + broken[end:]`` is the answered file.

    Offsets count characters of the broken file at ``path`` (POSIX, relative to the tree).
    """

    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Edit(Hole):
    """A span and what stands there instead: ``text[:start] + edit.text + text[end:]`` is the edited file."""

    text: str


@dataclass(frozen=True, slots=True)
class TestSplit:
    """Node ids by use: reward, held-out twin, must-not-break; ``paid`` are those of ``visible`` that no rollout can read."""

    __test__ = False  # the name starts with Test; pytest must not collect it

    visible: tuple[str, ...]
    hidden: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    paid: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[str, ...]:
        """The tests of the reward that a policy can read and run."""
        return tuple(test for test in self.visible if test not in self.paid)

    @property
    def unseen(self) -> tuple[str, ...]:
        """What no text for a policy may name or quote: hidden tests, and paid ones that are not shown."""
        return (*self.hidden, *self.paid)


@dataclass(frozen=True, slots=True)
class Task:
    """One deleted feature of one real repository.

    ``repository`` is ``NAME==VERSION`` (a folder's version may be empty), ``symbol`` the qualified name without the module (a
    module's is its dotted name), ``environment`` the fingerprint of the locked environment in which its tests run.
    ``granularity`` is function, class, module or feature; ``removal`` is body (signatures and docstrings stay) or whole.
    ``path`` is the file of the symbol, ``holes`` are the places where code was taken out, ``removed_files`` are gone
    altogether. ``num_twins`` of its functions have their recorded behaviour as a further hidden test.
    """

    task_id: str
    repository: str
    symbol: str
    granularity: str
    removal: str
    path: str
    holes: tuple[Hole, ...]
    tests: TestSplit
    environment: str
    num_body_lines: int
    removed_files: tuple[str, ...] = ()
    num_twins: int = 0

    @property
    def is_one_hole(self) -> bool:
        """Whether one text spliced into one file can be an answer, which single-turn rollouts need."""
        return len(self.holes) == 1 and self.granularity == "function" and self.removal == "body"

    @property
    def hole(self) -> Hole:
        """The only hole; a ``ValueError`` for a task that is not one hole."""
        if not self.is_one_hole:
            raise ValueError(f"{self.task_id} has no single hole")
        return self.holes[0]

    @property
    def has_hidden_tests(self) -> bool:
        """Whether it has a truth that is not in the reward: tests held back, or recorded behaviour."""
        return bool(self.tests.hidden) or self.num_twins > 0

    @property
    def fail_to_pass(self) -> tuple[str, ...]:
        return tuple(sorted((*self.tests.visible, *self.tests.hidden)))


@dataclass(frozen=True, slots=True)
class TaskContent:
    """What a task is made of, for overlap checks: text by path, all test files of the repository, golden code.

    ``own_tests`` are the test functions that fail without that code. A task without ``has_hidden_tests`` cannot be held out.
    """

    task_id: str
    repository: str
    symbol: str
    broken_tree: Mapping[str, str]
    tests: Mapping[str, str]
    golden: str
    own_tests: str = ""
    has_hidden_tests: bool = True


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use: its whole process tree together, but each process its own ``num_open_files``."""

    memory_bytes: int = 2 * 1024**3
    num_processes: int = 64
    disk_bytes: int = 256 * 1024**2
    output_bytes: int = 4 * 1024**2
    num_open_files: int = 256


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox sees, each path under its own host path.

    ``tree`` is the caller's private copy: writable inside and the working directory. ``read_only`` are files or folders to
    read and execute from, ``masked`` paths below them or the system folders whose content must not be readable.
    """

    tree: Path
    read_only: tuple[Path, ...] = ()
    masked: tuple[Path, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What one command inside a sandbox did (UTF-8 with replacement); ``stopped`` is the limit, not time, that ended it."""

    exit_code: int
    stdout: str
    stderr: str
    truncated: bool
    timed_out: bool
    out_of_memory: bool
    seconds: float
    stopped: str = ""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry of a sandbox's tree; ``path`` is POSIX and relative to it, ``mode`` has setuid, setgid and sticky bits too."""

    path: str
    kind: Literal["file", "folder", "link", "other"]
    num_bytes: int
    mode: int


@dataclass(frozen=True, slots=True)
class Check:
    """One named check with its outcome, as ``doctor`` and ``sandbox selftest`` print it."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer, of which ids are the truth; ``token_logp`` (nats) are the sampler's, empty where it gave none."""

    token_ids: tuple[int, ...]
    text: str
    stop_reason: StopReason
    token_logp: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """What the tests said about one answer.

    ``outcomes`` maps node id to outcome. ``error`` is empty, or says why the run itself is a failure of the candidate (no
    closing record, time-out, other node ids than the stored ones). ``paid`` are the tests that the policy cannot read.
    ``is_forged``: the candidate changed what its tests said, so it fails all of them; ``error`` says what showed it.
    """

    outcomes: Mapping[str, Outcome]
    error: str = ""
    seconds: float = 0.0
    paid: tuple[str, ...] = ()
    is_forged: bool = False

    @property
    def num_passed(self) -> int:
        return sum(outcome is Outcome.PASSED for outcome in self.outcomes.values())

    @property
    def all_passed(self) -> bool:
        return not self.error and bool(self.outcomes) and self.num_passed == len(self.outcomes)

    @property
    def pass_share(self) -> float:
        return 0.0 if self.error or not self.outcomes else self.num_passed / len(self.outcomes)

    def passed_all(self, *, paid: bool) -> bool:
        """Whether all tests passed that are paid but not shown, or all the others; False where there are none."""
        own = [outcome for test, outcome in self.outcomes.items() if (test in self.paid) is paid]
        return not self.error and bool(own) and all(outcome is Outcome.PASSED for outcome in own)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of the policy and the prompt it answered."""

    prompt_ids: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the policy may call; ``parameters`` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it: ``arguments`` is its own text, JSON or not; ``call_id`` that of a server or template."""

    name: str
    arguments: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the environment answered to one call; ``seconds`` are not compared.

    ``is_error`` says that the tool itself refused or failed; ``exit_code`` is that of a command, None for tools that run none.
    ``fault`` is ``invalid`` where no tool could take the call (unknown name, no JSON, wrong arguments, after the end of the
    attempt), ``refused`` where it was one too many in its answer, so that no environment has seen it; or what a tool met:
    ``missing-file``, ``command-not-found``, ``edit-not-applied``, ``out-of-memory``.
    """

    text: str
    is_error: bool = False
    exit_code: int | None = None
    timed_out: bool = False
    seconds: float = field(default=0.0, compare=False)
    fault: str = ""

    @property
    def failed(self) -> bool:
        return self.is_error or self.timed_out or self.exit_code not in (None, 0)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at one task. ``reward`` is None when infrastructure failed."""

    task_id: str
    step: int
    turns: tuple[Turn, ...]
    reward: float | None
    score: Score | None
    stop_reason: StopReason
    seconds: float


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """What came of one attempt at a task: whether every test of the reward passed, and ``trouble`` where it was not graded.

    One whose result cannot be believed (forged outcomes, flagged by the hack monitor) is an attempt without a pass.
    """

    task_id: str
    is_full_pass: bool
    trouble: Literal["", "infrastructure"] = ""


@dataclass(frozen=True, slots=True)
class HintedTurn:
    """One turn that went wrong, as token ids: the sampled completion after the policy's prompt and after a hinted one.

    ``sampled_logp`` are log-probabilities under the sampler (nats; empty where unknown), ``weight`` scales the turn's loss.
    """

    prompt_ids: tuple[int, ...]
    hinted_prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampled_logp: tuple[float, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt, as token ids; ``weight``, at least 0, scales the pair's loss; ``source`` labelled it."""

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    weight: float = 1.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class HeldoutReading:
    """One held-out evaluation: the mean truth in [0, 1], without infrastructure failures.

    ``pairs`` are (visible, hidden) scores per task; ``evaluation_idx`` counts from 1.
    """

    evaluation_idx: int
    score: float
    pairs: tuple[tuple[float, float], ...]
    canary_passes: tuple[float, ...]
    split_fingerprint: str
    seconds: float
    infrastructure_failures: int = 0
