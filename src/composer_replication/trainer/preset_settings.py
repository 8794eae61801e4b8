"""From ``trainer.preset`` and the keys beside it to TRL's arguments and our own options.

And what is refused of settings, before a model loads or in the words of the library that refuses it; libraries' notices stay out.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from traceback import walk_tb
from types import SimpleNamespace
from typing import Annotated, Any, Final, Literal, NamedTuple, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from composer_replication.config import PRESETS, RunConfig
from composer_replication.errors import ComposerError, UsageError

_DEFINING = ["trl.loss_type", "trl.scale_rewards", "trl.importance_sampling_level", "trl.num_iterations"]
_DEFINING += ["trl.beta", "trainer.kl_in_reward"]
"""Keys without which a method is another one, where its preset has them; ``trl.beta`` where it is 0: that method has no KL."""
_OWN = ("kl_in_reward", "effort_weight", "dynamic_sampling_rounds")
IMPORTANCE_CLIP = 2.0
"""Of every recipe; it acts with ``[agent]``: no other rollouts bring their sampler's log-probabilities."""


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """The policy-gradient channel's own settings, keys of ``[trainer]`` but for the last; with the defaults all is as in TRL.

    ``kl_in_reward``: ``args.beta`` times the summed log-ratio to the reference is taken off the reward, and TRL's KL in the loss
    is off. ``dynamic_sampling_rounds``: how often, at most, the groups of one generation whose rewards are all equal are replaced
    by fresh prompts. ``importance_clip``: largest importance weight of a token where a rollout function gave the sampler's
    log-probabilities; 0 corrects nothing.
    """

    kl_in_reward: bool = False
    effort_weight: float = 0.0
    dynamic_sampling_rounds: int = 0
    importance_clip: float = 0.0


class ResolvedMethod(NamedTuple):
    """What a recipe's method comes to: keys of ``GRPOConfig``, the recipe's over the preset's, and what is ours.

    The last ``overlong_share`` of ``max_completion_length`` is punished; 0 is none.
    """

    trl: dict[str, Any]
    options: PolicyOptions
    overlong_share: float


def resolve_method(config: RunConfig) -> ResolvedMethod:
    """Lay the recipe's keys over those of its preset; what defines a method and is set otherwise is refused (CR0760)."""
    name, preset = config.trainer.preset, PRESETS.get(config.trainer.preset or "", {})
    own = {f"trainer.{key}": getattr(config.trainer, key) for key in _OWN}
    given = {f"trl.{key}": value for key, value in config.trl.items()}
    given |= {key: value for key, value in own.items() if value is not None}
    for key in _DEFINING:
        has_both = key in preset and key in given and (key != "trl.beta" or preset[key] == 0.0)
        if has_both and preset[key] not in (given[key], _scaling(given[key])):
            mine, other = json.dumps(preset[key]), json.dumps(given[key])
            words = f"the preset {name} has {key} = {mine} by definition, and the recipe sets {other}"
            fix = f"take {key} out, or take trainer.preset out and write the method's keys yourself."
            raise contradiction(words, where=key, fix=fix)
    tables: dict[str, dict[str, Any]] = {"trl": {}, "trainer": {"importance_clip": IMPORTANCE_CLIP}}
    if config.agent is not None:  # all that follows the first prompt of an episode is its completion
        tables["trl"]["max_completion_length"] = config.agent.max_context_tokens
    for key, value in (preset | given).items():
        table, _, rest = key.partition(".")
        tables[table][rest] = value
    overlong_share = 0.2 if name == "dapo" else 0.0  # the paper's 4,096 of 20,480 tokens
    return ResolvedMethod(tables["trl"], PolicyOptions(**tables["trainer"]), overlong_share)


def _scaling(value: Any) -> Any:
    """``scale_rewards`` as TRL's word for it, where it takes a bool too; other values as they are."""
    return {True: "group", False: "none"}[value] if isinstance(value, bool) else value


NO_FILTERS: dict[str, Any] = {"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "max_completion_length": 512, **NO_FILTERS}
"""How TRL samples where nothing is set; a test compares them with its arguments."""


def sampling_settings(config: RunConfig) -> SimpleNamespace:
    """How a recipe's answers are sampled: of TRL's arguments those that say so, its defaults for what is not set."""
    given = resolve_method(config).trl
    return SimpleNamespace(**{name: given.get(name, default) for name, default in SAMPLING.items()})


def filters_of(sampling: Any) -> dict[str, Any]:
    """The filters of TRL's arguments, all four; None has none."""
    given = {name: getattr(sampling, name, off) for name, off in NO_FILTERS.items()}
    return {**given, "top_k": given["top_k"] or 0}


def overlong_punishment(method: ResolvedMethod, args: Any) -> list[Callable[..., Any]]:
    """DAPO's soft punishment as a further reward function, TRL's own; none where the share is 0.

    0 up to ``max_completion_length - cache`` tokens, then falling to -1, ``cache`` being the share of
    that length, at least one token (2503.14476, equation 13).
    """
    if not method.overlong_share:
        return []
    from trl.rewards import get_soft_overlong_punishment

    longest = int(args.max_completion_length)
    return [get_soft_overlong_punishment(longest, max(round(method.overlong_share * longest), 1))]


def check_policy_options(options: PolicyOptions, args: Any) -> None:
    """Refuse what would give another gradient than it says: CR0760.

    A term in the reward is exact only while advantages are not divided by a standard deviation, and a KL in the reward of
    weight 0, which is TRL's own default, would hold the policy to nothing. ``args`` is TRL's ``GRPOConfig``, or None.
    """
    if not options.kl_in_reward and options.effort_weight == 0.0:
        return
    term = "kl_in_reward" if options.kl_in_reward else "effort_weight"
    is_scaled = _scaling(getattr(args, "scale_rewards", "group")) != "none"
    if is_scaled or getattr(args, "multi_objective_aggregation", "") == "normalize_then_sum":
        key = "scale_rewards" if is_scaled else "multi_objective_aggregation"
        words = f"{term} is exact only where rewards are not divided by their standard deviation, "
        words += f"and trl.{key} is {getattr(args, key, 'group')!r}"
        fix = 'set trl.scale_rewards = "none" and trl.multi_objective_aggregation = "sum_then_normalize", '
        fix += f"or leave trainer.{term} out."
        raise contradiction(words, where=f"trainer.{term}, trl.{key}", fix=fix)
    if options.kl_in_reward and not getattr(args, "beta", 0.0):
        words = "kl_in_reward weighs the KL by trl.beta, which is 0: nothing would be taken off the reward"
        fix = "set trl.beta above 0, for example 0.001, or trainer.kl_in_reward = false."
        raise contradiction(words, where="trainer.kl_in_reward, trl.beta", fix=fix)


def check_arguments(config: RunConfig, arguments: Any, options: PolicyOptions) -> None:
    """What cannot go together in TRL's arguments and our options, before anything is loaded: CR0760."""
    check_policy_options(options, arguments)
    largest = arguments.epsilon if arguments.epsilon_high is None else arguments.epsilon_high
    if arguments.loss_type == "cispo" and largest < 1:  # where TRL clamps CISPO's ratio
        words = f"with loss_type cispo every ratio above {largest} is cut to it, so even on-policy gradients would shrink"
        fix = 'set trl.epsilon_high = 5.0, the largest ratio that may pass, or trainer.preset = "cispo".'
        raise contradiction(words, where="trl.epsilon_high", fix=fix)
    has_stop_rule = config.agent is None and config.rollouts.prompt_style == "completion"
    refuse_masked_stops(arguments, stops_rows=has_stop_rule and config.trainer.prefix_sharing)
    if options.dynamic_sampling_rounds:
        refuse_split_groups(arguments, num_processes=arguments.world_size)


_TOKENS = {"thinking_token": 1.0, "tool_call_token": 1.0, "tool_output_token": 0.1, "final_token": 1.0}
EFFORT_UNITS: Final[Mapping[str, float]] = _TOKENS | {"tool_call": 20.0, "turn": 20.0}
"""What one of each kind adds to x, the effort of a rollout: a choice of ours, since the originals are not published."""
EFFORT_COLUMN = "effort_counts"
"""A rollout function returns under it one mapping of kind to number for each row."""


def effort_units(counts: Mapping[str, Any]) -> float:
    """``x``, the counts times ``EFFORT_UNITS``; kinds that are not given count 0."""
    for kind, number in counts.items():
        if kind not in EFFORT_UNITS or not 0 <= float(number) < float("inf"):
            words = f"effort_counts has {kind} = {number!r}; it needs numbers from 0 of {', '.join(EFFORT_UNITS)}."
            fix = "return one mapping of these kinds to numbers for each rollout."
            raise UsageError("CR0777", words, where="the rollout function's effort_counts", fix=fix)
    return sum(EFFORT_UNITS[kind] * float(number) for kind, number in counts.items())


_ABOVE_0 = ["gradient_accumulation_steps", "max_completion_length", "num_iterations", "num_train_epochs"]
_ABOVE_0 += ["per_device_train_batch_size", "steps_per_generation", "temperature"]
_FROM_0 = ("beta", "entropy_coef", "epsilon", "epsilon_high", "max_grad_norm", "top_k")
_RANGES: dict[str, Any] = {**dict.fromkeys(_ABOVE_0, Field(gt=0)), **dict.fromkeys(_FROM_0, Field(ge=0))}
_RANGES |= {"top_p": Field(gt=0, le=1), "min_p": Field(ge=0, le=1)}
"""The libraries take others for these, and then divide by them, or train something else without a word."""
_KINDS: dict[str, Any] = {
    # TRL looks at these two in the first loss
    "importance_sampling_level": Literal["token", "sequence"],
    "loss_type": Literal["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"],
    # with 0 transformers would count epochs, as with -1
    "max_steps": Annotated[int, Field(ge=1)] | Literal[-1],
    "scale_rewards": str | bool,  # TRL takes more than it declares
}


class TrainerSettingError(UsageError, ValueError):
    """A trainer argument that cannot work; a ``ValueError`` too, as Python code expects."""


def spread_weights(where: str) -> UsageError:
    """Episodes ask for answers at times of their own, and each forward of spread weights needs every process."""
    words = "the agent loop cannot sample weights that are spread over processes."
    fix = "sample by vLLM (trl.use_vllm), or launch with whole weights on each process (accelerate's MULTI_GPU)."
    return UsageError("CR0757", words, where=where, fix=fix)


def refuse_bad_values(table: Mapping[str, Any]) -> None:
    """Compare the value of each key of TRL's with the type that TRL declares, and with a range where TRL checks none."""
    from trl.trainer.grpo_config import GRPOConfig

    kinds = get_type_hints(GRPOConfig) | _KINDS
    settings = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)
    for key, value in table.items():
        bounds = None if value is None else _RANGES.get(key)
        kind: Any = kinds[key] if bounds is None else Annotated[kinds[key], bounds]
        try:
            TypeAdapter(kind, config=settings).validate_python(value)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"].removeprefix("Input should be ")
            raise refused(f"trl.{key} is {value!r}: it must be {problem}", where=f"trl.{key}") from error


@contextmanager
def refusals(where: str = "[trl]") -> Iterator[None]:
    """Inside, what TRL, transformers or peft raise about settings is an error of the recipe, whose tables ``where`` names."""
    try:
        yield
    except ComposerError:
        raise
    except Exception as error:
        modules = (str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
        if any(name.partition(".")[0] == "vllm" for name in modules):  # a function of its was running
            cause = (str(error).strip() or type(error).__name__).splitlines()[0]
            fix = "composer-rl doctor says whether it fits and what GPU is free; trl.vllm_gpu_memory_utilization is its share."
            raise refused(f"vLLM did not start: {cause[:300]}", where="trl.use_vllm", fix=fix) from error
        if not isinstance(error, (ArithmeticError, ImportError, TypeError, ValueError)):
            raise
        raise refused(f"the training libraries refuse {where}: {error}", where=where) from error


def refused(sentence: str, *, where: str, fix: str = "") -> UsageError:
    """The error for a table, or a key of it, that TRL or we refuse."""
    key = where if where.startswith("trl.") else "trl.KEY"
    fix = fix or f"correct it in the recipe, or type --set {key}=VALUE."
    return UsageError("CR0211", f"{sentence.strip().rstrip('.')[:400]}.", where=where, fix=fix)


def contradiction(sentence: str, *, where: str, fix: str) -> TrainerSettingError:
    """The error for keys of which each is fine, and that do not go together."""
    return TrainerSettingError("CR0760", f"{sentence}.", where=where, fix=fix)


def nothing_to_learn(weight: Literal["alpha_sdpo", "beta_replay"]) -> TrainerSettingError:
    """The error for a loss channel whose weight is not 0, and that has no hint source, or no pair that weighs something."""
    sources = {"alpha_sdpo": "hint_source", "beta_replay": "replay_pairs, or replay.sibling_pairs = true"}
    words = f"{weight} is not 0, but there is nothing to learn from."
    fix = f"give it {sources[weight]}, or set {weight} to 0."
    return TrainerSettingError("CR0755", words, where=f"trainer.{weight}", fix=fix)


def refuse_masked_stops(arguments: Any, *, stops_rows: bool) -> None:
    """A rule that ends single rows leaves them without an end-of-sequence token, so all would be masked."""
    if stops_rows and arguments.mask_truncated_completions:
        words = "mask_truncated_completions takes the rows that is_finished (the end of the function) stopped for truncated ones"
        fix = "set trl.mask_truncated_completions = false, or trainer.prefix_sharing = false."
        where = "trl.mask_truncated_completions, trainer.prefix_sharing"
        raise contradiction(words, where=where, fix=fix)


def refuse_few_prompts(arguments: Any, num_generations: int, num_prompts: int) -> None:
    """A data set that does not fill one generation trains not one step."""
    per_generation = arguments.generation_batch_size // num_generations
    if num_prompts < per_generation:
        words = f"one generation takes {per_generation} prompts, but there are only {num_prompts}: not one step could be trained"
        where = "trl.per_device_train_batch_size, trl.steps_per_generation, trl.num_generations"
        fix = "lower the batch size or steps_per_generation, raise num_generations, or add tasks."
        raise contradiction(words, where=where, fix=fix)


def refuse_split_groups(arguments: Any, *, num_processes: int) -> None:
    """Dynamic sampling replaces groups, each within one process."""
    num_rows = arguments.per_device_train_batch_size * arguments.steps_per_generation
    if num_processes > 1 and num_rows % arguments.num_generations:
        words = "dynamic sampling needs whole groups on each process, and "
        words += f"{num_rows} rows are not a multiple of {arguments.num_generations} generations"
        fix = "make their product with steps_per_generation a multiple of num_generations."
        where = "trl.per_device_train_batch_size, trl.num_generations"
        raise contradiction(words, where=where, fix=fix)


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
        libraries = ("transformers", "trl", "accelerate", "peft", "datasets", "huggingface_hub", "torch")
        for logger in map(logging.getLogger, (*libraries, *(["composer_replication"] if quiet else []))):
            afterwards.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        has_hub_bars = not hub.are_progress_bars_disabled()
        disable_progress_bars()
        transformers.disable_progress_bar()  # of the hub, too
        if has_hub_bars and not quiet:
            hub.enable_progress_bars()
        yield
