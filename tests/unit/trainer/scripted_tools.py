"""Scripted decoding for a model that has not learned to call tools: the words are a script's, their probabilities its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from composer_replication.records import Completion, StopReason
from composer_replication.rollouts.episodes.policies import SampleOptions
from composer_replication.trainer.policy import ModelSampler

END = "<|im_end|>"
ASSISTANT = "<|im_start|>assistant"


def said(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + f"\n</tool_call>{END}"


class ScriptedSampler(ModelSampler):
    """Each conversation follows one script: the one whose first words are in it, for a new one that of its seed."""

    scripts: Sequence[Sequence[str]] = ()

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> Sequence[Completion]:
        answers = []
        for prompt, each in zip(prompts, options, strict=True):
            ids = self.tokenizer.encode(self.words(prompt, each.seed), add_special_tokens=False)
            ids = ids[: each.max_new_tokens]
            answers.append(self.completion(ids, self.own_logps(prompt, ids, each.temperature)))
        return answers

    def completion(self, ids: list[int], logps: list[float]) -> Completion:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        reason = StopReason.FINISHED if ids[-1] in self.eos_token_ids else StopReason.LENGTH
        return Completion(tuple(ids), text, reason, tuple(logps))

    def words(self, prompt: tuple[int, ...], seed: int) -> str:
        text = self.tokenizer.decode(prompt)
        first, *later = text.split(f"{ASSISTANT}\n")[1:]
        script = self.scripts[seed % len(self.scripts)]
        if later:
            script = next(each for each in self.scripts if each[0] in first)
        return script[len(later)]

    def own_logps(self, prompt: tuple[int, ...], ids: list[int], temperature: float) -> list[float]:
        with torch.no_grad():
            logits_TV = self.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        logp_TV = (logits_TV.float() / temperature).log_softmax(-1)
        return [float(row[token]) for row, token in zip(logp_TV, ids, strict=True)]


class ThinkingSampler(ScriptedSampler):
    """Begins every answer with a few ids that the model draws itself, by its seed."""

    num_thoughts = 5

    def __call__(self, prompts: list[tuple[int, ...]], options: list[SampleOptions]) -> Sequence[Completion]:
        few = [replace(each, max_new_tokens=self.num_thoughts) for each in options]
        drawn = super(ScriptedSampler, self).__call__(prompts, few)
        special = {self.tokenizer.convert_tokens_to_ids(word) for word in ("<pad>", "<|im_start|>", END)}
        answers = []
        for prompt, each, thought in zip(prompts, options, drawn, strict=True):
            kept = [idx for idx, token in enumerate(thought.token_ids) if token not in special]
            ids = [thought.token_ids[idx] for idx in kept]
            ids += self.tokenizer.encode(self.words(prompt, each.seed), add_special_tokens=False)
            answers.append(self.completion(ids, self.own_logps(prompt, ids, each.temperature)))
        return answers


def sampler_of(scripts: Sequence[Sequence[str]], kind: type[ScriptedSampler] = ScriptedSampler) -> Any:
    """In the place of ``episode_rollouts.model_sampler``."""

    def make(model: Any, trainer: Any) -> ScriptedSampler:
        sampler = kind(model, trainer.args, trainer.processing_class, eos_token_ids=trainer.eos_token_ids)
        sampler.scripts = scripts
        return sampler

    return make
