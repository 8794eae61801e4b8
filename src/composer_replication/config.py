"""One recipe, typed: ``run.toml`` in, ``run.toml`` out; an unknown key is an error.

The ``[trl]`` table goes unchanged to TRL's ``GRPOConfig``. Paths in a recipe are relative to the recipe's own folder.
"""

from __future__ import annotations

import copy
import difflib
import tomllib
from collections.abc import Mapping
from operator import eq
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from composer_replication.errors import UsageError
from composer_replication.records import MonitorMode


class Section(BaseModel):
    """A table of the recipe: unknown keys are errors, values are not coerced, numbers are finite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    def wrong(self) -> dict[str, Any]:
        """By its sentence, whether values do not fit each other."""
        return {}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if problem := next((problem for problem, is_so in self.wrong().items() if is_so), ""):
            raise ValueError(problem)
        return self


class LoraSection(Section):
    """Low-rank adapters of all linear layers, or of those named, instead of full fine-tuning (needs peft)."""

    rank: int = Field(16, ge=1)
    lora_alpha: int = Field(32, ge=1)
    target_modules: str | list[str] = "all-linear"


class ModelSection(Section):
    """Which causal language model."""

    name: str
    sha256: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraSection | None = None


class TasksSection(Section):
    """Where tasks come from: ``source`` is built into the cache, ``store`` is used as it is."""

    source: list[str] = []
    store: str = ""
    symbols: dict[str, list[str]] = {}
    max_tasks: int | None = Field(None, ge=1)

    def wrong(self) -> dict[str, Any]:
        return {"give exactly one of source and store": bool(self.source) == bool(self.store)}


class RolloutsSection(Section):
    """How the prompt of a single answer is cut, and how many answers are graded at a time."""

    prompt_style: Literal["completion", "chat"] = "completion"
    context_lines: int = Field(12, ge=0)
    grading_jobs: int = Field(2, ge=1)


class RewardSection(Section):
    """In-loop reward: a dotted path ``package.module:function`` of (text, answer, score) -> float."""

    function: str = "composer_replication.rollouts.rewards:visible_tests_pass"
    tests: Literal["visible", "weakened"] = "visible"
    is_shuffled: bool = False


class GuardSection(Section):
    """``HeldOutGuard``'s own arguments and defaults; without this table there is no guard."""

    min_steps: int = Field(5, ge=1)
    decline_patience: int = Field(8, ge=1)
    ema_alpha: float = Field(0.8, ge=0.0, lt=1.0)
    kl_hard_stop: float = Field(0.08, gt=0.0)
    max_proxy_real_gap: float = Field(0.35, gt=0.0)


class EvidenceSection(Section):
    """``EvidenceGuard`` beside the ``[guard]``: a halt that is false in at most 1% of honest runs (docs/safety.md)."""

    planned_evaluations: int = Field(ge=1)
    tolerated_gap: float = Field(gt=0.0, lt=1.0)


class SandboxSection(Section):
    """Backend by name or dotted path (empty: the best of this machine)."""

    backend: str = ""
    accept_no_isolation: list[str] = []


class TrainerSection(Section):
    """What ``ComposerReplicationTrainer`` takes beyond TRL's own arguments; docs/trainer.md has formulas and the table of presets."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "composer"] | None = None
    kl_in_reward: bool | None = None
    dynamic_sampling_rounds: int | None = Field(None, ge=0)
    effort_weight: float | None = Field(None, ge=0.0)
    alpha_sdpo: float = Field(0.0, ge=0.0)
    beta_replay: float = Field(0.0, ge=0.0)
    prefix_sharing: bool = False
    checkpoint_every: int = Field(5, ge=1)
    cpu_threads: int = Field(0, ge=0)
    save_model: bool = True


class HeldoutSection(Section):
    """How the truth is measured; tasks here are never trained on. docs/rollouts.md explains readings."""

    repositories: list[str] = []
    split: str = ""
    fraction: float | None = Field(None, gt=0.0, lt=1.0)
    every: int = Field(1, ge=1)
    samples_per_task: int = Field(1, ge=1)
    sample_size: int = Field(0, ge=0)
    num_canaries: int = Field(0, ge=0)
    before_and_after_samples: int = Field(0, ge=0)
    before_and_after_trained_samples: int | None = Field(None, ge=1)

    def wrong(self) -> dict[str, Any]:
        others = self.repositories or self.fraction is not None
        return {"give split alone, without repositories and fraction": self.split and others}


class HintsSection(Section):
    """Hint distillation (``trainer.alpha_sdpo``): the policy under a hint teaches the policy without it (docs/hints.md)."""

    teacher: Literal["ema", "frozen", "lora-off"] = "ema"
    jsd_alpha: float = Field(0.5, ge=0.0, le=1.0)


class ReplaySection(Section):
    """Preference pairs (``trainer.beta_replay``), mixed into every step: ``pairs_per_step`` of those given."""

    kind: Literal["dpo", "ipo", "simpo"] = "dpo"
    pairs: str = ""
    pairs_per_step: int = Field(4, ge=1)
    sibling_pairs: bool = False


class RaySection(Section):
    """Attempts and gradings as actors of a Ray cluster, and a build of ``tasks.source`` too; docs/rollouts_on_ray.md has more."""

    address: str
    resources: dict[str, Annotated[float, Field(ge=0.0)]] = {}


class ReplicasSection(Section):
    """Several trainers of one run (DiLoCo), each with its share of the tasks; docs/replicas.md explains each key."""

    transport: str
    num_replicas: int = Field(2, ge=1)
    sync_every: int = Field(100, ge=1)
    fragments: int = Field(1, ge=1)
    delay: int = Field(0, ge=0)
    precision: Literal["fp32", "bf16", "int8", "int4"] = "int8"
    min_replicas: int = Field(1, ge=1)
    grace_seconds: float = Field(60.0, gt=0.0)
    deadline_seconds: float = Field(600.0, gt=0.0)

    @property
    def lighthouse(self) -> str:
        """HOST:PORT where the transport is torchft, else empty."""
        return self.transport.partition("torchft://")[2]

    @property
    def interval(self) -> int:
        """Steps between two outer steps."""
        return self.sync_every // self.fragments

    def wrong(self) -> dict[str, Any]:
        no_address = "transport is no address such as s3://bucket/run-7 or torchft://HOST:PORT"
        return {
            "sync_every is no multiple of fragments": self.sync_every % self.fragments,
            f"delay is not below sync_every / fragments = {self.interval}": self.delay >= self.interval,
            "min_replicas is above num_replicas": self.min_replicas > self.num_replicas,
            no_address: not self.transport.partition("://")[2],
        }


class AgentRewardSection(Section):
    """What an attempt with tools is worth; docs/environment.md explains each key."""

    rule: Literal["fraction", "all_or_nothing"] = "fraction"
    breaks: Literal["mask", "cost", "ignore"] = "mask"
    break_sample: int = Field(0, ge=0)
    invalid_call_cost: float = Field(0.0, ge=0.0)


class AgentToolsSection(Section):
    """What the tools of an attempt give: ``max_characters`` of one result at most."""

    max_characters: int = Field(16_000, ge=1000)


class AgentSection(Section):
    """Rollouts of several turns with tools; without this table a rollout is one answer (docs/agentic_training.md)."""

    max_turns: int = Field(20, ge=1)
    max_context_tokens: int = Field(16_384, ge=2)
    max_new_tokens: int = Field(2048, ge=1)
    min_new_tokens: int = Field(16, ge=1)
    max_concurrent: int = Field(32, ge=1)
    summary_tokens: int = Field(0, ge=0)
    reminder: str = ""
    template_options: dict[str, Any] = {}
    monitor: MonitorMode = "mask"
    judge: str = ""
    reward: AgentRewardSection = AgentRewardSection()
    tools: AgentToolsSection = AgentToolsSection()

    def wrong(self) -> dict[str, Any]:
        rest, most = "has to be below max_context_tokens: a prompt needs room, too", self.max_context_tokens
        return {
            f"max_new_tokens {rest}": self.max_new_tokens >= most,
            f"summary_tokens {rest}": self.summary_tokens >= most,
            "min_new_tokens is above max_new_tokens": self.min_new_tokens > self.max_new_tokens,
        }


class RunConfig(Section):
    """A whole recipe."""

    seed: int = Field(0, ge=0, lt=2**32)
    model: ModelSection
    tasks: TasksSection
    heldout: HeldoutSection | None = None
    rollouts: RolloutsSection = RolloutsSection()
    reward: RewardSection = RewardSection()
    guard: GuardSection | None = None
    evidence: EvidenceSection | None = None
    sandbox: SandboxSection = SandboxSection()
    trainer: TrainerSection = TrainerSection()
    hints: HintsSection | None = None
    replay: ReplaySection | None = None
    curriculum: Section | None = None  # draws tasks by their pass rates, not in the data's order
    agent: AgentSection | None = None
    ray: RaySection | None = None
    replicas: ReplicasSection | None = None
    trl: dict[str, Any] = {}

    def wrong(self) -> dict[str, Any]:
        """An idle key is harmless; refused is what would train something else than was meant."""
        guard, heldout, evidence, agent = self.guard, self.heldout, self.evidence, self.agent
        hints, replay, trainer = self.hints, self.replay, self.trainer
        takes_lora_off = hints and hints.teacher == "lora-off"
        lacks_pairs = trainer.beta_replay and not (replay and (replay.pairs or replay.sibling_pairs))
        has_reward = agent and self.reward != RewardSection()
        has_length = agent and "max_completion_length" in self.trl
        return {
            'hints.teacher = "lora-off" needs [model.lora]': takes_lora_off and not self.model.lora,
            "[hints] does nothing while trainer.alpha_sdpo is 0": hints and not trainer.alpha_sdpo,
            "[replay] does nothing while trainer.beta_replay is 0": replay and not trainer.beta_replay,
            "trainer.beta_replay needs pairs to learn from: replay.pairs or replay.sibling_pairs": lacks_pairs,
            "[reward] is about single answers; with [agent] use [agent.reward]": has_reward,
            "trl.max_completion_length is set by agent.max_context_tokens: take the key out": has_length,
            "a [guard] needs a [heldout] table: the truth that it compares with": guard and not heldout,
            "an [evidence] table needs a [guard] and a [heldout] table beside it": evidence
            and not (guard and heldout),
            "[evidence] needs heldout.sample_size: its guarantee is about fresh tasks": evidence
            and not (heldout and heldout.sample_size),
        }


def _data(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


PRESETS: Final = _data("presets.toml")
DEPARTED: Final = _data("departed_keys.toml")
_SEE_KEYS = "see docs/recipe-keys.md for every key."


def read_table(path: Path) -> dict[str, Any]:
    """A recipe as it stands in its file, unchecked; one that cannot be read or is no TOML is refused (CR0201)."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # of the file; of TOML or of UTF-8
        what = "cannot be read" if isinstance(error, OSError) else "is not valid TOML"
        fix = "correct that place, or give the path of another run.toml; composer-rl recipe new writes one."
        raise UsageError("CR0201", f"the recipe {what}: {error}.", where=str(path), fix=fix) from error


def load_config(path: Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a recipe (CR0201), apply ``section.key`` overrides, and check every key and value (CR0204)."""
    table = read_table(path)
    for key, value in (overrides or {}).items():
        _set(table, key, copy.deepcopy(value))  # a later key may change a table that the caller gave
    return parse_config(table, where=str(path), overrides=overrides or {})


def parse_config(
    table: Mapping[str, Any], *, where: str, overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """Check a recipe given as a table; an error in one of ``overrides`` names the flag instead of ``where``."""
    try:
        return RunConfig.model_validate(_without_departed(table))
    except ValidationError as error:
        key, sentence = _first_problem(error)
    parts = key.split(".")  # a flag and a key are about the same where one lies within the other
    flag = next((name for name in overrides or {} if all(map(eq, name.split("."), parts))), "")
    raise UsageError("CR0204", sentence, where=f"--set {flag}" if flag else where, fix=_SEE_KEYS)


def _without_departed(table: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe without keys that have left, where they have their last default."""
    current: dict[str, Any] = copy.deepcopy(dict(table))
    for section, keys in DEPARTED.items():
        found: Any = current
        for part in section.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        for key, last in keys.items() if isinstance(found, dict) else ():
            if found.get(key) == last or (key == "has_sentinel" and "evidence" in current):
                found.pop(key, None)
    return current


def parse_override(text: str) -> tuple[str, Any]:
    """``KEY=VALUE`` to key and TOML value (else CR0206); a value that is not TOML is taken as a string."""
    key, equals, value = text.partition("=")
    if not equals or not all(part.strip() for part in key.split(".")):
        raise UsageError(
            "CR0206", f"--set {text!r} is not KEY=VALUE.", fix="for example --set trl.max_steps=2"
        )
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value


def dump_config(config: RunConfig) -> str:
    """The recipe as resolved, as TOML (defaults written out)."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_none=True))


def _set(table: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    inner: Any = table
    for section in sections:
        inner = inner.setdefault(section, {})
        if not isinstance(inner, dict):
            raise UsageError("CR0204", f"{section} is not a table.", where=f"--set {dotted}", fix=_SEE_KEYS)
    inner[key] = value


def _first_problem(error: ValidationError) -> tuple[str, str]:
    """The dotted key that is wrong, and the sentence about it."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path) or "the recipe"
    if problem["type"] == "missing":
        return key, f"the key {key} is missing."
    if problem["type"] != "extra_forbidden":
        return key, f"{key}: {problem['msg'].removeprefix('Value error, ')}."
    if path[-1] in DEPARTED.get(".".join(path[:-1]), {}):
        return key, f"the key {key} has left: take the line out."
    near = difflib.get_close_matches(path[-1], _known_keys(path[:-1]), n=1, cutoff=0.0)
    nearest = f"the nearest known key is {'.'.join([*path[:-1], *near])}"
    return key, f"unknown key {key}{f'; {nearest}' if near else ': its table has no keys'}."


def _known_keys(path: list[str]) -> list[str]:
    """The keys of the table at ``path``."""
    kind: Any = RunConfig
    for part in path:
        kind = kind.model_fields[part].annotation
        kind, *_ = get_args(kind) or (kind,)  # out of ``Section | None``
    return list(kind.model_fields)
