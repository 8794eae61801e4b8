"""Episodes in the place of completions: TRL's ``rollout_func`` over an agent loop, and the reward that it brings.

``rollout_func`` and not ``environment_factory``: TRL then takes ids, mask and log-probabilities as they are. The model samples
in this process, or by vLLM (``vllm_mode`` server or colocate), whose weights TRL keeps those of the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from composer_replication.errors import UsageError
from composer_replication.model_endpoint import Endpoint
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes import policies
from composer_replication.rollouts.episodes.episode import rollout_row, trl_columns
from composer_replication.rollouts.episodes.episode_player import EpisodePlayer
from composer_replication.trainer.model_modes import weights_are_sharded
from composer_replication.trainer.policy import ModelSampler, end_token_ids, load_weights, server_endpoint
from composer_replication.trainer.preset_settings import filters_of, spread_weights
from composer_replication.trainer.processes import process_rank


def model_sampler(model: Any, trainer: Any) -> policies.SampleBatch:
    """The model itself, as TRL's arguments say."""
    if weights_are_sharded(trainer.model):
        raise spread_weights("ComposerReplicationTrainer(rollout_func=EpisodeRollouts)")
    return ModelSampler(model, trainer.args, trainer.processing_class, eos_token_ids=trainer.eos_token_ids)


def colocated_sampler(trainer: Any) -> policies.SampleBatch:
    """The engine that TRL has made in this process."""
    from vllm import SamplingParams

    engine = trainer.vllm_generation.llm
    fixed: dict[str, Any] = {"logprobs": 0, "stop_token_ids": list(trainer.eos_token_ids)}
    fixed |= {name: value for name, value in filters_of(trainer.args).items() if value is not None}

    def completion(output: Any) -> Completion:
        [answer] = output.outputs
        ids = tuple(answer.token_ids)
        logp = tuple(float(of[token].logprob) for token, of in zip(ids, answer.logprobs, strict=True))
        reason = StopReason.LENGTH if answer.finish_reason == "length" else StopReason.FINISHED
        return Completion(ids, answer.text, reason, logp)

    def sample(prompts: list[tuple[int, ...]], options: list[policies.SampleOptions]) -> Sequence[Completion]:
        own = (
            {"max_tokens": o.max_new_tokens, "temperature": o.temperature, "seed": o.seed} for o in options
        )
        asked = [SamplingParams(**each, **fixed) for each in own]
        prompt_ids = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [completion(each) for each in engine.generate(prompt_ids, asked, use_tqdm=False)]

    return sample


@dataclass(eq=False)
class TrainedPolicy:
    """The weights of a trainer as they are now, for many episodes at once; sampled as in training.

    Held-out episodes may be played amid a step: the model is sampled as it lies, and torch's own random numbers stay where
    they were.
    """

    max_batch: int  # answers that are sampled together, at most
    endpoint: Endpoint | None = None  # a server that has a model of its own, not the trainer's weights
    trainer: Any = None  # to be given as soon as there is one

    @property
    def step(self) -> int:
        return int(self.trainer.state.global_step)

    @contextmanager
    def opened(
        self, num_running: Callable[[], int], model: AbstractContextManager[Any] | None = None
    ) -> Iterator[policies.TokenPolicy]:
        """The policy for a while; ``model`` gives the weights where this process samples, by default as they lie."""
        trainer, endpoint = self.trainer, self.endpoint
        uses_vllm = getattr(trainer.args, "use_vllm", False)  # which a stand-in for a trainer may not have
        if endpoint is None and uses_vllm:
            load_weights(trainer)
            if trainer.args.vllm_mode == "server":
                endpoint = policies.find_server(server_endpoint(trainer.args)).endpoint
        if endpoint is not None:
            filters, ends = filters_of(trainer.args), trainer.eos_token_ids
            yield policies.ServedPolicy(endpoint, filters=filters, stop_token_ids=ends)
            return
        with nullcontext(trainer.model) if model is None or uses_vllm else model as at_hand:
            sampler = colocated_sampler(trainer) if uses_vllm else model_sampler(at_hand, trainer)
            # an engine batches as requests come; our own sampler waits for whoever may ask
            waiting: dict[str, Any] = {} if uses_vllm else {"num_expected": num_running}
            with closing(policies.BatchingPolicy(sampler, max_batch=self.max_batch, **waiting)) as policy:
                yield policy


def still_trainer(sampling: Any, model: Any, tokenizer: Any) -> Any:
    """What ``TrainedPolicy`` reads of a trainer, for a model that nobody trains now; ``sampling`` is of ``sampling_settings``."""
    return SimpleNamespace(
        model=model,
        args=sampling,
        processing_class=tokenizer,
        eos_token_ids=end_token_ids(model, tokenizer),
        state=SimpleNamespace(global_step=0),
    )


class EpisodeRollouts:
    """``rollout_func`` of ``ComposerReplicationTrainer``: every row's task is played by the weights at hand.

    At most ``max_batch`` answers are sampled together. When called it refuses a row that names no task (CR0412), weights that
    are spread over processes where vLLM does not sample (CR0757), and a generation whose every episode was lost (CR0390).
    """

    def __init__(self, player: EpisodePlayer, *, max_batch: int = 32) -> None:
        self.player, self.max_batch = player, max_batch
        self._last_place: tuple[int, bool] = (-1, True)
        self._num_at_place = 0

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        task_ids = [row.get("task_id") for row in trainer.generation.rows]
        if len(task_ids) != len(prompts) or not all(isinstance(each, str) and each for each in task_ids):
            words = f"{len(prompts)} prompts are to be played, and not every one of {len(task_ids)} rows names a task."
            fix = "give the data set a column task_id with the ids of tasks of the store."
            raise UsageError("CR0412", words, where="train_dataset", fix=fix)
        is_training = bool(trainer.model.training)
        step = 1 + int(trainer.state.global_step)
        place = self._place(step, is_training=is_training)
        trained, model = TrainedPolicy(self.max_batch, trainer=trainer), trainer.model_for_generation()
        with trained.opened(lambda: self.player.num_running, model) as policy:
            played = self.player.generation(task_ids, policy, step=step, place=place, is_training=is_training)
        filler = trainer.processing_class.eos_token_id
        rows = [rollout_row(each, filler_id=filler) for each in played]
        return trl_columns(rows, may_chain=self.player.options.summary_tokens > 0)

    def _place(self, step: int, *, is_training: bool) -> str:
        """Which generation of its step this is, in this process; checkpoints lie between steps, so a resume counts alike."""
        if self._last_place != (step, is_training):
            self._last_place, self._num_at_place = (step, is_training), 0
        self._num_at_place += 1
        return f"{'train' if is_training else 'eval'}/{self._num_at_place}/{process_rank()}"


def episode_reward_of(player: EpisodePlayer) -> Callable[..., list[float | None]]:
    """``reward_funcs`` beside ``EpisodeRollouts``: what each episode was worth, and the figures of its generation."""

    def episode(
        *, episode_reward: Sequence[float | None], log_metric: Callable[[str, float], None], **_: Any
    ) -> list[float | None]:
        """One value a row; None moves no weight, and TRL leaves it out of its group's mean."""
        for name, value in player.figures.items():
            log_metric(name, value)
        return list(episode_reward)

    return episode
