"""A tiny model that has learned to call tools: random weights call none, and vLLM needs heads of 64."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from composer_replication.rollouts.environment.feature_deletion_env import first_message
from composer_replication.rollouts.episodes.agent_loop import LedgerTalk
from composer_replication.rollouts.tools.toolbox import TOOLS
from composer_replication.tasks.store import TaskStore
from composer_replication.trainer.tiny_models import make_tiny_tools_model

CALLS = (
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>',
    '<tool_call>\n{"name": "run_visible_tests", "arguments": {}}\n</tool_call><|im_end|>',
)
NUM_STEPS = 400
MOST_CONTEXT = 64  # ids before an answer that it learns from: positions are relative


def make_tool_caller(folder: Path, store: TaskStore, *, is_tied: bool = False) -> None:
    """Save it, with its tokenizer; it answers the first prompt of each task by one call or the other."""
    _, tokenizer = make_tiny_tools_model(0)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=8192,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=is_tied,
        )
    )
    talk = LedgerTalk(tokenizer)
    prompts = [talk.open(first_message(store, task), TOOLS).prompt_ids() for task in store.tasks()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(NUM_STEPS):
        prompt = prompts[step % len(prompts)][-MOST_CONTEXT:]
        answer = tokenizer.encode(CALLS[step // len(prompts) % 2], add_special_tokens=False)
        ids = torch.tensor([[*prompt, *answer]])
        labels = torch.tensor([[-100] * len(prompt) + answer])
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
