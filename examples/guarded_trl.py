"""The guard in TRL's own GRPOTrainer: the reward can be gamed, and training stops. Half a minute on a processor, offline.

python examples/guarded_trl.py
"""

import keyword

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from composer_replication.safety import CollapseStopError, HeldOutGuard
from composer_replication.trainer.guard_callback import HeldOutGuardCallback
from composer_replication.trainer.tiny_models import make_tiny_model

model, tokenizer = make_tiny_model(seed=0)  # two random layers over bytes: put your model here


def paid(completions: list[str], **_: object) -> list[float]:
    """What training is paid for: the share of lower-case letters."""
    return [sum(letter.islower() for letter in text) / max(1, len(text)) for text in completions]


def evaluate() -> float:
    """What is wanted, asked for by prompts that are never trained on: a word of Python."""
    prompts = tokenizer(["class, def or if: "] * 8, return_tensors="pt").to(model.device)
    answers = model.generate(**prompts, do_sample=True, max_new_tokens=16)[:, prompts["input_ids"].shape[1] :]
    return sum(keyword.iskeyword(text.strip()) for text in tokenizer.batch_decode(answers)) / len(answers)


trainer = GRPOTrainer(
    model,
    paid,
    processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"prompt": ["write: ", "say: "] * 200}),
    args=GRPOConfig(
        "outputs",
        max_steps=60,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=16,
        report_to="none",
        use_cpu=True,
    ),
    callbacks=[HeldOutGuardCallback(HeldOutGuard(), evaluate)],
)
try:
    trainer.train()
except CollapseStopError as halt:
    print(f"stopped: {halt.status.reason}")
