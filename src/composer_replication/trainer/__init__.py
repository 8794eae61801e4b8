"""How are weights updated?

By TRL's GRPO trainer with a guard that halts a run whose reward has come apart from the held-out score, exact resume, one log
line for every step, prompts that are forwarded once for their group, checks that speak, and two loss channels.

    composer_trainer   ComposerReplicationTrainer; import it from there
    generation         what one generation knows of its rows, and what of it travels with them
    guard              one fold of it, the hook of our trainer, and a callback for any other one
    checkpoints        whole, half-written or damaged, whose they are, and what we keep in them
    metrics_log        metrics.jsonl, verdicts.jsonl, an orderly stop; checks says when a run no longer trains what it says
    packed_rows        each prompt forwarded once in training; policy in sampling
    preset_settings    a recipe's method of the GRPO family; policy_terms carries it out
    loss_channels      hint distillation and replayed preferences; collator makes their tensors
    rollout_columns    what a rollout function may bring: chains of conversations, routing to replay

The only folder that imports TRL and transformers. Importing this package loads neither.
"""
