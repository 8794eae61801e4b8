"""Episodes sampled by vLLM: TRL keeps its weights those of the trainer, our loop asks it for tokens.

In the mode ``server`` each process asks the server itself, in ``colocate`` the engine in its own process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from composer_replication.errors import ComposerError
from composer_replication.interfaces import TokenPolicy
from composer_replication.model_endpoint import Endpoint
from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes import policies
from composer_replication.rollouts.episodes.policies import BatchingPolicy, SampleOptions, ServedPolicy
from composer_replication.trainer.policy import filters_of


def server_endpoint(args: Any) -> Endpoint:
    """The server that TRL's arguments name."""
    url = args.vllm_server_base_url or f"http://{args.vllm_server_host}:{args.vllm_server_port}"
    return policies.open_server(url)


def load_weights(trainer: Any) -> None:
    """Let vLLM have the trainer's weights of this step, as TRL does before it generates; nothing where it has them."""
    step = trainer.state.global_step
    if trainer._last_loaded_step == step:  # noqa: SLF001  TRL's mark, which its own generation reads
        return
    is_served = trainer.args.vllm_mode == "server"
    if is_served:
        policies.find_server(server_endpoint(trainer.args))  # TRL would try for a minute
    try:
        trainer.vllm_generation.sync_weights()
    except ComposerError:
        raise
    except Exception as error:  # what TRL's client raises, of which some is a bare Exception
        if not is_served or not (isinstance(error, OSError) or type(error) is Exception):
            raise
        raise policies.server_gone(
            f"it did not take the weights of step {step} ({str(error)[:200]})"
        ) from error
    trainer._last_loaded_step = step  # noqa: SLF001


@contextmanager
def vllm_policy(trainer: Any, *, max_batch: int) -> Iterator[TokenPolicy]:
    """The weights of ``trainer`` as they are now, sampled by vLLM."""
    load_weights(trainer)
    if trainer.args.vllm_mode == "server":
        endpoint = policies.find_server(server_endpoint(trainer.args)).endpoint
        yield served_policy(endpoint, trainer)
        return
    with closing(BatchingPolicy(ColocatedSampler(trainer), max_batch=max_batch)) as policy:
        yield policy


def served_policy(endpoint: Endpoint, trainer: Any) -> ServedPolicy:
    """A server that is asked as TRL's arguments say."""
    return ServedPolicy(endpoint, filters=filters_of(trainer.args), stop_token_ids=trainer.eos_token_ids)


class ColocatedSampler:
    """A ``SampleBatch`` over the engine that TRL has made in this process."""

    def __init__(self, trainer: Any) -> None:
        self.engine, self.stop_token_ids = trainer.vllm_generation.llm, list(trainer.eos_token_ids)
        self.filters = {name: value for name, value in filters_of(trainer.args).items() if value is not None}

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> Sequence[Completion]:
        """One completion for each prompt."""
        from vllm import SamplingParams

        asked = [
            SamplingParams(
                max_tokens=each.max_new_tokens,
                temperature=each.temperature,
                seed=each.seed,
                logprobs=0,
                stop_token_ids=self.stop_token_ids,
                **self.filters,
            )
            for each in options
        ]
        prompt_ids = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [_completion(each) for each in self.engine.generate(prompt_ids, asked, use_tqdm=False)]


def _completion(output: Any) -> Completion:
    [answer] = output.outputs
    ids = tuple(answer.token_ids)
    logp = tuple(float(of[token].logprob) for token, of in zip(ids, answer.logprobs, strict=True))
    reason = StopReason.LENGTH if answer.finish_reason == "length" else StopReason.FINISHED
    return Completion(ids, answer.text, reason, logp)
