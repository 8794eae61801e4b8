"""How are weights updated?

By TRL's GRPO trainer with a guard that halts a run whose reward has come apart from the held-out score, exact resume, one log
line for every step, prompts that are forwarded once for their group, checks that speak, and two loss channels.

    composer_trainer    ComposerReplicationTrainer; generation is what it knows of the rows under way
    guard, checks       may this run go on; guard_callback is for any other trainer
    checkpoints         whole, half-written or damaged; metrics_log has the lines of a run, and stops it in good order
    run_setup           from a recipe to TRL's arguments, and what a step costs; model_loading loads and saves the model
    model_modes         what a model is: its mode, its weights, its head, and whether it can share a prompt exactly
    packed_rows         each prompt forwarded once in training; policy in sampling
    preset_settings     a recipe's method of the GRPO family; policy_terms carries it out
    loss_channels       hint distillation and replayed preferences; collator makes their tensors
    rollout_columns     what a rollout function may bring: chains of conversations, routing to replay

The only folder that imports TRL and transformers. Importing this package loads neither.
"""
