"""One recipe, typed: ``run.toml`` in, ``run.toml`` out; an unknown key is an error.

The ``[trl]`` table goes unchanged to TRL's ``GRPOConfig``. Paths in a recipe are relative to the recipe's own folder.
"""

from __future__ import annotations

import copy
import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from composer_replication.errors import UsageError
from composer_replication.records import MonitorMode


class Section(BaseModel):
    """A table of the recipe: unknown keys are errors, values are not coerced, numbers are finite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class LoraSection(Section):
    """Low-rank adapters of all linear layers, or of those named, instead of full fine-tuning (needs peft)."""

    rank: int = Field(16, ge=1)
    lora_alpha: int = Field(32, ge=1)
    target_modules: str | list[str] = "all-linear"


class ModelSection(Section):
    """Which causal language model.

    ``name`` is a folder, a model name that transformers resolves, ``package:NAME==VERSION`` (a GGUF model inside a wheel of the
    package registry, pinned by ``sha256`` of the wheel), ``tiny-random`` or ``tiny-tools`` (made on the spot, tests).
    """

    name: str
    sha256: str = ""
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraSection | None = None


class TasksSection(Section):
    """Where tasks come from: ``source`` is built into the cache, ``store`` is used as it is.

    ``symbols`` pins for each source the names to delete (``path/inside/tree.py::Qualified.name``), which else are drawn.
    """

    source: list[str] = []
    store: str = ""
    symbols: dict[str, list[str]] = {}
    max_tasks: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_origin(self) -> TasksSection:
        if bool(self.source) == bool(self.store):
            raise ValueError("give exactly one of source and store")
        return self


class RolloutsSection(Section):
    """How the prompt of a single answer is cut, and how many answers are graded at a time."""

    prompt_style: Literal["completion", "chat"] = "completion"
    context_lines: int = Field(12, ge=0)
    grading_jobs: int = Field(2, ge=1)


class RewardSection(Section):
    """In-loop reward: a dotted path ``package.module:function`` of (text, answer, score) -> float.

    ``tests = "weakened"`` judges by the visible tests without their assertions, to see what a suite that never checks does to
    a policy. ``is_shuffled`` hands the rewards of each batch out anew, by the seed: a control that learns from nothing.
    """

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
    """``EvidenceGuard`` beside the ``[guard]``: a halt that is false in at most 1% of honest runs (docs/safety.md).

    ``planned_evaluations`` is how many the run plans, ``tolerated_gap`` the visible-minus-hidden gap of honest policies,
    measured before the run. Needs ``heldout.sample_size``, fresh draws from a large pool.
    """

    planned_evaluations: int = Field(ge=1)
    tolerated_gap: float = Field(gt=0.0, lt=1.0)


class SandboxSection(Section):
    """Backend by name or dotted path (empty: the best of this machine).

    ``accept_no_isolation`` names guards of the self-test that need not hold, or ``everything``, which the backend ``none``
    needs. It is shown in the run's report.
    """

    backend: str = ""
    accept_no_isolation: list[str] = []


def _method(loss_type: str, scale_rewards: str, level: str = "token", **more: Any) -> dict[str, Any]:
    """A row of ``PRESETS``; ``a__b`` is the key a.b. Token-level truncation in the place of TRL's cut of sequences."""
    row: dict[str, Any] = {"loss_type": loss_type, "scale_rewards": scale_rewards}
    row |= {"importance_sampling_level": level}
    row |= {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 2.0}
    named = {key.replace("__", "."): value for key, value in more.items()}
    return {f"trl.{key}": value for key, value in row.items()} | named


PRESETS: Final[dict[str, dict[str, Any]]] = {
    "grpo": _method("grpo", "group"),  # 2402.03300
    "dr_grpo": _method("dr_grpo", "none"),  # 2503.20783; the loss alone does not switch the scaling off
    "dapo": _method("dapo", "group", trl__beta=0.0, trl__epsilon=0.2, trl__epsilon_high=0.28)  # 2503.14476
    | {"trl.mask_truncated_completions": True, "trainer.dynamic_sampling_rounds": 3},
    # 2507.18071; with the loss type "dapo" long sequences would weigh more
    "gspo": _method("grpo", "group", "sequence", trl__beta=0.0, trl__epsilon=3e-4, trl__epsilon_high=4e-4),
    # 2506.13585; epsilon_high is the largest ratio itself, not its distance from 1
    "cispo": _method("cispo", "group", trl__beta=0.0, trl__epsilon_high=5.0),
    # beta and the price of effort are choices of ours: the originals are not published
    "composer": _method("dr_grpo", "none", trl__num_iterations=1, trl__num_train_epochs=1.0, trl__beta=0.001)
    | {"trainer.kl_in_reward": True, "trainer.effort_weight": 1e-4},
}
"""What each method sets, by the recipe's own keys. A key of the recipe wins over its preset."""


class TrainerSection(Section):
    """What ``ComposerReplicationTrainer`` takes beyond TRL's own arguments; docs/trainer.md has formulas and the table of presets.

    ``preset`` names a method of the GRPO family. Keys that are set here or in ``[trl]`` win over it, unless they contradict
    it (CR0760). The three keys after it are as the preset says where they are not set, and off without one:
    ``kl_in_reward`` takes ``beta`` times the KL to the reference off the reward, in place of TRL's term in the loss;
    ``dynamic_sampling_rounds`` is how often groups of equal rewards are replaced by fresh prompts in one generation;
    ``effort_weight`` prices tokens, calls and turns, within the group.

    ``cpu_threads`` of the model's arithmetic on the CPU, 0 for torch's own choice. On a small machine 1 is much faster than
    one a core: threads that wait for each other burn the time that grading needs. ``save_model`` writes the trained model
    with its card to ``model/`` at the end of a run that was not halted.
    """

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
    """How the truth is measured; tasks here are never trained on. docs/rollouts.md explains readings.

    ``repositories`` (without version) names whose tasks are held out; ``split`` is a file of ``composer-rl tasks split``, made
    of these very tasks; ``fraction`` draws so many, by repository where there are several. Without all three the
    ``split.json`` of ``tasks.store`` counts, or else 0.3 are drawn. ``every`` guard folds share one reading, which draws
    ``sample_size`` tasks afresh (0: all) and ``num_canaries`` that cannot be solved honestly. One longer than
    two hours is missed, and the third in a row halts. ``before_and_after_samples`` measures all tasks twice, trained
    ones with ``before_and_after_trained_samples`` where that is given.
    """

    repositories: list[str] = []
    split: str = ""
    fraction: float | None = Field(None, gt=0.0, lt=1.0)
    every: int = Field(1, ge=1)
    samples_per_task: int = Field(1, ge=1)
    sample_size: int = Field(0, ge=0)
    num_canaries: int = Field(0, ge=0)
    before_and_after_samples: int = Field(0, ge=0)
    before_and_after_trained_samples: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_division(self) -> HeldoutSection:
        if self.split and (self.repositories or self.fraction is not None):
            raise ValueError("give split alone, without repositories and fraction")
        return self


class HintsSection(Section):
    """Hint distillation (``trainer.alpha_sdpo``): the policy under a hint teaches the policy without it (docs/hints.md).

    ``teacher`` is a moving average of the policy (``ema``, by 0.05 a step), its first weights (``frozen``) or the model without
    its adapter (``lora-off``). ``jsd_alpha``: 0 forward KL, 1 reverse KL, between them Jensen-Shannon.
    """

    teacher: Literal["ema", "frozen", "lora-off"] = "ema"
    jsd_alpha: float = Field(0.5, ge=0.0, le=1.0)


class ReplaySection(Section):
    """Preference pairs (``trainer.beta_replay``), mixed into every step: ``pairs_per_step`` of those given.

    ``kind`` is the loss, on mean log-probabilities a token, with a beta of 5.0 (dpo), 0.1 (ipo) or 2.0 (simpo).
    ``pairs`` is a file of JSON lines with prompt, chosen and rejected (texts, messages or ids). ``sibling_pairs`` also pairs,
    inside each group, rollouts whose reward reaches 1 with those that do not.
    """

    kind: Literal["dpo", "ipo", "simpo"] = "dpo"
    pairs: str = ""
    pairs_per_step: int = Field(4, ge=1)
    sibling_pairs: bool = False


class CurriculumSection(Section):
    """Draws the tasks of each generation by their pass rates, in the place of the data order (docs/curriculum.md).

    A task weighs E[p(1-p)] under what it did so far, beginning with what ``eval --update-difficulty`` kept beside the tasks.
    """


class RaySection(Section):
    """Attempts and gradings as actors of a Ray cluster, and a build of ``tasks.source`` too; docs/rollouts_on_ray.md has more.

    ``address`` as ``tasks build --ray`` takes it; ``train --ray ADDRESS`` sets it. There is an actor for each episode that
    runs at a time (``agent.max_concurrent``), or as many as the nodes have room for where that is less. Each asks Ray for
    ``resources``, which may set ``CPU`` (else 1). A run may be resumed with another table.
    """

    address: str
    resources: dict[str, Annotated[float, Field(ge=0.0)]] = {}


OuterPrecision = Literal["fp32", "bf16", "int8", "int4"]


class ReplicasSection(Section):
    """Several trainers of one run (DiLoCo), each with its share of the tasks; docs/replicas.md explains each key.

    ``transport`` is the address of an object store (``s3://``, ``gs://``, ``az://``, ``file:///``), or for replicas on one
    network ``torchft://HOST:PORT`` of ``composer-rl replicas lighthouse``.
    """

    transport: str
    num_replicas: int = Field(2, ge=1)
    sync_every: int = Field(100, ge=1)
    fragments: int = Field(1, ge=1)
    delay: int = Field(0, ge=0)
    precision: OuterPrecision = "int8"
    min_replicas: int = Field(1, ge=1)
    grace_seconds: float = Field(60.0, gt=0.0)
    deadline_seconds: float = Field(600.0, gt=0.0)

    @property
    def is_torchft(self) -> bool:
        return self.transport.partition("://")[0] == "torchft"

    @property
    def lighthouse(self) -> str:
        """HOST:PORT, where the transport is torchft; empty where none is named yet."""
        return self.transport.partition("://")[2] if self.is_torchft else ""

    @property
    def interval(self) -> int:
        """Steps between two outer steps."""
        return self.sync_every // self.fragments

    @model_validator(mode="after")
    def _fits(self) -> ReplicasSection:
        if self.sync_every % self.fragments:
            raise ValueError("sync_every is no multiple of fragments")
        if self.delay >= self.interval:
            raise ValueError(f"delay is not below sync_every / fragments = {self.interval}")
        if self.min_replicas > self.num_replicas:
            raise ValueError("min_replicas is above num_replicas")
        if not self.is_torchft and "://" not in self.transport:
            raise ValueError("transport is no address such as s3://bucket/run-7 or torchft://HOST:PORT")
        return self


class AgentRewardSection(Section):
    """What an attempt with tools is worth; docs/environment.md explains each key.

    ``rule`` is the ``fraction`` of the visible tests that pass, or ``all_or_nothing``. To break a test that passed before
    pays nothing (``breaks`` ``mask``), costs the share that broke (``cost``), or is not looked at (``ignore``);
    ``break_sample`` of them are run, 0 runs all. Each call that could not be made costs ``invalid_call_cost``.
    """

    rule: Literal["fraction", "all_or_nothing"] = "fraction"
    breaks: Literal["mask", "cost", "ignore"] = "mask"
    break_sample: int = Field(0, ge=0)
    invalid_call_cost: float = Field(0.0, ge=0.0)


class AgentToolsSection(Section):
    """``max_characters`` of one result of a tool."""

    max_characters: int = Field(16_000, ge=1000)


class AgentSection(Section):
    """Rollouts of several turns with tools; without this table a rollout is one answer. docs/agentic_training.md has more.

    An answer has at most ``max_new_tokens``, a whole conversation ``max_context_tokens``; from ``summary_tokens`` on (0: never)
    the policy sums up and goes on in a new one, four times at most. docs/episodes.md tells of the other limits; at most
    ``max_concurrent`` episodes run at a time. ``monitor`` pays rollouts with a finding 0 at most (``mask``), as docs/monitor.md
    says, or only counts findings (``report``). ``judge`` (``URL#MODEL``) is a server whose model is asked about a tenth of the
    paid ones, for a report.
    """

    max_turns: int = Field(20, ge=1)
    max_context_tokens: int = Field(16_384, ge=2)
    max_new_tokens: int = Field(2048, ge=1)
    min_new_tokens: int = Field(16, ge=1)
    max_concurrent: int = Field(32, ge=1)
    summary_tokens: int = Field(0, ge=0)
    reminder: str = ""
    monitor: MonitorMode = "mask"
    judge: str = ""
    reward: AgentRewardSection = AgentRewardSection()
    tools: AgentToolsSection = AgentToolsSection()

    @model_validator(mode="after")
    def _limits_fit(self) -> AgentSection:
        for name in ("max_new_tokens", "summary_tokens"):
            if getattr(self, name) >= self.max_context_tokens:
                raise ValueError(f"{name} has to be below max_context_tokens: a prompt needs room, too")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError("min_new_tokens is above max_new_tokens")
        return self


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
    curriculum: CurriculumSection | None = None
    agent: AgentSection | None = None
    ray: RaySection | None = None
    replicas: ReplicasSection | None = None
    trl: dict[str, Any] = {}

    @model_validator(mode="after")
    def _tables_fit(self) -> RunConfig:
        """An idle key is harmless; refused is what would train something else than was meant."""
        guard, heldout, evidence, agent = self.guard, self.heldout, self.evidence, self.agent
        hints, replay, trainer = self.hints, self.replay, self.trainer
        takes_lora_off = hints and hints.teacher == "lora-off"
        lacks_pairs = trainer.beta_replay and not (replay and (replay.pairs or replay.sibling_pairs))
        has_reward, has_length = self.reward != RewardSection(), "max_completion_length" in self.trl
        wrong = {
            'hints.teacher = "lora-off" needs [model.lora]': takes_lora_off and not self.model.lora,
            "[hints] does nothing while trainer.alpha_sdpo is 0": hints and not trainer.alpha_sdpo,
            "[replay] does nothing while trainer.beta_replay is 0": replay and not trainer.beta_replay,
            "trainer.beta_replay needs pairs to learn from: replay.pairs or replay.sibling_pairs": lacks_pairs,
            "[reward] is about single answers; with [agent] use [agent.reward]": agent and has_reward,
            "trl.max_completion_length is set by agent.max_context_tokens: take the key out": agent
            and has_length,
            "a [guard] needs a [heldout] table: the truth that it compares with": guard and not heldout,
            "an [evidence] table needs a [guard] and a [heldout] table beside it": evidence
            and not (guard and heldout),
            "[evidence] needs heldout.sample_size: its guarantee is about fresh tasks": evidence
            and not (heldout and heldout.sample_size),
        }
        for problem, is_so in wrong.items():
            if is_so:
                raise ValueError(problem)
        return self


DEPARTED: Final[dict[str, dict[str, Any]]] = {
    "rollouts": {"test_timeout_seconds": 20.0},
    "sandbox": {"memory_bytes": 2 * 1024**3, "num_processes": 64, "disk_bytes": 256 * 1024**2},
    "trainer": {"importance_clip": None, "effort": None, "checks": True},
    "heldout": {"has_sentinel": False, "timeout_seconds": 1800.0},
    "evidence": {"alpha": 0.01},
    "hints": {
        "writing": {"layers": ["template", "environment"]},
        "turns_per_step": 4,
        "ema_rate": 0.05,
        "top_k": 100,
        "strict": True,
    },
    "replay": {"margin": 0.0, "length_normalised": True, "beta": None, "pass_reward": 1.0},
    "curriculum": {"half_life": 100.0, "recorded": "any"},
    "replicas": {"lighthouse": "", "interface": "127.0.0.1"},
    "agent": {
        "dialect": "",
        "max_summaries": 4,
        "system": "",
        "template_options": {},
        "log_prob_check": "report",
    },
    "agent.tools": {"is_warm": True},
    "ray": {"num_actors": 0},
}
"""Keys that have left, by table, with their last defaults: the run.toml of an older run has them, and is still read."""
_INSTEAD = {
    "trainer.importance_clip": "take the line out (it is always 2.0 now)",
    "trainer.effort": "write trainer.effort_weight in place of the table",
    "heldout.timeout_seconds": "take the line out (a reading may take two hours now)",
    "agent.log_prob_check": "take the line out (it is always reported now)",
    "ray.num_actors": "take the line out, and set agent.max_concurrent",
    "heldout.has_sentinel": "take the line out (with [evidence] it is always true now)",
    "replicas.lighthouse": 'write transport = "torchft://HOST:PORT"',
}
"""How the sentence ends that refuses another value, where that is not just to take the line out."""


def read_table(path: Path) -> dict[str, Any]:
    """A recipe as it stands in its file, unchecked; one that cannot be read or is no TOML is refused (CR0201)."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:  # of the file; of TOML or of UTF-8
        problem = f"the recipe is not valid TOML: {error}."
        fix = "correct that place in the file; strings need quotes, tables their brackets."
        if isinstance(error, OSError):
            problem = f"the recipe cannot be read: {error.strerror}."
            fix = "give the path of a run.toml; composer-rl recipe new writes one."
        raise UsageError("CR0201", problem, where=str(path), fix=fix) from error


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
    current, problem = _without_departed(table)
    if problem is None:
        try:
            return RunConfig.model_validate(current)
        except ValidationError as error:
            problem = _first_problem(error)
    key, sentence = problem
    flag = next((name for name in overrides or {} if _is_within(key, name) or _is_within(name, key)), "")
    fix = "see docs/recipe-keys.md for every key."
    raise UsageError("CR0204", sentence, where=f"--set {flag}" if flag else where, fix=fix)


def _without_departed(table: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """The recipe without keys that have left, and the first one that had another value than its last default, if any."""
    current: dict[str, Any] = copy.deepcopy(dict(table))
    ray = current.get("ray")
    if isinstance(ray, dict) and "num_cpus" in ray:  # of an older run
        asked = ray.setdefault("resources", {})
        if isinstance(asked, dict):
            asked.setdefault("CPU", ray.pop("num_cpus"))
    for section, keys in DEPARTED.items():
        found: Any = current
        for part in section.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            continue
        for key, last in keys.items():
            value, dotted = found.pop(key, last), f"{section}.{key}"
            if value != last and not (dotted == "heldout.has_sentinel" and "evidence" in current):
                constant = f" (it is always {json.dumps(last)} now)" if isinstance(last, int | float) else ""
                cure = _INSTEAD.get(dotted, f"take the line out{constant}")
                return current, (dotted, f"the key {dotted} has left: {cure}.")
    return current, None


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
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            fix = "see docs/recipe-keys.md for every key."
            raise UsageError("CR0204", f"{section} is not a table.", where=f"--set {dotted}", fix=fix)
        table = inner
    table[key] = value


def _is_within(key: str, table: str) -> bool:
    return f"{key}.".startswith(f"{table}.")


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
    near = difflib.get_close_matches(path[-1], _known_keys(path[:-1]), n=1, cutoff=0.0)
    nearest = f"the nearest known key is {'.'.join([*path[:-1], *near])}"
    return key, f"unknown key {key}{f'; {nearest}' if near else ': its table has no keys'}."


def _known_keys(path: list[str]) -> list[str]:
    """The keys of the table at ``path``."""
    kind: type[BaseModel] = RunConfig
    for part in path:
        annotation = kind.model_fields[part].annotation if part in kind.model_fields else None
        options = [annotation, *getattr(annotation, "__args__", ())]
        inner = next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
        if inner is None:
            break
        kind = inner
    return list(kind.model_fields)
