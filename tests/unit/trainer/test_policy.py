"""The model in this process as a policy: its answers end where those of training do."""

from __future__ import annotations

from composer_replication.records import StopReason
from composer_replication.trainer.policy import InProcessPolicy, end_token_ids
from composer_replication.trainer.tiny_models import make_tiny_tools_model


def test_an_answer_ends_at_each_end_token_of_the_model() -> None:
    model, tokenizer = make_tiny_tools_model(0)

    def answer() -> tuple[tuple[int, ...], StopReason]:
        policy = InProcessPolicy(model.eval(), tokenizer)
        [[said]] = policy.generate(["def f"], num_samples=1, max_new_tokens=4, temperature=0, seed=0)
        return said.token_ids, said.stop_reason

    model.generation_config.eos_token_id = None
    ids, reason = answer()
    assert (len(ids), reason) == (4, StopReason.LENGTH)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, ids[0]]
    assert answer() == (ids[:1], StopReason.FINISHED)
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id, ids[0]]
    model.generation_config.eos_token_id = ids[0]
    assert end_token_ids(model, tokenizer) == [tokenizer.eos_token_id, ids[0]]
